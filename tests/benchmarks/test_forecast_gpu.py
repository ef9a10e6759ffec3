"""The matrix of forecasts beside real steps: its settings, its processes and what a card says."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forecast_gpu
import gpu_check
import gpu_slices
import pytest
from allocator_recording import Recording, replay

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = sorted((ROOT / "benchmarks" / "results" / "recordings").glob("*.json.gz"))


@pytest.mark.parametrize("file", [None, *RECORDINGS], ids=lambda file: file.name if file else "written here")
def test_the_allocator_does_on_paper_what_a_gpu_did(file: Path | None, tmp_path: Path) -> None:
    """Over what `make gpu-check` recorded, once a card has; and over a history of one allocation of two pages."""
    if file is None:
        history = [
            {"action": "segment_map", "addr": 4096, "size": 40 * 2**20, "stream": 0},
            {"action": "alloc", "addr": 4096, "size": 30 * 2**20, "stream": 0},
        ]
        written = forecast_gpu.record(forecast_gpu.SETTINGS[0], history, 30 * 2**20, tmp_path)
        assert written["reserved_error"] == 0
        file = tmp_path / written["file"]
        assert Recording.from_json(gzip.decompress(file.read_bytes()).decode()).events == (30 * 2**20,)
    assert file.stat().st_size < forecast_gpu.RECORDING_BYTES
    found = replay(Recording.from_json(gzip.decompress(file.read_bytes()).decode()))
    assert found.modelled.reserved_bytes == pytest.approx(found.recorded.reserved_bytes, rel=0.03)
    assert found.modelled.allocated_bytes == pytest.approx(found.recorded.allocated_bytes, rel=0.01)


def test_a_recording_too_large_for_a_repository_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_gpu, "RECORDING_BYTES", 10)
    history = [{"action": name, "addr": 4096, "size": 2**21, "stream": 0} for name in ("segment_map", "alloc")]
    assert "left_out" in forecast_gpu.record(forecast_gpu.SETTINGS[0], history, 2**21, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_matrix_has_each_lever_and_no_name_twice() -> None:
    settings = forecast_gpu.SETTINGS
    assert len({setting.file_name for setting in settings}) == len({setting.name for setting in settings})
    assert len(settings) == len({setting.name for setting in settings}) >= forecast_gpu.ENOUGH
    configs = [setting.resolved() for setting in settings]
    for section, key, values in (
        ("quantization", "kind", {"nf4", "fp4", "int8", "none"}),
        ("quantization", "double", {True, False}),
        ("adapter", "kind", {"lora", "none"}),
        ("memory", "checkpointing", {"all", "none", "every-2", 4}),
        ("memory", "offload", {"none", "checkpoints"}),
        ("optimizer", "kind", {"paged_adamw_8bit", "paged_adamw_32bit", "adamw_8bit", "adamw_torch_fused"}),
        ("model", "attention", {"auto", "eager"}),
        ("training", "micro_batch", {1, 2, 4, 8}),
    ):
        assert {getattr(getattr(config, section), key) for config in configs} >= values, key


def test_the_matrix_is_shared_out_among_slices_that_end_in_time() -> None:
    parts = [
        forecast_gpu.part_of(forecast_gpu.SETTINGS, f"{part}/{gpu_slices.FORECAST_PARTS}")
        for part in range(1, gpu_slices.FORECAST_PARTS + 1)
    ]
    assert [setting for part in parts for setting in part] == list(forecast_gpu.SETTINGS)
    for part in parts:
        assert sum(setting.seconds for setting in part) + 20 <= gpu_slices.FORECAST_SECONDS < gpu_check.LIMIT_SECONDS


def test_every_setting_is_a_valid_job() -> None:
    import measured_step

    from finetune.config.rules import contradictions
    from finetune.model.recompute import checkpointing

    for setting in forecast_gpu.SETTINGS:
        config, architecture = setting.resolved(), setting.build_architecture()
        assert not contradictions(config), setting.name
        assert config.model.weights == "random"
        assert config.fitted
        assert max(length for length, _ in setting.rows) == config.data.max_length == setting.length
        assert setting.length <= architecture.max_position_embeddings
        measured_step._check(config, setting.rows, setting.padded)
        checkpointed = checkpointing.pattern(config.memory.checkpointing, architecture.num_hidden_layers)
        # A number of layers is a part of them.
        assert not isinstance(config.memory.checkpointing, int) or set(checkpointed) == {"all", "none"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["110m nf4, segments of fixed size", "0.5B int8, evaluated", "7B nf4"])
def test_a_setting_is_forecast_without_a_gpu(name: str) -> None:
    import measured_step

    from finetune.forecast import devices as device
    from finetune.forecast.planning import Planner

    (setting,) = (one for one in forecast_gpu.SETTINGS if one.name == name)
    config, architecture = setting.resolved(), setting.build_architecture()
    data = measured_step._data(config, architecture.vocab_size, setting.rows)
    card = dataclasses.replace(device.find("H100", config.memory), expandable_segments=setting.expandable)
    found = Planner(config, architecture, card, data).forecast()
    assert found.fits
    assert found.batch.source == "the data's rows"
    assert 0 < found.peak_allocated_bytes <= found.peak_reserved_bytes
    assert ("evaluation" in found.phases) == (config.data.eval != "none")
    errors = forecast_gpu.relative_errors(
        found, {"allocated_bytes": found.peak_allocated_bytes * 2, "reserved_bytes": found.peak_reserved_bytes}
    )
    assert errors == {"allocated": -0.5, "reserved": 0.0}


class FakeWorker:
    """Takes so many seconds of the fake clock and answers."""

    def __init__(self, clock: list[float], seconds: float, log: list[str], name: str) -> None:
        self.clock, self.seconds, self.log, self.name = clock, seconds, log, name
        log.append(f"start {name}")

    def finish(self, limit: float) -> dict[str, Any]:
        self.log.append(f"finish {self.name}")
        self.clock[0] += min(self.seconds, limit)
        return {"error": "too long"} if self.seconds > limit else {"relative_errors": {}}

    def stop(self) -> None:
        self.log.append(f"stop {self.name}")


def test_the_next_process_imports_while_one_works_and_each_is_ended() -> None:
    clock, log = [0.0], []
    settings = forecast_gpu.SETTINGS[:2]
    reported: list[list[str]] = []
    forecast_gpu.sweep(
        settings,
        forecast_gpu.Deadline(1000, lambda: clock[0]),
        lambda setting: FakeWorker(clock, 1, log, str(settings.index(setting))),
        lambda rows: reported.append(list(rows)),
    )
    assert log == ["start 0", "start 1", "finish 0", "stop 0", "finish 1", "stop 1"]
    assert reported == [[settings[0].name], [setting.name for setting in settings]]


def test_what_no_time_is_left_for_is_left_out_and_said() -> None:
    clock, log = [0.0], []
    by_name = {setting.name: setting for setting in forecast_gpu.SETTINGS}
    settings = [by_name[name] for name in ("110m nf4", "7B nf4", "0.5B nf4")]
    seconds = settings[0].seconds + settings[2].seconds
    rows: dict[str, Any] = {}
    forecast_gpu.sweep(
        settings,
        forecast_gpu.Deadline(seconds, lambda: clock[0]),
        lambda setting: FakeWorker(clock, setting.seconds, log, setting.name),
        rows.update,
    )
    assert [name for name, row in rows.items() if "left_out" in row] == ["7B nf4"]
    assert log.count("stop 7B nf4") == 1
    assert "relative_errors" in rows["0.5B nf4"]


def test_a_setting_that_hangs_ends_at_its_limit_or_with_the_sweep() -> None:
    clock = [0.0]
    deadline = forecast_gpu.Deadline(530, lambda: clock[0])
    assert deadline.limit(12) == 90
    assert deadline.limit(40) == 120
    clock[0] = 500
    assert deadline.limit(12) == 30
    assert deadline.has(30)
    assert not deadline.has(31)
    clock[0] = 600
    assert deadline.left == 0


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    process = forecast_gpu.process_of(forecast_gpu.TINY, "cpu", tmp_path, None)
    try:
        assert process.finish(0.1) == {"error": "it took longer than 0 s"}
        assert process._process.returncode is not None
    finally:
        process.stop()


def errors(allocated: float, reserved: float) -> dict[str, Any]:
    return {"relative_errors": {"allocated": allocated, "reserved": reserved}, "config": {}}


def test_the_summary_counts_what_is_within_the_goals() -> None:
    rows = {
        "a": errors(0.01, -0.02) | {"recording": {"file": "a.json.gz"}},
        "b": errors(-0.011, 0.03) | {"recording": {"left_out": "too large"}},
        "c": {"error": "CUDA"},
        "d": {"left_out": "3 s were left"},
    }
    found = forecast_gpu.summary(rows, 4)
    assert (found["settings"], found["measured"]) == (4, 2)
    assert (found["failed"], found["left_out"]) == (["c"], ["d"])
    assert found["within"] == {"allocated": 1, "reserved": 2}
    assert found["worst"] == {
        "allocated": {"setting": "b", "error": -0.011},
        "reserved": {"setting": "b", "error": 0.03},
    }
    assert found["median_absolute_error"]["allocated"] == pytest.approx(0.0105)
    assert found["recordings"] == ["a.json.gz"]
    assert not found["passed"]


@pytest.mark.parametrize(
    ("measured", "wanted", "passed"),
    [
        pytest.param(20, 28, True, id="twenty of the matrix are enough"),
        pytest.param(19, 28, False, id="nineteen are not"),
        pytest.param(1, 1, True, id="one of one that was asked for"),
        pytest.param(0, 1, False, id="none"),
    ],
)
def test_the_matrix_passes_only_when_enough_was_measured(measured: int, wanted: int, passed: bool) -> None:
    rows = {str(number): errors(0.0, 0.0) for number in range(measured)}
    assert forecast_gpu.summary(rows, wanted)["passed"] is passed


def test_what_lies_outside_the_allocator_is_taken_where_no_state_is_paged() -> None:
    def row(optimizer: dict[str, str], outside: int) -> dict[str, Any]:
        return {**errors(0, 0), "config": optimizer, "measured": {"outside_bytes": outside}}

    rows = {
        "a": row({}, 9),
        "b": row({"optimizer.kind": "paged_adamw_32bit"}, 8),
        "c": row({"optimizer.kind": "sgd"}, 5),
    }
    assert forecast_gpu.summary(rows, 3)["largest_outside_bytes"] == 5


def test_a_lasting_meter_keeps_the_peak_between_the_phases() -> None:
    class Meter:
        now = peak = 0

        def hold(self, size: int) -> None:
            self.now, self.peak = size, max(self.peak, size)

        def reset(self) -> None:
            self.peak = self.now

        def read(self) -> dict[str, int]:
            return {"allocated_bytes": self.peak}

    meter = Meter()
    lasting = forecast_gpu.LastingMeter(meter)
    meter.hold(7)
    meter.hold(1)
    lasting.reset()
    assert lasting.read() == {"allocated_bytes": 1}
    assert lasting.peak == {"allocated_bytes": 7}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("580.159.04, 4\n580.159.04, 9\n", ("580.159.04", 4 * 2**20)),
        ("580.159.04, [N/A]\n", ("580.159.04", None)),
        ("", (None, None)),
        ("NVIDIA-SMI has failed\n", (None, None)),
    ],
)
def test_the_driver_is_read_where_there_is_one(text: str, expected: Any) -> None:
    assert forecast_gpu.read_smi(text) == expected


def test_a_history_that_cannot_be_followed_is_said(tmp_path: Path) -> None:
    history = [{"action": "free_completed", "addr": 4096, "size": 512, "stream": 0}]
    found = forecast_gpu.record(forecast_gpu.SETTINGS[0], history, 512, tmp_path)
    assert "did not allocate" in found["left_out"]
    assert not list(tmp_path.iterdir())


class FakeCuda:
    """torch.cuda of a card of 80 GiB, on which `allocated` bytes are taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, history: list[dict[str, Any]]) -> None:
        import torch

        self.allocated = 0
        self.recorded: list[dict[str, Any]] = []
        properties = SimpleNamespace(
            name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, major=9, minor=0, multi_processor_count=132
        )
        fakes: dict[str, Any] = {
            "init": lambda: None,
            "current_device": lambda: 0,
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda: None,
            "get_device_properties": lambda device: properties,
            "mem_get_info": lambda: (79 * 2**30 - self.allocated, 80 * 2**30),
            "memory_allocated": lambda: self.allocated,
            "memory_reserved": lambda: self.allocated,
            "max_memory_allocated": lambda: self.allocated,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [history]})
        monkeypatch.setattr(
            torch.cuda.memory, "_record_memory_history", lambda **arguments: self.recorded.append(arguments)
        )


