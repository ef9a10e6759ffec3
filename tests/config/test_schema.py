"""The JSON schema accepts what the program accepts, and refuses the types and names that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from finetune import settings
from finetune.config import dump
from finetune.errors import ConfigError
from finetune.model.chat_template import TEMPLATES
from finetune.settings import load_config

CONFIGS = sorted((Path(settings.__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def check() -> Any:
    schema = settings.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).is_valid


def read_as_yaml_1_1(text: str) -> Any:
    """As PyYAML reads it, and most editors do: `2e-4` is text."""
    return yaml.safe_load(text)


def test_a_shipped_config_is_valid_as_yaml_1_1(check: Any, subtests: pytest.Subtests) -> None:
    for path in CONFIGS:
        with subtests.test(path=path):
            assert check(read_as_yaml_1_1(path.read_text()))
            assert check(read_as_yaml_1_1(dump(load_config(path))))


ACCEPTED = [
    "",
    "adapter: {targets: q_proj}",
    "tracking: {to: tensorboard}",
    "training:\n",
    "training: {learning_rate: 2e-4}",
    "training: {learning_rate: 3e0}",
    "training: {learning_rate: 1.5e-4}",
    "training: {learning_rate: .5e-4}",
    "training: {learning_rate: +.5}",
    "training: {learning_rate: 1}",
    "training: {warmup: 1E2, epochs: 2e0}",
    "training: {batch_size: 0o20, micro_batch: 08}",
    "training: {micro_batch: auto}",
    "training: {max_steps: null}",
    "optimizer: {epsilon: 1e-8, weight_decay: 0}",
    "data: {chat_template: my/own.jinja}",
    "data: {train: [a.jsonl, {source: b/, weight: 5e-1}]}",
    "memory: {budget: 24GiB, limit: 1024}",
    "memory: {budget: 1.5 GiB}",
    "memory: {checkpointing: every-2}",
    "memory: {checkpointing: 3}",
    "memory: {checkpointing: keep-attention}",
    "memory: {checkpointing: {all: 20, keep-products: 12}}",
    "adapter: {targets: [q_proj]}",
    *(f"data: {{chat_template: {name}}}" for name in TEMPLATES),
]

REFUSED = [
    "- a",
    "training: 5",
    "training: []",
    "trainings: {}",
    "training: {learning_rate: fast}",
    "training: {learning_rate: e5}",
    "training: {learning_rate: '0.5'}",
    "training: {learning_rate: 0}",
    "training: {learning_rate: 20}",
    "training: {learning_rate: true}",
    "training: {batch_size: '16'}",
    "training: {batch_size: 1.5}",
    "training: {batch_size: -1}",
    "training: {batch_size: 99999999999999999999}",
    "training: {micro_batch: most}",
    "training: {seed: -5}",
    "training: {seed: 4294967296}",
    "training: {seed: null}",
    "training: {schedule: cosin}",
    "training: {precision: bf32}",
    "training: {lr: 1}",
    "optimizer: {kind: adam}",
    "quantization: {kind: nf5, double: true}",
    "quantization: {double: 1}",
    "data: {chat_template: chatm}",
    "data: {chat_template: own.txt}",
    "data: {chat_template: []}",
    "data: {train: []}",
    "data: {train: [{source: a, weight: 0}]}",
    "data: {train: [{weight: 1}]}",
    "data: {train: [{source: a, weights: 1}]}",
    "data: {format: chat}",
    "data: {columns: [a]}",
    "memory: {budget: 24GB}",
    "memory: {budget: 0}",
    "memory: {checkpointing: every-0}",
    "memory: {checkpointing: some}",
    "memory: {checkpointing: -1}",
    "memory: {checkpointing: {}}",
    "memory: {checkpointing: {most: 3}}",
    "memory: {checkpointing: {all: -1}}",
    "adapter: {targets: []}",
    "adapter: {targets: 5}",
    "tracking: {to: mlflo}",
    "adapter: {rank: 0}",
    "tracking: {to: [mlflo]}",
    "model: {name: ''}",
    "model: {attention: flash}",
    "output: {keep: 1}",
]


def accepts(config: Path) -> bool:
    """Whether the program takes it."""
    try:
        load_config(config)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(("texts", "valid"), [(ACCEPTED, True), (REFUSED, False)], ids=["accepted", "refused"])
def test_schema_and_program_accept_the_same(
    texts: list[str], valid: bool, check: Any, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    config = tmp_path / "config.yaml"
    for text in texts:
        with subtests.test(text=text):
            config.write_text(text)
            assert accepts(config) is valid
            assert check(read_as_yaml_1_1(text)) is valid
