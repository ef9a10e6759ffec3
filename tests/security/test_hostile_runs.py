"""Where a run writes, and what it does not write over."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hostile import refused


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
def test_a_run_writes_in_its_directory_alone_which_is_the_users_and_talks_to_nobody(
    train, call, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the hub allowed: a model from a directory asks it nothing, in training, saving, merging and answering."""
    import huggingface_hub.constants

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    ended = train(f"model.name={tiny_base}", "output.save_every=1", "output.merge=true", "tracking.to=[tensorboard]")
    assert ended.code == 0, ended.err
    run = tmp_path / "out" / "run"
    assert stat.S_IMODE(run.stat().st_mode) & 0o077 == 0
    answered = call("generate", run, "--prompt", "x", "--max-new-tokens", 2, "--model", "merged")
    assert answered.code == 0, answered.err
