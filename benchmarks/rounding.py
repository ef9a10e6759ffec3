"""What rounding with the training rows takes: memory and time at the width of Llama 3.2 1B, and what kills cost it.

- 1B: some layers of the shape of Llama 3.2 1B with random weights, merged, and rounded in a process of its own to
  Q4_K_M with some thousand tokens. The peak of anonymous memory, less what the process has before, is beside the
  forecast. Two layers are as wide and so as large at their peak as sixteen, which take eight times as long.
- kills: sixteen layers of an eighth of that width are rounded in processes that are killed at random moments, one after
  the other, and then to the end. All files must be those of a rounding that nothing disturbed.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import harness
import merge

from finetune.choices import config_of
from finetune.export.conversion import ExportRequest
from finetune.export.finished_run import FinishedRun
from finetune.export.gguf import gguf_export
from finetune.export.rounding import rounded_run
from finetune.model.source import catalog
from finetune.storage.rundir import RunDirectory

KIND = "q4_k_m"
SHAPE = "meta-llama/Llama-3.2-1B"
STARTED = "started"


def child(path: Path) -> None:
    """Round the merged model of a run, and say when that begins."""
    run = RunDirectory(path)
    config = config_of(run)
    tokenizer = FinishedRun(run, config).tokenizer()
    conversion = ExportRequest(run, config, tokenizer, merge.CPU, KIND)
    print(STARTED, flush=True)
    rounded_run.rounded(conversion, gguf_export.forms, lambda text: None)


def start(run: RunDirectory) -> subprocess.Popen[str]:
    """A process that has begun to round."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(run.path)]
    process = subprocess.Popen(
        command, env=harness.variables(1, harness.ALLOCATOR), stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != STARTED:
        sys.exit("a rounding did not begin")
    return process


def merged(folder: Path, **sizes: int) -> RunDirectory:
    """A merged run on a base of the shape of 1B with other `sizes`."""
    architecture = deepcopy(catalog.config(SHAPE))
    for name, value in sizes.items():
        setattr(architecture, name, value)
    merge.write_base(folder / "base", architecture, 1)
    run, _ = merge.make_run(folder / "run", folder / "base", tokens=512)
    harness.finetune("merge", run.path, threads=1)
    return run


def measured(folder: Path, layers: int) -> dict[str, Any]:
    """Time and memory of a rounding at full width."""
    run = merged(folder, num_hidden_layers=layers)
    process, started = start(run), time.perf_counter()
    before = _anonymous_bytes(process)
    _, peak = merge.resident_peaks(process)
    seconds = time.perf_counter() - started
    if process.returncode:
        sys.exit(f"the rounding ended with status {process.returncode}")
    record = json.loads((_target(run) / "rounding.json").read_text())
    return {
        "shape": SHAPE, "layers": layers, "kind": KIND, "tokens": record["tokens"], "seconds": round(seconds, 1),
        "weights": sum(file.stat().st_size for file in run.merged.glob("*.safetensors")) // 2,
        "forecast_bytes": record["forecast_bytes"], "peak_bytes": peak - before, "process_bytes": before,
        "forecast_error": round(record["forecast_bytes"] / (peak - before) - 1, 4),
    }  # fmt: skip


def _anonymous_bytes(process: subprocess.Popen[str]) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _target(run: RunDirectory) -> Path:
    return run.path / f"rounded-{KIND}"


def killed(folder: Path, kills: int) -> dict[str, Any]:
    """A rounding that is killed at random moments, and completed."""
    run = merged(folder, hidden_size=256, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=2)
    started = time.perf_counter()
    start(run).wait()
    seconds = time.perf_counter() - started
    whole = _files(_target(run))
    moments, count, rounds, partial = random.Random(0), 0, 0, 0
    while count < kills:
        # Long enough for a layer or two, so that each rounding is killed several times before it is complete.
        process = start(run) if rounds else _anew(run)
        rounds += 1
        try:
            process.wait(moments.uniform(0, 3 * seconds / 16))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            count += 1
            partial += _target(run).exists()
        else:
            rounds = 0  # complete: the next one begins anew
    start(run).wait()
    return {
        "shape": SHAPE, "width": 256, "layers": 16, "kind": KIND, "rounding_seconds": round(seconds, 1),
        "kills": count, "published_before_complete": partial,
        "ended_with_other_files": int(_files(_target(run)) != whole),
    }  # fmt: skip


def _anew(run: RunDirectory) -> subprocess.Popen[str]:
    for folder in (_target(run), _target(run).with_name(f"{_target(run).name}.incomplete")):
        shutil.rmtree(folder, ignore_errors=True)
    return start(run)


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def main() -> None:
    parser = harness.parser(__doc__, "rounding.json")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2, help="of the model at full width")
    parser.add_argument("--folder", type=Path, help="on a disk with 10 GB of room; by default that of temporary files")
    parser.add_argument("--only", nargs="*", default=["1B", "kills"], help="which parts")
    parser.add_argument("--child", type=Path, help="used by this script alone")
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        if "kills" in options.only:
            result["kills"] = killed(Path(temporary) / "kills", options.kills)
        if "1B" in options.only:
            result["rounding_1B"] = measured(Path(temporary) / "1B", options.layers)
    made = {"command": harness.command_line(), "environment": harness.environment(1)}
    parts = {name: harness.saved(options.output, name) for name in ("kills", "rounding_1B")}
    parts |= {name: part | made for name, part in result.items()}
    harness.write_result(options.output, {name: part for name, part in parts.items() if part})
    for name, part in result.items():
        print(name, part)
    kills = result.get("kills", {})
    if kills.get("published_before_complete") or kills.get("ended_with_other_files"):
        sys.exit(1)


if __name__ == "__main__":
    main()
