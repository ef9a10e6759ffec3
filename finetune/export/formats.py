"""Export formats of a trained model. A new one is one entry in FORMATS.

A `Format` is written from the model while it is merged, a `Conversion` from what the run has published. Importing this
module loads no library: `finetune --help` reads the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from finetune.config import ModelSection


@dataclass(frozen=True)
class Format:
    """How the merged model is written to a folder, and loaded again to verify its logits.

    `write(model, tokenizer, folder)` gets the model merged in 16 bit. The tokenizer is for formats that contain it; its
    own files are added to every folder.
    `load(folder, base, dtype, device)` returns a model that takes `input_ids` and returns `logits`, computed in `dtype`
    (None: as written). `base` says whether Python code of the base may run, and which. `roundoff` is the relative error
    of a weight if larger than that of 16 bit; the bound of the proof follows from it.
    """

    help: str
    write: Callable[[Any, Any, Path], object]
    load: Callable[[Path, ModelSection, torch.dtype | None, torch.device], Any]
    roundoff: float = 0.0


@dataclass(frozen=True)
class Conversion:
    """How the published adapter, or the merged model, is rewritten for other programs.

    `module` of this package has two functions of a `finetune.export.job.Job`: `check(job)` raises ConfigError for a run
    that the format cannot express, before anything is loaded; `make(job, folder)` writes the files, proves them and
    returns the facts of export.json. `folder` is its name in the run directory; `merged` whether it is made from the
    merged model.
    """

    help: str
    folder: str
    module: str
    merged: bool = True


def write_transformers(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write safetensors files, config.json and generation_config.json."""
    model.save_pretrained(str(folder))


def load_transformers(folder: Path, base: ModelSection, dtype: torch.dtype | None, device: torch.device) -> Any:
    """Load what `write_transformers` wrote, with the base's own code if `base` allows it.

    Raises ArtifactError for a damaged file or a missing weight.
    """
    from transformers import GenerationConfig

    from finetune.model.base import from_safetensors, load_architecture, pinned_code, refuse_missing
    from finetune.model.locate import hub_call

    def load() -> Any:
        code = pinned_code(base)
        if base.trust_remote_code:
            # transformers 5.23 loads a class without a repository prefix from the folder itself, and runs the folder's
            # `custom_generate/generate.py` when it reads the generation config; neither is the pinned code.
            code["config"] = architecture = load_architecture(base)
            place = getattr(architecture, "auto_map", {}).get(_CLASS)
            if place and "--" not in place:
                architecture.auto_map[_CLASS] = f"{base.name}--{place}"
            code["generation_config"] = GenerationConfig.from_pretrained(str(folder))
        return from_safetensors(
            str(folder), dtype=dtype or "auto", device_map={"": device}, output_loading_info=True, **code
        )

    model, report = hub_call(f"merged model {folder}", load)
    refuse_missing(report, f"merged model {folder}", "restore the folder from a backup, or merge or train again")
    return model


_CLASS = "AutoModelForCausalLM"


FORMATS: dict[str, Format | Conversion] = {
    "merged": Format("16-bit safetensors, for transformers and vLLM", write_transformers, load_transformers),
    "adapter": Conversion(
        "plain LoRA, for vLLM, SGLang and llama.cpp", "plain-adapter", "adapter_export", merged=False
    ),
    "gguf": Conversion("one GGUF file, for llama.cpp", "gguf", "gguf_export"),
    "ollama": Conversion("a GGUF file and a Modelfile, for Ollama", "ollama", "ollama"),
}


def find(name: str) -> Format | Conversion:
    """The format of this name. Raises ConfigError with the closest name and the list of all."""
    if name not in FORMATS:
        from finetune.config.fields import unknown

        raise ConfigError(f"export format {unknown(name, FORMATS)}")
    return FORMATS[name]
