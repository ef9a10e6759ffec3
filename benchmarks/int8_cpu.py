"""What 8-bit weights cost in accuracy, with inputs in 16 bit as here and with inputs in 8 bit as in bitsandbytes.

    python benchmarks/int8_cpu.py

The built-in base on held-out rows, against its weights in float32: the root mean square of the difference of the
centred logits over that of the logits (see `finetune.export.proof`). And one layer, whose input has a feature 20 times
above the others, as those of large language models do (arXiv 2208.07339, section 3). bitsandbytes' CPU kernels make the
same integers as those for CUDA.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import harness
import torch

from finetune.config import DataSection, ModelSection, QuantizationSection
from finetune.data.prepare import compared_rows
from finetune.export import proof
from finetune.model.base import load_architecture, load_base
from finetune.model.source.tokenizer import load_tokenizer
from finetune.model.structure import eight_bit
from finetune.runtime import libraries

ROWS, TOKENS = 16, 256
OUTLIER = 20.0
CPU = torch.device("cpu")


def base(kind: str, dtype: torch.dtype) -> Any:
    section = ModelSection()
    return load_base(
        section, QuantizationSection(kind=kind), load_architecture(section), attention="sdpa", dtype=dtype, device=CPU
    )


def inputs_in_8_bit(model: torch.nn.Module) -> Any:
    """`model` with bitsandbytes' own forward pass in its 8-bit layers."""
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear8bitLt):
            module.__class__ = bnb.nn.Linear8bitLt
    return model


def logit_errors() -> dict[str, float]:
    """Relative error of the logits for each way to store the base and compute with it."""
    rows = compared_rows(DataSection(), load_tokenizer(ModelSection()), ROWS, TOKENS, print).ids
    exact = proof.logits(base("none", torch.float32), rows)
    models = {
        "bf16": base("none", torch.bfloat16),
        "int8": base("int8", torch.bfloat16),
        "int8, inputs in 8 bit": inputs_in_8_bit(base("int8", torch.bfloat16)),
        "nf4": base("nf4", torch.bfloat16),
    }
    found = {name: proof.compare(proof.logits(model, rows), exact, exact, bound=0.0) for name, model in models.items()}
    return {name: round(compared.error, 5) for name, compared in found.items()}


def layer_errors(outlier: float) -> dict[str, float]:
    """Relative error of the output of a layer (1024 to 1024) whose input's first feature is `outlier` times larger."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1024, 1024, generator=generator).bfloat16()
    x = torch.randn(256, 1024, generator=generator)
    x[:, 0] *= outlier
    expected = x @ weight.float().T
    found = {}
    for name, change in (("int8", lambda layer: layer), ("int8, inputs in 8 bit", inputs_in_8_bit)):
        layer = bnb.nn.Linear8bitLt(1024, 1024, bias=False, has_fp16_weights=False).eval()
        layer.weight = eight_bit.quantized(weight)
        eight_bit.weight_only(layer)
        with torch.inference_mode():
            out = change(layer)(x.bfloat16()).float()
        found[name] = round(float((out - expected).norm() / expected.norm()), 5)
    return found


def main() -> None:
    options = harness.parser(__doc__, "int8_cpu.json").parse_args()
    libraries.quiet()
    result = {
        "rows": ROWS,
        "tokens_of_a_row": TOKENS,
        "logits": logit_errors(),
        "layer": layer_errors(1.0),
        "layer_with_an_outlier": {"times": OUTLIER, **layer_errors(OUTLIER)},
    }
    harness.save(options.output, result)
    for name in ("logits", "layer", "layer_with_an_outlier"):
        print(name, result[name])


if __name__ == "__main__":
    main()
