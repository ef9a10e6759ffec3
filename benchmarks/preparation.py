"""How fast chat rows are tokenized and masked: finetune beside TRL's own preparation of the same rows, in turn.

Both sides read the same JSON lines with the same tokenizer and template, whose generation marks tell the assistant's
tokens, and end with ids and labels in an Arrow file on disk that is mapped into memory. Each runs in a process of its
own, with an empty cache; TRL's is read and mapped in one process as well (`dataset_num_proc` is its default, none).
Times are taken within the process, from the file to the data set, without imports. Ours also checks the file line by
line, looks for duplicates and counts.

The tokenizer (Rust, the same in both) may use all cores in either: it does so for many texts in one call, and TRL calls
it for each row. `cpu_seconds` stand beside for that reason. Then ours is started again, for what its cache saves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness

BOUND = 2.0
"""Smallest ratio of rows per second, ours over TRL's, that counts as passed."""

MAX_LENGTH = 1024
MODEL = harness.ROOT / "data" / "tiny-llama"

# Words of common English, so that a word is a token or a few, as in the chats that models are tuned on.
_WORDS = """
the of and to in a is that for it as was with be by on not he this are or his from at which but have an had
they you were their one all we can her has there been if more when will would who so no out up into them then
she many some time very upon about may its only now like little than other made after make called function
returns value string list default argument example module object error file number sequence because however
therefore question answer compute between without always never something different important possible
understand explanation
"""


def main() -> None:
    options = _options()
    runs = []
    with tempfile.TemporaryDirectory(prefix="preparation-", dir=options.scratch) as scratch:
        bench, file = _Bench(Path(scratch)), Path(scratch) / "rows.jsonl"
        write_chats(file, options.rows)
        for _ in range(options.pairs):
            run = {"trl": bench.trl(file), "finetune": bench.finetune(file)}
            run["second_start"] = bench.finetune(file, again=True)
            runs.append(run)
            print(json.dumps(run), flush=True)
        bytes_of_file = file.stat().st_size
    ratios = [_rate(run["finetune"]) / _rate(run["trl"]) for run in runs]
    ratio = statistics.median(ratios)
    result = {
        "cores": os.cpu_count(),
        "job": {
            "rows": options.rows,
            "bytes": bytes_of_file,
            "max_length": MAX_LENGTH,
            "tokens": runs[0]["finetune"]["tokens"],
            "threads": 1,
        },
        "bound": BOUND,
        "rows_per_second": {
            side: round(statistics.median(_rate(run[side]) for run in runs), 1) for side in ("trl", "finetune")
        },
        "ratio": {"median": round(ratio, 3), "least": round(min(ratios), 3), "largest": round(max(ratios), 3)},
        "peak_resident_bytes": {
            side: max(run[side]["peak_resident_bytes"] for run in runs) for side in ("trl", "finetune", "second_start")
        },
        "second_start_seconds": round(statistics.median(run["second_start"]["seconds"] for run in runs), 3),
        "passed": ratio >= BOUND,
        "runs": runs,
    }
    harness.save(options.output, result, threads=1)
    print(_table(result))
    sys.exit(0 if result["passed"] else 1)


class _Bench:
    """Runs either side in a fresh process; a first start finds no cache, a second one that of the first."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch

    def trl(self, file: Path) -> dict[str, Any]:
        return self._measure("plain_trl_preparation.py", file, again=False)

    def finetune(self, file: Path, *, again: bool = False) -> dict[str, Any]:
        return self._measure("timed_preparation.py", file, again=again)

    def _measure(self, script: str, file: Path, *, again: bool) -> dict[str, Any]:
        cache = self.scratch / "cache"
        if not again:
            shutil.rmtree(cache, ignore_errors=True)
        command = ["env", "-u", "TOKENIZERS_PARALLELISM", sys.executable, Path("benchmarks") / "scripts" / script]
        given = ["--model", MODEL, "--data", file, "--max-length", str(MAX_LENGTH)]
        done = harness.run([*command, *given], threads=1, extra={"HF_DATASETS_CACHE": str(cache)})
        return json.loads(harness.succeeded(done).output.splitlines()[-1])


def write_chats(path: Path, rows: int) -> None:
    """Write `rows` conversations of one to four questions, each as JSON with `messages`; the same on each call.

    Message lengths are log-normal (median 27 words, sigma 0.9); a third has a system message.
    """
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": messages}) + "\n" for messages in _chats(rows))


def _chats(rows: int) -> Iterator[list[dict[str, str]]]:
    luck, words = random.Random(0), _WORDS.split()
    for row in range(rows):
        messages = [{"role": "system", "content": f"Be brief and right. {row}"}] if row % 3 == 0 else []
        for turn in range(2 * luck.randint(1, 4)):
            said = luck.choices(words, k=max(2, min(2000, round(math.exp(luck.gauss(3.3, 0.9))))))
            messages.append({"role": ("user", "assistant")[turn % 2], "content": " ".join(said) + "."})
        yield messages


def _rate(measured: dict[str, Any]) -> float:
    return measured["rows"] / measured["seconds"]


def _table(result: dict[str, Any]) -> str:
    rate, peak, ratio = result["rows_per_second"], result["peak_resident_bytes"], result["ratio"]
    rows = [(side, f"{rate[side]:,.0f}", harness.mib(peak[side])) for side in ("trl", "finetune")]
    return (
        harness.table(("", "rows/s", "peak MiB"), rows)
        + f"\nratio {ratio['median']:.2f} (of the pairs {ratio['least']:.2f} to {ratio['largest']:.2f}); "
        f"second start {result['second_start_seconds']:.2f} s"
    )


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__, "preparation.json")
    parser.add_argument("--rows", type=int, default=1_000_000, help="conversations (default 1,000,000)")
    parser.add_argument("--pairs", type=int, default=1, help="runs of each side, in turn (default 1)")
    parser.add_argument(
        "--scratch", type=Path, help="folder on a large disk for all files (default: the system's temporary one)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
