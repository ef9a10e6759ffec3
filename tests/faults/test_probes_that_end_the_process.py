"""A process that a kernel or a pass of the model ends before the first step: the next start goes on without."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from children import Children, Ended, Fault

from finetune.storage.rundir import RunDirectory

Train = Callable[..., tuple[RunDirectory, Ended]]
FEW = ["training.max_steps=1", "data.eval=none", "training.eval_every=null"]
FUSED = [*FEW, "kernels.fused=auto"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_a_kernel_that_ends_the_process_is_off_until_it_is_to_be_tried_again_and_ctrl_c_blames_nothing(
    train_apart: Train, children: Children
) -> None:
    kernel = "finetune.kernels.ops:gated"
    for action, code in (("SIGINT", 130), ("SIGSEGV", -signal.SIGSEGV)):
        run, ended = train_apart(Fault(kernel, action=action), *FUSED)
        assert ended.code == code, ended.output
        assert not run.saved_steps

    run, ended = train_apart(None, *FUSED)
    assert ended.code == 0, ended.output
    assert ended.in_one_line.count("`mlp` off") == 1
    assert " mlp" not in fused(ended)

    findings = json.loads(children.run(["doctor", "--json"]).output)["findings"]
    (finding,) = (one for one in findings if one["about"] == "kernels")
    assert finding["status"] == "warning"
    (file,) = shlex.split(finding["remedy"])[-1:]
    Path(file).unlink()
    _, ended = train_apart(None, *FUSED, run="again")
    assert " mlp" in fused(ended)


def fused(ended: Ended) -> str:
    """The line on the kernels that a run fused."""
    return next((line for line in ended.output.splitlines() if line.startswith("kernels: fused")), "")


def test_after_a_pass_of_the_whole_model_no_kernel_is_fused(train_apart: Train) -> None:
    _, ended = train_apart(Fault("finetune.model.probes.causality:prove", action="SIGSEGV"), *FUSED)
    assert ended.code == -signal.SIGSEGV
    _, ended = train_apart(None, *FUSED)
    assert ended.code == 0, ended.output
    assert "none is fused" in ended.in_one_line
    assert not fused(ended)


def test_a_run_killed_from_outside_in_a_probe_resumes_with_the_same_kernels(train_apart: Train) -> None:
    _, ended = train_apart(Fault("finetune.kernels.ops:gated"), *FUSED)
    assert ended.code == -signal.SIGKILL
    _, ended = train_apart(None, *FUSED)
    assert ended.code == 0, ended.output
    assert " mlp" in fused(ended)
    assert "earlier process" not in ended.in_one_line


def test_packing_that_ends_the_process_is_refused_with_what_to_set(train_apart: Train) -> None:
    _, ended = train_apart(
        Fault("finetune.model.probes.packed_rows:prove", action="SIGSEGV"), *FEW, "data.packing=true"
    )
    assert ended.code == -signal.SIGSEGV
    _, ended = train_apart(None, *FEW, "data.packing=true")
    assert ended.code == 4
    assert "data.packing: false" in ended.in_one_line
