"""A secret in the environment, or by mistake in a config, is in no file, no output and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile import TINY

CANARY = "hf_canaryCANARYcanary0123456789"
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, CANARY)


@pytest.mark.slow
def test_no_file_of_a_run_and_no_output_has_it(train, foreign: Path, tmp_path: Path) -> None:
    config = foreign / "job.yaml"
    config.write_text(f"# token: {CANARY}\n{TINY.read_text()}")
    more = ["output.merge=true", "output.save_every=1", "tracking.to=[tensorboard]", "memory.profile_steps=1"]
    ended = train(*more, config=config)
    assert ended.code == 0, ended.err
    assert CANARY not in ended.out + ended.err
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert len(files) > 20
    assert [file for file in files if CANARY.encode() in file.read_bytes()] == []


@pytest.mark.parametrize("debug", [(), ("--debug",)])
@pytest.mark.parametrize("override", ["model.name=./nowhere", "model.name=someone/else", "data.train=nowhere.jsonl"])
def test_no_error_and_no_traceback_has_it(override: str, debug: tuple[str, ...], train) -> None:
    ended = train(override, *debug)
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
