"""The catalog against the library: on the meta device, each entry builds into the model as published."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from messages import refusal
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


def built(config: Any) -> PreTrainedModel:
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


def test_no_name_stands_for_two_models() -> None:
    assert len(set(NAMES)) == len(NAMES) == len(MODELS) + len(ALIASES)
    assert all(catalog.find(name).source for name in NAMES)


@pytest.mark.long
def test_the_model_has_the_published_number_of_parameters(subtests: pytest.Subtests) -> None:
    for name in MODELS:
        with subtests.test(name=name):
            model = built(catalog.config(name))
            assert all(p.is_meta for p in model.parameters())
            # parameters() yields a tied weight once.
            assert sum(p.numel() for p in model.parameters()) == catalog.find(name).parameters


def test_the_class_is_the_architecture_named(subtests: pytest.Subtests) -> None:
    for name in MODELS:
        with subtests.test(name=name):
            config, entry = catalog.config(name), catalog.find(name)
            config.num_hidden_layers = 1
            if hasattr(config, "layer_types"):
                config.layer_types = config.layer_types[:1]
            model = built(config)
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


def test_an_alias_is_its_model_but_for_tokens_and_context(subtests: pytest.Subtests) -> None:
    for name in ALIASES:
        with subtests.test(name=name):
            entry = catalog.find(name)
            model = catalog.find(entry.alias_of)
            assert entry.name == name
            assert entry.source
            assert model.alias_of is None
            assert (entry.parameters, entry.source, entry.note) == (model.parameters, model.source, model.note)
            differing = {fact for fact in model.facts if entry.facts[fact] != model.facts[fact]}
            assert differing <= {"eos_token_id", "max_position_embeddings", "rms_norm_eps"}
            assert entry.facts.keys() == model.facts.keys()


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
    assert len(catalog.nearest("Qwen/Qwen2.5-7B", limit=2)) == 2
    assert catalog.nearest("zzz") == []
