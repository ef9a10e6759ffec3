"""What the benchmarks share: fresh processes, run directories read back, tables, and results with their environment.

Every measured job runs in a process of its own, so that a peak or a start-up time belongs to that job alone. Nothing
here imports torch: on a GPU machine the parent must not hold a CUDA context of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

LINE = 160
"""Characters of a line of a result."""

# glibc moves the size from which memory is returned to the system as soon as it is freed up to 32 MiB while a program
# runs, and a resident peak then counts freed tensors. Held at its initial value, the peak is what is in use.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}

Line = dict[str, Any]

_DESCRIBE = """
import json
from finetune.runtime.environment import describe
from finetune.runtime.device import this_device
print(json.dumps(describe(this_device())))
"""


@dataclass(frozen=True)
class Finished:
    """A process that ended: its exit code, its wall and CPU (user + system) time in seconds, and what it printed."""

    exit_code: int
    wall_seconds: float
    cpu_seconds: float
    output: str
    errors: str


def run(
    command: Sequence[str | Path],
    *,
    threads: int | None = None,
    extra: Mapping[str, str] | None = None,
    log: Path | None = None,
    folder: Path = ROOT,
) -> Finished:
    """Run `command` in `folder` to its end, without network access of the libraries, with `threads` for arithmetic.

    What it prints is in files from the start, `log` with `.out` and `.err` if given: it stays if this process dies.
    """
    environment = variables(threads, extra)
    with _printed(log, ".out") as output, _printed(log, ".err") as errors:
        cpu_before, started = _children_cpu_seconds(), time.perf_counter()
        done = subprocess.run(
            [str(part) for part in command], cwd=folder, env=environment, stdout=output, stderr=errors, check=False
        )
        wall, cpu = time.perf_counter() - started, _children_cpu_seconds() - cpu_before
        output.seek(0)
        errors.seek(0)
        return Finished(done.returncode, wall, cpu, output.read(), errors.read())


def _printed(log: Path | None, suffix: str) -> TextIO:
    if log is None:
        return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    log.parent.mkdir(parents=True, exist_ok=True)
    return open(f"{log}{suffix}", "w+", encoding="utf-8", errors="replace")


def python(*arguments: str | Path, **options: Any) -> Finished:
    """Run this interpreter in a fresh process; `options` are those of `run`."""
    return run([sys.executable, *arguments], **options)


def succeeded(done: Finished) -> Finished:
    """`done`, or the end of this benchmark with what the process said."""
    if done.exit_code:
        sys.exit(f"a measured process ended with exit code {done.exit_code}:\n{done.errors.strip()[-2000:]}")
    return done


def finetune(*arguments: object, **options: Any) -> str:
    """The output of finetune's command line, which must succeed; `options` are those of `run`."""
    return succeeded(python("-m", "finetune", *map(str, arguments), **options)).output


def variables(threads: int | None = None, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process whose libraries ask no network, with `threads` CPU threads for arithmetic.

    Byte code is written, as on a user's machine: a start that compiles every module is half a second longer.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    found = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": path,  # finetune need not be installed: this checkout comes first
        **(extra or {}),
    }
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    if threads is not None:
        found |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return found


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """In the block, forecasts are made: their cache does not know of functions that a benchmark replaces."""
    from finetune.forecast.cache import Kept

    with mock.patch.object(Kept, "get", lambda self, batches, trace: trace()):
        yield


def _children_cpu_seconds() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


# -- what a job is made of ---------------------------------------------------------------------------------------------


@functools.cache
def documents() -> dict[str, list[str]]:
    """Docstrings of this Python and its language reference, `train` and `eval`."""
    return json.loads(succeeded(python(ROOT / "data" / "build_python_docs.py", "--documents")).output)


def write_long_rows(path: Path, *, rows: int, tokens: int) -> None:
    """Write `rows` plain-text rows (JSON lines with `text`), each longer than `tokens` tokens in any tokenizer.

    A word is at least one token. The rows differ, so that a cache of any kind has nothing to repeat.
    """
    with open(path, "w", encoding="utf-8") as file:
        for row in range(rows):
            words = [f"word{(row * 7919 + place * 104_729) % 9973}" for place in range(tokens + 8)]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")


def write_uneven_rows(path: Path, *, rows: int, tokens: int) -> None:
    """Write `rows` plain-text rows of an eighth of `tokens` words and less, a few tokens each; the same ones each time.

    Most are short, as in the chats that models are tuned on.
    """
    draw = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for row in range(rows):
            words = max(4, int(tokens / 8 * draw.random() ** 2))
            text = " ".join(f"word{(row * 7919 + place * 104_729) % 9973}" for place in range(words))
            file.write(json.dumps({"text": text}) + "\n")


