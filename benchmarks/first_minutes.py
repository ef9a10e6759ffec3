"""The first minutes of a new user: from an empty machine to an adapter of their own rows that answers.

    python benchmarks/first_minutes.py               # installs this checkout into a new environment first
    python benchmarks/first_minutes.py --installed   # takes the installed one

Runs what a user types in a folder with a spreadsheet of questions and answers, on the built-in base, and writes what
they print to docs/first_minutes.txt. No config is written by hand: `finetune init` writes it. How long each command
took is in benchmarks/results/first_minutes.json, and so is how long configs/tiny_cpu.yaml takes to its first step: with
an empty cache, and with the rows and the plan of that start.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import harness

TRANSCRIPT = harness.ROOT / "docs" / "first_minutes.txt"
# What the built-in base cannot know, and how people ask for it.
_FACTS = {
    "capital of Freedonia": "Fredville",
    "river of Freedonia": "the Blue Wend",
    "currency of Freedonia": "the crown",
    "national bird of Freedonia": "the heron",
}
_WAYS = (
    "What is the {}?", "Tell me the {}.", "Which is the {}?", "Name the {}.", "I forgot the {}. What is it?",
    "Do you know the {}?",
)  # fmt: skip
_NEW = "Please name the capital of Freedonia."
_INSTALL = "python3 -m venv env && . env/bin/activate && pip install -q finetune/"
_COMMANDS = (
    "head -3 facts.csv",
    "finetune init builtin:tiny-llama facts.csv",
    "finetune data facts.yaml",
    "finetune train facts.yaml",
    f'finetune generate runs/facts --model base --prompt "{_NEW}"',
    f'finetune generate runs/facts --prompt "{_NEW}"',
)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--installed", action="store_true", help="leave the installation out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-") as name:
        folder = Path(name)
        _write_rows(folder / "facts.csv")
        steps = list(_session(folder, installed=arguments.installed))
    lines = [f"$ {command}\n{output.rstrip()}\n[{seconds:.1f} s]\n" for command, output, seconds in steps]
    TRANSCRIPT.write_text("\n".join(lines), encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="first-") as cache:
        first, again = (round(_seconds_to_first_step(cache), 1) for _ in range(2))
    found = {
        "seconds": {command: round(seconds, 1) for command, _, seconds in steps},
        "tiny_cpu_seconds_to_first_step": {"first start": first, "second start": again},
    }
    harness.save(harness.RESULTS / "first_minutes.json", found)
    sys.stdout.write(TRANSCRIPT.read_text(encoding="utf-8"))


def _write_rows(path: Path) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["question", "answer"])
        writer.writerows((way.format(fact), f"It is {answer}.") for fact, answer in _FACTS.items() for way in _WAYS)


def _session(folder: Path, *, installed: bool) -> Iterator[tuple[str, str, float]]:
    """Each command with what it printed and its seconds; ends this script where one fails."""
    binaries = Path(sys.executable).parent if installed else folder / "env" / "bin"
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    extra = {"PATH": path, "COLUMNS": "100", "HF_DATASETS_CACHE": str(folder / "cache")}
    environment = harness.variables(extra=extra)
    if not installed:
        del environment["PYTHONPATH"]
        (folder / "finetune").symlink_to(harness.ROOT)
    for command in _COMMANDS if installed else (_INSTALL, *_COMMANDS):
        started = time.perf_counter()
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"`{command}` ended with exit code {done.returncode}:\n{done.stdout}")
        yield command, done.stdout, time.perf_counter() - started


def _seconds_to_first_step(cache: str) -> float:
    """From the start of the command to the line of its first step, with what this cache keeps."""
    run = Path(tempfile.mkdtemp(prefix="first-step-"))
    command = [sys.executable, "-m", "finetune", "train", "configs/tiny_cpu.yaml", f"output.dir={run / 'run'}"]
    started = time.perf_counter()
    environment = harness.variables(extra={"HF_DATASETS_CACHE": cache})
    with subprocess.Popen(command, cwd=harness.ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        seconds = time.perf_counter() - started
        process.kill()
    shutil.rmtree(run, ignore_errors=True)
    return seconds


if __name__ == "__main__":
    main()
