"""The catalog against the library: on the meta device, each entry builds into the model as published."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from messages import refusal
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from finetune.errors import ConfigError
from finetune.model.source import catalog

MODELS = catalog.names()
NAMES = catalog.names(aliases=True)
ALIASES = [name for name in NAMES if name not in MODELS]


# What a configuration takes beside its fields; the third is read by the layers of Qwen3's mixtures.
_NO_FIELDS = {"model_type", "quantization_config", "head_dim"}
# What the library makes a field of some layers of.
_OF_SOME_LAYERS = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}


@cache
def shared(name: str) -> PreTrainedModel:
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(catalog.config(name))
    model.tie_weights()
    return model


def test_no_name_stands_for_two_models() -> None:
    assert len(set(NAMES)) == len(NAMES) == len(MODELS) + len(ALIASES)


@pytest.mark.slow
def test_the_model_has_the_published_number_of_parameters(subtests: pytest.Subtests) -> None:
    for name in MODELS:
        with subtests.test(name=name):
            model = shared(name)
            assert all(p.is_meta for p in model.parameters())
            # parameters() yields a tied weight once.
            assert sum(p.numel() for p in model.parameters()) == catalog.find(name).parameters


def test_the_class_is_the_architecture_named(subtests: pytest.Subtests) -> None:
    for name in MODELS:
        with subtests.test(name=name):
            model, entry = shared(name), catalog.find(name)
            assert [type(model).__name__] == entry.facts["architectures"]
            tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
            assert tied == entry.facts["tie_word_embeddings"]


def test_every_fact_is_a_field_of_the_configuration_and_arrives_there(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            config, facts = catalog.config(name), catalog.find(name).facts
            fields = {field.name for field in dataclasses.fields(config)}
            assert facts.keys() <= {*_NO_FIELDS, *_OF_SOME_LAYERS} | fields
            differing = set(_OF_SOME_LAYERS.values()) if facts.keys() & _OF_SOME_LAYERS.keys() else set()
            assert all(facts[field] in catalog.values(config, field) for field in differing)
            # The library may add to the rope settings (Phi-3 gets its rotary factor), never change them.
            assert {**config.rope_parameters, **facts["rope_parameters"]} == config.rope_parameters
            for field in facts.keys() - {"rope_parameters", *_OF_SOME_LAYERS}:
                assert field in differing or getattr(config, field) == facts[field], field
            for field in facts.keys() & _OF_SOME_LAYERS.keys():
                assert facts[field] in catalog.values(config, _OF_SOME_LAYERS[field])


def test_every_entry_says_where_its_number_was_published() -> None:
    assert [name for name in NAMES if not catalog.find(name).source] == []


def test_sliding_window_layers(subtests: pytest.Subtests) -> None:
    for name, sliding, full in [
        ("meta-llama/Llama-3.1-8B", 0, 32),
        ("Qwen/Qwen2.5-32B", 0, 64),
        ("Qwen/Qwen3-32B", 0, 64),
        # Gemma 2 alternates (https://arxiv.org/abs/2408.00118, section 2); Gemma 3 has five local layers to
        # each global one (https://arxiv.org/abs/2503.19786, section 2). Both begin with a local layer.
        ("google/gemma-2-9b", 21, 21),
        ("google/gemma-3-1b-pt", 22, 4),
        ("google/gemma-3-27b-pt", 52, 10),
        ("google/gemma-4-31B-it", 50, 10),
        ("openai/gpt-oss-20b", 12, 12),
    ]:
        with subtests.test(name=name):
            config = catalog.config(name)
            kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
            assert (kinds.count("sliding_attention"), kinds.count("full_attention")) == (sliding, full)


def test_every_fourth_layer_of_qwen3_5_attends_to_all_tokens() -> None:
    assert catalog.config("Qwen/Qwen3.5-9B").layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 8


def test_an_alias_is_its_model_but_for_tokens_and_context(subtests: pytest.Subtests) -> None:
    for name in ALIASES:
        with subtests.test(name=name):
            entry = catalog.find(name)
            model = catalog.find(entry.alias_of)
            assert entry.name == name
            assert model.alias_of is None
            assert (entry.parameters, entry.source, entry.note) == (model.parameters, model.source, model.note)
            differing = {fact for fact in model.facts if entry.facts[fact] != model.facts[fact]}
            assert differing <= {"eos_token_id", "max_position_embeddings", "rms_norm_eps"}
            assert entry.facts.keys() == model.facts.keys()


def test_aliases_resolve() -> None:
    for name, model in [
        ("meta-llama/Llama-2-70b-chat-hf", "meta-llama/Llama-2-70b-hf"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-14B"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("google/gemma-2-2b-it", "google/gemma-2-2b"),
        ("google/gemma-3-4b-it", "google/gemma-3-4b-pt"),
    ]:
        assert catalog.find(name).alias_of == model


def test_multimodal_checkpoints_say_that_only_their_text_model_is_here(subtests: pytest.Subtests) -> None:
    gemma3 = [f"google/gemma-3-{size}-pt" for size in ("4b", "12b", "27b")]
    for name in [*gemma3, "google/gemma-4-31B-it", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B"]:
        with subtests.test(name=name):
            entry = catalog.find(name)
            assert entry.facts["model_type"].endswith("_text")
            assert "text model" in entry.note


def test_quantizable_parameters(subtests: pytest.Subtests) -> None:
    for name, quantizable in [
        ("meta-llama/Llama-2-7b-hf", 6_476_005_376),
        ("meta-llama/Llama-3.1-8B", 6_979_321_856),
        ("Qwen/Qwen2.5-7B", 6_525_288_448),
    ]:
        with subtests.test(name=name):
            model = shared(name)
            head = model.get_output_embeddings()
            linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
            assert sum(m.weight.numel() for m in linears) == quantizable


def test_each_configuration_is_new() -> None:
    changed = catalog.config("microsoft/phi-4")
    changed.rope_parameters["rope_theta"] = 1.0
    changed.hidden_size = 1
    assert catalog.config("microsoft/phi-4").rope_parameters["rope_theta"] == 250_000.0
    assert catalog.config("microsoft/phi-4").hidden_size == 5120


def test_find_returns_none_for_an_unknown_name_and_config_raises_with_advice() -> None:
    assert catalog.find("meta-llama/Llama-3.1-9B") is None
    with refusal(ConfigError, "meta-llama/Llama-3.1-8B"):
        catalog.config("meta-llama/Llama-3.1-9B")
    with refusal(ConfigError, "no model 'zzz' in the catalog"):
        catalog.config("zzz")


def test_nearest_ignores_case_and_a_missing_organisation(subtests: pytest.Subtests) -> None:
    for name, first in [
        ("meta-llama/Llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("qwen/qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("phi4", "microsoft/phi-4"),
    ]:
        with subtests.test(name=name):
            assert catalog.nearest(name)[0] == first


def test_nearest_keeps_to_its_limit() -> None:
    assert len(catalog.nearest("Qwen/Qwen2.5-7B", limit=2)) == 2
    assert catalog.nearest("zzz") == []
