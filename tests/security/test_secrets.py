"""A secret in the environment, or by mistake in a config, is in no output and no traceback.

Nor in a file of a run: test_hostile_runs.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile import CANARY, SECRETS, TINY


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)


def test_no_error_and_no_traceback_has_it(training: list[str], call_each) -> None:
    given = [
        ("model.name=./nowhere",), ("model.name=someone/else",), ("data.train=nowhere.jsonl",),
        ("model.name=someone/else", "--debug"), ("data.train=nowhere.jsonl", "--debug"),
    ]  # fmt: skip
    for (_, *debug), ended in zip(given, call_each(*(("train", TINY, *training, *one) for one in given)), strict=True):
        assert ended.code in ((1,) if debug else (3, 4, 7))
        assert ("Traceback" in ended.err) == bool(debug)
        assert CANARY not in ended.out + ended.err


@pytest.mark.parametrize("debug", [(), ("--debug",)])
def test_a_token_in_a_config_is_refused_by_its_key_alone(debug: tuple[str, ...], foreign: Path, call) -> None:
    config = foreign / "job.yaml"
    config.write_text(f"# {CANARY}\nmodel:\n  hub_token: {CANARY}\ntoken: {CANARY}\n")
    ended = call("train", config, *debug)
    assert ended.code == (1 if debug else 2)
    assert "model.hub_token" in ended.err
    assert CANARY not in ended.out + ended.err


def test_the_doctor_shows_none(call) -> None:
    ended = call("doctor")
    assert ended.code == 0
    assert CANARY not in ended.out + ended.err
    assert "offline" in ended.out
