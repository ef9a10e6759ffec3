"""Each value that the program refuses, the JSON schema refuses, and no other, read as YAML 1.1 and as YAML 1.2."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from finetune import choices
from finetune.choices import load_config
from finetune.config import dump, strict_yaml
from finetune.errors import ConfigError
from finetune.model.source.chat_template import TEMPLATES

ROOT = Path(choices.__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def check() -> Any:
    schema = choices.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).is_valid


def read_as_yaml_1_2(text: str) -> Any:
    """By the core schema, as this program and VS Code read it."""
    document = strict_yaml.parse(text)
    return document.problems or document.values


READERS: list[Callable[[str], Any]] = [yaml.safe_load, read_as_yaml_1_2]
"""PyYAML reads YAML 1.1, where `2e-4` is text and `on` is true."""


@pytest.mark.slow
def test_a_shipped_config_is_valid_and_names_the_schema_for_editors(check: Any, subtests: pytest.Subtests) -> None:
    for path in CONFIGS:
        with subtests.test(path=path):
            text = path.read_text()
            assert all(check(read(one)) for read in READERS for one in (text, dump(load_config(path))))
            named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
            assert named
            assert (path.parent / named[1]).resolve() == ROOT / "docs" / "config.schema.json"


def test_docs_config_schema_json_is_the_schema() -> None:
    """`make docs` makes the file anew."""
    written = (ROOT / "docs" / "config.schema.json").read_text(encoding="utf-8")
    schema = json.loads(written)
    assert schema == choices.schema()  # as values: pydantic 2.10 writes the bound 0 of a float as 0.0
    assert written == json.dumps(schema, indent=2) + "\n"


ACCEPTED = [
    "", "adapter: {targets: q_proj}", "tracking: {to: tensorboard}", "training:\n", "training: {learning_rate: 2e-4}",
    "training: {learning_rate: 3e0}", "training: {learning_rate: 1.5e-4}", "training: {learning_rate: .5e-4}",
    "training: {learning_rate: +.5}", "training: {learning_rate: 1}", "training: {warmup: 1E2, epochs: 2e0}",
    "training: {batch_size: 0o20, micro_batch: 08}", "training: {micro_batch: auto}", "training: {max_steps: null}",
    "optimizer: {epsilon: 1e-8, weight_decay: 0}", "data: {chat_template: my/own.jinja}",
    "data: {train: [a.jsonl, {source: b/, weight: 5e-1}]}", "memory: {budget: 24GiB, limit: 1024}",
    "memory: {budget: 1.5 GiB}", "memory: {checkpointing: every-2}", "memory: {checkpointing: 3}",
    "memory: {checkpointing: keep-attention}", "memory: {checkpointing: {all: 20, keep-products: 12}}",
    "adapter: {targets: [q_proj]}", "kernels: {fused: on}", "kernels: {fused: off}\nmemory: {check: off}",
    "optimizer: {kind: sgd, epsilon: 1e-8, beta2: 0.999}", "optimizer: {kind: adafactor}",
    f"model: {{trust_remote_code: true, revision: {'a1' * 20}}}",
    *(f"data: {{chat_template: {name}}}" for name in TEMPLATES),
]  # fmt: skip

REFUSED = [
    "- a", "training: 5", "training: []", "trainings: {}", "training: {learning_rate: fast}",
    "training: {learning_rate: e5}", "training: {learning_rate: '0.5'}", "training: {learning_rate: 0}",
    "training: {learning_rate: 20}", "training: {learning_rate: true}", "training: {batch_size: '16'}",
    "training: {batch_size: 1.5}", "training: {batch_size: -1}", "training: {batch_size: 99999999999999999999}",
    "training: {micro_batch: most}", "training: {seed: -5}", "training: {seed: 4294967296}", "training: {seed: null}",
    "training: {schedule: cosin}", "training: {precision: bf32}", "training: {lr: 1}", "optimizer: {kind: adam}",
    "quantization: {kind: nf5, double: true}", "quantization: {double: 1}", "data: {chat_template: chatm}",
    "data: {chat_template: own.txt}", "data: {chat_template: []}", "data: {train: []}",
    "data: {train: [{source: a, weight: 0}]}", "data: {train: [{weight: 1}]}",
    "data: {train: [{source: a, weights: 1}]}", "data: {format: chat}", "data: {columns: [a]}",
    "memory: {budget: 24GB}", "memory: {budget: 0}", "memory: {checkpointing: every-0}",
    "memory: {checkpointing: some}", "memory: {checkpointing: -1}", "memory: {checkpointing: {}}",
    "memory: {checkpointing: {most: 3}}", "memory: {checkpointing: {all: -1}}", "adapter: {targets: []}",
    "adapter: {targets: 5}", "tracking: {to: mlflo}", "adapter: {rank: 0}", "tracking: {to: [mlflo]}",
    "model: {name: ''}", "model: {attention: flash}", "output: {keep: 1}", "memory: {check: on}",
    "tracking: {to: [wandb, wandb]}",
]  # fmt: skip


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
    config = tmp_path / "job.yaml"
    for text in texts:
        with subtests.test(text=text):
            config.write_text(text)
            assert accepts(config) is valid
            assert [check(read(text)) for read in READERS] == [valid, valid]
