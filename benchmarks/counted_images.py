"""A base that has never seen anything learns to count circles: the share of right answers before and after.

    python benchmarks/counted_images.py

Runs notebooks/seeing.ipynb, which draws the pictures and makes the base, with each of three seeds, and writes the
answers of the first one to docs/counted_images.png.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

NOTEBOOK = harness.ROOT / "notebooks" / "seeing.ipynb"
PICTURE = harness.ROOT / "docs" / "counted_images.png"
SEEDS = (0, 1, 2)
LEAST = 0.9
"""The least share of right answers after training, with any seed."""

_RUN = """
import json, sys
import nbformat
from finetune.report import plots

notebook, seed, folder = sys.argv[1:]
names = {}
for cell in nbformat.read(notebook, as_version=4).cells:
    if cell.cell_type == "code":
        exec(cell.source.replace("seed = 0", f"seed = {seed}"), names)
result, measures = names["result"], names["scores"].as_dict()["measures"]
found = {"steps": result.run.steps_done, "seconds": result.summary()["seconds"], "rows": len(names["rows"]),
         "held_out": len(names["held_out"]), "measures": {one["name"]: one["models"] for one in measures}}
open(f"{folder}/found.json", "w").write(json.dumps(found))
open(f"{folder}/picture.png", "wb").write(plots.png(names["figure"]))
"""


def main() -> None:
    options = harness.parser(__doc__, "counted_images.json").parse_args()
    runs = {}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory(prefix="counted-") as folder:
            runs[str(seed)] = counted(seed, Path(folder))
            if seed == SEEDS[0]:
                PICTURE.write_bytes((Path(folder) / "picture.png").read_bytes())
        print(seed, runs[str(seed)]["measures"]["exact_match"], flush=True)
    harness.save(options.output, {"least": LEAST, "runs": runs}, threads=1)
    sys.exit(0 if all(run["measures"]["exact_match"]["adapter"]["low"] > LEAST for run in runs.values()) else 1)


def counted(seed: int, folder: Path) -> dict[str, Any]:
    """What the notebook's run with a seed measures; its picture is in `folder`."""
    done = harness.python(
        "-c", _RUN, NOTEBOOK, str(seed), folder, threads=1, extra={"MPLBACKEND": "agg"}, folder=folder
    )
    harness.succeeded(done)
    return json.loads((folder / "found.json").read_text())


if __name__ == "__main__":
    main()
