"""The matrix of forecasts beside real steps: its settings, its processes and what a card says."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forecast_gpu
import gpu_slices
import pytest
from allocator_recording import Recording, replay
from jobs import sampled

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = sorted((ROOT / "benchmarks" / "results" / "recordings").glob("*.json.gz"))


@pytest.mark.parametrize("file", [None, *RECORDINGS], ids=lambda file: file.name if file else "written here")
def test_the_replayed_allocator_matches_the_recording(file: Path | None, tmp_path: Path) -> None:
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
        assert sum(setting.seconds for setting in part) + 15 <= gpu_slices.FORECAST_SECONDS
        assert gpu_slices.SLICES["forecast-1"].seconds > gpu_slices.FORECAST_SECONDS


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
@pytest.mark.parametrize(
    "name", sampled(["110m nf4, segments of fixed size", "0.5B int8, evaluated"], "110m nf4, segments of fixed size")
)
def test_a_setting_is_forecast_without_a_gpu(name: str) -> None:
    import measured_step

    from finetune.forecast import devices as device
    from finetune.resolve.planner import Planner

    (setting,) = (one for one in forecast_gpu.SETTINGS if one.name == name)
    config, architecture = setting.resolved(), setting.build_architecture()
    data = measured_step._data(config, architecture.vocab_size, setting.rows)
    software = device.Software(expandable_segments=setting.expandable)
    card = dataclasses.replace(device.find("H100", config.memory), software=software)
    found = Planner(config, architecture, card, data).forecast()
    assert found.fits
    assert found.batch.source == "the data's rows"
    assert 0 < found.peak_allocated_bytes <= found.peak_reserved_bytes
    assert ("evaluation" in found.phases) == (config.data.eval != "none")
    errors = forecast_gpu.relative_errors(
        found, {"allocated_bytes": found.peak_allocated_bytes * 2, "reserved_bytes": found.peak_reserved_bytes}
    )
    assert errors == {"allocated": -0.5, "reserved": 0.0}


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    process = forecast_gpu.process_of(forecast_gpu.TINY, "cpu", tmp_path, None)
    try:
        assert process.finish(0.1) == {"error": "it took longer than 0 s"}
        assert process._process.returncode is not None
    finally:
        process.stop()


def test_the_summary_counts_what_is_within_the_goals() -> None:
    def errors(allocated: float, reserved: float, **recording: str) -> dict[str, Any]:
        found = {"allocated": allocated, "reserved": reserved}
        return {"relative_errors": found, "config": {}, "recording": recording}

    rows = {
        "a": errors(0.01, -0.02, file="a.json.gz"), "b": errors(-0.011, 0.03, left_out="too large"),
        "c": {"error": "CUDA"}, "d": {"left_out": "3 s were left"},
    }  # fmt: skip
    found = forecast_gpu.summary(rows, 4)
    assert (found["settings"], found["measured"], found["passed"]) == (4, 2, False)
    assert (found["failed"], found["left_out"], found["recordings"]) == (["c"], ["d"], ["a.json.gz"])
    assert found["within"] == {"allocated": 1, "reserved": 2}
    worst = {"allocated": {"setting": "b", "error": -0.011}, "reserved": {"setting": "b", "error": 0.03}}
    assert found["worst"] == worst
    assert found["median_absolute_error"]["allocated"] == pytest.approx(0.0105)


class FakeCuda:
    """torch.cuda of a card of 80 GiB, on which `allocated` bytes are taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, history: list[dict[str, Any]]) -> None:
        import torch

        self.allocated = 0
        self.recorded: list[dict[str, Any]] = []
        properties = SimpleNamespace(
            name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, major=9, minor=0, multi_processor_count=132
        )
        fakes: dict[str, Any] = dict.fromkeys(("init", "synchronize", "empty_cache", "reset_peak_memory_stats"), list)
        fakes |= dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated"), lambda: self.allocated)
        fakes |= {
            "current_device": int,
            "get_device_properties": lambda device: properties,
            "mem_get_info": lambda: (79 * 2**30 - self.allocated, 80 * 2**30),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [history]})
        monkeypatch.setattr(
            torch.cuda.memory, "_record_memory_history", lambda **arguments: self.recorded.append(arguments)
        )


@pytest.mark.slow
def test_measuring_on_a_gpu_records_forecast_peaks_and_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines that only a card runs, with the training and torch.cuda replaced."""
    import measured_step

    size = 30 * 2**20
    history = [{"action": name, "addr": 4096, "size": size, "stream": 0} for name in ("segment_map", "alloc")]
    cuda = FakeCuda(monkeypatch, history)
    meter = SimpleNamespace(reset=lambda: None, read=dict)
    meter.peak = {"allocated_bytes": size, "reserved_bytes": 2 * size, "device_bytes": 3 * size}
    step = {"loss": 10.0, "tokens": 128 + 96, "tokens_per_second": 112.0}

    def train(config: Any, architecture: Any, data: Any, device: Any, monitor: Any) -> Any:
        cuda.allocated = size
        monitor.peaks["forward"] = dict(meter.peak)
        return [step, step], "flash_attention_3"

    monkeypatch.setattr(forecast_gpu, "LastingMeter", lambda _: meter)
    monkeypatch.setattr(measured_step, "train", train)
    setting = dataclasses.replace(forecast_gpu.TINY, recorded=True)
    found = forecast_gpu.measure(setting, SimpleNamespace(type="cuda", index=0), tmp_path, idle_bytes=2**20)
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
