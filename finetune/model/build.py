"""The one builder of models, used by training, forecast, merge, inference and evaluation.

    Blueprint ─▶ base: loaded on a device, or weightless ─▶ trainable: a new adapter, activation checkpointing

`finetune.model.adapters.adapter_files.load_adapter` puts a trained adapter on a base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.config import AdapterSection, Config, MemorySection, ModelSection, QuantizationSection
from finetune.errors import ConfigError
from finetune.model.adapters import peft_format, starting
from finetune.model.adapters.adapter import attach, check_rank
from finetune.model.attention import backends as attentions
from finetune.model.base import base_dtype, load_architecture, load_base
from finetune.model.distributed.placement import Placement
from finetune.model.recompute import checkpointing
from finetune.model.recompute.offload import Copies
from finetune.model.skeleton import mixture, weightless_base
from finetune.model.source import identity, prequantized
from finetune.model.source.locate import locate, remote_code
from finetune.model.structure import composite, linear_layers, streamed
from finetune.model.structure.mixture import Mixture
from finetune.runtime.stages import stage


@dataclass(frozen=True)
class Blueprint:
    """The specification of a base: transformers' config, the name of an attention implementation, and the dtype of
    unquantized weights, in which quantized ones compute.
    """

    model: ModelSection
    quantization: QuantizationSection
    architecture: Any
    attention: str
    dtype: torch.dtype

    def load(self, device: torch.device, placement: Placement | None = None) -> Any:
        """The base with its weights on `device`; with a `placement`, which `trainable` needs too, this rank's part."""
        stage(f"loading the weights of {self.model.name}")
        return load_base(
            self.model, self.quantization, self.architecture,
            attention=self.attention, dtype=self.dtype, device=device, placement=placement,
        )  # fmt: skip

    def weightless(self, shorten: Callable[[Any], None] = lambda base: None) -> Any:
        """The base on the meta device: all modules, but no memory. `shorten` may remove layers first."""
        base = weightless_base(
            self.architecture, self.quantization,
            attention=self.attention, dtype=self.dtype, remote_code=remote_code(self.model), shorten=shorten,
            whole=self.model.vision != "none",
        )  # fmt: skip
        if self.model.vision == "adapter":
            composite.adapt_images(base)
        return base

    def check(self, adapter: AdapterSection) -> Mixture | None:
        """Check that the base can be trained, without its weights; returns how its experts are stored (`mixture`).

        Raises ConfigError for a class whose head cannot be separated from its layers, as the loss requires, and for an
        adapter that does not fit the base.
        """
        mixtures: list[Mixture | None] = []
        base = self.weightless(lambda whole: mixtures.append(mixture(whole, self.quantization)))
        if base.base_model is base:
            raise ConfigError(
                f"`model.name`: {type(base).__name__} cannot be trained here: transformers gives no access to its "
                "layers without the head, which the loss needs"
            )
        if between := linear_layers.after_layers(base):
            raise ConfigError(
                f"`model.name`: {type(base).__name__} does not multiply the states of its last layer by its head "
                f"alone, as the loss does here: `{between[0]}` is between them; use another base"
            )
        check_rank(base, adapter)
        peft_format.check(base, lambda: weightless(self.model, self.architecture), adapter)
        if adapter.start_from:  # its tensors do not depend on the quantization, and DoRA would dequantize no weights
            starting.check(weightless(self.model, self.architecture), adapter)
        return mixtures[0]


LoadBase = Callable[[Blueprint, torch.device, Placement | None], Any]
"""What `recipe.train` takes as `load_base`: `Blueprint.load`, which calls the function of that name in `model/base.py`,
or a function in its place that returns a base that the process already holds."""


def blueprint(config: Config, architecture: Any, attention: str) -> Blueprint:
    """The blueprint of the job's base."""
    dtype = base_dtype(config.adapter, config.training.precision)
    return Blueprint(config.model, config.quantization, architecture, attention, dtype)


def choose_attention(config: Config, architecture: Any, device_type: str) -> tuple[str, str]:
    """The attention implementation that the job trains with on this machine, and the reason in one clause."""
    name, longest = config.model.attention, config.data.max_length
    if config.model.vision != "none":
        # The tokens of an image may see each other, by a mask that other kernels and blocks of a window do not take.
        name, longest = "sdpa" if name == "auto" else name, 0
    implementation, reason = attentions.choose(
        name, architecture, device_type, config.training.precision, packed=config.data.packing, longest=longest
    )
    return implementation, reason if name == config.model.attention else "it takes the masks of images"


def attention_of_exports(model: ModelSection, architecture: Any, device_type: str, precision: str) -> str:
    """The attention implementation that the models of a merge or an export are compared with."""
    name = "auto" if model.vision == "none" else "sdpa"  # SDPA accepts the masks of images
    return attentions.choose(name, architecture, device_type, precision)[0]


def weightless(model: ModelSection, architecture: Any = None) -> Any:
    """The unquantized base on the meta device, to compare names and shapes. Raises as `load_architecture` does."""
    architecture = load_architecture(model) if architecture is None else architecture
    return Blueprint(model, QuantizationSection(kind="none"), architecture, "eager", torch.float32).weightless()


def check_files(model: ModelSection, architecture: Any) -> None:
    """Check the weight files of a local base by their headers; those of the hub are checked once they are loaded.

    Raises ArtifactError for files that are missing or damaged, or that are not of this architecture.
    """
    folder = Path(locate(model.name))
    if model.weights == "random" or not folder.is_dir():
        return
    files = identity.files_to_load(folder)
    if not prequantized.form(architecture):  # packed weights have other shapes
        streamed.Weights(weightless(model, architecture), files).check_tensors()


def load(config: Config, architecture: Any, device: torch.device) -> Any:
    """The job's base on this machine, quantized as in training, but whole. Raises as `Blueprint.load` does."""
    attention, _ = choose_attention(config, architecture, device.type)
    return blueprint(config, architecture, attention).load(device)


def trainable(
    base: Any, model: ModelSection, adapter: AdapterSection, memory: MemorySection, *, seed: int, device_type: str,
    placement: Placement | None = None, copies_to_host: Copies | None = None,
) -> Any:  # fmt: skip
    """`base` with an adapter (new, or with weights to start from) and activation checkpointing, divided among ranks by
    `placement`. `copies_to_host` are those of a trace, which fake tensors on a CPU do not show.

    Without an adapter all weights are trainable. The same seed gives the same adapter. Raises ConfigError for targets
    or checkpointing that the base does not support.
    """
    built = attach(base, adapter, model.name, seed, model.revision)
    starting.fill(built, adapter)
    checkpointing.apply(base, memory, device_type, copies_to_host)
    if placement:
        placement.apply(built)
    return built
