"""What kill -9 of one rank costs a run of several: killed at random moments, resumed by the same command.

Each run of a small job on a CPU starts with two ranks, as torchrun starts them. At a random moment a random rank is
killed; the others have to end by themselves. Then the same command starts again, now and then with one or three ranks,
until the run ends. Its adapter is compared with that of the uninterrupted run: bit for bit if all starts had two ranks,
else to 1e-6, as the order of sums differs.

- named: the other ranks ended with exit code 4 and named the killed one. Before the ranks are connected it is the
  launcher that ends them, and when rank 0 does the rest alone they are done. Ranks that had run out of memory when the
  kill came are not counted.
- steps lost: steps that were done at the kill and had to be done again.

With `--share fsdp` or `deepspeed` the ranks hold parts of the model. With `--out-of-memory` a random rank of each start
also runs out of memory at a random moment, while the micro-batch can still be lowered: then all ranks have to end with
exit code 6, the same command starts again, as a launcher does, and the adapter is compared to 1e-6.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
from faults import lines, write_rows

sys.path.insert(0, str(harness.ROOT / "tests"))
sys.path.insert(0, str(harness.ROOT / "tests" / "faults"))
from children import Child, Children, Ended, Fault
from safetensors.numpy import load_file
from together import Together

from finetune.errors import OutOfMemoryError
from finetune.storage.rundir import RunDirectory

STEPS, INTERVAL, RANKS, OTHER_RANKS = 60, 3, 2, (1, 3)
KILLS_OF_A_RUN = 5
LAUNCHER_SECONDS = 20.0
"""After this long the ranks that a kill left are ended, as a launcher would; torchrun waits 30 seconds."""
TOLERANCE = 1e-6
PASS = "finetune.training.step:Step.micro_step"
OUT_OF_MEMORY = ["training.batch_size=24", "training.micro_batch=4"]  # which one, two and three ranks can share
LOWERED_AT_MOST = 2
"""Times that memory runs out in a run: micro-batches of four rows, then of two, then of one."""
SHARING = {"ddp": [], "fsdp": ["distributed.kind=fsdp"], "deepspeed": ["distributed.kind=deepspeed"]}
JOB = [
    "data.eval=none", "training.eval_every=null", "quantization.kind=none", "adapter.rank=32",
    "adapter.targets=[q_proj, v_proj]", "memory.checkpointing=none", "memory.check=off", "training.batch_size=12",
    "training.micro_batch=2", "optimizer.kind=sgd", "training.learning_rate=0.1", f"training.max_steps={STEPS}",
    f"output.save_every={INTERVAL}", "output.merge=false",
]  # fmt: skip


@dataclass
class Campaign:
    """Kills ranks of runs below `folder`, and counts what came of it."""

    children: Children
    folder: Path
    data: Path
    overrides: list[str] = field(default_factory=list)
    out_of_memory: bool = False
    moments: random.Random = field(default_factory=lambda: random.Random(0))
    counts: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    errors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for name in ("first", "expected"):  # the first also waits for the libraries to be imported
            self.expected, started = self._job(name), time.perf_counter()
            for ended in self.expected.go(RANKS):
                if ended.code:
                    sys.exit(f"the job does not run: {ended.output[-2000:]}")
            self.seconds = time.perf_counter() - started

    def _job(self, name: str) -> Together:
        return Together(
            self.children, [*JOB, f"data.train={self.data}", *self.overrides], RunDirectory(self.folder / name)
        )

    def run(self) -> None:
        """One run to its end, killed up to KILLS_OF_A_RUN times on the way."""
        job, sizes = self._job(f"run{self.counts['runs']}"), []
        self.counts["runs"] += 1
        kill = 0
        while True:
            size = self.moments.choice((RANKS, RANKS, self.moments.choice(OTHER_RANKS))) if sizes else RANKS
            sizes.append(size)
            done, starts = self._done(job), len(self._starts(job))
            ranks = job.start(size, self._faults(job, size))
            killed = self._kill(ranks) if kill < KILLS_OF_A_RUN else None
            ended = self._end(ranks, killed)
            self._count_lost(job, done, starts)
            if killed is not None and ended[killed].code == -signal.SIGKILL:
                kill += 1
                self.counts["kills"] += 1
                self._count_named(killed, ended)
            elif self.out_of_memory and all(each.code == OutOfMemoryError.exit_code for each in ended):
                self.counts["starts_after_running_out_of_memory"] += 1
            else:
                self._judge(job, sizes, ended)
                break
        shutil.rmtree(job.run.path)

    def _faults(self, job: Together, size: int) -> dict[int, Fault]:
        """A rank that runs out of memory in one of the start's passes, unless its micro-batches are single rows."""
        events = [event for each in job.run.of_ranks for event in lines(each.events_file)]
        lowered = [event for event in events if event["event"] == "micro_batch_lowered"]
        if not self.out_of_memory or len(lowered) == LOWERED_AT_MOST:
            return {}
        moment = self.moments.randrange(1, STEPS)
        return {self.moments.randrange(size): Fault(PASS, nth=moment, action="memory")}

    def _kill(self, ranks: list[Child]) -> int:
        time.sleep(self.moments.uniform(0, self.seconds))
        killed = self.moments.randrange(len(ranks))
        ranks[killed].send(signal.SIGKILL)
        return killed

    def _end(self, ranks: list[Child], killed: int | None) -> list[Ended]:
        """The end of each; of those that a kill left, by the launcher if need be."""
        until = time.monotonic() + LAUNCHER_SECONDS
        for rank in ranks if killed is not None else ():
            while not rank.ended and time.monotonic() < until:
                time.sleep(0.05)
            if not rank.ended:
                rank.send(signal.SIGKILL)
                self.counts["ended_by_the_launcher"] += 1
        return [rank.wait() for rank in ranks]

    def _count_named(self, killed: int, ended: list[Ended]) -> None:
        """Count the ranks that the kill left at work, and those of them that named it."""
        before = (0, -signal.SIGKILL, OutOfMemoryError.exit_code)
        others = [each for rank, each in enumerate(ended) if rank != killed and each.code not in before]
        self.counts["others"] += len(others)
        for each in others:
            said = " ".join(each.output.split())
            if each.code == 4 and f"rank {killed} was killed" in said:
                self.counts["others_that_named_it"] += 1
            else:
                self.errors.add(f"exit {each.code}: {harness.last_line(each.output)[:200]}")

    def _starts(self, job: Together) -> list[int]:
        """The step after which each start of training so far began."""
        events = lines(job.run.events_file)
        return [event.get("step", 0) for event in events if event["event"] in ("started", "resumed")]

    def _done(self, job: Together) -> int:
        return max((line["step"] for line in lines(job.run.metrics_file)), default=0)

    def _count_lost(self, job: Together, done: int, starts: int) -> None:
        if starts and (began := self._starts(job)[starts:]):
            self.lost.append(done - began[0])

    def _judge(self, job: Together, sizes: list[int], ended: list[Ended]) -> None:
        self.counts["runs_with_another_number_of_ranks"] += set(sizes) != {RANKS}
        if any(each.code for each in ended):
            self.counts["runs_that_could_not_resume"] += 1
            self.errors.add(f"cannot resume: {harness.last_line(ended[0].output)[:200]}")
            return
        found, expected = (load_file(run.run.adapter / "adapter_model.safetensors") for run in (job, self.expected))
        difference = max(float(abs(found[name] - expected[name]).max()) for name in expected)
        self.differences.append(difference)
        alike = set(sizes) == {RANKS} and not self.out_of_memory and not self.overrides
        if difference > (0.0 if alike else TOLERANCE):
            self.counts["runs_that_ended_with_other_weights"] += 1

    def as_dict(self) -> dict[str, Any]:
        keys = (
            "kills", "runs", "runs_with_another_number_of_ranks", "runs_that_could_not_resume",
            "runs_that_ended_with_other_weights", "starts_after_running_out_of_memory", "others",
            "others_that_named_it", "ended_by_the_launcher",
        )  # fmt: skip
        return {
            **{key: self.counts[key] for key in keys},
            "resumes": len(self.lost),
            "steps_lost_max": max(self.lost, default=0),
            "steps_lost_mean": round(sum(self.lost) / max(1, len(self.lost)), 2),
            "largest_difference_of_a_weight": max(self.differences, default=0.0),
            "other_ends": sorted(self.errors),
        }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--share", choices=SHARING, default="ddp", help="how ranks share the model")
    parser.add_argument("--out-of-memory", action="store_true", help="ranks run out of memory as well")
    parser.add_argument("--output", type=Path, help="default: faults_ranks.json, or one named by `--share`")
    options = parser.parse_args()
    name = "faults_ranks" if options.share == "ddp" else f"faults_ranks_{options.share}"
    with tempfile.TemporaryDirectory() as temporary, Children(Path(temporary, "logs")) as children:
        folder = Path(temporary)
        write_rows(folder / "data.jsonl", folder / "text.jsonl")
        overrides = SHARING[options.share] + (OUT_OF_MEMORY if options.out_of_memory else [])
        campaign = Campaign(children, folder, folder / "data.jsonl", overrides, options.out_of_memory)
        while campaign.counts["kills"] < options.kills:
            campaign.run()
            print(json.dumps(campaign.as_dict()), flush=True)
    found = campaign.as_dict()
    result = {
        "save_interval_steps": INTERVAL, "steps": STEPS, "ranks": RANKS, "other_numbers_of_ranks": OTHER_RANKS,
        "seconds_of_an_uninterrupted_run": round(campaign.seconds, 1), "found": found,
    }  # fmt: skip
    harness.save(options.output or harness.RESULTS / f"{name}.json", result, threads=1)
    failed = found["runs_that_could_not_resume"] + found["runs_that_ended_with_other_weights"]
    if failed or found["steps_lost_max"] > INTERVAL:
        sys.exit(1)


if __name__ == "__main__":
    main()
