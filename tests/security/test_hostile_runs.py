"""Where a run writes, what it writes of secrets, and what it does not write over."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hostile import CANARY, SECRETS, TINY, refused


@pytest.mark.slow
def test_a_run_is_not_written_over_a_file_or_into_another_folder(tmp_path: Path, train) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "letter.txt").write_text("mine\n")
    letter = folder / "letter.txt"
    refused(train(f"output.dir={folder}"), folder, "not empty, and not a run", code=4)
    refused(train(f"output.dir={letter}", writes=letter), letter, code=4)
    refused(train(f"output.dir={letter / 'run'}", writes=letter), letter, code=4)
    assert letter.read_text() == "mine\n"
    assert list(folder.iterdir()) == [letter]


@pytest.mark.slow
def test_a_run_writes_in_its_directory_alone_which_is_the_users_talks_to_nobody_and_writes_no_secret(
    train, call, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the hub allowed: a model from a directory asks it nothing, in training, saving, merging and answering."""
    import huggingface_hub.constants

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)
    config = foreign / "job.yaml"
    config.write_text(f"# token: {CANARY}\n{TINY.read_text()}")
    more = ["output.merge=true", "output.save_every=1", "tracking.to=[tensorboard]", "memory.profile_steps=1"]
    ended = train(*more, config=config)
    assert ended.code == 0, ended.err
    run = tmp_path / "out" / "run"
    assert stat.S_IMODE(run.stat().st_mode) & 0o077 == 0
    answered = call("generate", run, "--prompt", "x", "--max-new-tokens", 2, "--model", "merged")
    assert answered.code == 0, answered.err
    assert CANARY not in ended.out + ended.err + answered.out + answered.err
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert len(files) > 20
    assert [file for file in files if CANARY.encode() in file.read_bytes()] == []
