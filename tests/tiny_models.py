"""Tiny models and their traces, and the settings and the instrument of benchmarks/forecast_cpu.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from finetune.config import Config, MemorySection
from finetune.data.batching import LargestBatch
from finetune.forecast import devices, traced_step
from finetune.forecast.device import Device
from finetune.forecast.extrapolate import Shortened, shorten
from finetune.forecast.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import forecast_cpu  # noqa: E402
import measured_step  # noqa: E402

BATCH = LargestBatch(rows=2, tokens=64, padded=True, trained_tokens=96)
_TINY: dict[str, Any] = {
    "llama": {"model_type": "llama"},
    "mixture": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 32},
    "windows": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 32, "sliding_window_pattern": 3},
}


def architecture(name: str = "llama", layers: int = 9) -> Any:
    """A tiny architecture: 64 wide, 256 words."""
    values = forecast_cpu.config_json(hidden=64, layers=layers, heads=(4, 2), vocabulary=256, **_TINY[name])
    return measured_step.architecture_of(values)


def config(**changes: Any) -> Config:
    """Two rows a step on random weights; `changes` by section__key."""
    given = {key.replace("__", "."): value for key, value in changes.items()}
    fixed = {"training.micro_batch": 2, "training.batch_size": 2, "data.eval": "none"}
    return measured_step.config_of({**fixed, **given})


def cpu() -> Device:
    return devices.find("cpu", MemorySection())


def card(name: str = "RTX 4090") -> Device:
    return devices.find(name, MemorySection())


def trace(
    job: Config,
    model: Any,
    *,
    where: Device | None = None,
    batch: LargestBatch = BATCH,
    evaluation: LargestBatch | None = None,
    attention: str = "sdpa",
    shortening: Callable[[Sequence[Hashable], Sequence[Hashable]], Shortened] = shorten,
    world_size: int = 1,
    models: traced_step.Models | None = None,
) -> Trace:
    """The trace of a step of `job`; by default of few layers, extrapolated to all."""
    setting = traced_step.StepSetting(job, model, batch, evaluation, where or cpu(), attention, world_size)
    return traced_step._trace_step(setting, shortening, models or traced_step.Models())
