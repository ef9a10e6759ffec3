"""The tasks of an array job train the members of a sweep."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from children import Children
from jobs import QUICK, TINY
from typer.testing import CliRunner

from finetune.cli import app
from finetune.storage.rundir import RunDirectory

RATES = "training.learning_rate=1e-3,3e-3"


@pytest.mark.slow
def test_a_task_of_the_batch_script_trains_each_member_and_a_sweep_compares_them(
    tmp_path: Path, rows_file: Path, shallow_base: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without SLURM: each task is the script of `finetune launch`, and what it starts by srun runs here."""
    monkeypatch.chdir(tmp_path)
    children.in_place_of_modules(tmp_path)
    folder = tmp_path / "sweep"
    job = [*QUICK, "data.eval_share=0.5", "quantization.kind=none"]
    job += [f"data.train={rows_file}", f"model.name={shallow_base}"]
    arguments = [str(TINY), *job, "training.max_steps=1", f"output.dir={folder}", RATES]
    script = tmp_path / "sweep.sbatch"
    launched = CliRunner().invoke(app, ["launch", "--on", "slurm", "--sweep", "--output", str(script), *arguments])
    assert launched.exit_code == 0, launched.output
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nexec "${@:2}"\n')
    srun.chmod(stat.S_IRWXU)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for task in range(2):
        environment = os.environ | {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task)}
        ended = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    compared = CliRunner().invoke(app, ["sweep", "--full", "--json", *arguments])
    assert compared.exit_code == 0, compared.output
    table = json.loads((folder / "sweep.json").read_text())
    assert [each["state"] for each in table["settings"]] == ["finished"] * 2
    assert table["winner"] or table["undecided"]
    for each in table["settings"]:
        [run] = each["runs"]
        assert [event["event"] for event in RunDirectory(run).events()].count("started") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([RATES], "add --sweep"),
        (["--sweep", "training.learning_rate=auto", "model.name=a,b"], "members are trained on one base"),
        (["--sweep", "training.learning_rate=auto", "optimizer.kind=adamw_8bit,sgd"],
         "no sweep tells the rate of `sgd`"),
        (["--sweep", "training.learning_rate=auto", "quantization.kind=auto", "adapter.rank=8,16"],
         "set the kind that `finetune plan` names"),
    ],
)  # fmt: skip
def test_a_sweep_that_would_be_refused_is_refused_before_a_file_is_written(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    script = tmp_path / "sweep.sbatch"
    launched = CliRunner().invoke(app, ["launch", "--on", "slurm", "--output", str(script), str(TINY), *arguments])
    assert launched.exit_code == 2
    assert said in launched.output.replace("\n", " ")
    assert not script.exists()
