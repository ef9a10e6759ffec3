"""A machine on which Triton cannot build its kernels: it is detected and reported, and training goes on without them.

There is no GPU here; a stand-in of Triton's few names fails as the real one does (triton 3.9, runtime/build.py).
"""

from __future__ import annotations

import contextlib
import functools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from jobs import OLD_TORCH, lacks
from messages import refusal, reported

import finetune
from finetune.data.batching import LargestBatch
from finetune.errors import MachineError
from finetune.extras.doctor import machine
from finetune.forecast import devices, job_forecast, replay
from finetune.kernels import ops
from finetune.model.attention import backends
from finetune.model.precision import of_card
from finetune.runtime import libraries
from finetune.runtime.device import this_device
from finetune.runtime.out_of_memory import is_out_of_memory

NO_COMPILER = RuntimeError(
    "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl."
)
NO_HEADERS = subprocess.CalledProcessError(1, ["gcc", "cuda_utils.c", "-O3"])
CUDA = torch.device("cuda")


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], list[int]]]:
    """Simulates a Triton whose kernels run or fail as given; returns the list of their starts."""

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
    """Clear the cache, as in a process that has not tried Triton yet."""
    sys.modules.pop("finetune.runtime.triton_probe", None)
    vars(finetune.runtime).pop("triton_probe", None)
    libraries.triton_obstacle.cache_clear()


@pytest.fixture
def avoided() -> Iterator[None]:
    """Restores after the test what a process disables without Triton."""
    libraries.without_triton()
    yield
    if not OLD_TORCH:
        torch.backends.python_native.triton.enable()


# -- whether it works --------------------------------------------------------------------------------------------------


def test_working_kernels_and_a_full_card_are_no_obstacle(triton) -> None:
    starts = triton()
    assert libraries.triton_obstacle() is None
    assert libraries.triton_obstacle() is None
    assert len(starts) == 1
    assert next(machine._kernels("cuda")).status == "ok"
    full = RuntimeError("Triton Error [CUDA]: out of memory")  # third_party/nvidia/backend/driver.c, CUDA_CHECK
    triton(full)
    assert libraries.triton_obstacle() is None
    assert is_out_of_memory(full)


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (NO_COMPILER, "Failed to find C compiler"),
        (NO_HEADERS, "gcc"),
        (OSError(30, "Read-only file system"), "Read-only"),
    ],
    ids=["compiler", "headers", "cache"],
)
def test_a_kernel_failure_names_what_to_install(triton, fails: Exception, reason: str) -> None:
    triton(fails)
    obstacle = libraries.triton_obstacle()
    assert obstacle is not None
    assert reason in obstacle
    assert "\n" not in obstacle
    found = next(machine._kernels("cuda"))
    assert found.status == "warning"
    assert obstacle in found.what
    assert "gcc" in found.remedy


def test_a_missing_triton_is_an_obstacle(triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "import of triton" in str(libraries.triton_obstacle())


# -- going on without --------------------------------------------------------------------------------------------------


def test_without_triton_the_loss_uses_torchs_operators_on_a_gpu(triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setitem(
        sys.modules, "finetune.kernels.triton_kernels", SimpleNamespace(fold_logits_=lambda *args: None)
    )
    sums = torch.tensor([[-torch.inf], [0.0], [0.0]])
    given = sums, torch.tensor([[1.0, 2.0]]), torch.tensor([1]), 0, 1.0, None, 1.0
    on_a_gpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    fold = functools.partial(ops.fold_logits_.redispatch, on_a_gpu)
    triton()
    fold(*given)
    assert not sums[1], "by the kernel"
    triton(NO_COMPILER)
    forget()
    fold(*given)
    assert sums[:, 0].tolist() == [2.0, pytest.approx(1 + math.exp(-1)), 2.0]


def test_the_first_line_of_a_run_says_so(triton, quick, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    class _Said(Exception):
        pass

    def stop(*args: object) -> None:
        raise _Said

    triton(NO_COMPILER)
    monkeypatch.setattr("finetune.recipe.start.this_device", lambda: CUDA)
    monkeypatch.setattr("finetune.model.probes.marker.ended", lambda device: frozenset())
    monkeypatch.setattr("finetune.recipe.inputs.check", stop)
    monkeypatch.setattr("finetune.model.precision.of_device", lambda device: of_card("A100", (8, 0)))
    with pytest.raises(_Said):
        finetune.train(quick())
    reported(capsys.readouterr().out, "Failed to find C compiler", "finetune doctor")


@lacks(reason="torch 2.11 has no kernels of its own in Triton")
def test_choosing_the_device_disables_triton(triton, avoided, monkeypatch: pytest.MonkeyPatch) -> None:
    triton(NO_COMPILER)
    torch.backends.python_native.triton.enable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert this_device() == torch.device("cuda", 0)
    assert not torch.backends.python_native.triton.enabled


def test_flex_attention_which_compiles_is_refused(triton) -> None:
    triton(NO_COMPILER)
    with refusal(MachineError, "C compiler"):
        backends.choose("flex", SimpleNamespace(), "cuda", "bf16")


# -- the forecast ------------------------------------------------------------------------------------------------------


def test_a_plan_for_the_local_card_knows_whether_triton_works(triton, l4: None) -> None:
    for fails, works in ((NO_COMPILER, False), (None, True)):
        triton(fails)
        assert devices.here(CUDA, tiny_models.config().memory).software.triton is works
    assert tiny_models.card().software.triton, "of a card elsewhere nothing else is known"


@pytest.mark.parametrize("trained_tokens", [32, 96])
def test_torchs_operators_copy_each_tile_in_float32(trained_tokens: int) -> None:
    batch = LargestBatch(rows=2, tokens=64, padded=True, trained_tokens=trained_tokens)
    job = tiny_models.config(quantization__kind="none", kernels__fused="off")
    model = tiny_models.architecture(layers=1)
    model.vocab_size = 4096

    def peak(works: bool) -> int:
        card = replace(tiny_models.card(), software=devices.Software(triton=works))
        trace = tiny_models.trace(job, model, where=card, batch=batch)
        found = job_forecast.make(trace, card, batch, "sdpa", replay.RunSetting()).categories
        return found["loss"] + found["workspace"]

    tile = 4 * trained_tokens * model.vocab_size
    assert tile <= peak(False) - peak(True) <= 8 * tile
