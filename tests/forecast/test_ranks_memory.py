"""What a process keeps because it shares its steps with another: a copy of all gradients, as forecast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

from finetune.forecast import operator_costs

# Two processes, forked once the libraries are there, take a model with frozen and trained weights as the trainer does,
# and step three times (the buckets are made anew after the first). Each prints how many blocks of each size are left.
MEASURE = f"""
import collections, json, multiprocessing, os, sys
sys.path += {[str(tiny_models.ROOT / "tests"), str(tiny_models.ROOT / "benchmarks")]}
import measured_step, torch
from accelerate import Accelerator
from torch.profiler import ProfilerActivity, profile

def train(rank):
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300, bias=False) for _ in range(100)))
    model[0].requires_grad_(False)
    rows = torch.ones(1, 300)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        shared = accelerator.prepare(model)
        for _ in range(3):
            shared.zero_grad()
            shared(rows).sum().backward()
    left = collections.Counter()
    for event in measured_step._events(profiler):
        left[abs(event.size_bytes)] += 1 if event.size_bytes > 0 else -1
    print(json.dumps(left) + "\\n", end="", flush=True)  # in one write: two processes share the pipe
    accelerator.end_training()

ranks = [multiprocessing.get_context("fork").Process(target=train, args=(rank,)) for rank in range(2)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
sys.exit(any(rank.exitcode for rank in ranks))
"""


@pytest.mark.slow
def test_each_of_two_processes_keeps_a_copy_of_all_gradients(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "store")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    buckets = operator_costs.gradient_buckets([4 * 300 * 300] * 99)
    assert len(set(buckets)) == 3, "a small one at first, and none as large as a gradient"
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 2
    for left in found:
        assert {size: left.get(str(size)) for size in buckets} == dict.fromkeys(buckets, 1)
