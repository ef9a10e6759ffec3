"""`finetune train`, with the trainer's own account of its loop written to the run directory as loop.json.

    python benchmarks/scripts/timed_train.py CONFIG [section.key=value ...]

`train_runtime` is what transformers measures around the optimizer steps; nothing else of the command is touched.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from finetune.cli import main
from finetune.training.trainer import Trainer

_train = Trainer.train


def _timed(self: Trainer, *args: Any, **kwargs: Any) -> Any:
    cpu_before = time.process_time()
    output = _train(self, *args, **kwargs)
    spent = {"train_cpu_seconds": time.process_time() - cpu_before}
    (self.run.path / "loop.json").write_text(json.dumps({**output.metrics, **spent}))
    return output


if __name__ == "__main__":
    Trainer.train = _timed
    sys.argv[1:1] = ["train"]
    main()
