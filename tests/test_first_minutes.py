"""The recorded first minutes of a new user: few commands, no config written by hand, and an answer at the end."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_recorded_session_is_short_and_ends_with_the_answer() -> None:
    text = (ROOT / "docs" / "first_minutes.txt").read_text(encoding="utf-8")
    commands = [line for line in text.splitlines() if line.startswith("$ ")]
    assert len(commands) <= 8
    base, answer = text.split("$ finetune generate")[1:]
    assert "Fredville" not in base.partition("\n")[2]
    assert answer.partition("\n")[2].startswith("It is Fredville.")
