"""The bases that an adapter can be merged into, and each weight of the merged model.

Models stay on disk: a weight is read from the base's files when it is needed, and logits are computed with one layer
at a time on the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from finetune.config import Config, QuantizationSection
from finetune.data.media import NOTHING, Shown
from finetune.errors import ArtifactError
from finetune.export import proof
from finetune.export.merging.updates import Updates, base_name
from finetune.model import build
from finetune.model.adapters.adapter_files import weightless_adapter
from finetune.model.base import load_architecture, refuse_not_finite
from finetune.model.build import Blueprint
from finetune.model.precision import PRECISIONS
from finetune.model.skeleton import make_buffers
from finetune.model.source import prequantized
from finetune.model.structure import composite, experts, sequence_head, streamed
from finetune.runtime import libraries
from finetune.storage import weight_files

if TYPE_CHECKING:
    from finetune.model.structure.quantizers import Rounding

Onto = Literal["16-bit", "quantized"]
ONTO: dict[Onto, str] = {
    "16-bit": "the base as published, which usually gives the lower loss",
    "quantized": "the quantized base that the adapter was trained on, dequantized, which gives the trained model",
}
"""The bases that an adapter can be merged into."""


class Bases:
    """The base of a run in its files: to merge into, and to run on rows that show the images `shown`, of `longest`
    tokens at most.
    """

    def __init__(
        self, config: Config, adapter: Path, files: list[Path], device: torch.device, shown: Shown = NOTHING,
        longest: int = proof.ROW_TOKENS,
    ) -> None:  # fmt: skip
        if not files:
            raise ArtifactError(
                f"the weights of {config.model.name} are not in safetensors files, which a merge reads; convert them"
            )
        self.config, self.adapter, self.files, self.device, self._shown = config, adapter, files, device, shown
        precision = PRECISIONS[config.training.precision]
        self.dtype = self.compute_dtype = precision.merged
        self.architecture = load_architecture(config.model)
        self.requantized = prequantized.requantizes(config.quantization, self.architecture)
        text = self.architecture.get_text_config()
        self.layers = text.num_hidden_layers
        self.bare = self._weightless(self.architecture)
        outputs = len(config.model.labels) if sequence_head.is_classifier(self.bare) else text.vocab_size
        self.stride = proof.stride(outputs, longest)
        self.weights = streamed.Weights(self.bare, files, PRECISIONS[config.training.precision].dtype)
        self.adapted = weightless_adapter(self._weightless(self.architecture), adapter, config.adapter)
        self.updates = Updates(self.adapted, adapter, device)
        self._beside = tuple(f"{part}." for part in composite.beside_language(self.bare))
        self.mixture = experts.is_mixture(self.bare)
        # Trained embeddings or head are separate tensors.
        tied = self.bare.all_tied_weights_keys.items()
        self.untied = sorted({name for pair in tied if self.updates.replaced.keys() & {*pair} for name in pair})

        self.merged_architecture = deepcopy(self.architecture)
        self.merged_architecture.dtype = self.dtype
        for part in (self.merged_architecture, self.merged_architecture.get_text_config()):
            vars(part).pop("quantization_config", None)
        self.merged_architecture.architectures = self.architecture.architectures or [type(self.bare).__name__]
        # The KV cache was off for training, but is needed for generation.
        self.merged_architecture.use_cache = True
        if self.untied:
            text = self.merged_architecture.get_text_config()
            self.merged_architecture.tie_word_embeddings = text.tie_word_embeddings = False

    def merging(self, onto: Onto) -> Merging:
        """A merge onto that base."""
        if onto == "16-bit":
            return Merging(self, {})
        from finetune.model.structure import quantizers

        quantized = self._weightless(self.architecture, self.config.quantization)
        return Merging(self, quantizers.roundings(quantized))

    def run(self, model: Any, fetch: Callable[[str], torch.Tensor | None], rows: list[list[int]]) -> proof.Streamed:
        """Logits of a model whose weights `fetch` reads."""
        libraries.return_freed_memory()  # left over from merging or an earlier model
        return proof.Streamed(model, fetch, rows, self.stride, self.device, self._shown)

    def keeps(self, *names: str) -> bool:
        """Whether one of these weights is of the model of images, and stays as it is in the files."""
        return any(name.startswith(self._beside) and name not in self.updates for name in names)

    def run_of_files(self, folder: Path, rows: list[list[int]]) -> proof.Streamed:
        """Logits of the merged model that was written to `folder`."""
        model = make_buffers(self._weightless(self.merged_architecture), self.device)
        if self.compute_dtype == torch.float32:  # else buffers stay as they are, such as rotary frequencies
            model.float()
        files = sorted(folder.glob("*" + weight_files.SUFFIX))
        return self.run(model, streamed.Weights(model, files).get, rows)

    def _weightless(self, architecture: Any, quantization: QuantizationSection | None = None) -> Any:
        config = self.config
        implementation = build.attention_of_exports(
            config.model, architecture, self.device.type, config.training.precision
        )
        quantization = quantization or QuantizationSection(kind="none")
        return Blueprint(config.model, quantization, architecture, implementation, self.dtype).weightless()


@dataclass
class Merging:
    """A merge onto one of the bases; `quantized` are the parameters that it quantizes and dequantizes first."""

    bases: Bases
    quantized: dict[str, Rounding]

    def base(self, name: str) -> torch.Tensor | None:
        """A weight of the base that is merged into; None for a buffer that the files lack."""
        weight = self.bases.weights.get(name)
        return None if weight is None else self._base(name, weight)

    def adapted(self, name: str) -> torch.Tensor | None:
        """A weight of that base with the adapter, by its name in PEFT's model."""
        own = self.bases.updates.fetch(name)
        return self.base(base_name(name)) if own is None else own

    def rounded_at_random(self, name: str) -> torch.Tensor | None:
        """`adapted`, with an error like that of rounding in each weight that the adapter changes, and each other one of
        the base as the merge rounds it.
        """
        weight, plain, updates = self.adapted(name), base_name(name), self.bases.updates
        if weight is None or (updates.fetch(name) is not None and ".modules_to_save." not in name):
            return weight
        if plain in updates or ".modules_to_save." in name:
            return proof.rounded_at_random(weight, self.bases.dtype, seed=zlib.crc32(name.encode()))
        return weight if self.bases.keeps(plain) else self._rounded(weight)

    def merged(self, name: str) -> torch.Tensor | None:
        """A weight of the merged model."""
        weight = self.bases.weights.get(name)
        return None if weight is None else self._merged(name, weight)

    def tensors(self, group: streamed.ConversionGroup) -> dict[str, torch.Tensor]:
        """The tensors of the merged model's files that replace a group of the base's."""
        weights = self.bases.weights
        if self.bases.keeps(*group.targets):
            return {source: weights.stored(source) for source in group.sources}
        if not any(name in self.bases.updates or name in self.quantized for name in group.targets):
            return {source: self._rounded(weights.stored(source)) for source in group.sources}
        merged = {name: self._merged(name, weight) for name, weight in weights.converted(group).items()}
        return weights.reverted(group, merged)

    def _base(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        if name not in self.quantized:
            return weight
        dtype = PRECISIONS[self.bases.config.training.precision].dtype
        return self.quantized[name].trained_against(weight.to(self.bases.device, dtype))

    def _merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return self._rounded(self.bases.updates.apply(name, self._base(name, weight)))

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor:
        if not weight.is_floating_point():
            return weight
        if not weight_files.is_finite(weight):
            refuse_not_finite(self.bases.config.model)
            raise ArtifactError(f"{self.bases.adapter}: the merged weights are not finite; train again")
        return weight.to(self.bases.dtype)
