"""What kill -9 costs a run: the same campaign against finetune and against a plain Hugging Face Trainer script.

    python benchmarks/faults.py [--objective dpo]

Each tool trains a small job on a CPU that saves every few steps. It is killed again and again, at random moments of
its training and saving and at each opening, fsync, rename and removal of a file below its checkpoints, and started
again by the same command until it ends. Its final adapter is compared, bit for bit, with the uninterrupted run's.

- could not resume: a start after a kill ended with an error; the run is over.
- other weights: the run ended with exit 0, and its adapter is not the uninterrupted run's. A silent error.
- steps lost: steps that were done at the kill and had to be done again.

With `--objective`, finetune alone trains on pairs and is killed at random moments, while it scores the reference as
well: no run finds the scores of another.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(harness.ROOT / "tests" / "faults"))
from children import Children, Ended, Fault

STEPS, FAILPOINT_STEPS, INTERVAL = 30, 9, 3
ROWS = 48
WEIGHTS = "adapter_model.safetensors"
KILLS_OF_A_RUN = 5
EVENTS = ("open", "fsync", "rename", "mkdir", "remove")
"""Failpoints: what each tool's Python does to files below its checkpoints; the plain script calls no fsync."""
OBJECTIVES = {"dpo": ["preference.reference=cached"]}
"""What `--objective` takes, with the keys of its job."""
PAIRS = 320
"""Rows of pairs, all of which are scored in about the time that the steps take."""


@dataclass
class Tool:
    """One side: its command, and where below a folder of its own it keeps what."""

    name: str
    arguments: list[str]
    weights: str
    checkpoints: str
    progress: str
    preload: str

    def command(self, folder: Path, steps: int) -> list[str]:
        return [part.format(run=folder / "run", steps=steps) for part in self.arguments]

    def starts(self, folder: Path) -> list[int]:
        """The step after which each start of training so far began."""
        if self.preload == "finetune":
            events = harness.read_lines(folder / "run" / "events.jsonl")
            return [event.get("step", 0) for event in events if event["event"] in ("started", "resumed")]
        return [line["resumed"] for line in lines(folder / self.progress) if "resumed" in line]

    def scoring(self, folder: Path, printed: str) -> bool:
        """Whether a start that `printed` this was killed while it scored the reference."""
        done = any(event["event"] == "reference_scored" for event in lines(folder / "run" / "events.jsonl"))
        return "with the starting model, once" in printed and not done

    def done(self, folder: Path) -> int:
        """The last step that was done."""
        noted = [line.get("step", line.get("resumed")) for line in lines(folder / self.progress)]
        return noted[-1] if noted else 0


def lines(file: Path) -> list[dict[str, Any]]:
    """JSON lines, without a last one that a kill tore."""
    found = []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def tools(data: Path, text: Path) -> list[Tool]:
    """finetune, and the plain script keeping one checkpoint and two."""
    plain = [
        "--model", str(harness.ROOT / "data" / "tiny-llama"), "--data", str(text), "--output", "{run}",
        "--max-steps", "{steps}", "--save-steps", str(INTERVAL), "--save-total-limit",
    ]  # fmt: skip
    found = [finetune("finetune", data)]
    for limit in ("1", "2"):
        name = f"Hugging Face Trainer, save_total_limit={limit}"
        found.append(Tool(name, [*plain, limit], f"run/final/{WEIGHTS}", "/checkpoint-", "run.progress", "plain"))
    return found


def finetune(name: str, data: Path, *keys: str) -> Tool:
    """A job of seconds, with other `keys`."""
    ours = [
        "train", "configs/tiny_cpu.yaml", f"data.train={data}", "data.eval=none", "training.eval_every=null",
        "quantization.kind=none", "adapter.dropout=0.1", "adapter.rank=32", "adapter.targets=[q_proj, v_proj]",
        "memory.checkpointing=none", "memory.check=off", "training.batch_size=4", "training.micro_batch=2",
        "training.max_steps={steps}", f"output.save_every={INTERVAL}", "output.merge=false", "output.dir={run}", *keys,
    ]  # fmt: skip
    return Tool(name, ours, f"run/adapter/{WEIGHTS}", "/checkpoints/", "run/metrics.jsonl", "finetune")


