"""Packed weights: decoded to the published values, and trained on like the same values in 16 or 32 bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bases import loaded
from jobs import sampled
from messages import refusal
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig, Mxfp4Config, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from finetune.config import ModelSection, QuantizationSection
from finetune.errors import ArtifactError
from finetune.forms import packed
from finetune.model import base
from finetune.model.skeleton import weightless_base
from finetune.model.structure import streamed
from finetune.model.structure.quantization import QUANTIZATIONS
from finetune.model.structure.recipes import RECIPES
from tests.model import nvfp4_reference

CPU = torch.device("cpu")
IDS = torch.arange(20)[None]
_SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN = Qwen3MoeConfig(**_SIZES, num_experts=4, moe_intermediate_size=128)
CONFIGS = {
    "mxfp4": GptOssConfig(**_SIZES, num_local_experts=4), "fp8": _QWEN,
    "compressed-tensors": _QWEN, "modelopt": _QWEN,
}  # fmt: skip
# All but the first leave a layer in 16 bit.
STATED: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "fp8": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.1.self_attn.o_proj"],
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
        },
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*1.self_attn.o"],
    },
    "modelopt": {
        "quant_method": "modelopt", "quant_algo": "NVFP4",
        "ignore": ["lm_head", "model.layers.*.mlp.gate", "*.1.self_attn.o*"],
    },
}  # fmt: skip
FORMS = {"mxfp4": "mxfp4", "fp8": "fp8", "compressed-tensors": "nvfp4", "modelopt": "nvfp4"}
"""The `quantization.kind` of each library's files."""
PACKED = {"mxfp4": 4, "fp8": 11, "compressed-tensors": 11, "modelopt": 11}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


def in_nvfp4(name: str, weight: torch.Tensor, library: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tensors of the files in place of a weight, and their values in float32."""
    rows, columns = weight.shape
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.randint(100, 448, (rows, columns // 16)).to(torch.float8_e4m3fn)
    factor = torch.rand(()) / 1e4
    each = scales.float() * factor
    tensors = {name: codes, f"{name}_scale": scales, f"{name}_scale_2": factor}
    if library == "compressed-tensors":
        divisor = 1 / factor.reshape(1)
        each = scales.float() / divisor
        tensors = {f"{name}_packed": codes, f"{name}_scale": scales, f"{name}_global_scale": divisor}
        tensors[name.replace("weight", "input_global_scale")] = torch.ones(1)
    values = E2M1[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).long()]
    return tensors, values * each.repeat_interleave(16, dim=-1)


@pytest.fixture(scope="module", params=STATED)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A form, or a library that writes NVFP4, and a base in such files with random bytes."""
    form, folder = request.param, tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[form], dtype=torch.bfloat16)
    model.save_pretrained(folder)
    values = {}
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if form == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensors.pop(name).shape
            blocks = (experts, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 123, blocks, dtype=torch.uint8)
        elif "1.self_attn.o" in name:
            continue
        elif FORMS[form] == "nvfp4" and "_proj" in name:
            made, values[name] = in_nvfp4(name, tensors.pop(name), form)
            tensors |= made
        elif form == "fp8" and "_proj" in name:
            tensors[name] = weight.mul(1000).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)) / 1000
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if values:  # transformers 5.24 reads no files in NVFP4
        shutil.copytree(folder, folder / "values")
        plain = {name: weight.float() for name, weight in tensors.items() if weight.dtype is torch.bfloat16}
        save_file(plain | values, folder / "values" / "model.safetensors", {"format": "pt"})
    stated = json.loads((folder / "config.json").read_text()) | {"quantization_config": STATED[form]}
    (folder / "config.json").write_text(json.dumps(stated))
    return form, folder


def load(folder: Path, kind: str) -> Any:
    return loaded(kind, folder, attention="eager")


def plain(form: str, folder: Path) -> Any:
    """The base as transformers itself dequantizes it, or loads the values of NVFP4."""
    if FORMS[form] == "nvfp4":
        return AutoModelForCausalLM.from_pretrained(folder / "values", dtype=torch.float32, attn_implementation="eager")
    config = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}[form](dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, attn_implementation="eager"
    )
    return model.float()  # transformers 5.24 leaves in bfloat16 what is not packed


