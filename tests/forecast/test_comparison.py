"""Forecast beside measured: the phases that both have, each in its own measure."""

from __future__ import annotations

import json

import pytest
from forecasts import GIB, MIB, forecast

from finetune.storage.records import LARGE_DIFFERENCE, Difference


def test_on_a_card_allocated_and_reserved_are_compared_and_the_device_is_not() -> None:
    measured = {
        "backward": {"allocated_bytes": 5000 * MIB, "reserved_bytes": 6144 * MIB, "device_bytes": 9000 * MIB},
        "save": {"allocated_bytes": MIB},
    }
    found = forecast().differences(measured)
    assert [(each.phase, each.measure, each.forecast_bytes) for each in found] == [
        ("backward", "allocated_bytes", 5632 * MIB),
        ("backward", "reserved_bytes", 6144 * MIB),
    ]
    assert found[0].relative == pytest.approx(0.1264)
    assert [each.large for each in found] == [True, False]


def test_on_a_cpu_tensors_are_compared_and_the_resident_size_is_not() -> None:
    peaks = {"backward": {"resident_bytes": 7 * GIB, "allocated_bytes": 5700 * MIB}, "load": {"resident_bytes": GIB}}
    [found] = forecast(type="cpu").differences(peaks)
    assert found == Difference("backward", "allocated_bytes", 5632 * MIB, 5700 * MIB)
    assert found.relative < 0, "too little was forecast"


def test_a_difference_above_the_threshold_is_large_in_either_direction() -> None:
    for share in (1 - 2 * LARGE_DIFFERENCE, 1 - LARGE_DIFFERENCE / 2, 1.0, 1 + 2 * LARGE_DIFFERENCE):
        found = Difference("load", "allocated_bytes", round(1e9 * share), 10**9)
        assert found.large is (abs(share - 1) > LARGE_DIFFERENCE), share


def test_forecast_json_has_the_forecast_and_later_the_measurements() -> None:
    before = json.loads(json.dumps(forecast().beside({})))
    assert (before["measured"], before["differences"]) == ({}, [])
    assert before["peak_allocated_bytes"] == 5632 * MIB
    after = forecast().beside({"load": {"allocated_bytes": 3000 * MIB}})
    assert after["measured"] == {"load": {"allocated_bytes": 3000 * MIB}}
    [difference] = after["differences"]
    assert (difference["phase"], difference["measure"], difference["relative"]) == ("load", "allocated_bytes", 0.024)
    assert (difference["forecast_bytes"], difference["measured_bytes"]) == (3072 * MIB, 3000 * MIB)
