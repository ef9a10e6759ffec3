"""Recipes: which form each weight has in training and in a file, and that training computes with the decoded values."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf_in_llama_cpp as bench
import pytest
import torch
from bases import loaded
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from finetune.config import QuantizationSection
from finetune.config.serving import GGUF, GRIDS, PACKED
from finetune.forms import FORMS, packed
from finetune.model.skeleton import weightless_base
from finetune.model.source import gguf_families, gguf_names
from finetune.model.structure import quantizers, recipes
from finetune.model.structure.quantization import QUANTIZATIONS
from finetune.objectives import log_probs

IDS = torch.arange(24)[None] % 64
_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 10, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 64, "pad_token_id": 0,
}  # fmt: skip
_FEW: dict[str, Any] = {**_SIZES, "num_hidden_layers": 1}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 256, "num_experts_per_tok": 2, "norm_topk_prob": True}
FAMILIES = {
    "llama": LlamaConfig(**_SIZES),
    "tied": Gemma3TextConfig(**{**_SIZES, "num_key_value_heads": 2}),
    "fused attention": Phi3Config(**_SIZES),
    "experts": Qwen3MoeConfig(**_SIZES, **_EXPERTS, num_experts=4),
    "eight experts": Qwen3MoeConfig(**_SIZES, **_EXPERTS, num_experts=8),
}


def weightless(config: Any, kind: str = "none") -> Any:
    return weightless_base(config, QuantizationSection(kind=kind), attention="eager", dtype=torch.float32)


def test_the_kinds_that_are_served_are_those_of_the_tables() -> None:
    assert set(GGUF) == set(recipes.RECIPES)
    assert {kind for kind, one in QUANTIZATIONS.items() if one.packed} == set(PACKED)
    assert all(FORMS.keys() >= {one.main, one.head} for one in recipes.RECIPES.values())
    assert FORMS.keys() >= {form.codec.gguf.fallback for form in FORMS.values() if form.module} - {None}


@pytest.mark.parametrize("family", FAMILIES)
def test_training_gives_each_weight_the_type_that_llama_cpp_gives_its_tensor(
    family: str, subtests: pytest.Subtests
) -> None:
    config = FAMILIES[family]
    model, entry = weightless(config), gguf_families.family(config)
    names = gguf_names.mapped(config, entry)
    for kind in recipes.RECIPES:
        with subtests.test(kind=kind):
            forms = quantizers.recipe_of(model, kind)
            assert len(forms) > 10 * 4
            for name, form in forms.items():
                weight = model.get_parameter(name)
                for part, stored in gguf_names.stored(name, weight, config, entry).items():
                    called = gguf_names.name_of(names, part, entry)
                    assert recipes.form_of(called, stored.shape[-1], kind, config) == form, name


def test_half_of_the_layers_have_more_bits() -> None:
    """As in `test_gguf.py` by llama.cpp's names."""
    forms = quantizers.recipe_of(weightless(FAMILIES["llama"]), "q4_k_m")
    finer = [name for name, form in forms.items() if form == "q6_k"]
    layers = (0, 3, 6, 8, 9)
    parts = ("self_attn.v_proj", "mlp.down_proj")
    assert sorted(finer) == sorted(
        ["lm_head.weight", *(f"model.layers.{layer}.{part}.weight" for layer in layers for part in parts)]
    )
    assert {forms[name] for name in forms.keys() - set(finer)} == {"q4_k"}


def test_iq4_xs_has_five_bits_for_shared_values_and_for_the_first_layers() -> None:
    forms = quantizers.recipe_of(weightless(FAMILIES["llama"]), "iq4_xs")  # four heads share keys and values
    five = [f"model.layers.{layer}.self_attn.v_proj.weight" for layer in range(10)]
    assert sorted(name for name, form in forms.items() if form == "q5_k") == sorted(
        [*five, "model.layers.0.mlp.down_proj.weight"]
    )


@pytest.mark.parametrize(("heads", "form"), [(1, "q5_1"), (2, "iq4_nl")])
def test_where_layers_differ_the_first_says_how_many_heads_share_values(heads: int, form: str) -> None:
    shape = bench.SHAPES["gemma4 mixture"]
    fields = {**shape.fields, "num_key_value_heads": heads, "num_global_key_value_heads": 4}
    config = bench.architecture(bench.Shape(shape.tokenizer, fields), 600)
    forms = quantizers.recipe_of(weightless(config), "iq4_xs")
    assert {forms[name] for name in forms if name.endswith("v_proj.weight")} == {form}


