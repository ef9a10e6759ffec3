"""Rows with images by finetune and by TRL's SFTTrainer on a CPU, as whole processes: time, and losses step by step.

    python benchmarks/beside_images.py

LoRA on the language layers of an Idefics 3 of random weights, whose model of images is frozen, in float32, one image a
row, one epoch. TRL trains with its defaults, which recompute everything, and with nothing recomputed. Ours has the
defaults: the run forecasts its memory, chooses what is recomputed, and writes plot and report. Both sides see the same
rows in the same order with the same initial adapter. Each run of TRL is followed by one of ours; ratios are taken
within these pairs.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

import beside_dpo
import harness
import overhead

BOUNDS = {"process": 0.8, "losses": 1e-5}
"""Largest wall time of the process, over that of TRL with its defaults, and how far the losses of a step may differ, in
nats per token."""
SIDES = {"trl": ["--checkpointing=all"], "trl-kept": ["--checkpointing=none"]}
"""TRL's runs, the first with its defaults."""
QUESTIONS = ("fast", "equal")

# The rows in the order in which finetune visits them.
_ORDER = """
import sys
from pathlib import Path
from finetune.data.batching import RowOrder

rows, ordered, batch = *map(Path, sys.argv[1:3]), int(sys.argv[3])
lines = rows.read_text().splitlines(keepends=True)
ordered.write_text("".join(lines[index] for index in RowOrder(range(len(lines)), batch, 42, False)))
"""


@dataclasses.dataclass(frozen=True)
class Job(overhead.Job):
    """One epoch of rows with images, in two micro-batches a step."""

    train: Path = Path()

    @property
    def settings(self) -> list[str]:
        """finetune's: what both sides need alike, with images."""
        own = ("data.train=", "memory.")
        kept = [setting for setting in super().settings if not setting.startswith(own)]
        return [*kept, f"data.train={self.train}", "model.vision=frozen", "output.merge=false"]

    @property
    def options(self) -> list[str]:
        return [*super().options, "--images"]


class Bench(overhead.Bench):
    """Runs either side on rows and a base that are made here."""

    def _export(self) -> None:
        rows = self.job.steps * self.job.batch
        made = Path("benchmarks") / "scripts" / "made_to_see.py"
        harness.succeeded(harness.python(made, f"--folder={self.scratch}", f"--rows={rows}"))
        train = self.scratch / "rows.jsonl"
        harness.succeeded(harness.python("-c", _ORDER, train, self.rows, str(self.job.batch)))


def main() -> None:
    parser = harness.parser(__doc__, "beside_images.json")
    parser.add_argument("--rounds", type=int, default=3, help="after a warm-up (default 3)")
    parser.add_argument("--steps", type=int, default=60, help="of 8 rows (default 60)")
    parser.add_argument("--side", choices=SIDES, action="append", help="only beside this run of TRL's, or these")
    options = parser.parse_args()
    sides = {side: SIDES[side] for side in options.side or SIDES}
    with tempfile.TemporaryDirectory(prefix="beside-") as scratch:
        folder = Path(scratch)
        job = Job(
            steps=options.steps, threads=1, logged=1, batch=8, tokens=512, model=folder / "base",
            train=folder / "rows.jsonl",
        )  # fmt: skip
        bench = Bench(folder, job)
        memory, rounds = beside_dpo.all_rounds(bench, sides, options.rounds)
    found = {
        "bounds": BOUNDS,
        "job": {"steps": job.steps, "rows": job.steps * job.batch,
                "settings": list(map(harness.without_paths, job.settings))},
        "beside": {side: beside_dpo.beside(rounds, memory, side, BOUNDS) for side in sides},
        "runs": beside_dpo.seconds(rounds),
    }  # fmt: skip
    harness.save(options.output, found, job.threads)
    print(beside_dpo.table(found["beside"]))
    default = next(iter(found["beside"].values()))
    sys.exit(0 if all(default[question] for question in QUESTIONS) else 1)


if __name__ == "__main__":
    main()
