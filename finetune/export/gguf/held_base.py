"""The base of an adapter as a GGUF file, in the very bytes that the adapter was trained on, or in 16 bit.

Packed bytes are made again from the base's files by the code that training made them with, and must have the hash that
the run recorded. What reads the file back is transformers' reader or else the gguf package, and llama.cpp with the
adapter on it, where that is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.config.serving import GGUF, RUNTIMES
from finetune.errors import ArtifactError, ConfigError, MachineError
from finetune.export.conversion import Conversion, ExportRequest
from finetune.export.gguf import gguf_export, gguf_model, gguf_vocabulary, llama_cpp
from finetune.export.gguf.gguf_types import TYPES
from finetune.forms import packed
from finetune.model.base import base_dtype
from finetune.model.source import gguf_families
from finetune.model.source.locate import weights_directory

HeldWeights = dict[str, nn.Parameter]
"""The packed weights of a base, or the matrices of one in 16 bit, by name."""


def wanted(job: ExportRequest) -> bool:
    """Whether training held the base in a form of GGUF files, and the run serves it in that form."""
    kind, output = job.config.quantization.kind, job.config.output
    if job.config.scorer:
        return False
    in_16_bit = (kind, output.serve, job.config.model.vision) == ("none", "16bit", "none")
    with_adapters = kind in RUNTIMES["llama.cpp"].adapters or in_16_bit
    return kind in (*GGUF, "gguf") or (output.runtime == "llama.cpp" and with_adapters)


def check(job: ExportRequest) -> None:
    """Raise ConfigError for a base that no GGUF file can hold, MachineError if nothing here can read one of it."""
    if job.config.model.weights == "random":
        raise ConfigError(f"{job.run.path} has random weights as its base, which were not kept; train on a base")
    is_file = job.config.quantization.kind == "gguf"
    family = gguf_families.family(job.architecture) if is_file else gguf_model.check(job.architecture, job.tokenizer)
    if not family.readable and not llama_cpp.installed():
        raise MachineError(
            f"a GGUF file of `{family.arch}` is proven by llama.cpp alone: `pip install xllamacpp` (34 MB)"
        )


def packed_of(job: Conversion, base: Any) -> HeldWeights:
    """The packed weights of `base`. Raises ArtifactError if they are not the bytes that the run was trained on."""
    kind, model = job.config.quantization.kind, job.config.model
    if (trained := job.run.packed_base) and packed.digest(base) != trained:
        raise ArtifactError(
            f"{model.name} has other bytes in {kind} on this device ({job.device}) than in training, so the adapter "
            "would not compute what was trained; export on the device, and with the torch, of the training"
        )
    return {name: weight for name, weight in base.named_parameters() if packed.packing_of(weight)}


def write(job: Conversion, base: Any, folder: Path) -> tuple[Path, HeldWeights, list[str]]:
    """Write `base`, as training holds it, to a file in a new `folder`; returns the file, the weights in it and
    llama.cpp's known differences. A base that is a GGUF file is not written again.

    Raises what `packed_of` raises.
    """
    kind, packed_ones = job.config.quantization.kind, packed_of(job, base)
    if kind == "gguf":
        return Path(job.config.model.name), packed_ones, []
    folder.mkdir()
    if kind == "none":  # in 16 bit: the type of the training, or for one in float32 that of the base's files
        dtype = base_dtype(job.config.adapter, job.config.training.precision)
        kind = gguf_model.SIXTEEN_BIT.get(dtype) or gguf_model.stored_type(_source(job))
        kind = kind if kind in TYPES else "f16"
    file = folder / gguf_export.file_name(kind)
    differences = gguf_model.write(
        _source(job), job.architecture, job.tokenizer, file, kind, packed=packed_ones,
        starts_with_bos=job.starts_with_bos,
    )  # fmt: skip
    return file, packed_ones or {name: one for name, one in base.named_parameters() if one.dim() > 1}, differences


def _source(job: Conversion) -> Path:
    return weights_directory(job.config.model.name, job.config.model.revision)


def read(job: Conversion, file: Path, held: HeldWeights, dtype: torch.dtype) -> Any | None:
    """The model of the file by transformers' reader, to compute in `dtype`; None if that knows no such model.

    Raises ArtifactError for a weight that it reads as other values than those that were trained on.
    """
    if not gguf_families.family(job.architecture).readable:
        return None
    model = gguf_export.load(file, job.architecture, dtype, job.device)
    differing = {
        name: count
        for name, weight in held.items()
        if (how := packed.packing_of(weight))
        and (count := int((model.get_parameter(name).to(weight.device) != how.decoded(weight.data, dtype)).sum()))
    }
    if differing:
        name = min(differing)
        raise ArtifactError(
            f"{file.name} holds {sum(differing.values())} other weights than were trained on, {differing[name]} of "
            f"them in `{name}`. Nothing was published"
        )
    return model


def weights(job: Conversion, file: Path, held: HeldWeights, *, read: bool) -> dict[str, int] | None:
    """The `count` of weights in `file`, and how many are `differing` from those trained on, as the gguf package decodes
    them; none if packed weights were `read` and compared already. None for a base that only llama.cpp reads.

    Raises ArtifactError for a packed one that differs.
    """
    sizes = [how.shape.numel() for weight in held.values() if (how := packed.packing_of(weight))]
    if read and sizes:
        return {"count": sum(sizes), "differing": 0}
    if job.config.quantization.kind == "gguf":
        return None
    return gguf_model.differing(_source(job), job.architecture, file, held)


def run(
    job: Conversion, file: Path, lora: Path, trained: list[torch.Tensor], base: list[torch.Tensor],
    differences: list[str],
) -> tuple[dict[str, Any] | None, list[str]]:  # fmt: skip
    """Run the file with the adapter `lora` in llama.cpp, whose `differences` are known; returns figures, and what was
    not proven.
    """
    alike = gguf_vocabulary.SPACES_AFTER_SPECIAL not in differences
    nearly = 0.0 if job.config.output.serve == "16bit" else llama_cpp.NEARLY
    ran, not_proven = llama_cpp.compare(file, job, trained, lora=lora, tokenizes_alike=alike, nearly=nearly)
    if ran is None:
        return None, not_proven
    written, expected, without, following = llama_cpp.logits(file, job, trained, base, lora)
    found = job.served(written, expected, without, following)["served"]
    return {**ran, "kl": found["kl"], "kl_max": found["kl_max"]}, not_proven
