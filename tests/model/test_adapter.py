"""Adapters: what is trained, how it starts, and what is said when it cannot be."""

from pathlib import Path

import pytest
import torch
from bases import Operators
from bases import loaded as base
from jobs import logits
from messages import refusal
from peft import PeftModel, get_peft_model_state_dict

from finetune.config import AdapterSection, MemorySection, ModelSection
from finetune.errors import ConfigError
from finetune.model.adapters.adapter import attach, casts_by_autocast, check_rank, set_trained_dtype
from finetune.model.adapters.adapter_files import weights
from finetune.model.attention import backends
from finetune.model.base import load_architecture
from finetune.model.recompute import checkpointing
from finetune.training import state

CPU = torch.device("cpu")
BASE = "builtin:tiny-llama"
IDS = torch.arange(48)[None]


def trained(model) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_all_linear_layers_but_the_head_are_adapted() -> None:
    model = attach(base("nf4"), AdapterSection(rank=4), BASE, seed=1)
    assert sum(weight.numel() for weight in trained(model).values()) == 217_088 // 4
    assert not any("lm_head" in name or "embed" in name for name in trained(model))


def test_a_pattern_chooses_layers_by_their_full_names() -> None:
    model = attach(base("nf4"), AdapterSection(targets=["o_proj", ".*layers[.][01][.]mlp[.].*"]), BASE, seed=1)
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.model.layers.") for name in trained(model)}
    mlp = {f"{layer}.mlp.{name}_proj" for layer in (0, 1) for name in ("gate", "up", "down")}
    assert adapted == mlp | {f"{layer}.self_attn.o_proj" for layer in range(4)}
    with refusal(ConfigError, "model.layers.0"):
        attach(base(), AdapterSection(targets=["layers[.]0[.]mlp"]), BASE, seed=1)


def test_a_rank_above_the_smaller_side_of_each_layer_is_refused() -> None:
    check_rank(base(), AdapterSection(rank=192))
    check_rank(base(), AdapterSection(rank=64, targets=["k_proj"]))
    with refusal(ConfigError, "65 is more than the smaller side of each layer it would adapt, 64 at most"):
        check_rank(base(), AdapterSection(rank=65, targets=["k_proj"]))


@pytest.mark.parametrize("init", ["pissa", "loftq"])
def test_a_start_from_more_singular_values_than_a_layer_has_is_refused_with_what_to_set(init: str) -> None:
    section = AdapterSection(rank=65)
    check_rank(base(), section)
    with refusal(ConfigError, "`adapter.init`", init, "adapter.ranks", "k_proj", "v_proj"):
        check_rank(base(), section.model_copy(update={"init": init}))
    check_rank(base(), section.model_copy(update={"init": init, "ranks": {"k_proj": 64, "v_proj": 64}}))


def test_the_rank_to_set_for_a_start_from_singular_values_is_that_of_the_narrowest_layer_of_a_name() -> None:
    layers = base()
    layers.model.layers[0].self_attn.k_proj = torch.nn.Linear(128, 16)
    with refusal(ConfigError, "`k_proj`", "adapter.ranks", "k_proj", "v_proj"):
        check_rank(layers, AdapterSection(rank=65, init="pissa"))


def test_the_first_name_or_pattern_that_matches_gives_the_rank() -> None:
    section = AdapterSection(rank=4, alpha=8, ranks={"q_proj": 6, "layers[.](0|1)[.].*": 2})
    model = attach(base("nf4"), section, BASE, seed=1)
    layers = model.base_model.model.model.layers
    found = [(layers[n].self_attn.q_proj.r, layers[n].mlp.up_proj.r) for n in (0, 1, 2)]
    assert found == [({"default": 6}, {"default": rest}) for rest in (2, 2, 4)]
    assert layers[0].mlp.up_proj.scaling == {"default": 8 / 2}, "alpha is the same for all"


def test_peft_reads_the_ranks_of_a_saved_adapter_in_their_order(tmp_path: Path) -> None:
    section = AdapterSection(rank=4, ranks={"q_proj": 6, "layers[.](0|1)[.].*": 2})
    state.save_weights(attach(base(), section, BASE, seed=1), tmp_path)
    read = PeftModel.from_pretrained(base(), str(tmp_path))
    assert read.base_model.model.model.layers[0].self_attn.q_proj.r == {"default": 6}


def test_a_rank_that_no_adapted_layer_has_names_the_candidates() -> None:
    with refusal(ConfigError, "model.layers.0"):
        check_rank(base(), AdapterSection(ranks={"layers[.]9[.].*": 8}))
    with refusal(ConfigError, "`q_proj`"):
        check_rank(base(), AdapterSection(targets=["q_proj"], ranks={"o_proj": 8}))
    with refusal(ConfigError, "`adapter.ranks`"):
        check_rank(base(), AdapterSection(ranks={"k_proj": 65}))


def test_extra_modules_are_trained_whole() -> None:
    model = attach(base("nf4"), AdapterSection(targets=["q_proj"], extra_modules=["norm"]), BASE, seed=1)
    assert any("norm.modules_to_save" in name for name in trained(model))