def write_rows(data: Path, text: Path) -> None:
    """The same short rows for both sides, as conversations and as text."""
    with open(data, "w", encoding="utf-8") as chats, open(text, "w", encoding="utf-8") as texts:
        for number in range(ROWS):
            answer = " ".join(["word"] * (1 + number % 7)) + f" {number}"
            turns = [{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": answer}]
            chats.write(json.dumps({"messages": turns}) + "\n")
            texts.write(json.dumps({"text": f"Say {number}: {answer}"}) + "\n")


class Campaign:
    """Kills one tool's runs of `steps` steps, and counts what came of it."""

    def __init__(self, tool: Tool, children: Children, folder: Path, steps: int) -> None:
        self._tool, self._children, self._folder, self._steps = tool, children, folder, steps
        self._names = map(str, itertools.count())
        folder.mkdir()
        self._expected = self._uninterrupted()
        started = time.perf_counter()
        if self._uninterrupted() != self._expected:
            sys.exit(f"{tool.name}: two uninterrupted runs differ, so that nothing could be compared")
        self.seconds = time.perf_counter() - started  # of the second: the first one also fills the disk's cache
        self.kills = self._runs = self._could_not_resume = self._other_weights = self._scoring = 0
        self._lost: list[int] = []
        self._errors: set[str] = set()

    def _new(self) -> Path:
        """The folder of another run, for which no run before it has scored a reference."""
        folder = self._folder / next(self._names)
        folder.mkdir()
        harness.forget_references()
        return folder

    def _uninterrupted(self) -> bytes:
        folder = self._new()
        ended = self._children.run(self._tool.command(folder, self._steps))
        if ended.code:
            sys.exit(f"{self._tool.name} does not run: {ended.output[-2000:]}")
        return (folder / self._tool.weights).read_bytes()

    def run(self, moments: Iterable[Fault | float]) -> bool:
        """One run, killed at each of `moments`: at a failpoint, or so many seconds after a start. Whether one hit."""
        tool, folder, before = self._tool, self._new(), self.kills
        self._runs += 1
        for moment in (*moments, None):
            done, starts = tool.done(folder), len(tool.starts(folder))
            child = self._children.start(
                tool.command(folder, self._steps), moment if isinstance(moment, Fault) else None
            )
            if isinstance(moment, float):
                time.sleep(moment)
                child.send(signal.SIGKILL)
            ended = child.wait()
            began = tool.starts(folder)[starts:]
            if began and starts:
                self._lost.append(done - began[0])
            if ended.code != -signal.SIGKILL:
                self._judge(ended, folder)
                break
            self.kills += 1
            self._scoring += tool.scoring(folder, ended.output)
        shutil.rmtree(folder)
        return self.kills > before

    def _judge(self, ended: Ended, folder: Path) -> None:
        if ended.code:
            self._could_not_resume += 1
            self._errors.add(harness.without_paths(ended.output.strip().splitlines()[-1])[:200])
        elif (folder / self._tool.weights).read_bytes() != self._expected:
            self._other_weights += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "kills": self.kills,
            "kills_while_scoring": self._scoring,
            "runs": self._runs,
            "resumes": len(self._lost),
            "runs_that_could_not_resume": self._could_not_resume,
            "runs_that_ended_with_other_weights": self._other_weights,
            "steps_lost_max": max(self._lost, default=0),
            "steps_lost_mean": round(sum(self._lost) / max(1, len(self._lost)), 2),
            "errors": sorted(self._errors),
        }


def at_random(campaign: Campaign, kills: int) -> dict[str, Any]:
    """Killed at random moments between start and end, several times a run."""
    moments = random.Random(0)
    while campaign.kills < kills:
        campaign.run([moments.uniform(0, campaign.seconds) for _ in range(KILLS_OF_A_RUN)])
    return campaign.as_dict()


def at_failpoints(campaign: Campaign, path: str, at_most: int) -> dict[str, Any]:
    """Killed once a run, at each thing that is done to a file of a checkpoint in turn."""
    for event in EVENTS:
        for nth in itertools.count(1):
            if campaign.kills >= at_most or not campaign.run([Fault(event, path, nth)]):
                break
    return campaign.as_dict()


def main() -> None:
    options = _options()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")  # read by the processes that fork
        for number, tool in enumerate(_tools(options.objective, folder)):
            with Children(folder / f"logs{number}", preload=tool.preload) as children:
                long = Campaign(tool, children, folder / f"a{number}", STEPS)
                found[tool.name] = {"random": at_random(long, options.kills)}
                if not options.objective:
                    short = Campaign(tool, children, folder / f"b{number}", FAILPOINT_STEPS)
                    found[tool.name]["failpoints"] = at_failpoints(short, tool.checkpoints, options.failpoints)
            print(tool.name, json.dumps(found[tool.name]), flush=True)
            steps = {"random": STEPS, "failpoints": FAILPOINT_STEPS}
            result = {"save_interval_steps": INTERVAL, "steps": steps, "tools": found}
            harness.save(options.output, result, threads=1)  # after each tool: what is done in an hour is not lost
    rows = [
        (f"{name}, {how}", *(counts[key] for key in KEYS))
        for name, both in found.items()
        for how, counts in both.items()
    ]
    print(harness.table(("", *(key.replace("_", " ") for key in KEYS)), rows))
    ours = [counts for name, both in found.items() if name.startswith("finetune") for counts in both.values()]
    if any(counts[key] for counts in ours for key in KEYS[4:6]) or any(
        counts["steps_lost_max"] > INTERVAL for counts in ours
    ):
        sys.exit(1)


def _tools(objective: str | None, folder: Path) -> list[Tool]:
    data, text = folder / "data.jsonl", folder / "text.jsonl"
    if objective:
        harness.write_pairs(data, rows=PAIRS)
        keys = ["training.objective=" + objective, *OBJECTIVES[objective]]
        return [finetune(f"finetune, {objective}", data, *keys)]
    write_rows(data, text)
    return tools(data, text)


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--objective", choices=OBJECTIVES, help="finetune alone, on pairs")
    parser.add_argument("--output", type=Path, help="the result (default: that of docs)")
    parser.add_argument("--kills", type=int, default=200, help="random kills of each tool")
    parser.add_argument("--failpoints", type=int, default=1000, help="failpoints of each tool, at most")
    options = parser.parse_args()
    name = f"faults_{options.objective}.json" if options.objective else "faults.json"
    options.output = options.output or harness.RESULTS / name
    return options


KEYS = (
    "kills", "kills_while_scoring", "runs", "resumes", "runs_that_could_not_resume",
    "runs_that_ended_with_other_weights", "steps_lost_max", "steps_lost_mean",
)  # fmt: skip

if __name__ == "__main__":
    main()
