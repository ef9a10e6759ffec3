"""The base of an adapter as a GGUF file, in the very bytes that the adapter was trained on.

They are made again from the base's files by the code that training made them with, and must have the hash that the run
recorded. What reads them back is transformers' reader, and llama.cpp with the adapter on them, where that is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.config.serving import GGUF
from finetune.errors import ArtifactError, ConfigError, MachineError
from finetune.export.conversion import Conversion
from finetune.export.gguf import gguf_export, gguf_model, gguf_vocabulary, llama_cpp
from finetune.model.source import gguf_families
from finetune.model.source.locate import weights_directory
from finetune.model.structure import packed

Held = dict[str, nn.Parameter]
"""The packed weights of a base, by name."""


def wanted(job: Conversion) -> bool:
    """Whether the base of a run was held in training as a GGUF file would hold it."""
    kind = job.config.quantization.kind
    if job.config.scorer:
        return False
    return kind in (*GGUF, "gguf") or (job.config.output.runtime == "llama.cpp" and kind in ("mxfp4", "nvfp4"))


def check(job: Conversion) -> None:
    """Raise ConfigError for a base that no GGUF file can hold, MachineError if nothing here can read one of it."""
    if job.config.model.weights == "random":
        raise ConfigError(f"{job.run.path} has random weights as its base, which were not kept; train on a base")
    family = gguf_families.family(job.architecture)
    if not family.readable and not llama_cpp.installed():
        raise MachineError(
            f"a GGUF file of `{family.arch}` is proven by llama.cpp alone: `pip install xllamacpp` (34 MB)"
        )


def packed_of(job: Conversion, base: Any) -> Held:
    """The packed weights of `base`. Raises ArtifactError if they are not the bytes that the run was trained on."""
    kind, model = job.config.quantization.kind, job.config.model
    if (trained := job.run.packed_base) and packed.digest(base) != trained:
        raise ArtifactError(
            f"{model.name} has other bytes in {kind} on this device ({job.device}) than in training, so the adapter "
            "would not compute what was trained; export on the device, and with the torch, of the training"
        )
    return {name: weight for name, weight in base.named_parameters() if packed.packing_of(weight)}


def write(job: Conversion, base: Any, folder: Path) -> tuple[Path, Held, list[str]]:
    """Write `base`, as training holds it, to a file in a new `folder`; with its packed weights and llama.cpp's
    differences. A base that is a GGUF file is not written again.

    Raises as `packed_of`.
    """
    kind, model, held = job.config.quantization.kind, job.config.model, packed_of(job, base)
    if kind == "gguf":
        return Path(model.name), held, []
    folder.mkdir()
    file = folder / gguf_export.file_name(kind)
    differences = gguf_model.write(
        weights_directory(model.name, model.revision), job.architecture, job.tokenizer, file, kind, packed=held,
        starts_with_bos=bool(job.prompt) and job.prompt[0] == job.tokenizer.bos_token_id, end_of_turn=job.end_of_turn,
    )  # fmt: skip
    return file, held, differences


def read(job: Conversion, file: Path, held: Held, dtype: torch.dtype) -> Any | None:
    """The model of the file by transformers' reader, to compute in `dtype`; None if that knows no such model.

    Raises ArtifactError for a weight that it reads as other values than those that were trained on.
    """
    if not gguf_families.family(job.architecture).readable or job.config.quantization.kind not in (*GGUF, "gguf"):
        return None
    model = gguf_export.load(file, job.architecture, dtype, job.device)
    differing = {
        name: count
        for name, weight in held.items()
        if (count := int((model.get_parameter(name).to(weight.device) != _values(weight, dtype)).sum()))
    }
    if differing:
        name = min(differing)
        raise ArtifactError(
            f"{file.name} holds {sum(differing.values())} other weights than were trained on, {differing[name]} of "
            f"them in `{name}`. Nothing was published"
        )
    return model


def _values(weight: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    how = packed.packing_of(weight)
    assert how is not None
    return how.decoded(weight.data, dtype)


def run(
    job: Conversion, file: Path, lora: Path, trained: list[torch.Tensor], base: list[torch.Tensor],
    differences: list[str],
) -> tuple[dict[str, Any] | None, list[str]]:  # fmt: skip
    """Run the file with the adapter `lora` in llama.cpp, whose `differences` are known; returns figures, and what was
    not proven.
    """
    alike = gguf_vocabulary.SPACES_AFTER_SPECIAL not in differences
    ran, not_proven = llama_cpp.compare(file, job, trained, lora=lora, tokenizes_alike=alike, nearly=llama_cpp.NEARLY)
    if ran is None:
        return None, not_proven
    written, expected, without, following = llama_cpp.logits(file, job, trained, base, lora)
    found = job.served(written, expected, without, following)["served"]
    return {**ran, "kl": found["kl"], "kl_max": found["kl_max"]}, not_proven
