"""Forecasts written by hand: every number that a test expects can be read here."""

from __future__ import annotations

import dataclasses
from typing import Any

from finetune.data.batching import LargestBatch
from finetune.forecast.device import Device
from finetune.forecast.gpus import Rates
from finetune.forecast.job_forecast import WORDS, Forecast
from finetune.forecast.replay import Point
from finetune.forecast.trace import CATEGORIES, Work

MIB, GIB = 2**20, 2**30

_STEP_MIB = [
    ("forward", {"activations": 0, "gradients": 0}),
    ("forward", {"activations": 1024, "gradients": 0}),
    ("backward", {"activations": 2048, "gradients": 256}),
    ("backward", {"activations": 512, "gradients": 512}),
    ("optimizer", {"activations": 0, "gradients": 512}),
]
_STAYING_MIB = {"base_weights": 3072, "optimizer_states": 256}


def forecast(*, budget: int = 12 * GIB, type: str = "cuda", name: str = "RTX 3090", **changes: Any) -> Forecast:
    """A step whose tensors peak at 5.5 GiB; with 0.5 GiB of slack and 1 GiB of context it needs 7 GiB."""
    slack = 0 if type == "cpu" else 512 * MIB
    points = [
        Point(
            phase,
            {category: MIB * {**_STAYING_MIB, **sizes}.get(category, 0) for category in CATEGORIES},
            5632 * MIB + slack,
        )
        for phase, sizes in _STEP_MIB
    ]
    at_peak = {"base_weights": 3072, "gradients": 256, "optimizer_states": 256, "activations": 2048, "context": 1024}
    peaks = {"load": 3072, "forward": 4352, "backward": 5632, "optimizer": 3840}
    reserved = {"load": 3072, "forward": 4352}
    made = Forecast(
        device=Device(
            type=type, name=name, budget_bytes=budget, outside_bytes=GIB,
            rates=Rates(flops=1e12, fp32_flops=1e11, bandwidth_bytes=1e11, call_seconds=1e-6),
        ),
        attention="sdpa",
        batch=LargestBatch(rows=4, tokens=2048, padded=True, trained_tokens=8188, source="data.max_length"),
        peak_allocated_bytes=5632 * MIB,
        peak_reserved_bytes=5632 * MIB + slack,
        host_bytes=0,
        disk_bytes=0,
        phases={
            phase: {
                "allocated_bytes": peak * MIB,
                "reserved_bytes": reserved.get(phase, 5632) * MIB + (slack if peak > 3072 else 0),
            }
            for phase, peak in peaks.items()
        },
        categories={**{category: MIB * at_peak.get(category, 0) for category in WORDS}, "allocator_slack": slack},
        work=Work(flops=5_000_000_000_000, moved_bytes=200_000_000_000, calls=10_000),
        seconds=8.0,
        tokens=2 * 4 * 2048,
        curve=tuple(points),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)
