"""Row 10, in the base: NaN in its weights is said of it, by file and tensor, and not of the learning rate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from messages import refusal
from safetensors.torch import load_file, save_file

import finetune
from finetune.config import Config
from finetune.errors import ArtifactError, NumbersError
from finetune.report.terminal import Terminal
from finetune.storage.rundir import RunDirectory

# In the embedding every row meets it; one in a layer below NF4 is met as the quantization leaves it on this device.
TENSORS = ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"]


@pytest.fixture(params=TENSORS)
def damaged(request: pytest.FixtureRequest, tiny_base: Path, tmp_path: Path) -> tuple[Path, str]:
    base = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    file = base / "model.safetensors"
    weights = load_file(file)
    weights[request.param].fill_(float("nan"))
    save_file(weights, file, metadata={"format": "pt"})
    return base, request.param


def refused(tensor: str, use: Callable[[], object]) -> None:
    with refusal(ArtifactError, "model.safetensors:", f"`{tensor}`"):
        use()


def test_training_says_it_of_the_base(damaged: tuple[Path, str], quick: Callable[..., Config]) -> None:
    base, tensor = damaged
    refused(tensor, lambda: finetune.train(quick(f"model.name={base}"), terminal=Terminal(quiet=True)))


def test_training_without_questions_says_it_too(
    damaged: tuple[Path, str], quick: Callable[..., Config], tmp_path: Path
) -> None:
    base, tensor = damaged
    (tmp_path / "rows.txt").write_text("a line of text\n" * 20)
    job = quick(f"model.name={base}", f"data.train={tmp_path / 'rows.txt'}", "data.eval=none")
    refused(tensor, lambda: finetune.train(job, terminal=Terminal(quiet=True)))


def test_so_do_answers_evaluation_and_merge(damaged: tuple[Path, str], run: RunDirectory) -> None:
    base, tensor = damaged
    run.config_file.write_text(run.config_file.read_text().replace("builtin:tiny-llama", str(base)))
    kept = run.adapter / "fingerprint.json"  # of an earlier version: another base would be refused for that alone
    kept.write_text(json.dumps({"tokenizer": json.loads(kept.read_text())["tokenizer"]}))
    refused(tensor, lambda: finetune.generate(run, "x", max_new_tokens=2))
    refused(tensor, lambda: finetune.generate(run, "x", which="base", max_new_tokens=2))
    refused(tensor, lambda: finetune.evaluate(run))
    refused(tensor, lambda: finetune.merge(run, terminal=Terminal(quiet=True)))


def test_a_sound_base_is_not_blamed(quick: Callable[..., Config]) -> None:
    job = quick("optimizer.weight_decay=1e9", "training.max_steps=8").changed({"training.learning_rate": 1e9})
    with refusal(NumbersError, "learning_rate"):
        finetune.train(job, terminal=Terminal(quiet=True))