def test_the_trained_weights_are_found_without_a_copy_of_anything() -> None:
    """PEFT's own way copies parts of each 4-bit weight's quantization, more than a small adapter takes."""
    section = AdapterSection(rank=4, dora=True, extra_modules=["norm"])
    model = attach(base("nf4"), section, BASE, seed=1)
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    with Operators() as operators:
        found = weights(model)
    assert set(operators.calls) <= {"aten::detach"}, "a view"
    assert found.keys() == expected.keys()
    assert {id(weight) for weight in found.values()} == {id(weight) for weight in trained(model).values()}


def test_the_seed_decides_the_adapter() -> None:
    one, same, other = (trained(attach(base(), AdapterSection(rank=2), BASE, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("section", [AdapterSection(), AdapterSection(rslora=True), AdapterSection(dora=True)])
def test_a_new_adapter_changes_nothing(section: AdapterSection) -> None:
    model = base()
    before = logits(model)
    torch.testing.assert_close(logits(attach(model, section, BASE, seed=1)), before, rtol=1e-4, atol=1e-4)


def test_pissa_moves_weight_into_the_adapter_and_changes_nothing() -> None:
    model = base()
    before = logits(model)
    adapted = attach(model, AdapterSection(init="pissa"), BASE, seed=1)
    torch.testing.assert_close(logits(adapted), before, rtol=1e-3, atol=1e-3)
    assert all(tensor.abs().max() > 0 for tensor in trained(adapted).values())


@pytest.mark.slow
def test_loftq_brings_a_4_bit_base_nearer_to_the_weights_on_disk() -> None:
    exact = logits(base("none"))
    plain = attach(base("nf4"), AdapterSection(rank=32, alpha=64), BASE, seed=1)
    loftq = attach(base("nf4"), AdapterSection(rank=32, alpha=64, init="loftq"), BASE, seed=1)
    assert (logits(loftq) - exact).norm() < 0.8 * (logits(plain) - exact).norm()


def test_rank_stabilised_scaling() -> None:
    model = attach(base(), AdapterSection(rank=16, alpha=32, rslora=True), BASE, seed=1)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == 32 / 16**0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_weights_have_the_type_asked_for(dtype: str) -> None:
    section = AdapterSection(dtype=dtype, dora=True, targets=["q_proj"])
    model = attach(base("nf4", dtype=torch.bfloat16), section, BASE, seed=1)
    for name, tensor in trained(model).items():
        tensor.data = tensor.data.to(torch.float16)  # as another library might
        del name
    set_trained_dtype(model, section)
    for name, tensor in trained(model).items():
        expected = torch.float32 if "magnitude" in name else getattr(torch, dtype)
        assert tensor.dtype == expected, name


# -- activation checkpointing ------------------------------------------------------------------------------------------


_SECTIONS = [
    ("nf4", MemorySection(checkpointing="all", offload="checkpoints"), 4),
    ("nf4", MemorySection(checkpointing=3), 3),
    ("nf4", MemorySection(checkpointing={"keep-both": 1, "all": 2}), 3),
    ("int8", MemorySection(checkpointing="all"), 4),
    ("int8", MemorySection(checkpointing="all", offload="checkpoints"), 4),
]


@pytest.mark.slow
def test_checkpointing_saves_the_layers_it_says_and_changes_no_gradient() -> None:
    def gradients(kind: str, section: MemorySection) -> tuple[int, list[torch.Tensor]]:
        model = attach(base(kind), AdapterSection(rank=4, dropout=0.2), BASE, seed=1)
        checkpointing.apply(model.get_base_model(), section, "cpu")
        model.train()
        torch.manual_seed(7)
        model(input_ids=IDS, labels=IDS).loss.backward()
        return checkpointing.checkpointed(model), [tensor.grad for tensor in trained(model).values()]

    plain = {kind: gradients(kind, MemorySection(checkpointing="none")) for kind in ("nf4", "int8")}
    for kind, section, layers in _SECTIONS:
        none, expected = plain[kind]
        count, found = gradients(kind, section)
        assert (none, count) == (0, layers), section
        assert sum(grad.abs().sum() for grad in expected) > 0
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), section


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected", "why"),
    [("builtin:tiny-llama", "sdpa", ("flash_attention_3", "CUDA")),
     ("google/gemma-2-9b", "eager", ("caps attention logits",))],
)  # fmt: skip
def test_auto_attention_says_why(name: str, expected: str, why: tuple[str, ...]) -> None:
    architecture = load_architecture(ModelSection(name=name, weights="random"))
    implementation, reason = backends.choose("auto", architecture, "cpu", "bf16")
    assert implementation == expected
    assert all(word in reason for word in why)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_base_is_loaded_with_the_attention_that_was_chosen(name: str) -> None:
    assert base(attention=name).config._attn_implementation == name


@pytest.mark.parametrize("kind", ["nf4", "int8", "none"])
def test_autocast_alone_casts_what_a_lora_layer_is_given(kind: str) -> None:
    """And the logits are the same to the bit."""
    section = AdapterSection(rank=4)
    model = attach(base(kind, dtype=torch.bfloat16), section, BASE, seed=1)
    given: list[torch.dtype] = []
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        before = logits(model)
        assert set(given) == {torch.float32}, "PEFT's own cast"
        given.clear()
        with casts_by_autocast(model, section, "bf16"):
            found = logits(model)
    assert set(given) == {torch.bfloat16}
    assert torch.equal(found, before)