@pytest.mark.parametrize(
    ("kind", "part", "form"),
    [
        ("q4_k_m", "attn_v", "q8_0"), ("q4_k_m", "attn_k", "q8_0"), ("q4_k_m", "attn_output", "q5_k"),
        ("q5_k_m", "attn_output", "q5_k"), ("q5_k_m", "attn_k", "q8_0"), ("q6_k", "attn_output", "q6_k"),
        ("iq4_xs", "attn_output", "q5_k"), ("q4_0", "attn_v", "q8_0"), ("q4_0", "attn_output", "q4_0"),
    ],
)  # fmt: skip
def test_beside_eight_experts_attention_has_more_bits(kind: str, part: str, form: str) -> None:
    text = SimpleNamespace(num_hidden_layers=32, tie_word_embeddings=False, num_local_experts=8)
    assert recipes.wanted(f"blk.1.{part}.weight", kind, text) == form


@pytest.mark.parametrize(
    ("kind", "columns", "form"),
    [
        ("q4_k_m", 320, "q5_0"), ("q5_k_m", 320, "q5_1"), ("q6_k", 320, "q8_0"), ("iq4_xs", 320, "iq4_nl"),
        ("q4_0", 320, "q4_0"), ("q4_k_m", 200, None), ("q8_0", 200, None),
    ],
)  # fmt: skip
def test_rows_that_blocks_do_not_divide_have_another_form(kind: str, columns: int, form: str | None) -> None:
    text = SimpleNamespace(num_hidden_layers=32, tie_word_embeddings=False)
    assert recipes.form_of("model.layers.9.mlp.gate_proj.weight", columns, kind, text) == form


def results(model: Any) -> list[torch.Tensor]:
    """Loss by the fused head, and gradients of an adapter, with the logits."""
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(target_modules=["o_proj"], init_lora_weights=False))
    log_probs.attach(adapted)
    log_probs.check(adapted)
    loss = -adapted(input_ids=IDS, labels=IDS, fused_lm_head=True).log_probs.sum()
    loss.backward()
    gradients = [weight.grad for weight in adapted.parameters() if weight.requires_grad]
    assert all(gradient is not None and gradient.any() for gradient in gradients)
    return [loss, adapted(input_ids=IDS).logits, *gradients]


TRAINED = {
    "llama": (LlamaConfig(**_FEW), "q4_k_m"),
    # By a root that is no whole number.
    "tied and scaled": (Gemma3TextConfig(**_FEW | {"hidden_size": 512}), "q5_k_m"),
    "fused": (Phi3Config(**_FEW), "iq4_xs"),
    "experts": (Qwen3MoeConfig(**_FEW, **_EXPERTS, num_experts=4), "q6_k"),
    "transposed experts": (GptOssConfig(**_FEW, num_local_experts=4, num_experts_per_tok=2), "q4_0"),
    "linear attention": (
        Qwen3_5TextConfig(
            **_FEW | {"num_hidden_layers": 2}, layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4, linear_value_head_dim=64, linear_num_key_heads=2, linear_key_head_dim=64,
        ),
        "q8_0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", TRAINED)
def test_a_base_in_the_form_of_a_file_trains_like_its_decoded_values(family: str, tmp_path: Path) -> None:
    config, kind = TRAINED[family]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    held, plain = (loaded(each, tmp_path, attention="eager") for each in (kind, "none"))
    forms = quantizers.recipe_of(weightless(config), kind)
    stored = {name: how.form for name, one in held.named_parameters() if (how := packed.packing_of(one))}
    tied = set(held.all_tied_weights_keys)
    assert stored == {name: form for name, form in forms.items() if name not in tied}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= stored.keys() | tied
    assert (held.lm_head.weight is held.model.embed_tokens.weight) is bool(tied)
    for name in stored:
        plain.get_parameter(name).data = packed.values(held.get_parameter(name)).contiguous()
    for mine, theirs in zip(results(held), results(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_the_page_on_shipping_tells_the_error_of_each_form() -> None:
    """Of normally distributed weights, relative to their size."""
    page = (Path(__file__).parents[2] / "docs/shipping.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`.* \| ([\d.]+)% \|$", page, re.MULTILINE)
    assert {name for name, _ in rows} == set(GRIDS)
    weight = torch.randn((128, 1024), generator=torch.Generator().manual_seed(0))
    for name, told in rows:
        form = recipes.RECIPES[name].main if name in recipes.RECIPES else name
        error = (packed.exact(packed.pack(form, weight)) - weight).norm() / weight.norm()
        assert 100 * float(error) == pytest.approx(float(told), rel=0.02, abs=0.06), name