def test_what_is_done_on_a_card_around_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines that only a card runs, with the training and torch.cuda replaced."""
    import measured_step

    size = 30 * 2**20
    history = [{"action": name, "addr": 4096, "size": size, "stream": 0} for name in ("segment_map", "alloc")]
    cuda = FakeCuda(monkeypatch, history)
    meter = SimpleNamespace(reset=lambda: None, read=dict)
    meter.peak = {"allocated_bytes": size, "reserved_bytes": 2 * size, "device_bytes": 3 * size}
    step = {"loss": 10.0, "tokens": 4 * 512 - 128, "tokens_per_second": 960.0}

    def train(config: Any, architecture: Any, data: Any, device: Any, monitor: Any) -> Any:
        cuda.allocated = size
        monitor.run["forward"] = dict(meter.peak)
        return [step, step], "flash_attention_3"

    monkeypatch.setattr(forecast_gpu, "LastingMeter", lambda _: meter)
    monkeypatch.setattr(measured_step, "train", train)
    found = forecast_gpu.measure(
        forecast_gpu.SETTINGS[0], SimpleNamespace(type="cuda", index=0), tmp_path, idle_bytes=2**20
    )
    json.dumps(found, allow_nan=False)
    assert found["forecast_allocated_bytes"] == 0
    assert found["attention"] == {"forecast": "sdpa", "measured": "flash_attention_3"}
    assert found["step_seconds"]["measured"] == 2.0
    assert found["measured"]["peak_reserved_bytes"] == 2 * size
    assert found["measured"]["outside_bytes"] == 2**30 - 2**20
    assert {(phase["phase"], phase["measure"]) for phase in found["phases"]} == {
        ("forward", "allocated_bytes"),
        ("forward", "reserved_bytes"),
    }
    assert set(found["relative_errors"]) == {"allocated", "reserved"}
    assert found["recording"]["recorded"] == {"allocated_bytes": size, "reserved_bytes": size}
    assert [arguments["enabled"] for arguments in cuda.recorded] == ["all", None]
    assert forecast_gpu.summary({"110m nf4": {"config": {}, "seconds": 1.0} | found}, 1)["measured"] == 1


def test_a_cards_facts_stand_beside_what_is_forecast_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, [])
    monkeypatch.setattr(forecast_gpu, "_smi", lambda: ("580.1", 2**20))
    monkeypatch.setattr(forecast_gpu, "_workspaces", lambda device: (32 * 2**20, 64 * 2**20))
    monkeypatch.setattr("finetune.runtime.environment.describe", lambda device: {})
    found = forecast_gpu.facts(SimpleNamespace(type="cuda"))
    json.dumps(found, allow_nan=False)
    assert found["name"] == "NVIDIA H100 80GB HBM3"
    assert found["capability"] == [9, 0]
    assert found["context"]["before_the_first_allocation_bytes"] == 2**30 - 2**20
    assert found["workspace"]["forecast_bytes"] == found["workspace"]["forward_and_backward_bytes"]


def test_the_products_behind_the_workspaces_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    FakeCuda(monkeypatch, [])
    assert forecast_gpu._workspaces(torch.device("cpu")) == (0, 0)
