"""What a checkpoint costs the training, beside writing the same bytes to the same disk.

A job with a checkpoint of about 150 MiB trains on the CPU and saves every few steps. Of each save are taken:

- held: how long the training thread stood still, for the copy of the state, and before the next update where the save
  was not over yet. This is the verdict: at most 1.1 of the raw time.
- whole: from the copy to the published checkpoint: hashed, written, fsynced, read back and renamed.
- raw: files of the same sizes written and fsynced one after the other, with nothing else; just after the job, in turn.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import harness
from forecast_cpu import config_json

SAVES = 8
BOUND = 1.1
"""Largest time that training is held, over the raw time."""

_JOB = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from finetune import recipe
from finetune.training import sample_answers
from finetune.choices import load_config
from finetune.training.checkpoints import Checkpoints

sample_answers.TOKENS = 1
waited = []
wait = Checkpoints.wait

def timed(self):
    started = time.perf_counter()
    wait(self)
    waited.append(round(time.perf_counter() - started, 4))

Checkpoints.wait = timed
result = recipe.train(load_config("configs/tiny_cpu.yaml", sys.argv[1:]))
result.run.event("waited", seconds=waited)
"""


def main() -> None:
    parser = harness.parser(__doc__, "saving.json")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default the one of temporary files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        run = folder / "run"
        harness.succeeded(harness.python("-c", _JOB, *job(folder), threads=1))
        saved = [line for line in harness.read_lines(run / "events.jsonl") if line["event"] == "saved"]
        waited = harness.event(run, "waited")["seconds"]
        newest = max((run / "checkpoints").glob("step-*"))
        sizes = [file.stat().st_size for file in newest.iterdir()]
        contents = [os.urandom(size) for size in sizes]
        raw = [write(folder / "raw", contents) for _ in range(SAVES)]
    # All waiting together is shared out: which save an update waited for is not noted.
    held = statistics.median(line["held_seconds"] for line in saved) + sum(waited) / len(saved)
    whole, raw_seconds = statistics.median(line["seconds"] for line in saved), statistics.median(raw)
    result = {
        "checkpoint_bytes": sum(sizes),
        "saves": len(saved),
        "held_seconds": round(held, 4),
        "copy_seconds": [line["held_seconds"] for line in saved],
        "waited_seconds": round(sum(waited), 4),
        "whole_seconds": [line["seconds"] for line in saved],
        "raw_seconds": [round(seconds, 4) for seconds in raw],
        "held_over_raw": round(held / raw_seconds, 3),
        "whole_over_raw": round(whole / raw_seconds, 3),
        "held_bound": BOUND,
        "passed": held <= BOUND * raw_seconds,
    }
    harness.save(options.output, result, threads=1)
    print(json.dumps(result, indent=2))
    sys.exit(not result["passed"])


def job(folder: Path) -> list[str]:
    """All of a model of 13 million random weights is trained, with AdamW's states in 32 bit."""
    values = config_json("llama", 384, 7, (6, 6), 2048) | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return [
        f"model.name={folder}", "model.weights=random", "model.tokenizer=builtin:tiny-llama", "adapter.kind=none",
        "quantization.kind=none", "optimizer.kind=adamw_torch_fused", "training.precision=fp32",
        "memory.checkpointing=none", "memory.check=off", "data.eval=none", "training.eval_every=null",
        "training.batch_size=16", "training.micro_batch=8", f"training.max_steps={2 * SAVES}", "output.save_every=2",
        "output.merge=false", f"output.dir={folder / 'run'}",
    ]  # fmt: skip


def write(folder: Path, contents: list[bytes]) -> float:
    """Seconds to write and fsync files of these contents."""
    folder.mkdir(exist_ok=True)
    started = time.perf_counter()
    for number, content in enumerate(contents):
        with open(folder / str(number), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
