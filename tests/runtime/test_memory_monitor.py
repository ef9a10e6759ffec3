"""The monitor measures peaks by phase, and distinguishes leaks from noise."""

import copy
import gc
import json
from pathlib import Path

import forecasts
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import finetune
from finetune.forecast import devices
from finetune.resolve.planner import Planner
from finetune.runtime import live_tensors, memory_snapshots
from finetune.runtime.memory_monitor import HostMeter, LeakWatch, Monitor, headline

MIB = 2**20


class Scripted:
    """A meter that returns the given numbers, one for each read."""

    def __init__(self, *peaks: int) -> None:
        self.peaks = list(peaks)

    def reset(self) -> None: ...

    def read(self) -> dict[str, int]:
        return {"resident_bytes": self.peaks.pop(0)}


def test_tensors_of_a_compiler_trace_take_no_memory() -> None:
    before = live_tensors.live_bytes()
    traced = torch._to_functional_tensor(torch.ones(MIB))
    assert before < live_tensors.live_bytes() < before + 2 * traced.nbytes


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux sets the resident peak back")
def test_the_resident_peak_covers_one_phase() -> None:
    gc.collect()  # what earlier tests left is not freed between the phases
    monitor = Monitor(HostMeter())
    with monitor.phase("forward"):
        block = torch.ones(200 * MIB // 4)
        del block
    with monitor.phase("backward"):
        block = torch.ones(50 * MIB // 4)
        del block
    step = monitor.take_step()
    difference = step["forward"]["resident_bytes"] - step["backward"]["resident_bytes"]
    assert 100 * MIB < difference < 200 * MIB, "150, but for what else the process allocates meanwhile"


def test_without_a_resettable_peak_the_resident_size_is_read(tmp_path: Path) -> None:
    meter = HostMeter(proc=tmp_path / "nothing")
    assert not meter.resets
    meter.reset()
    assert meter.read()["resident_bytes"] > 10 * MIB


def test_only_tensors_are_counted_by_phase() -> None:
    others = torch.ones(4 * MIB // 4)
    monitor = Monitor(HostMeter())
    held = torch.ones(3 * MIB // 4)
    with monitor.phase("load"):
        torch.ones(MIB)
    with monitor.counting_tensors():
        with monitor.phase("forward"):
            block = torch.empty(100 * MIB // 4)  # occupies no page
            bytearray(50 * MIB)
        torch.empty(900 * MIB // 4)  # between the phases
        with monitor.phase("backward"):
            torch.empty(20 * MIB // 4)
            del block
            torch.empty(110 * MIB // 4)
    counted = {phase: peak.get("allocated_bytes") for phase, peak in monitor.take_step().items()}
    assert counted == {"load": None, "forward": 103 * MIB, "backward": 123 * MIB}
    assert monitor.peaks["backward"].keys() == {"allocated_bytes", "resident_bytes"}
    assert others.nbytes + held.nbytes <= live_tensors.live_bytes()


def test_weights_of_the_run_loaded_earlier_are_counted() -> None:
    model, others = torch.nn.Linear(2**10, 2**8, bias=False), torch.ones(4 * MIB // 4)
    monitor = Monitor(HostMeter())
    monitor.include(copy.deepcopy(model, {id(model.weight): model.weight}))
    with monitor.counting_tensors(), monitor.phase("forward"):
        torch.ones(2 * MIB // 4)
    assert monitor.peaks["forward"]["allocated_bytes"] == 3 * MIB
    assert others.nbytes == 4 * MIB


def test_bytes_declared_apart_are_not_counted() -> None:
    peaks = []
    for apart_bytes in (0, 2**22):
        monitor = Monitor(HostMeter())
        copies = torch.zeros(2**20)
        with monitor.counting_tensors(apart_bytes), monitor.phase("forward"):
            torch.zeros(2**10)
        peaks.append(monitor.peaks["forward"]["allocated_bytes"])
    assert copies.nbytes == 2**22
    assert peaks == [2**22 + 2**12, 2**12]


@pytest.mark.slow
def test_a_resumed_run_measures_its_warm_up_without_the_copies_of_optimizer_states(quick, monkeypatch) -> None:
    monkeypatch.setattr(Planner, "forecast", lambda *_, **named: forecasts.forecast(type="cpu"))  # takes seconds
    job = ["memory.check=refuse", "optimizer.kind=adamw_torch_fused", "adapter.rank=64"]
    peaks = []
    for steps in (1, 2):
        run = finetune.train(quick(f"training.max_steps={steps}", *job)).run
        measured = json.loads(run.forecast_file.read_text())["measured"]
        peaks.append({phase: measured[phase]["allocated_bytes"] for phase in ("forward", "backward", "optimizer")})
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


def test_tensors_are_not_counted_while_the_caller_profiles() -> None:
    monitor = Monitor(HostMeter())
    with profile(activities=[ProfilerActivity.CPU]), monitor.counting_tensors(), monitor.phase("forward"):
        torch.ones(8)
    assert monitor.take_step()["forward"].keys() == {"resident_bytes"}


def test_a_failed_block_ends_counting_and_its_phase() -> None:
    monitor = Monitor(Scripted(7))
    with pytest.raises(ValueError, match="inside"), monitor.counting_tensors(), monitor.phase("load"):
        raise ValueError("inside")
    assert live_tensors.can_count()
    assert monitor.take("load")["resident_bytes"] == 7


def test_a_phase_keeps_its_largest_peak_over_micro_batches() -> None:
    monitor = Monitor(Scripted(5, 1, 9, 2))
    for _ in range(2):
        monitor.enter("forward")
        monitor.enter("backward")
    monitor.leave()
    assert monitor.take_step() == {"forward": {"resident_bytes": 9}, "backward": {"resident_bytes": 2}}
    assert monitor.take_step() == {}
    assert monitor.peaks["forward"] == {"resident_bytes": 9}


def test_headline_is_reserved_on_cuda_and_resident_on_a_cpu() -> None:
    assert headline({"forward": {"resident_bytes": 3}, "backward": {"resident_bytes": 8}}) == 8
    assert headline({"forward": {"allocated_bytes": 1, "reserved_bytes": 4, "device_bytes": 9}}) == 4
    assert headline({}) == 0


def test_a_peak_that_keeps_growing_at_one_shape_is_a_leak_once() -> None:
    watch = LeakWatch()
    grown = [watch.see((4, 128, 1), {"allocated_bytes": n * 2 * MIB}) for n in range(10)]
    assert grown == [0, 0, 0, 0, 8 * MIB, 0, 0, 0, 0, 0]


def test_fluctuation_slow_growth_and_new_shapes_are_not_leaks() -> None:
    up_and_down = [((4, 128, 1), {"allocated_bytes": (n % 4) * 9 * MIB}) for n in range(40)]
    below_the_grain = [((4, 128, 1), {"resident_bytes": n * 4 * MIB}) for n in range(40)]
    new_shapes = [(shape, {"resident_bytes": n * 32 * MIB}) for n in range(40) for shape in ((4, 128), (4, n))]
    for seen in (up_and_down, below_the_grain, new_shapes):
        watch = LeakWatch()
        assert not any(watch.see(*each) for each in seen)


@pytest.mark.slow
def test_a_real_leak_in_training_is_reported(quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.training.step import Step

    rows = tmp_path / "equal.jsonl"
    rows.write_text('{"text": "All rows of this file are of one length."}\n' * 24)
    held = []
    micro_step = Step.micro_step

    def leaking(self, *arguments, **named):
        held.append(torch.ones(40 * MIB // 4))  # over 32 MiB malloc takes none that earlier tests have freed
        return micro_step(self, *arguments, **named)

    monkeypatch.setattr(Step, "micro_step", leaking)
    one_shape = [f"data.train={rows}", "data.eval=none", "training.batch_size=2", "training.micro_batch=2"]
    config = quick(*one_shape, "training.max_steps=12", "training.eval_every=null")
    run = finetune.train(config).run
    leaks = [event for event in run.events() if event["event"] == "leak"]
    assert leaks
    assert leaks[0]["grown_bytes"] >= 4 * 16 * MIB


def test_cap_and_snapshot_do_nothing_on_a_cpu_and_a_profiler_is_absent_unless_asked_for(tmp_path: Path) -> None:
    device = torch.device("cpu")
    assert memory_snapshots.profiler(0, tmp_path, device) is None
    devices.cap(1, device)
    with memory_snapshots.recorded(tmp_path / "snapshot.pickle", device, history=True):
        pass
    assert list(tmp_path.iterdir()) == []
