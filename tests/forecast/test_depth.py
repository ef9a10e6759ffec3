"""A model with layers left out is the same model but for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

from finetune.config import QuantizationSection
from finetune.forecast import depth
from finetune.forecast.extrapolate import shorten
from finetune.model.recompute import checkpointing
from finetune.model.skeleton import weightless_base


def built(name: str, layers: int, kept: Sequence[int] | None = None, kind: str = "none") -> Any:
    return weightless_base(
        tiny_models.architecture(name, layers),
        QuantizationSection(kind=kind),
        attention="sdpa",
        dtype=torch.bfloat16,
        shorten=(lambda model: None) if kept is None else (lambda model: depth.keep(model, kept)),
    )


def test_like_layers_are_of_one_kind_and_windows_alternate_with_full_attention() -> None:
    assert len(set(depth.kinds(built("llama", 6)))) == 1
    kinds = depth.kinds(built("windows", 9))
    assert len(set(kinds)) == 2
    assert kinds == kinds[:3] * 3
    assert shorten(kinds * 7).repeats == (1, 17, 1, 1, 1), "three layers are a unit"


def test_a_layer_of_other_sizes_or_parts_is_of_another_kind() -> None:
    model = built("llama", 6)
    model.model.layers[2].mlp.up_proj = nn.Linear(64, 65, device="meta")
    model.model.layers[4].mlp.act_fn = nn.Identity()
    kinds = depth.kinds(model)
    assert kinds[0] == kinds[1] == kinds[3] == kinds[5]
    assert len(set(kinds)) == 3


def test_model_and_config_have_only_the_kept_layers() -> None:
    kept = (0, 2, 5)
    model, whole = built("windows", 6, kept), built("windows", 6)
    assert [type(layer) for layer in model.model.layers] == [type(whole.model.layers[number]) for number in kept]
    assert model.config.num_hidden_layers == 3
    assert model.config.layer_types == [whole.config.layer_types[number] for number in kept]
    assert len(checkpointing.layers(model)) == 3
    one = sum(weight.numel() for weight in whole.model.layers[0].parameters())
    assert whole.num_parameters() - model.num_parameters() == 3 * one


def test_kept_layers_are_quantized_as_in_the_whole_model() -> None:
    short, whole = built("llama", 6, (1, 4), "nf4"), built("llama", 6, kind="nf4")
    assert depth.kinds(short) == [depth.kinds(whole)[number] for number in (1, 4)]
    assert all(type(layer.mlp.up_proj).__name__ == "Linear4bit" for layer in short.model.layers)
    assert type(short.lm_head) is nn.Linear


def test_a_model_without_one_list_of_layers_is_refused() -> None:
    model = built("llama", 4)
    model.second = nn.ModuleList([model.model.layers.pop(3)])
    with pytest.raises(depth.Scattered, match="LlamaForCausalLM"):
        depth.keep(model, (0, 1))


def test_only_lists_with_an_entry_for_each_layer_are_shortened() -> None:
    model = built("llama", 4)
    model.config.note, model.config.sizes = "abcd", [1, 2]
    depth.keep(model, (0, 3))
    assert (model.config.note, model.config.sizes) == ("abcd", [1, 2])
