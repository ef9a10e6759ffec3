"""`kernels.compile: layers` computes what the layers compute, and compiles a few programs, whatever the lengths."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import test_equality
import torch
from messages import refusal

import finetune
from finetune import kernels
from finetune.config import Config
from finetune.errors import MachineError
from finetune.kernels import compiled

# torch 2.13 warns of what its own tracing does.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
SHAPES = ((2, 24), (3, 40), (4, 9), (2, 31))
"""Rows and tokens of micro-batches."""


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The programs that are compiled; here they are run operator by operator."""
    found: list[Any] = []

    def backend(program: Any, inputs: Any) -> Any:
        found.append(program)
        return program.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


def steps(model: Any, job: Config) -> list[test_equality.Result]:
    return [test_equality.step(model, job, **dict.fromkeys(("input_ids", "labels"), ids)) for ids in batches()]


def batches() -> list[torch.Tensor]:
    return [test_equality.ids(number, *shape) for number, shape in enumerate(SHAPES)]


@pytest.mark.long
@pytest.mark.parametrize("checkpointed", ["all", 1])
def test_a_step_is_the_same_and_no_length_is_compiled_anew(programs: list[Any], checkpointed: str | int) -> None:
    model, job = test_equality.made("llama", memory__checkpointing=checkpointed)
    expected = steps(model, job)
    assert compiled.attach(model, kernels.Attached()) == []
    found = steps(model, job)
    for one, other in zip(found, expected, strict=True):
        assert test_equality.distances(one, other).max() <= 1e-5
    assert 1 <= len(programs) <= 3, "a first layer whose input has no gradient, one that is checkpointed, the others"


@pytest.mark.slow
def test_evaluations_are_not_compiled(programs: list[Any]) -> None:
    model, _ = test_equality.made("llama", "none")
    compiled.attach(model, kernels.Attached())
    with torch.no_grad():
        model.eval()(test_equality.ids())
    assert not programs


def test_a_fused_layer_is_not_compiled_and_a_line_says_so() -> None:
    model, _ = test_equality.made("llama", "none")
    before = [layer.forward for layer in compiled.checkpointing.layers(model)]
    lines = compiled.attach(model, kernels.attach(model, "on"))
    assert [layer.forward for layer in compiled.checkpointing.layers(model)] == before
    assert lines == ["kernels: 2 of 2 layers are fused, and are not compiled"]


def test_a_layer_that_keeps_tensors_is_not_compiled_and_a_line_says_so() -> None:
    model, _ = test_equality.made("llama", "none", memory__checkpointing={"keep-attention": 1, "all": 1})
    before = [layer.forward for layer in compiled.checkpointing.layers(model)]
    lines = compiled.attach(model, kernels.Attached())
    assert lines == ["kernels: 1 of 2 layers keep tensors, and are not compiled"]
    after = [layer.forward for layer in compiled.checkpointing.layers(model)]
    assert [one == other for one, other in zip(after, before, strict=True)] == [False, True]


def test_without_a_compiler_nothing_is_trained(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with refusal(MachineError, "kernels.compile", "`none`"):
        finetune.train(quick("kernels.compile=layers"))


@pytest.mark.slow
def test_a_run_trains_to_the_same_losses(quick, programs: list[Any]) -> None:
    short = ("training.max_steps=2", "data.eval=none", "quantization.kind=none", "adapter.targets=q_proj")
    plain, other = (finetune.train(quick(f"kernels.compile={kind}", *short, run=kind)) for kind in ("none", "layers"))
    assert 1 <= len(programs) <= 3, "micro-batches of four lengths take the same code"
    assert losses(other) == pytest.approx(losses(plain), 1e-5)


def losses(result: Any) -> list[float]:
    return [line["loss"] for line in result.run.metrics()]
