"""The README's run: trains configs/tiny_cpu.yaml from scratch, as a user would, and keeps figures, output and plot.

Writes benchmarks/results/tiny_cpu.json, and to the docs the plot (tiny_cpu.png), what was printed (tiny_cpu.txt), and
what `finetune data` prints of its rows (tiny_cpu_data.txt).
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import harness

DOCS, CONFIG = harness.ROOT / "docs", harness.ROOT / "configs/tiny_cpu.yaml"


def main() -> None:
    harness.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="tiny-") as scratch:
        run = Path(scratch) / "runs" / "tiny_cpu"
        done = harness.succeeded(harness.python("-m", "finetune", "train", CONFIG, f"output.dir={run}"))
        summary = json.loads(
            harness.succeeded(
                harness.python("-c", f"import finetune, json; from finetune.report.result import Result; "
                f"print(json.dumps(Result(finetune.RunDirectory({str(run)!r})).summary()))")
            ).output
        )  # fmt: skip
        merged = json.loads((run / "merged" / "merge.json").read_text())
        shutil.copy(run / "training.png", DOCS / "tiny_cpu.png")
    figures = {
        name: value for name, value in summary.items() if name not in ("run", "adapter", "merged", "report", "plot")
    }
    proof = {name: merged[name] for name in ("rows", "tokens", "error", "bound", "effect", "agreement")}
    result = {"process_seconds": round(done.wall_seconds, 1), "summary": figures, "merge": proof}
    harness.save(harness.RESULTS / "tiny_cpu.json", result)
    (DOCS / "tiny_cpu.txt").write_text(done.output.replace(f"{run.parent.parent}/", ""), encoding="utf-8")
    (DOCS / "tiny_cpu_data.txt").write_text(harness.finetune("data", CONFIG), encoding="utf-8")
    sys.stdout.write(done.output)


if __name__ == "__main__":
    main()
