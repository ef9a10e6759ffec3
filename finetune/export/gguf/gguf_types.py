"""Types of the matrices in a GGUF file: the forms that `finetune.forms` says are in such files.

Importing this module loads no library: `finetune --help` reads the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config.field_types import pick
from finetune.errors import ConfigError
from finetune.export.export_formats import FORMATS
from finetune.forms import FORMS


@dataclass(frozen=True)
class Type:
    """A type that all matrices of a file have, but those that a recipe gives another if it is `mixed`. `name` is
    llama.cpp's of the file.
    """

    help: str
    name: str
    mixed: bool
    roundoff: float


TYPES = {
    form.name: Type(form.words, form.gguf.type, form.gguf.mixed, form.roundoff)
    for form in sorted(FORMS.values(), key=lambda form: (-form.bits, form.is_of_safetensors))
    if form.gguf
}
"""By name, those of most bits first, and those of GGUF files alone before others."""


def check(kind: str, format: str = "gguf") -> None:
    """Raise ConfigError for a type that this program does not write, and for an export format without types."""
    if not FORMATS[format].module.startswith("gguf."):
        raise ConfigError(
            f"`--type {kind}`: `{format}` has no GGUF file, whose type it is; leave it out, or export `gguf`"
        )
    if kind in TYPES:
        return
    if kind.lower() not in TYPES and kind.lower().startswith(("q", "iq", "tq")):
        raise ConfigError(
            f"GGUF type `{kind}` is not written here, but by a program of llama.cpp: export `f16` and run "
            f"`llama-quantize model-f16.gguf model-{kind}.gguf {kind}`; here choose from {', '.join(TYPES)}"
        )
    pick(TYPES, kind, "GGUF type")
