"""DPO by finetune and by TRL's DPOTrainer on a CPU, as whole processes: time, peaks, and losses step by step.

    python benchmarks/beside_dpo.py

LoRA on pairs made of the built-in rows, each question with its answer and that of another, one epoch in float32. TRL
trains with its defaults (everything recomputed, the reference computed in each step), and with nothing recomputed, the
reference in each step or precomputed. Ours has the defaults: kernels, what is recomputed and when the reference is
computed are chosen by the run, which also forecasts its memory first, and writes plot and report. Both sides see the
same pairs in the same order with the same initial adapter. Each run of TRL is followed by one of ours, and ratios are
taken within these pairs, so that a slow drift of a shared machine falls on both.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness
import overhead

BOUNDS = {"process": 0.6, "losses": 1e-5}
"""Largest wall time of the process, over that of TRL with its defaults, and how far the losses of a step may differ, in
nats per pair or token."""
SIDES = {
    "trl": ["--checkpointing=all", "--pairs=in-step"],
    "trl-kept": ["--checkpointing=none", "--pairs=in-step"],
    "trl-kept-precomputed": ["--checkpointing=none", "--pairs=precomputed"],
}
"""TRL's runs, the first with its defaults."""

# Writes as many pairs as the job takes, and the same in the order in which finetune visits them. Prompts end, and
# answers begin, where the tokenizer splits words, so that both sides have the same tokens.
_EXPORT = """
import json, sys
from finetune.data import sources
from finetune.data.batching import RowOrder

pairs, ordered, rows, batch = *sys.argv[1:3], *map(int, sys.argv[3:])
turns = [[turn["content"] for turn in row.fields["messages"]] for row in sources.rows("builtin:python_docs")]
found = [
    {"prompt": f"{question} Answer:", "chosen": f" {answer}", "rejected": f" {other}"}
    for (question, answer), (_, other) in zip(turns, turns[1:])
    if answer != other and max(len(answer), len(other)) < 400
][:rows]
assert len(found) == rows
for path, order in ((pairs, range(rows)), (ordered, RowOrder(range(rows), batch, 42, False))):
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(found[index]) + "\\n" for index in order)
"""


@dataclasses.dataclass(frozen=True)
class Job(overhead.Job):
    """One epoch of pairs, in two micro-batches a step."""

    pairs: Path = Path()
    learning_rate: float = 1e-4

    @property
    def settings(self) -> list[str]:
        """finetune's: what both sides need alike."""
        return [
            f"model.name={self.model}",
            "quantization.kind=none",
            f"data.train={self.pairs}",
            "data.eval=none",
            f"data.max_length={self.tokens}",
            "training.objective=dpo",
            f"training.batch_size={self.batch}",
            f"training.micro_batch={self.batch // 2}",
            f"training.precision={self.precision}",
            "training.group_by_length=false",
            "training.warmup=0",
            f"training.learning_rate={self.learning_rate}",
            "training.epochs=1",
            "optimizer.kind=adamw_torch_fused",
        ]

    @property
    def options(self) -> list[str]:
        """The plain script's."""
        return [*super().options, f"--learning-rate={self.learning_rate}"]


class Bench(overhead.Bench):
    """Runs either side on the pairs of the job."""

    def _export(self) -> None:
        numbers = map(str, (self.job.steps * self.job.batch, self.job.batch))
        harness.succeeded(harness.python("-c", _EXPORT, self.job.pairs, self.rows, *numbers))


def main() -> None:
    parser = harness.parser(__doc__, "beside_dpo.json")
    parser.add_argument("--rounds", type=int, default=3, help="after a warm-up (default 3)")
    parser.add_argument("--steps", type=int, default=80, help="of 16 pairs (default 80)")
    parser.add_argument("--side", choices=SIDES, action="append", help="only beside this run of TRL's, or these")
    options = parser.parse_args()
    sides = {side: SIDES[side] for side in options.side or SIDES}
    with tempfile.TemporaryDirectory(prefix="beside-") as scratch:
        job = Job(steps=options.steps, threads=1, logged=1, pairs=Path(scratch) / "pairs.jsonl")
        bench = Bench(Path(scratch), job)
        memory, rounds = all_rounds(bench, sides, options.rounds)
    found = {
        "bounds": BOUNDS,
        "job": {
            "steps": job.steps,
            "pairs": job.steps * job.batch,
            "settings": list(map(harness.without_paths, job.settings)),
        },
        "beside": {side: beside(rounds, memory, side) for side in sides},
        "runs": seconds(rounds),
    }
    harness.save(options.output, found, job.threads)
    print(table(found["beside"]))
    sys.exit(0 if passed(found["beside"]) else 1)


Round = Mapping[str, Mapping[str, dict[str, Any]]]
"""By side of TRL, what it and the run of finetune that follows it measured."""


def one_round(bench: overhead.Bench, sides: Mapping[str, list[str]]) -> Round:
    """Run each side of TRL, and after each of them ours."""
    return {side: {"plain": bench.plain(*options), "finetune": bench.finetune()} for side, options in sides.items()}


def all_rounds(bench: overhead.Bench, sides: Mapping[str, list[str]], rounds: int) -> tuple[Round, list[Round]]:
    """A round that is the warm-up (page cache, byte code) and shows memory, as what is freed is given back at once; and
    those that are timed.
    """
    bench.allocator = harness.ALLOCATOR
    memory = one_round(bench, sides)
    bench.allocator = overhead.ALLOCATORS["kept"]
    return memory, [one_round(bench, sides) for _ in range(rounds)]


def seconds(rounds: list[Round]) -> list[dict[str, Any]]:
    """What each run of each round took."""
    return [
        {side: {name: overhead.seconds(one) for name, one in pair.items()} for side, pair in each.items()}
        for each in rounds
    ]


def passed(beside: Mapping[str, Any]) -> bool:
    """Whether all bounds are kept beside TRL with its defaults."""
    default = next(iter(beside.values()))
    return all(default[question] for question in ("fast", "equal", "small"))


def beside(rounds: list[Round], memory: Round, side: str, bounds: Mapping[str, float] = BOUNDS) -> dict[str, Any]:
    """Time, losses and resident peak of finetune beside one of TRL's."""
    found = overhead.summary([dict(each[side]) for each in rounds])
    pair = rounds[-1][side]
    apart = overhead.loss_difference(pair["finetune"], pair["plain"])
    resident = {name: one["resident_bytes"] for name, one in memory[side].items()}
    return {
        **found,
        "resident_bytes": resident,
        "losses": {name: [one["losses"][0], one["losses"][-1]] for name, one in pair.items()},
        "largest_loss_difference": apart,
        "fast": found["ratios"]["process_seconds"]["median"] <= bounds["process"],
        "equal": apart <= bounds["losses"],
        "small": resident["finetune"] <= resident["plain"],
    }


def table(beside: Mapping[str, Any]) -> str:
    rows = [
        (
            side,
            *(f"{one['medians'][name]['process_seconds']:.1f}" for name in ("finetune", "plain")),
            *(f"{one['ratios'][measure]['median']:.3f}" for measure in ("process_seconds", "loop_seconds")),
            " / ".join(harness.mib(one["resident_bytes"][name]) for name in ("finetune", "plain")),
            f"{one['largest_loss_difference']:.1e}",
        )
        for side, one in beside.items()
    ]
    return harness.table(("beside", "s", "its s", "process", "loop", "MiB / its", "losses apart"), rows)


if __name__ == "__main__":
    main()
