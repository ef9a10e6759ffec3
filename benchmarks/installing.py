"""From a clone to the first training step: `make finetune`, by pip and by uv, with their caches empty and full.

    python benchmarks/installing.py          # needs uv on the PATH, or in this environment (make setup)

Clones this checkout's last commit, and ends `make finetune` at its first step. Seconds, and those of a CPU, are of
everything; `installed` is when the environment was ready and finetune was started. Where pip is told of a folder with a
build of torch (PIP_FIND_LINKS), uv is told of it too; else both take the CPU build of PyTorch's index.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import psutil

UV = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))


def main() -> None:
    options = harness.parser(__doc__, "installing.json").parse_args()
    found: dict[str, dict[str, harness.Line]] = {}
    with tempfile.TemporaryDirectory(prefix="installing-") as folder:
        for tool, uv in {"pip": "", "uv": UV}.items():
            caches = Path(folder) / f"{tool}-cache"
            found[tool] = {state: _begun(uv, caches) for state in ("empty cache", "full cache")}
    versions = {tool: harness.succeeded(harness.run([*command, "--version"])).output.split()[1] for tool, command in
                {"pip": [sys.executable, "-m", "pip"], "uv": [UV]}.items()}  # fmt: skip
    harness.save(options.output, {"versions": versions, "first_step": found})
    heads = ("installed", "first step", "CPU seconds")
    rows = [[f"{tool}, {state}", *one.values()] for tool, states in found.items() for state, one in states.items()]
    print(harness.table(["", *heads], rows))


def _begun(uv: str, caches: Path) -> harness.Line:
    """Run `make finetune` in a new clone until its first step; `uv` is empty for pip."""
    environment = {**os.environ, "PIP_CACHE_DIR": str(caches), "UV_CACHE_DIR": str(caches), "PYTHONUNBUFFERED": "1"}
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PIP_NO_CACHE_DIR", "VIRTUAL_ENV", "MAKEFLAGS"):
        environment.pop(name, None)
    arguments = [f"UV={uv}"]
    if links := os.environ.get("PIP_FIND_LINKS"):
        arguments.append(f"UV_FLAGS=--find-links {links}")
    with tempfile.TemporaryDirectory(prefix="clone-") as name:
        clone = Path(name) / "finetune"
        harness.succeeded(harness.run(["git", "clone", "--quiet", harness.ROOT, clone]))
        environment["HF_DATASETS_CACHE"] = str(Path(name) / "rows")
        started, installed = time.perf_counter(), 0.0
        with subprocess.Popen(
            ["make", "finetune", *arguments], cwd=clone, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            assert process.stdout
            said = []
            for line in process.stdout:
                said.append(line)
                if "finetune train" in line and not installed:
                    installed = time.perf_counter() - started
                if line.startswith("step 1/"):
                    break
            else:
                sys.exit(f"`make finetune` trained no step:\n{''.join(said)[-2000:]}")
            seconds, cpu = time.perf_counter() - started, _cpu_seconds(psutil.Process(process.pid))
            os.killpg(process.pid, signal.SIGKILL)
    return {"installed": round(installed, 1), "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1)}


def _cpu_seconds(root: psutil.Process) -> float:
    """Of a process and all that it started, those that have ended included."""
    spent = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            spent += sum(process.cpu_times()[:4])
    return spent


if __name__ == "__main__":
    main()
