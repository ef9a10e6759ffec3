"""A kernel that the model itself rules out after the plan: the plan is made again, and later starts know."""

import json
from typing import Any

import pytest

import finetune
from finetune import recipe
from finetune.kernels import mlp
from finetune.report.terminal import Terminal
from finetune.storage.rundir import RunDirectory


def notes(config: Any) -> str:
    """What a training of `config` says."""
    said: list[str] = []
    terminal = Terminal(quiet=True)
    terminal.note = said.append
    recipe.train(config, terminal=terminal)
    return "\n".join(said)


def forecast(run: RunDirectory) -> Any:
    return json.loads(run.forecast_file.read_text())


@pytest.mark.slow
def test_a_job_whose_model_rules_out_a_kernel_trains_by_a_plan_without_it(quick, monkeypatch, tmp_path) -> None:
    right = mlp.ops.gated_backward_

    def wrong(gate: Any, *others: Any) -> Any:
        returned = right(gate, *others)
        gate.mul_(1.2)
        return returned

    job = [
        "memory.check=refuse", "memory.checkpointing=auto", "output.save_every=1", "kernels.fused=auto",
        "training.batch_size=8", "training.max_steps=3", "data.eval=none", "training.eval_every=null",
        "adapter.targets=[gate_proj, up_proj, down_proj]",
    ]  # fmt: skip
    with_kernels = finetune.plan(quick(*job), "cpu").forecast
    with monkeypatch.context() as patch:
        patch.setattr(mlp.ops, "gated_backward_", wrong)
        said = notes(quick(*job))
    run = RunDirectory(tmp_path / "run")
    assert "`mlp` is off: in LlamaMLP" in said
    assert said.count("planning again") == 1
    again = forecast(run)["phases"]
    assert again["forward"]["allocated_bytes"] > with_kernels.phases["forward"]["allocated_bytes"]
    assert [event["kernels"] for event in run.events() if event["event"] == "kernels_ruled_out"] == [["mlp"]]

    # The kernel is right again, and the run goes on without it all the same.
    said = notes(quick(*job, "training.max_steps=4"))
    assert "`mlp` is off: an earlier start of this run" in said
    assert "planning again" not in said
    assert not [event for event in run.events() if event["event"] == "changed" and "memory" in str(event)]
    assert len([event for event in run.events() if event["event"] == "kernels_ruled_out"]) == 1
    assert forecast(run)["phases"] == again
