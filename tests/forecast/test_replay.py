"""A traced step on a device, from traces written by hand: peaks, purposes, and whether it fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from forecasts import GIB, MIB
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Story

from finetune.data.batching import LargestBatch
from finetune.forecast import job_forecast, operator_costs, replay
from finetune.forecast.device import Device, Software
from finetune.forecast.gpus import Rates
from finetune.forecast.job_forecast import PHASES, WORDS, Forecast
from finetune.forecast.replay import Ranks
from finetune.forecast.trace import CATEGORIES

CPU = Device("cpu", "CPU", 10 * GIB, 100 * MIB, Rates(1e9, 1e9, bandwidth_bytes=1e8, call_seconds=1e-3))
CARD = dataclasses.replace(CPU, type="cuda", name="a card", outside_bytes=300 * MIB, capability=(8, 9))
BATCH = LargestBatch(rows=2, tokens=64, padded=True, trained_tokens=96)


def step(unit: int = MIB, *, paged: int = 0) -> Story:
    """10 of weights, 2 of states; 12 of activations and 4 of logits are the peak, at 28."""
    story = Story().at("load").make("weights", 10 * unit, "base_weights").make("copy", 3 * unit, "workspace")
    story.drop("copy").at("optimizer").make("gradients", unit, "gradients").make("states", 2 * unit, "optimizer_states")
    if paged:
        story.make("paged", paged, "optimizer_states", managed=True)
    story.drop("gradients")
    story.at("forward").make("saved", 8 * unit).make("logits", 4 * unit, "loss").work(1000, 500, 2)
    story.at("backward").make("more", 4 * unit).drop("more", "saved", "logits").make("gradients", unit, "gradients")
    story.work(2000, 500, 3)
    story.at("optimizer").make("norms", unit, "workspace").drop("norms", "gradients").work(80, 40, 4)
    return story.at("evaluation").make("logits", 6 * unit, "loss").drop("logits")


def made(story: Story, device: Device = CPU, **changes: Any) -> Forecast:
    return job_forecast.make(story.trace, device, BATCH, "sdpa", replay.RunSetting(**changes))


def test_on_a_cpu_the_live_tensors_are_what_counts() -> None:
    found = made(step())
    assert {phase: peak["allocated_bytes"] // MIB for phase, peak in found.phases.items()} == {
        "load": 13, "forward": 24, "backward": 28, "optimizer": 14, "evaluation": 18, "save": 12,
    }  # fmt: skip
    assert all(peak["reserved_bytes"] == peak["allocated_bytes"] for peak in found.phases.values())
    assert found.peak_allocated_bytes == found.peak_reserved_bytes == 28 * MIB
    assert found.needed_bytes == 128 * MIB, "with what the process held before it began"
    assert found.host_bytes == CPU.outside_bytes


@pytest.mark.parametrize("unit", [MIB, 700_001, 333, 4 * MIB])
def test_on_a_card_segments_count_and_the_workspace_stays(unit: int) -> None:
    found = made(step(unit), CARD)
    workspace = operator_costs.workspace_bytes(CARD.capability)
    for phase in found.phases.values():
        assert phase["reserved_bytes"] >= phase["allocated_bytes"]
        assert phase["reserved_bytes"] % (2 * MIB) == 0
    assert found.peak_allocated_bytes >= 28 * unit + workspace
    assert found.phases["save"]["allocated_bytes"] >= 12 * unit + workspace
    assert found.categories["workspace"] == workspace
    assert found.categories["context"] == CARD.outside_bytes
    assert found.host_bytes == 0


def test_segments_that_grow_reserve_whole_pages_and_lie_together() -> None:
    """By hand, in MiB: pages of 20 behind one another, as many as hold the tensors and the hole that gradients left.

    Loading: weights 100 and a copy of 30, so 7 pages; 5 of them stay. Then the workspace's 16.25 (to 120), gradients
    of 10 (to 140) and states of 20 (to 160) in the optimizer's first step. The gradients go, and the 80 that are saved
    (to 240) do not fit their place, nor do 40 of logits (to 280) and 40 more (to 320).
    """
    card = dataclasses.replace(CARD, software=Software(expandable_segments=True))
    found = made(step(10 * MIB), card)
    reserved = {phase: peak["reserved_bytes"] // MIB for phase, peak in found.phases.items()}
    assert reserved.pop("load") == 140
    assert set(reserved.values()) == {320}
    assert found.peak_allocated_bytes == 296.25 * MIB


def test_the_workspace_is_larger_on_newer_cards_and_counted_as_set() -> None:
    for capability, setting, expected in (
        ((8, 9), "", 16.25 * MIB),
        ((9, 0), "", 64 * MIB),
        ((8, 9), ":4096:8", 2 * 32 * MIB),
        ((9, 0), ":4096:2:16:8", 16.25 * MIB),
    ):
        assert operator_costs.workspace_bytes(capability, setting) == expected
    assert dataclasses.replace(CARD, software=Software(cublas_workspace=":16:8")).workspace_bytes == 2 * 16 * 8 * 1024
    newer = dataclasses.replace(CARD, capability=(9, 0))
    assert made(step(), newer).peak_allocated_bytes - made(step(), CARD).peak_allocated_bytes == (64 - 16.25) * MIB


def test_managed_memory_is_not_the_allocators_and_may_go_to_the_host() -> None:
    without, paged = made(step(), CARD), made(step(paged=5 * MIB), CARD)
    assert paged.peak_allocated_bytes == without.peak_allocated_bytes
    assert paged.categories == without.categories
    assert (without.host_bytes, paged.host_bytes) == (0, 5 * MIB)
    assert made(step(paged=5 * MIB)).peak_allocated_bytes == 33 * MIB, "on a CPU there is but one memory"


def test_layer_inputs_on_the_host_lie_in_pinned_blocks_of_powers_of_two() -> None:
    story = Story().at("load").make("weights", MIB, "base_weights").at("forward")
    story.make("first", 5 * MIB, "layer_inputs", managed=True).make("second", 8 * MIB, "layer_inputs", managed=True)
    story.at("backward").drop("first", "second")
    assert made(story, CARD).host_bytes == 16 * MIB


@pytest.mark.parametrize("device", [CPU, CARD], ids=["cpu", "card"])
def test_it_fits_at_exactly_the_budget_and_not_one_byte_below(device: Device) -> None:
    needed = made(step(), device).needed_bytes
    assert made(step(), dataclasses.replace(device, budget_bytes=needed)).fits
    assert not made(step(), dataclasses.replace(device, budget_bytes=needed - 1)).fits


def test_a_step_repeats_its_passes_and_not_its_update() -> None:
    """The trace has two updates: the optimizer's first, and the one that is forecast."""
    found = made(step(), micro_batches=4)
    work = found.work
    assert (work.flops, work.moved_bytes, work.calls) == (4 * 3000 + 80 // 2, 4 * 1000 + 40 // 2, 4 * 5 + 4 // 2)
    assert found.seconds == pytest.approx(4 * (3000 / 1e9 + 1000 / 1e8 + 5 / 1e3) + (80 / 1e9 + 40 / 1e8 + 4 / 1e3) / 2)
    assert found.tokens == 4 * 2 * 64
    assert found.tokens_per_second == pytest.approx(found.tokens / found.seconds)
    assert found.peak_reserved_bytes == made(step()).peak_reserved_bytes


def test_a_product_that_is_bound_by_bandwidth_takes_the_time_of_its_traffic_alone() -> None:
    hidden = step()
    hidden.trace.stretches[0].work.flops = hidden.trace.stretches[0].work.hidden_flops = 10**9
    hidden.trace.stretches[0].phase = "forward"
    assert made(hidden).work.flops - made(step()).work.flops == 10**9
    assert made(hidden).seconds == pytest.approx(made(step()).seconds)


@pytest.mark.parametrize(("nvlink_bytes", "expected"), [(0, 10 + 30), (1e9, 15), (10e9, 10)])
def test_what_is_sent_runs_beside_the_arithmetic_and_counts_where_it_takes_longer(
    nvlink_bytes: float, expected: float
) -> None:
    """By hand: copies of 5 GB to and from the host at 0.5 GB/s, and 15 GB to other cards, by NVLink or the same way."""
    card = dataclasses.replace(CARD, rates=dataclasses.replace(CARD.rates, pcie_bytes=0.5e9, nvlink_bytes=nvlink_bytes))

    def seconds(**sent: int) -> float:
        story = step().at("backward")
        for name, size_bytes in sent.items():
            setattr(story.trace.stretches[-1].work, name, size_bytes)
        return made(story, card).seconds

    assert seconds(copied_bytes=2**20, sent_bytes=2**20) == made(step(), card).seconds
    assert seconds(copied_bytes=5 * 10**9, sent_bytes=15 * 10**9) == pytest.approx(expected)


def test_copies_of_the_model_average_once_a_step_what_they_train() -> None:
    """In a ring, each rank sends twice all but its share."""
    for ranks, expected in ((1, 0), (2, 1200), (4, 1800), (1024, 2397)):
        assert job_forecast.averaging_bytes(1200, ranks) == expected
    story = step().at("load").make("adapter", 600, "adapter")
    story.trace.stretches.insert(1, story.trace.stretches.pop())
    assert made(story, CARD, ranks=Ranks(4, copied=True), micro_batches=3).as_dict()["sent_bytes"] == 2 * 3 * 600 // 4
    assert made(story, CARD, ranks=Ranks(4)).work.sent_bytes == 0, "slices are in the trace"


@pytest.mark.parametrize("device", [CPU, CARD], ids=["cpu", "card"])
def test_blocks_that_a_step_leaves_to_the_next_are_counted_once(device: Device) -> None:
    def story() -> Story:
        begun = Story().at("load").make("weights", 10 * MIB, "base_weights")
        begun.at("forward").make("saved", 8 * MIB).make("state", 5 * MIB)
        return begun.at("optimizer").make("norms", MIB, "workspace").drop("norms", "saved")

    assert made(story(), device).peak_allocated_bytes == made(story().drop("state"), device).peak_allocated_bytes


@pytest.mark.parametrize("device", [CPU, CARD], ids=["cpu", "card"])
def test_a_state_that_each_update_allocates_anew_is_counted_once(device: Device) -> None:
    """As transformers' Adafactor does with a weight's root mean square."""

    def made_anew(times: int) -> Forecast:
        story = step()
        story.trace.stretches, evaluation = story.trace.stretches[:-1], story.trace.stretches[-1:]
        for number in range(times):
            story.at("optimizer").make(f"states {number}", 2 * MIB, "optimizer_states")
            story.drop(f"states {number - 1}" if number else "states")
        story.trace.stretches += evaluation
        return made(story, device)

    assert made_anew(1).phases["evaluation"] == made_anew(0).phases["evaluation"]
    assert made_anew(2).phases == made_anew(1).phases


def test_merge_and_disk_bytes_are_not_part_of_the_step() -> None:
    found = made(step(), merge_bytes=5 * GIB, disk_bytes=7 * GIB)
    assert found.phases["merge"] == {"allocated_bytes": 5 * GIB, "reserved_bytes": 5 * GIB}
    assert found.disk_bytes == 7 * GIB
    assert found.peak_reserved_bytes == made(step()).peak_reserved_bytes
    assert "merge" not in made(step()).phases


def test_the_weights_of_files_are_cut_from_one_segment_on_a_card() -> None:
    """transformers reserves as much as they take before it reads them; 11 MiB alone would have a segment of 12."""
    story = Story().at("load")
    for number in range(10):
        story.make(str(number), 11 * MIB, "base_weights")
    story.at("optimizer").at("forward").make("saved", MIB)
    random, files = (made(story, CARD, from_files=from_files).phases["load"] for from_files in (False, True))
    assert random == {"allocated_bytes": 120 * MIB, "reserved_bytes": 120 * MIB}, "the rest of a segment is too small"
    assert files == {"allocated_bytes": 110 * MIB, "reserved_bytes": 110 * MIB}
    assert made(story, from_files=True).phases == made(story).phases, "on a CPU nothing is reserved"


@pytest.mark.parametrize("device", [CPU, CARD], ids=["cpu", "card"])
def test_several_processes_hold_a_copy_of_all_gradients(device: Device) -> None:
    story = step()
    story.trace.blocks[0].category = "adapter"
    alone, one_of_two = made(story, device), made(story, device, ranks=Ranks(2, copied=True))
    assert one_of_two.peak_allocated_bytes - alone.peak_allocated_bytes == 10 * MIB
    assert one_of_two.categories["gradients"] - alone.categories["gradients"] == 10 * MIB
    assert one_of_two.phases["load"]["allocated_bytes"] >= 20 * MIB, "weights, and the copy that is sent"


def test_the_curve_begins_with_the_forward_pass_and_ends_with_the_update() -> None:
    curve = made(step()).curve
    phases = list(dict.fromkeys(point.phase for point in curve))
    assert phases == ["forward", "backward", "optimizer"]
    first = {name: size_bytes // MIB for name, size_bytes in curve[0].categories.items() if size_bytes}
    assert first == {"base_weights": 10, "optimizer_states": 2, "activations": 8}


PLACED = st.sampled_from(["forward", "backward", "optimizer"])
BLOCKS = st.lists(
    st.tuples(PLACED, st.integers(1, 3 * MIB), st.sampled_from(list(CATEGORIES)), st.integers(0, 30)),
    min_size=1, max_size=60,
)  # fmt: skip


def random_step(blocks: list[tuple[str, int, str, int]]) -> Story:
    """Each block lives for so many further blocks."""
    story = Story().at("load").make("weights", 5 * MIB, "base_weights").at("forward").make("first", 1).drop("first")
    ends: dict[int, list[str]] = {}
    order = sorted(blocks, key=lambda block: PHASES.index(block[0]))
    for number, (phase, size, category, life) in enumerate(order):
        story.at(phase).make(str(number), size, category)
        ends.setdefault(min(number + life, len(order) - 1), []).append(str(number))
        story.drop(*ends.pop(number, []))
    return story


@pytest.mark.parametrize("device", [CPU, CARD], ids=["cpu", "card"])
@settings(max_examples=60)
@given(blocks=BLOCKS)
def test_categories_add_up_to_the_needed_bytes_and_the_curve_reaches_the_peak(
    device: Device, blocks: list[tuple[str, int, str, int]]
) -> None:
    found = made(random_step(blocks), device)
    assert sum(found.categories.values()) == found.needed_bytes
    assert min(found.categories.values()) >= 0
    assert set(found.categories) == set(WORDS) - {"communicators"}
    assert found.peak_reserved_bytes == max(peak["reserved_bytes"] for peak in found.phases.values())
    if device is CPU:
        highest = max(sum(point.categories.values()) for point in found.curve)
        assert highest == max(found.phases[phase]["allocated_bytes"] for phase in found.phases if phase != "load")
        assert found.categories["allocator_slack"] == 0


def test_a_long_curve_keeps_its_highest_point() -> None:
    story = Story().at("load").make("weights", MIB, "base_weights").at("forward")
    for number in range(5000):
        story.make("block", MIB + (7 * MIB if number == 3217 else number)).drop("block")
    found = made(story)
    assert len(found.curve) < 1300
    assert max(sum(point.categories.values()) for point in found.curve) == found.peak_allocated_bytes == 9 * MIB
