"""The device of a plan: a card of the table, a size, what is here, or the CPU; and what a job may take of it."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from forecasts import GIB
from hypothesis import given
from hypothesis import strategies as st
from messages import refusal

from finetune.config import MemorySection
from finetune.errors import ConfigError, MachineError, OutOfMemoryError
from finetune.forecast import devices as device
from finetune.forecast import gpus, operator_costs
from finetune.runtime import control_groups

NONE = MemorySection()


def test_a_card_has_the_figures_of_the_table() -> None:
    for name in ("RTX 4090", "T4", "H100"):
        found, card = device.find(name, NONE), gpus.find(name)
        assert (found.type, found.name, found.budget_bytes) == ("cuda", name, card.total_bytes)
        assert found.capability == card.compute_capability
        assert found.rates == card.rates
        assert found.outside_bytes == operator_costs.context_bytes(card.multiprocessors)
        assert found.workspace_bytes == operator_costs.workspace_bytes(card.compute_capability) > 0


def test_a_size_is_the_budget_with_the_speed_of_the_nearest_card() -> None:
    cards = [card for card in gpus.smallest_first() if card.compute_capability >= (8, 0)]
    for text, gib in (("24GiB", 24), (" 16 GiB ", 16), ("7.5GiB", 7.5), ("81920MiB", 80)):
        found = device.find(text, NONE)
        nearest = min(cards, key=lambda card, gib=gib: abs(card.total_bytes - gib * GIB))
        assert (found.budget_bytes, found.rates.flops) == (gib * GIB, nearest.rates.flops), text
        assert nearest.name in found.name
        assert text in found.name


def test_an_unknown_gpu_is_refused_with_a_suggestion() -> None:
    for name, *hint in (("RTX 4900", "RTX 4090"), ("H10", "H100"), ("24GB", "GiB"), ("GiB",), ("",), ("24",)):
        with refusal(ConfigError, *hint) as raised:
            device.find(name, NONE)
        assert "\n" not in str(raised.value).strip()


def test_auto_without_a_card_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refusal(MachineError, "24GiB"):
        device.find("auto", NONE)


def test_the_budget_is_the_minimum_of_card_budget_and_limit() -> None:
    whole = device.find("T4", NONE).budget_bytes
    for name, sizes, expected in (
        ("T4", {"budget": 5 * GIB}, 5 * GIB),
        ("T4", {"limit": 6 * GIB}, 6 * GIB),
        ("T4", {"budget": 7 * GIB, "limit": 6 * GIB}, 6 * GIB),
        ("T4", {"budget": 100 * GIB}, whole),
        ("24GiB", {"budget": 8 * GIB}, 8 * GIB),
    ):
        assert device.find(name, MemorySection(**sizes)).budget_bytes == expected, (name, sizes)


class Card:
    """A fake card that is here: its cap, and what torch makes of it (CUDACachingAllocator.cpp, `setMemoryFraction`)."""

    def __init__(self, patch: pytest.MonkeyPatch, total_bytes: int, multiprocessors: int = 58) -> None:
        self.total_bytes = total_bytes
        self.share = 0.0
        properties = SimpleNamespace(
            name="NVIDIA L4", total_memory=total_bytes, multi_processor_count=multiprocessors, major=8, minor=9
        )
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(torch.cuda, "mem_get_info", lambda: (total_bytes, total_bytes))
        patch.setattr(torch.cuda, "memory_reserved", lambda: 0)
        patch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda share, device: setattr(self, "share", share)
        )

    @property
    def allowed_bytes(self) -> int:
        assert 0 <= self.share <= 1
        return int(self.share * self.total_bytes)


HERE = torch.device("cuda", 0)


@given(total=st.integers(8 * GIB, 2**40), data=st.data())
def test_the_cap_lets_the_allocator_reserve_what_the_budget_leaves_it(total: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(GIB, total - 1))
    with pytest.MonkeyPatch.context() as patch:
        card = Card(patch, total)
        device.cap(limit, HERE)
        assert card.allowed_bytes == device.here(HERE, MemorySection(limit=limit)).room_bytes


def test_a_cap_takes_the_context_off_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    card, context = Card(monkeypatch, 24 * GIB, multiprocessors=100), 100 * 5 * 2**20
    for limit, allowed in ((8 * GIB, 8 * GIB - context), (None, 24 * GIB), (100 * GIB, 24 * GIB)):
        device.cap(limit, HERE)
        assert card.allowed_bytes == allowed
    assert device.here(HERE, MemorySection(limit=context)).room_bytes == 0
    with refusal(OutOfMemoryError, "memory.limit", "MiB"):
        device.cap(context, HERE)


def test_a_cpus_budget_is_available_memory_and_what_this_process_holds() -> None:
    found = device.find("cpu", NONE)
    memory = psutil.virtual_memory()
    assert (found.type, found.name, found.workspace_bytes) == ("cpu", "CPU", 0)
    assert found.outside_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert found.outside_bytes < found.budget_bytes <= memory.total
    assert found.rates.flops > 1e8
    assert found.rates.bandwidth_bytes > 1e8
    assert 0 < found.rates.call_seconds < 0.1
    assert device.find("cpu", MemorySection(budget=GIB)).budget_bytes == GIB
    assert device.find("cpu", MemorySection(limit=1024)).budget_bytes > GIB, "a limit is a card's"
    assert device.here(torch.device("cpu"), NONE).type == "cpu"


def test_a_control_group_and_those_above_it_lower_what_a_cpu_has(tmp_path: Path) -> None:
    def group(folder: Path, limit: str, current: int, cache: int) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 7\n")

    process = tmp_path / "cgroup"
    process.write_text("4:memory:/old\n0::/batch/job\n")
    left = functools.partial(control_groups.left_bytes, process, tmp_path)
    assert left() == math.inf, "no such folder"
    group(tmp_path / "batch", "max", 100, 0)
    group(tmp_path / "batch" / "job", "1000", 400, 50)
    assert left() == 650
    group(tmp_path / "batch", "700", 600, 0)
    assert left() == 100
    process.write_text("4:memory:/old\n")
    assert left() == math.inf, "control groups of version 1"


def test_the_smallest_card_that_fits_holds_its_own_context_too() -> None:
    for needed in (GIB, 11 * GIB, 23 * GIB, 70 * GIB):
        found = device.smallest_fitting(needed)
        assert needed + found.outside_bytes <= found.budget_bytes
        smaller = [card for card in gpus.smallest_first() if card.total_bytes < found.budget_bytes]
        assert all(needed + operator_costs.context_bytes(card.multiprocessors) > card.total_bytes for card in smaller)
    assert device.smallest_fitting(1000 * GIB) is None
