"""Two nodes on this machine: the SLURM script, with an srun that starts its command twice."""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import time
from pathlib import Path

import psutil
import pytest
from children import Children
from jobs import QUICK, TINY

from finetune.extras.launch import render
from finetune.storage.rundir import RunDirectory

TWICE = '#!/bin/bash\nshift\n"$@" & first=$!\n"$@" & wait $! && wait $first\n'


def free_port() -> int:
    """One of those that the script takes from the job's number."""
    for port in range(20000, 30000):
        with socket.socket() as tried:
            if tried.connect_ex(("localhost", port)):
                return port
    raise AssertionError


def rank_under(process: psutil.Process, rank: int) -> psutil.Process:
    for child in process.children(recursive=True):
        with_rank = child.environ().get("RANK") == str(rank)
        if with_rank and "finetune" in child.cmdline():
            return child
    raise AssertionError


@pytest.mark.long
def test_two_agents_train_one_run_and_start_again_after_a_kill(
    tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    """By themselves, at a new rendezvous, from the last checkpoint. The script by itself: test_render.py."""
    monkeypatch.chdir(tmp_path)
    children.in_place_of_modules(tmp_path)
    for name, text in {"srun": TWICE, "scontrol": "#!/bin/bash\necho localhost\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    job = [*QUICK, f"data.train={rows_file}", "data.eval=none", "training.eval_every=null", "training.max_steps=30",
           "quantization.kind=none", "output.save_every=2", "output.dir=run"]  # fmt: skip
    file, _ = render.write(TINY, job, "slurm", nodes=2, gpus=1)
    run = RunDirectory(tmp_path / "run")
    environment = {
        **os.environ, "SLURM_JOB_ID": str(free_port() - 20000), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "a,b",
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with open(tmp_path / "log", "w") as log:
        started = psutil.Popen(["bash", str(file)], env=environment, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 600
        while not run.saved_steps:
            assert started.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()[-3000:]  # noqa: PT018
            time.sleep(0.05)
        rank_under(started, 1).send_signal(signal.SIGKILL)
        assert started.wait(timeout=600) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        for child in [*started.children(recursive=True), started] if started.is_running() else ():
            child.kill()
    events = [event["event"] for event in run.events()]
    assert (events.count("started"), events.count("resumed"), events.count("finished")) == (1, 1, 1)
    assert [line["step"] for line in run.metrics()] == list(range(1, 31))
    assert (run.path / "processes" / "1").is_dir()
