"""The GPU that each rank chooses on a machine with several. The GPUs are simulated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from messages import refusal

from finetune.errors import MachineError
from finetune.runtime import ranks

CARD = torch.device("cuda", 0)
Visible = Callable[[int], list[int]]


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Visible:
    """A function that makes a number of GPUs visible, and returns the list of devices chosen later."""

    def make(count: int) -> list[int]:
        chosen: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1] if chosen else 0)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(getattr(device, "index", device)))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "a card")
        return chosen

    return make


def test_idle_gpus_are_reported_with_the_used_one_and_the_command_that_uses_all(
    visible: Visible, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ranks.idle_gpus() is None
    visible(1)
    assert ranks.idle_gpus() is None
    chosen = visible(2)
    ranks.choose_gpu()
    assert chosen == [0], "transformers takes the first, wherever a notebook was before"
    note = ranks.idle_gpus()
    assert note is not None
    assert all(part in note for part in ("2 GPUs are visible", "GPU 0", "torchrun --nproc-per-node 2 "))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ranks.idle_gpus() is None


def test_more_processes_than_gpus_are_refused(visible: Visible, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = visible(2)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        ranks.choose_gpu()
    assert chosen == [0, 1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with refusal(MachineError, "--nproc-per-node"):
        ranks.choose_gpu()
