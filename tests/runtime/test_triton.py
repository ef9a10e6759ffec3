"""A machine on which Triton cannot build its kernels: it is detected and reported, and training goes on without them.

There is no GPU here; a stand-in of Triton's few names fails as the real one does (triton 3.9, runtime/build.py).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from messages import refusal, reported
from steps import assert_gradients_close, gradients, micro_batches, ready
from torch.backends import python_native
from trl.kernels import chunked_logprob

import finetune
from finetune.data.batching import LargestBatch
from finetune.doctor import machine
from finetune.errors import MachineError
from finetune.forecast import devices, job_forecast, replay
from finetune.measure.out_of_memory import is_out_of_memory
from finetune.model.attention import backends
from finetune.model.precision import of_card
from finetune.objectives import fused_head
from finetune.runtime import libraries
from finetune.runtime.device import this_device

NO_COMPILER = RuntimeError(
    "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl."
)
NO_HEADERS = subprocess.CalledProcessError(1, ["gcc", "cuda_utils.c", "-O3"])
CUDA = torch.device("cuda")


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], list[int]]]:
    """Puts a Triton here whose kernels run, or fail as given; the list has their starts."""

    def install(fails: Exception | None = None) -> list[int]:
        starts: list[int] = []

        def kernel(number: int) -> None:
            starts.append(number)
            if fails:
                raise fails

        fake = ModuleType("triton")
        fake.jit = lambda function: {(1,): kernel}  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "triton", fake)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        forget()
        return starts

    forget()
    yield install
    forget()


def forget() -> None:
    """As in a process that has not tried Triton yet."""
    sys.modules.pop("finetune.runtime.triton_probe", None)
    vars(finetune.runtime).pop("triton_probe", None)
    libraries.triton_obstacle.cache_clear()


@pytest.fixture
def avoided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a process does without Triton, for the length of a test."""
    monkeypatch.setattr(chunked_logprob, "_use_triton", chunked_logprob._use_triton)
    libraries.without_triton()
    yield
    python_native.triton.enable()


# -- whether it works --------------------------------------------------------------------------------------------------


def test_kernels_that_run_are_tried_once_and_not_an_obstacle(triton) -> None:
    starts = triton()
    assert libraries.triton_obstacle() is None
    assert libraries.triton_obstacle() is None
    assert len(starts) == 1
    assert machine._triton().status == "ok"


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (NO_COMPILER, "Failed to find C compiler"),
        (NO_HEADERS, "gcc"),
        (OSError(30, "Read-only file system"), "Read-only"),
    ],
    ids=["compiler", "headers", "cache"],
)
def test_the_reason_that_kernels_do_not_run_names_what_to_install(triton, fails: Exception, reason: str) -> None:
    triton(fails)
    obstacle = libraries.triton_obstacle()
    assert obstacle is not None
    assert reason in obstacle
    assert "\n" not in obstacle
    found = machine._triton()
    assert found.status == "warning"
    assert obstacle in found.what
    assert "gcc" in found.remedy


def test_a_missing_triton_is_an_obstacle(triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "import of triton" in str(libraries.triton_obstacle())


def test_a_full_card_is_out_of_memory_and_not_an_obstacle(triton) -> None:
    full = RuntimeError("Triton Error [CUDA]: out of memory")  # third_party/nvidia/backend/driver.c, CUDA_CHECK
    triton(full)
    assert libraries.triton_obstacle() is None
    assert is_out_of_memory(full)


# -- going on without --------------------------------------------------------------------------------------------------


def test_without_it_no_library_takes_its_kernels_on_a_gpu(avoided) -> None:
    assert not chunked_logprob._use_triton(CUDA)
    assert fused_head.scores_labelled(CUDA), "places without a label are left out all the same"
    assert not fused_head.scores_labelled(torch.device("cpu"))
    assert not python_native.triton.enabled


@pytest.mark.slow
def test_the_loss_of_labelled_positions_alone_is_the_loss(avoided, quick, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = ready(quick("quantization.kind=none", "training.precision=fp32"))
    inputs = micro_batches(loop, range(4), 2)
    loss, expected = gradients(loop, inputs)
    scored: list[int] = []
    forward = chunked_logprob.ChunkedLogProbFunction.forward

    def counted(ctx: Any, hidden: torch.Tensor, *rest: Any) -> Any:
        scored.append(len(hidden))
        return forward(ctx, hidden, *rest)

    monkeypatch.setattr(fused_head, "scores_labelled", lambda device: True)  # as on a GPU, see above
    monkeypatch.setattr(chunked_logprob.ChunkedLogProbFunction, "forward", staticmethod(counted))
    compact_loss, found = gradients(loop, inputs)
    assert sum(scored) == sum(int((part["labels"][:, 1:] != -100).sum()) for part in inputs)
    assert compact_loss == pytest.approx(loss, rel=1e-6)
    assert_gradients_close(found, expected)


def test_the_first_line_of_a_run_says_so(triton, quick, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    class _Said(Exception):
        pass

    def stop(*args: object) -> None:
        raise _Said

    triton(NO_COMPILER)
    monkeypatch.setattr("finetune.lifecycle.session.this_device", lambda: CUDA)
    monkeypatch.setattr("finetune.lifecycle.preparation.check", stop)
    monkeypatch.setattr("finetune.model.precision.of_device", lambda device: of_card("A100", (8, 0)))
    with pytest.raises(_Said):
        finetune.train(quick())
    reported(capsys.readouterr().out, "Failed to find C compiler", "finetune doctor")


def test_choosing_the_device_settles_it(triton, avoided, monkeypatch: pytest.MonkeyPatch) -> None:
    triton(NO_COMPILER)
    python_native.triton.enable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert this_device() == torch.device("cuda", 0)
    assert not python_native.triton.enabled


def test_flex_attention_which_compiles_is_refused(triton) -> None:
    triton(NO_COMPILER)
    with refusal(MachineError, "C compiler"):
        backends.choose("flex", SimpleNamespace(), "cuda", "bf16")


# -- the forecast ------------------------------------------------------------------------------------------------------


def test_the_card_that_is_here_is_planned_for_as_it_will_compute(triton, l4: None) -> None:
    for fails, works in ((NO_COMPILER, False), (None, True)):
        triton(fails)
        assert devices.here(CUDA, tiny_models.config().memory).triton is works
    assert tiny_models.card().triton, "of a card elsewhere nothing else is known"


@pytest.mark.parametrize("trained_tokens", [32, 96])
def test_torchs_own_operators_take_a_copy_of_each_tile_in_float32(trained_tokens: int) -> None:
    batch = LargestBatch(rows=2, tokens=64, padded=True, trained_tokens=trained_tokens)
    job = tiny_models.config(quantization__kind="none", kernels__fused="off")
    model = tiny_models.architecture(layers=1)

    def peak(works: bool) -> int:
        card = replace(tiny_models.card(), triton=works)
        trace = tiny_models.trace(job, model, where=card, batch=batch)
        return job_forecast.make(trace, card, batch, "sdpa", replay.RunSetting()).categories["loss"]

    tile = 4 * trained_tokens * model.vocab_size
    assert tile <= peak(False) - peak(True) <= 8 * tile
