"""Small bases in the forms that models are published in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

from finetune.forms import packed

STATED: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "nvfp4": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
        },
    },
}  # fmt: skip
"""What config.json says of each form."""


def publish(folder: Path, form: str) -> Path:
    """Put the weights of a saved base, in place, into `form`: experts of gpt-oss in MXFP4, or all projections."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, weight in list(tensors.items()):
        if form == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            codes, scales = _packed(form, tensors.pop(name), transposed=True)
            tensors[f"{name}_blocks"] = codes.view(*scales.shape, -1)
            tensors[f"{name}_scales"] = scales
        elif form == "fp8" and name.endswith("_proj.weight"):
            codes, scales = _packed(form, weight)
            tensors[name], tensors[f"{name}_scale_inv"] = codes.view(torch.float8_e4m3fn), scales
        elif form == "nvfp4" and name.endswith("_proj.weight"):
            codes, scales = _packed(form, tensors.pop(name))  # scales of a row: two factors, then those of the blocks
            tensors[f"{name}_packed"] = codes
            tensors[f"{name}_scale"] = scales[:, 8:].contiguous().view(torch.float8_e4m3fn)
            tensors[f"{name}_global_scale"] = scales[0, 4:8].clone().view(torch.float32)
    save_file(tensors, file, {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": STATED[form]}))
    return folder


def published(form: str, llama: Path, folder: Path) -> Path:
    """A base in `form`: `llama` (a folder with a tokenizer) in FP8, or a gpt-oss with its tokenizer in MXFP4."""
    shutil.copytree(llama, folder)
    if form == "mxfp4":
        vocabulary = json.loads((llama / "config.json").read_text())["vocab_size"]
        torch.manual_seed(0)
        config = GptOssConfig(
            vocab_size=vocabulary, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return publish(folder, form)


def _packed(form: str, weight: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    parameter = packed.pack(form, weight, **how)
    packing = packed.packing_of(parameter)
    assert packing is not None
    return parameter.data, packing.scales
