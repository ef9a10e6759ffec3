"""Types of the matrices in a GGUF file. A new one is one entry in TYPES.

Importing this module loads no library: `finetune --help` reads the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config.field_types import pick
from finetune.errors import ConfigError
from finetune.export.export_formats import FORMATS


@dataclass(frozen=True)
class Type:
    """`file_type` is llama.cpp's name of a file of this type, `roundoff` the relative rounding error of a weight.

    `recipe`: whether llama.cpp gives each tensor its own type; see `gguf_recipes`.
    """

    help: str
    file_type: str
    roundoff: float
    recipe: bool = False


TYPES: dict[str, Type] = {
    "f16": Type("16 bit, read everywhere", "MOSTLY_F16", 2**-12),
    "bf16": Type("16 bit with the range of float32", "MOSTLY_BF16", 2**-9),
    # Half a step is 1/254 of the largest of 32 weights, and so 2^-7 of their root mean square.
    "q8_0": Type("8 bit in blocks of 32", "MOSTLY_Q8_0", 2**-7),
    # Root mean square error of weights that are normally distributed, rounded up.
    "q6_k": Type("6 bit", "MOSTLY_Q6_K", 0.02, recipe=True),
    "q5_k_m": Type("5 and 6 bit", "MOSTLY_Q5_K_M", 0.04, recipe=True),
    "q4_k_m": Type("4 and 6 bit", "MOSTLY_Q4_K_M", 0.08, recipe=True),
    "q4_0": Type("4 bit in blocks of 32", "MOSTLY_Q4_0", 0.09, recipe=True),
    "iq4_xs": Type("4 bit by a table", "MOSTLY_IQ4_XS", 0.08, recipe=True),
    "mxfp4": Type("4-bit floating point in blocks of 32", "MOSTLY_MXFP4_MOE", 0.12, recipe=True),
    "nvfp4": Type("4-bit floating point in blocks of 16", "MOSTLY_NVFP4", 0.1, recipe=True),
}


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
