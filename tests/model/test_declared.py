"""A look at rows does without the base's config exactly where nothing in that could change the rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import finetune
from finetune.config import ModelSection
from finetune.model.source.declared import leaves_rows_alone
from finetune.model.source.locate import BUILTIN_BASE, locate
from finetune.model.source.tokenizer import load_tokenizer
from finetune.resolve import resolve

TINY = Path(__file__).parents[2] / "configs" / "tiny_cpu.yaml"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data.max_length=1024", "data.packing=true"],
        ["training.objective=dpo", "data.format=pairs"],
        ["model.name=meta-llama/Llama-2-7b-hf", "model.weights=random", "output.merge=false"],
    ],
)
def test_nothing_of_the_base_changes_these_rows(overrides: list[str]) -> None:
    config = finetune.load_config(TINY, overrides)
    assert leaves_rows_alone(config)
    resolved = resolve(config, until="base").config
    assert (resolved.data, resolved.model) == (config.data, config.model)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.max_length=2048"],
        ["data.new_tokens=[<think>]"],
        ["training.objective=classification"],
        ["output.serve=q4_k_m", "output.merge=false"],
        ["quantization.kind=published"],
        ["model.rope_scaling={rope_type: yarn, factor: 4}"],
        ["model.vision=frozen"],
        ["model.name=someone/model"],
        ["model.name=no/folder"],
    ],
)
def test_these_rows_may_depend_on_the_base(overrides: list[str]) -> None:
    assert not leaves_rows_alone(finetune.load_config(TINY, overrides))


@pytest.mark.parametrize("more", [{"max_position_embeddings": 64}, {"quantization_config": {}}, {"text_config": {}}])
def test_a_base_with_parts_or_quantized_or_short_is_loaded(more: dict[str, object], tmp_path: Path) -> None:
    known = json.loads(Path(locate(BUILTIN_BASE), "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(known))
    config = finetune.load_config(TINY, [f"model.name={tmp_path}"])
    assert leaves_rows_alone(config)
    (tmp_path / "config.json").write_text(json.dumps({**known, **more}))
    assert not leaves_rows_alone(config)


def test_the_built_in_tokenizer_is_the_one_that_transformers_chooses() -> None:
    ours, theirs = load_tokenizer(ModelSection()), AutoTokenizer.from_pretrained(locate(BUILTIN_BASE))
    assert type(ours) is type(theirs)
    assert ours.init_kwargs == theirs.init_kwargs
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
