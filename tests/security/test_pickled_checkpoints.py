"""Pickles where a checkpoint's state should be."""

from __future__ import annotations

import pytest
from hostile import Trap, refused

from finetune.storage.rundir import RunDirectory


@pytest.mark.slow
def test_a_checkpoint_with_pickles_is_refused_and_nothing_is_unpickled(run: RunDirectory, trap: Trap, call) -> None:
    """The files in which transformers keeps a checkpoint's state."""
    for checkpoint in run.complete_checkpoints():
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "adapter_model.bin"):
            trap.pickled(checkpoint / name)
    ended = call("train", run.config_file, "training.max_steps=21", f"output.dir={run.path}", writes=run.path)
    refused(ended, run.complete_checkpoints()[-1].name)
