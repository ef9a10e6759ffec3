"""A weight in NVFP4 as other libraries write and read it. `python tests/model/nvfp4_reference.py` records it anew.

That needs compressed-tensors 0.20 and nvidia-modelopt 0.47 (both Apache-2.0), of which tests need the first alone.
`reference` gives what was recorded.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

RECORDED = Path(__file__).with_suffix(".json")
ROWS, COLUMNS = 6, 64
_TYPES = {
    "weight": torch.float32, "values": torch.bfloat16, "weight_packed": torch.uint8, "weight_scale": torch.uint8,
    "weight_global_scale": torch.float32, "weight_scale_2": torch.float32,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


def reference() -> dict[str, Tensors]:
    """By library, the tensors of its files and the `values` that it reads in them, and the `weight` that it wrote.

    `weight_scale` is of e4m3, and ModelOpt's bytes are its `weight_packed`.
    """
    recorded = json.loads(RECORDED.read_text())
    return {
        library: {
            name: torch.frombuffer(bytearray.fromhex(value), dtype=_TYPES[name]) for name, value in tensors.items()
        }
        for library, tensors in recorded.items()
    }


def _weight() -> torch.Tensor:
    """Blocks of values of very different size, and one of zeros."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * torch.logspace(-5, 0, ROWS).unsqueeze(-1)
    weight[3, 16:32] = 0
    return weight


def _of_compressed_tensors(weight: torch.Tensor) -> Tensors:
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    divisor = generate_gparam(weight.amin(), weight.amax())
    blocks = weight.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor)
    written = NVFP4PackedCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}, scheme
    )
    return {**written, "values": NVFP4PackedCompressor.decompress(dict(written), scheme)["weight"]}


def _of_modelopt(weight: torch.Tensor) -> Tensors:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    written, scale, factor = NVFP4QTensor.quantize(weight.clone(), 16)
    values = written.dequantize(torch.bfloat16, scale=scale, double_scale=factor, block_sizes={-1: 16})
    packed = written._quantized_data
    return {"weight_packed": packed, "weight_scale": scale, "weight_scale_2": factor, "values": values}


def _hex(tensor: torch.Tensor) -> str:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()).hex()


if __name__ == "__main__":
    made = {"compressed-tensors": _of_compressed_tensors, "modelopt": _of_modelopt}
    of_each = {library: {"weight": _weight(), **write(_weight())} for library, write in made.items()}
    hexed = {library: {name: _hex(one) for name, one in tensors.items()} for library, tensors in of_each.items()}
    RECORDED.write_text(json.dumps(hexed, indent=1) + "\n")
