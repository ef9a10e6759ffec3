"""`finetune train`, with the trainer's own account of its loop written to the run directory as loop.json.

    python benchmarks/scripts/timed_train.py CONFIG [section.key=value ...]

`train_runtime` is what transformers measures around the optimizer steps; nothing else of the command is touched.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from finetune.cli import main
from finetune.training.loop import Loop

_run = Loop.run


def _timed(self: Loop, resumed_from: Path | None) -> None:
    started, cpu_before = time.perf_counter(), time.process_time()
    _run(self, resumed_from)
    spent = {
        "train_runtime": time.perf_counter() - started,
        "train_cpu_seconds": time.process_time() - cpu_before,
    }
    (self.recorder.outlets.run.path / "loop.json").write_text(json.dumps(spent))


if __name__ == "__main__":
    Loop.run = _timed
    sys.argv[1:1] = ["train"]
    main()
