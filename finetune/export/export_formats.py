"""Export formats of a trained model. A new one is one entry in FORMATS.

Importing this module loads no library: `finetune --help` reads the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.forms import FORMS


@dataclass(frozen=True)
class ExportFormat:
    """A form of a run's adapter or merged model for other programs.

    `module` of this package has its `Exporter`, and is empty for the merged model itself. `folder` is the name in the
    run directory; `merged`: whether it is made from the merged model; `kind`: the form that a module of several writes.
    """

    help: str
    folder: str
    module: str = ""
    merged: bool = True
    kind: str = ""


FORMATS: dict[str, ExportFormat] = {
    "merged": ExportFormat("16-bit safetensors, for transformers and vLLM", "merged"),
    "adapter": ExportFormat(
        "plain LoRA, for vLLM, SGLang and llama.cpp, with the base if training held it in a form of theirs",
        "plain-adapter", "adapter_export", merged=False,
    ),
    "gguf": ExportFormat("one GGUF file, for llama.cpp", "gguf", "gguf.gguf_export"),
    "ollama": ExportFormat("a GGUF file and a Modelfile, for Ollama", "ollama", "gguf.ollama"),
    **{
        form.name: ExportFormat(f"{form.words}, for vLLM and SGLang", form.name, "compressed_export", kind=form.name)
        for form in sorted(FORMS.values(), key=lambda form: form.roundoff)
        if form.is_of_safetensors
    },
}  # fmt: skip
