"""Validation of a run's files: valid values are kept, invalid ones skipped or reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from messages import refusal

from finetune.errors import ArtifactError
from finetune.storage import records

SAVED = {"time": 5.0, "event": "saved", "step": 3, "seconds": 0.5, "memory": {"resident_bytes": 7}}
STEP = {
    "step": 1, "loss": 2.5, "learning_rate": 1e-4, "grad_norm": None, "tokens": 10, "tokens_per_second": 5.0,
    "padding_share": 0.0, "memory": {"forward": {"resident_bytes": 7}},
}  # fmt: skip


def wrong(file: Path, shape: Any, *lines: object) -> dict[int, str]:
    file.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    found = records.read_lines(file, shape)
    assert len(found.rows) + len(found.wrong) == len(lines)
    return found.wrong


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"time": -1.0}, "time"), ({"time": "5"}, "time"), ({"time": float("nan")}, "time"), ({"step": -1}, "step"),
        ({"step": 3.0}, "step"), ({"step": True}, "step"), ({"seconds": "x"}, "seconds"),
        ({"memory": {"resident_bytes": -1}}, "memory"), ({"memory": [1]}, "memory"), ({"event": None}, "event"),
    ],
)  # fmt: skip
def test_an_event_with_an_invalid_value_is_skipped(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    assert field in wrong(tmp_path / "x", records.EVENT, SAVED, SAVED | change, SAVED)[2]


@pytest.mark.parametrize("key", [*STEP, "event", "time"])
def test_a_line_without_a_required_key_is_skipped(key: str, tmp_path: Path) -> None:
    line, shape = (STEP, records.METRIC) if key in STEP else (SAVED, records.EVENT)
    short = {name: value for name, value in line.items() if name != key}
    assert list(wrong(tmp_path / "x", shape, short, line)) == [1]


def test_invalid_lines_are_skipped_and_a_torn_last_line_is_reported_separately(tmp_path: Path) -> None:
    bad = [b"[]", b"3", b"", b"\xff\xfe", b'{"time"', b"null"]
    assert list(wrong(tmp_path / "x", records.EVENT, *bad, SAVED)) == [*range(1, len(bad) + 1)]
    (tmp_path / "x").write_bytes(json.dumps(SAVED).encode() + b'\n{"time": 1')
    found = records.read_lines(tmp_path / "x", records.EVENT)
    assert (len(found.rows), found.wrong, found.torn) == (1, {}, True)


def test_events_and_keys_of_a_later_version_are_kept(tmp_path: Path) -> None:
    later = [{"time": 1.0, "event": "new", "fact": [1]}, SAVED | {"new": {"x": 1}}]
    assert wrong(tmp_path / "x", records.EVENT, *later) == {}
    assert records.read_lines(tmp_path / "x", records.EVENT).rows == later


def test_an_invalid_file_is_named_with_its_field(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    manifest = {"format": 1, "step": 1, "files": {}, "made_with": {}, "sha256": ""}
    file.write_text(json.dumps(manifest))
    assert records.read(file, records.MANIFEST) == manifest
    file.write_text(json.dumps({**manifest, "files": {"x": {"bytes": -1, "sha256": ""}}}))
    with refusal(ArtifactError, "manifest.json:", "files.x.bytes"):
        records.read(file, records.MANIFEST)
    for text in ("", "[]", "{", '{"format": 1}', "\xff"):
        file.write_text(text, encoding="latin-1")
        with refusal(ArtifactError, "manifest.json:"):
            records.read(file, records.MANIFEST)


def test_a_missing_file_a_folder_and_read_errors_of_the_disk_are_reported(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for file in (tmp_path / "x", tmp_path / "folder", Path("/proc/self/mem")):  # there is nothing at its beginning
        with refusal(ArtifactError, f"{file.name}:"):
            records.read(file, records.OBJECT)
    assert records.read_lines(tmp_path / "y", records.EVENT).rows == []


def test_checking_a_value_names_its_first_invalid_field() -> None:
    records.check(SAVED, records.EVENT)
    with pytest.raises(ValueError, match=r"^`time`: "):
        records.check({**SAVED, "time": -1.0, "event": 3}, records.EVENT)


def test_lines_keep_their_key_order(tmp_path: Path) -> None:
    """A resume writes the lines that it keeps again, and must not change them."""
    line = {"memory": {"forward": {"resident_bytes": 7}}, **STEP}
    assert not wrong(tmp_path / "lines", records.METRIC, line)
    assert list(records.read_lines(tmp_path / "lines", records.METRIC).rows[0]) == list(line)