@pytest.mark.parametrize(
    "damage", sampled(["zero", "negative", "nan", "integers", "cut", "flat", "none"], "zero", "nan", "integers", "cut")
)
def test_a_base_with_damaged_scales_is_refused_by_the_name_of_its_weight(
    published: tuple[str, Path], damage: str, tmp_path: Path
) -> None:
    form, folder = published
    tensors = load_file(shutil.copytree(folder, tmp_path / "base") / "model.safetensors")
    ending = {"mxfp4": "_scales", "fp8": "_scale_inv", "modelopt": "_scale_2"}.get(form, "weight_global_scale")
    name = next(name for name in sorted(tensors) if name.endswith(ending))
    match damage:
        case "integers":
            tensors[name] = tensors[name].to(torch.int32)
        case "cut" | "flat" | "none" as shape:
            blocks = name if form in ("mxfp4", "fp8") else re.sub(r"weight_\w+$", "weight_scale", name)
            scales = tensors[blocks]
            tensors[blocks] = {"cut": scales[..., :-1].clone(), "flat": scales.flatten(), "none": scales[:0]}[shape]
        case "nan" if form == "mxfp4":
            tensors[name].flatten()[0] = 255
        case _ if form == "mxfp4":
            pytest.skip("exponents are neither zero nor negative")
        case _:
            tensors[name].flatten()[0] = {"zero": 0, "negative": -1, "nan": torch.nan}[damage]
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    weight = name.removesuffix(ending).rpartition(".experts.")[0] or name.removesuffix(ending)
    with refusal(ArtifactError, "base/model.safetensors:", weight):
        load(tmp_path / "base", FORMS[form])
    architecture = base.load_architecture(ModelSection(name=str(tmp_path / "base")))
    bare = weightless_base(architecture, QuantizationSection(kind="none"), attention="eager", dtype=torch.float32)
    with refusal(ArtifactError, "base/model.safetensors:", weight):
        dict(streamed.Weights(bare, [tmp_path / "base" / "model.safetensors"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_byte_decodes_as_in_transformers(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).repeat(256, 1, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).repeat(1, 16, 1)
    expected = convert_moe_packed_tensors(codes, scales, dtype=dtype)
    assert same_bits(packed.values(packed.from_published("mxfp4", codes, scales, expected.shape, dtype)), expected)
    bytes_ = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    codes, scales = bytes_.view(torch.float8_e4m3fn), torch.rand(2, 2)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)
    decoded = packed.values(packed.from_published("fp8", codes, scales, expected.shape, dtype))
    assert torch.equal(decoded.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


def test_mxfp4_rounds_to_nearest_and_ties_to_even() -> None:
    """The scale is 2^(2 - 2) for a largest value from 4 to below 8 (OCP MX v1.0, section 6.3)."""
    values = torch.tensor([7.9, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.26, -5.1, 0.0, 6.0])
    rounded = packed.values(packed.pack("mxfp4", values[None]))[0]
    assert rounded.tolist() == [6.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.0, -0.5, -6.0, 0.0, 6.0]


@pytest.mark.parametrize("library", ["compressed-tensors", "modelopt"])
def test_nvfp4_is_written_and_read_as_by_the_libraries_that_publish_it(library: str) -> None:
    tensors = nvfp4_reference.reference()[library]
    weight = tensors["weight"].view(nvfp4_reference.ROWS, nvfp4_reference.COLUMNS)
    factor = "weight_global_scale" if library == "compressed-tensors" else "weight_scale_2"
    codes = "weight_packed" if library == "compressed-tensors" else "weight"
    layout = packed.published([codes, "weight_scale", factor])["weight"].layout
    scales = tensors["weight_scale"].view(len(weight), -1)
    joined = layout.scales(tensors["weight_packed"], scales.view(torch.float8_e4m3fn), tensors[factor])
    read = packed.from_published("nvfp4", tensors["weight_packed"], joined, weight.shape, torch.bfloat16)
    assert torch.equal(packed.values(read), tensors["values"].view_as(weight)), "but for ModelOpt's 0 where this is -0"
    written = packed.pack("nvfp4", weight)
    assert torch.equal(written.flatten(), tensors["weight_packed"])
    how = packed.packing_of(written)
    assert how is not None
    different = how.scales[:, -scales.shape[1] :] != scales
    assert different.nonzero().tolist() == [[3, 1]], "that of zeros alone, which may be any"


@pytest.mark.parametrize(("form", "error"), [("mxfp4", 0.12), ("nvfp4", 0.1), ("fp8", 0.03)])
def test_a_weight_is_packed_with_the_error_of_its_form_once(form: str, error: float) -> None:
    weight = torch.randn(3, 130, 100, generator=torch.Generator().manual_seed(0))
    once = packed.values(packed.pack(form, weight))
    assert (once - weight).norm() < error * weight.norm()
    assert torch.equal(packed.values(packed.pack(form, once)), once)


def test_a_published_base_trains_like_its_dequantized_values(published: tuple[str, Path]) -> None:
    form, folder = published
    models = load(folder, FORMS[form]), plain(form, folder)
    assert sum(weight.dtype is torch.uint8 for weight in models[0].parameters()) == PACKED[form]
    results = []
    for model in models:
        torch.manual_seed(1)
        adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False))
        output = adapted(input_ids=IDS, labels=IDS)
        output.loss.backward()
        gradients = [weight.grad for weight in adapted.parameters() if weight.requires_grad]
        results.append([output.logits, output.loss, *gradients])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_published_base_is_read_in_16_bit_by_a_merge_and_without_quantization(published: tuple[str, Path]) -> None:
    form, folder = published
    expected = plain(form, folder).state_dict()
    decoded = load(folder, "none").state_dict()
    architecture = base.load_architecture(ModelSection(name=str(folder)))
    bare = weightless_base(architecture, QuantizationSection(kind="none"), attention="eager", dtype=torch.float32)
    files = streamed.Weights(bare, [folder / "model.safetensors"], torch.float32)
    for name, weight in expected.items():
        assert torch.equal(decoded[name], weight), name
        assert torch.equal(files[name].float(), weight), name


@pytest.mark.parametrize("form", [kind for kind, one in QUANTIZATIONS.items() if one.packed and kind != "gguf"])
def test_random_weights_are_packed_where_a_16_bit_base_has_linear_layers_and_experts(form: str) -> None:
    section = ModelSection(weights="random")
    model = base.load_base(
        section, QuantizationSection(kind=form), CONFIGS["fp8"], attention="eager", dtype=torch.float32, device=CPU
    )
    tables = 2 if form in RECIPES else 0
    assert sum(packed.packing_of(weight) is not None for weight in model.parameters()) == 2 * (4 + 2) + tables
    assert model(IDS).logits.isfinite().all()