def write_pairs(path: Path, *, rows: int) -> None:
    """Write `rows` short pairs of many lengths; the same ones each time."""
    with open(path, "w", encoding="utf-8") as file:
        for row in range(rows):
            answers = {"chosen": "yes " * (1 + row % 7), "rejected": "no " * (1 + row % 5)}
            file.write(json.dumps({"prompt": f"Say {row}. ", **answers}) + "\n")


def forget_references() -> None:
    """Let no run find what another has scored; `HF_DATASETS_CACHE` must name a folder of this benchmark's own."""
    for scores in Path(os.environ["HF_DATASETS_CACHE"]).glob("*/references"):
        shutil.rmtree(scores)


def in_order(lengths: Sequence[int], way: Any, areas: Sequence[int] = ()) -> list[list[int]]:
    """`finetune.data.batching.micro_batches` by rows, but cut in the order in which the rows come."""
    return [list(range(at, min(at + way.rows, len(lengths)))) for at in range(0, len(lengths), way.rows)]


def read_lines(path: Path) -> list[Line]:
    """The JSON objects of a .jsonl file, none where the file is missing."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def steps(run_directory: Path) -> list[Line]:
    """The metric lines of optimizer steps; those of evaluations are left out."""
    return [line for line in read_lines(run_directory / "metrics.jsonl") if "loss" in line]


def event(run_directory: Path, name: str) -> Line:
    """The last event of that name, empty where there is none."""
    found = [line for line in read_lines(run_directory / "events.jsonl") if line["event"] == name]
    return found[-1] if found else {}


def largest(peaks: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """The largest bytes by phase and measure over several steps' peaks."""
    found: dict[str, dict[str, int]] = {}
    for step in peaks:
        for phase, measures in step.items():
            into = found.setdefault(phase, {})
            for name, size in measures.items():
                into[name] = max(into.get(name, 0), size)
    return found


def peaks(run_directory: Path) -> dict[str, dict[str, int]]:
    """The largest bytes of a run by phase and measure, loading included; also of one that ran out of memory."""
    ended = event(run_directory, "trained") or event(run_directory, "out_of_memory")
    return largest([ended.get("memory", {}), *(line["memory"] for line in steps(run_directory))])


def seconds(line: Line) -> float:
    """What a step took, by its line of metrics."""
    return line["tokens"] / line["tokens_per_second"]


def resident_peak(lines: Sequence[Line]) -> int:
    """The largest resident bytes of these steps."""
    return max(peak["resident_bytes"] for line in lines for peak in line["memory"].values())


# -- what comes out ----------------------------------------------------------------------------------------------------


@functools.cache
def environment(threads: int | None = None) -> dict[str, Any]:
    """Versions, device and source revision, from a process of its own (see `finetune.runtime.environment`)."""
    return json.loads(succeeded(python("-c", _DESCRIBE, threads=threads)).output)


def parser(description: str | None, result: str = "") -> argparse.ArgumentParser:
    """A parser of a benchmark's options, with `--output` if it writes a file of RESULTS."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if result:
        parser.add_argument("--output", type=Path, default=RESULTS / result, help="the result (default: that of docs)")
    return parser


def save(path: Path, found: Mapping[str, Any], threads: int | None = None) -> None:
    """Write `found` as a result, with this command and the environment in which `threads` threads computed."""
    write_result(path, {"command": command_line(), "environment": environment(threads), **found})


def saved(path: Path, key: str) -> Any:
    """What an earlier result has under `key`; an empty dict where there is none."""
    return json.loads(path.read_text(encoding="utf-8")).get(key, {}) if path.is_file() else {}


def command_line() -> str:
    """This benchmark's command as a reader of the repository would type it."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return without_paths(" ".join(["python", str(name), *sys.argv[1:]]))


def without_paths(text: str) -> str:
    """`text` with absolute paths cut to their last part: a result says nothing about the machine's folders."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.+-]+/)+([\w.+-]*)", r"\1", text)


def last_line(text: str) -> str:
    """The last line of what a process said, without the machine's paths."""
    return without_paths((text.strip().splitlines() or ["no output"])[-1])


def write_result(path: Path, value: dict[str, Any]) -> None:
    """Write a result as JSON, what fits on a line on one; NaN and infinity are refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_json(value, "") + "\n", encoding="utf-8")


def _json(value: Any, indent: str) -> str:
    line = json.dumps(value, allow_nan=False)
    if len(line) <= LINE or not isinstance(value, dict | list):
        return line
    inner = indent + "  "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + _json(each, inner) for each in value) + f"\n{indent}]"
    parts = (f"{inner}{json.dumps(key)}: {_json(each, inner)}" for key, each in value.items())
    return "{\n" + ",\n".join(parts) + f"\n{indent}}}"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Text columns, the first aligned left, the others right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def mib(size_bytes: float) -> str:
    """Bytes for a person, in MiB."""
    return f"{size_bytes / 2**20:,.0f}"


def gib(size_bytes: float) -> str:
    """Bytes for a person, in GiB."""
    return f"{size_bytes / 2**30:.2f}"
