"""How far a training has come, as checkpoints of this version and of earlier ones say it."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import ArtifactError
from finetune.training.progress import FILE, Progress, read_progress


def read(folder: Path, written: dict[str, Any]) -> Progress:
    (folder / FILE).write_text(json.dumps(written))
    return read_progress(folder)


def test_progress_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000006"
    folder.mkdir()
    progress = Progress(6, 40, 1.5, best_step=3, best_loss=2.5, without_gain=2, owes_evaluation=True)
    assert read(folder, progress.as_json()) == progress


def test_counters_that_the_callbacks_of_transformers_trainer_kept_go_on(tmp_path: Path) -> None:
    """As the version before the loop of our own wrote them."""
    folder = tmp_path / "step-00000006"
    folder.mkdir()
    flags = {"should_epoch_stop": False, "should_evaluate": False, "should_save": False, "should_training_stop": False}
    written: dict[str, Any] = {
        "best_global_step": 3, "best_metric": 2.5, "best_model_checkpoint": None, "epoch": 1.5, "eval_steps": 1,
        "global_step": 6, "log_history": [], "max_steps": 40, "num_train_epochs": 7, "save_steps": 1, "total_flos": 0.0,
        "stateful_callbacks": {
            "EarlyStoppingCallback": {
                "args": {"early_stopping_patience": 3, "early_stopping_threshold": 0.0},
                "attributes": {"early_stopping_patience_counter": 2},
            },
            "StopAndSave": {"args": {}, "attributes": {"owes_evaluation": True}},
            "TrainerControl": {"args": flags, "attributes": {}},
        },
    }  # fmt: skip
    expected = Progress(6, 40, 1.5, best_step=3, best_loss=2.5, without_gain=2, owes_evaluation=True)
    assert read(folder, written) == expected
    written["stateful_callbacks"]["StopAndSave"]["attributes"]["owes_evaluation"] = "x"
    with pytest.raises(ArtifactError, match="owes_evaluation"):
        read(folder, written)
