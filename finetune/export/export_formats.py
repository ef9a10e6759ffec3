"""Export formats of a trained model. A new one is one entry in FORMATS.

Importing this module loads no library: `finetune --help` reads the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.errors import ConfigError


@dataclass(frozen=True)
class Format:
    """How what a run has published, its adapter or its merged model, is rewritten for other programs.

    `module` of this package has two functions of a `finished_run.Job`: `check(job)` raises ConfigError for a run
    that the format cannot express, before anything is loaded; `make(job, folder)` writes the files, proves them and
    returns the facts of export.json. It is empty for the merged model itself. `folder` is its name in the run
    directory; `merged` whether it is made from the merged model.
    """

    help: str
    folder: str
    module: str = ""
    merged: bool = True


FORMATS: dict[str, Format] = {
    "merged": Format("16-bit safetensors, for transformers and vLLM", "merged"),
    "adapter": Format("plain LoRA, for vLLM, SGLang and llama.cpp", "plain-adapter", "adapter_export", merged=False),
    "gguf": Format("one GGUF file, for llama.cpp", "gguf", "gguf_export"),
    "ollama": Format("a GGUF file and a Modelfile, for Ollama", "ollama", "ollama"),
}


def find(name: str) -> Format:
    """The format of this name. Raises ConfigError with the closest name and the list of all."""
    if name not in FORMATS:
        from finetune.config.field_types import unknown

        raise ConfigError(f"export format {unknown(name, FORMATS)}")
    return FORMATS[name]
