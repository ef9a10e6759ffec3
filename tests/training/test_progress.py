"""How far a training has come, as a checkpoint says it."""

import json
from pathlib import Path
from typing import Any

from messages import refusal

from finetune.errors import ArtifactError
from finetune.training.progress import FILE, Progress, read_progress


def read(folder: Path, written: dict[str, Any]) -> Progress:
    (folder / FILE).write_text(json.dumps(written))
    return read_progress(folder)


def test_only_an_evaluation_after_an_update_can_be_the_best() -> None:
    progress = Progress(step=1)
    assert progress.gains(1.0) is False
    assert progress.best_step is None
    progress.updates = 1
    assert [progress.gains(loss) for loss in (2.0, 2.0, 1.5)] == [True, False, True]
    assert (progress.best_step, progress.best_value, progress.without_gain) == (1, 1.5, 0)


def test_an_evaluation_says_which_direction_is_better() -> None:
    progress = Progress(step=1)
    progress.updates = 1
    assert [progress.gains(reward, higher_is_better=True) for reward in (0.2, 0.2, 0.1, 0.3)] == [
        True,
        False,
        False,
        True,
    ]
    assert (progress.best_value, progress.without_gain) == (0.3, 0)


def test_progress_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000006"
    folder.mkdir()
    progress = Progress(6, 40, 1.5, best_step=3, best_value=2.5, without_gain=2, owes_evaluation=True)
    assert read(folder, progress.as_json()) == progress
    with refusal(ArtifactError, "owes_evaluation"):
        read(folder, {**progress.as_json(), "owes_evaluation": "x"})
