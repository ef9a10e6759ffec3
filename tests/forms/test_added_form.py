"""The page on adding a form of weights, applied to a copy of the package: a base is trained on and served in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoConfig
import finetune
from finetune.export import compressed_export, served_model
from finetune.forms import FORMS, packed

source, rows, folder = map(Path, sys.argv[1:])
weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
error = (packed.values(packed.pack("int5", weight)) - weight).norm() / weight.norm()
config = AutoConfig.from_pretrained(source)
folder.mkdir()
packed_ones = compressed_export.RoundedWeights(source, config, "int5")
compressed_export.write(source, folder, config, "int5", packed_ones)
job = finetune.load_config({
    "model": {"name": str(folder)}, "data": {"train": str(rows)},
    "memory": {"check": "off"}, "output": {"dir": "run"},
    "training": {"max_steps": 16, "batch_size": 4, "micro_batch": 4, "learning_rate": 3e-2, "precision": "fp32"},
})
run = finetune.train(job).run
merged = finetune.merge(run)
exported = finetune.export_model(run, "int5")
print(json.dumps({
    "error": float(error), "roundoff": FORMS["int5"].roundoff, "weights": len(packed_ones),
    "kind": run.config().quantization.kind, "losses": [line["loss"] for line in run.metrics() if "loss" in line],
    "merged": merged, "exported": exported, "newest": served_model.newest(run, "rounded"),
    "files": sorted(file.name for file in (run.path / "int5").iterdir()),
    "stated": json.loads((run.path / "int5" / "config.json").read_text())["quantization_config"],
}, default=str))
"""


@pytest.mark.slow
def test_a_base_in_a_new_form_is_trained_on_merged_and_exported(
    shallow_base: Path, rows_file: Path, tmp_path: Path
) -> None:
    """Two files of the package change, and nothing else."""
    package = shutil.copytree(ROOT / "finetune", tmp_path / "finetune", ignore=shutil.ignore_patterns("__pycache__"))
    [code] = re.findall(r"`finetune/forms/int5\.py`:\n\n```python\n(.*?)^```", PAGE, re.M | re.S)
    (package / "forms" / "int5.py").write_text(code)
    [diff] = re.findall(r"`finetune/forms/table\.py`:[^\n]*\n\n```diff\n(.*?)^```", PAGE, re.M | re.S)
    *_, below = (line[1:] for line in diff.splitlines() if line.startswith(" "))
    added = "".join(line[1:] + "\n" for line in diff.splitlines() if line.startswith("+"))
    table = package / "forms" / "table.py"
    before = table.read_text()
    assert before.count(f"{below}\n") == 1
    table.write_text(before.replace(f"{below}\n", f"{added}{below}\n"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, shallow_base, rows_file, tmp_path / "base"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert 0.5 * facts["roundoff"] < facts["error"] < facts["roundoff"]
    assert facts["kind"] == facts["newest"] == "int5", "by the base's config.json, and by the export"
    assert facts["losses"][-1] < facts["losses"][0]
    assert facts["weights"] > 0
    assert facts["merged"]["error"] <= facts["merged"]["bound"]
    assert facts["exported"]["error"] <= facts["exported"]["bound"]
    assert facts["exported"]["weights"]["differing"] > 0
    assert facts["stated"] == {"quant_method": "int5", "modules_to_not_convert": ["lm_head"]}
    assert {"config.json", "export.json", "README.md"} < set(facts["files"])
