"""Jobs of several ranks on the same rows, what one process trains of them, and how close both are."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from children import Children
from jobs import QUICK, metric
from safetensors.torch import load_file, save_file
from together import Together, assert_all

from finetune.storage.rundir import RunDirectory

EXACT = ["training.precision=fp32", "adapter.dropout=0", "optimizer.kind=sgd", "training.learning_rate=0.1",
         "training.warmup=0"]  # fmt: skip
"""Plain descent, so that a gradient that is off shows as such."""
PLAIN = "quantization.kind=none"
FSDP = "distributed.kind=fsdp"
ZERO = "distributed.kind=deepspeed"
UNEVALUATED = ["data.eval=none", "training.eval_every=null"]


class Jobs:
    """Jobs on the same rows, each in a directory of its own."""

    def __init__(self, children: Children, rows: Path, folder: Path) -> None:
        self._children, self._rows, self._folder = children, rows, folder
        self._numbers = itertools.count()
        self._alone: dict[tuple[str, ...], RunDirectory] = {}

    def __call__(self, *overrides: str, run: RunDirectory | None = None) -> Together:
        run = run or RunDirectory(self._folder / f"run-{next(self._numbers)}")
        return Together(self._children, [*QUICK, f"data.train={self._rows}", "data.eval_share=0.2", *overrides], run)

    def alone(self, *overrides: str) -> RunDirectory:
        """What one process trains. Do not write to it."""
        if overrides not in self._alone:
            job = self(*overrides)
            assert_all(job.go(1), 0)
            self._alone[overrides] = job.run
        return self._alone[overrides]


def untied_base(base: Path, folder: Path) -> Path:
    """The base with a head of its own."""
    made = shutil.copytree(base, folder / "untied")
    tensors = load_file(made / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return made


def weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    """What was published: the adapter, or the weights of a model that was trained whole."""
    folder, name = (run.adapter, "adapter_model") if run.adapter.exists() else (run.merged, "model")
    return load_file(folder / f"{name}.safetensors")


def same_weights(one: RunDirectory, other: RunDirectory) -> bool:
    found, expected = weights(one), weights(other)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def assert_close(found: RunDirectory, expected: RunDirectory, *, within: float = 1e-6) -> None:
    """Every weight `within` that of the other run, and the losses and norms alike."""
    one, other = weights(found), weights(expected)
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(one[name], tensor, rtol=0, atol=within)
        assert (one[name] - tensor).abs().mean() < 1e-6
    for name in ("loss", "grad_norm", "eval_loss"):
        assert metric(found, name) == pytest.approx(metric(expected, name), rel=1e-5)


def resumed_at(run: RunDirectory) -> list[int]:
    return [event["step"] for event in run.events() if event["event"] == "resumed"]
