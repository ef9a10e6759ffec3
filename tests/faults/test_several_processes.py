"""Several processes train what one trains, whatever they share, and a resume may change their number."""

from __future__ import annotations

import json
import signal
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
from children import Fault
from jobs import metric, sampled, save_base
from rank_jobs import EXACT, FSDP, PLAIN, UNEVALUATED, ZERO, Jobs, assert_close, resumed_at, same_weights, untied_base
from safetensors.torch import load_file
from steps import before_each_step
from together import assert_all, assert_refused
from transformers import AutoConfig, AutoModelForCausalLM

import finetune
from finetune.runtime import ranks
from finetune.training.loop import Loop
from finetune.training.step import Step

STEP = "finetune.training.step:Step.clip"
JOB = [*EXACT, "training.batch_size=6", "training.micro_batch=1", "training.max_steps=5", "training.eval_every=2",
       "output.save_every=2"]  # fmt: skip
COPIES = [*JOB, PLAIN]
FEW = [*JOB, "training.max_steps=3", "training.eval_every=3"]
"""Of `few_rows`."""


def test_several_processes_train_what_one_trains(odd_jobs: Jobs) -> None:
    """Also in an epoch's last step, which has one row for all of them, and with two held-out rows."""
    alone, together = odd_jobs.alone(*COPIES), odd_jobs(*COPIES, "memory.check=warn", "kernels.fused=auto")
    ended = together.go(3)
    assert_all(ended, 0)
    assert_close(together.run, alone)
    assert metric(together.run, "tokens") == metric(alone, "tokens")
    # The first process alone writes the run and prints.
    first, *others = ended
    assert "6 rows over 3 processes; each 2 rows = 2 micro-batches of 1" in first.output
    assert [each.output for each in others] == ["", ""]
    names = [event["event"] for event in together.run.events()]
    assert names.count("largest_batch_fits") == names.count("trained") == names.count("finished") == 1
    assert json.loads(together.run.forecast_file.read_text())["fits"]
    own = together.run.of_rank(1)
    assert sorted(path.name for path in own.path.iterdir()) == ["events.jsonl", "metrics.jsonl"]
    assert metric(own, "step", "loss") == metric(together.run, "step", "loss")


@pytest.fixture(scope="module")
def few_rows(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Seven rows, a step of six and one of one row an epoch, and two that are held out."""
    lines, folder = rows_file.read_text().splitlines(keepends=True), tmp_path_factory.mktemp("few")
    files = {"data.train": (folder / "rows.jsonl", lines[:7]), "data.eval": (folder / "eval.jsonl", lines[7:9])}
    for file, rows in files.values():
        file.write_text("".join(rows))
    return [f"{key}={file}" for key, (file, _) in files.items()]


# -- what ranks share ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def untied(shallow_base: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.name={untied_base(shallow_base, tmp_path_factory.mktemp('untied'))}"


@pytest.fixture(scope="module")
def experts(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of experts of two layers, whose router sends tokens to all of them."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=2048, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, max_position_embeddings=256,
    )  # fmt: skip
    return f"model.name={save_base(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder, tiny_base)}"


@dataclass(frozen=True)
class Way:
    """How `ranks` train a job, on the base of a fixture."""

    way: list[str]
    job: list[str] = field(default_factory=list)
    ranks: int = 2
    base: str = ""


FULL = [PLAIN, "adapter.kind=none"]
NOISE = "training.neftune_noise_alpha=5"
GENTLE = "training.learning_rate=0.03"
PADDED = "training.micro_batch=3"  # rows of uneven and odd lengths
SLICES = "distributed.context=2"
WAYS = {
    "shards, nf4": Way([FSDP], [NOISE]),
    "shards, a head of its own, some results kept": Way(
        [FSDP, "distributed.stage=gradients", "memory.checkpointing=keep-products"], [PLAIN], base="untied"
    ),
    "shards, full": Way([FSDP, "distributed.offload=cpu"], [*FULL, NOISE], base="untied"),
    "copies of experts": Way([], [PLAIN], base="experts"),
    "shards of experts, which the layer that holds them gathers": Way([FSDP], [PLAIN], base="experts"),
    "slices of rows, nf4, fused": Way([SLICES, "kernels.fused=auto"], [PADDED]),
    "slices of packed rows": Way([SLICES, "data.packing=true"], [PADDED]),
    "slices of rows, more ranks than keys": Way(
        ["distributed.context=3", "memory.checkpointing=all"], [PLAIN, PADDED], ranks=3
    ),
    "two groups with slices of packed rows and shards": Way(
        [SLICES, FSDP, "data.packing=true", "model.attention=eager"], [PLAIN, PADDED], ranks=4
    ),
    "ZeRO, nf4": Way([ZERO, "distributed.offload=cpu", "distributed.stage=weights"], [GENTLE]),
    "ZeRO, some results kept": Way(
        [ZERO, "distributed.stage=gradients", "memory.checkpointing=keep-products"], [GENTLE, PLAIN]
    ),
    "ZeRO, full": Way([ZERO, "distributed.stage=optimizer"], [GENTLE, *FULL]),
    "ZeRO of one process, with slices on the host": Way([ZERO, "distributed.offload=cpu"], [GENTLE], ranks=1),
}
OFTEN = (
    "shards, nf4", "slices of rows, nf4, fused", "ZeRO, nf4",
)  # fmt: skip


@pytest.mark.parametrize("name", sampled(WAYS, *OFTEN))
def test_ranks_train_what_one_process_trains(
    name: str, odd_jobs: Jobs, few_rows: list[str], request: pytest.FixtureRequest
) -> None:
    """Every weight, or an adapter; sharded full training is in test_sharded_ranks.py as well."""
    way = WAYS[name]
    if ZERO in way.way:
        pytest.importorskip("deepspeed")
    job = [*FEW, *few_rows, *way.job, *([request.getfixturevalue(way.base)] if way.base else [])]
    together = odd_jobs(*job, *way.way)
    assert_all(together.go(way.ranks), 0)
    alone = odd_jobs.alone(*job)
    assert_close(together.run, alone)
    if PADDED in job and "data.packing=true" not in way.way:  # packing has no padding but that of slices
        assert metric(together.run, "tokens") == metric(alone, "tokens")
    if way.base == "experts":
        assert any(".experts." in name for name in load_file(alone.adapter / "adapter_model.safetensors"))


# -- their number ----------------------------------------------------------------------------------------------------


def test_another_number_of_processes_goes_on_with_the_same_rows_and_is_logged(odd_jobs: Jobs) -> None:
    """Fewer, and then more."""
    changed = odd_jobs(*COPIES)
    changed.kill(2, step=3, saved=2)
    changed.kill(1, step=3, saved=4)
    assert_all(changed.go(3), 0)
    events = [event for event in changed.run.events() if event["event"] == "changed"]
    assert [event["processes"] for event in events] == [[2, 1], [1, 3]]
    assert_close(changed.run, odd_jobs.alone(*COPIES))


def test_one_process_goes_on_with_the_rows_that_ranks_have_split(odd_jobs: Jobs, few_rows: list[str]) -> None:
    killed = odd_jobs(*FEW, *few_rows, PADDED, SLICES)
    killed.kill(2, step=3, saved=2)
    killed.arguments.append("distributed.context=1")
    assert_all(killed.go(1), 0)
    assert resumed_at(killed.run) == [2]
    assert_close(killed.run, odd_jobs.alone(*FEW, *few_rows, PADDED))


def test_ranks_that_make_no_groups_are_refused(odd_jobs: Jobs) -> None:
    assert_refused(odd_jobs(*JOB, SLICES).go(3), 2, "3 processes cannot form groups of 2")


# -- signals and locks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("signalled", "step"), sampled([(0, 3), (1, 4)], (1, 4)))
def test_a_signal_to_one_process_saves_and_ends_all(odd_jobs: Jobs, signalled: int, step: int) -> None:
    """Before the evaluation that step 4 owes, which a resume makes up for."""
    stopped = odd_jobs(*COPIES)
    assert_all(stopped.go(2, {signalled: Fault(STEP, nth=step, action="SIGTERM")}), 143)
    assert stopped.run.saved_steps == [2, step]
    assert len(metric(stopped.run, "eval_loss")) == 2
    assert not stopped.run.adapter.exists()
    assert_all(stopped.go(2), 0)
    assert_close(stopped.run, odd_jobs.alone(*COPIES))


@pytest.mark.long
def test_a_signal_in_the_evaluation_that_ends_two_ranks_early_adds_no_step(odd_jobs: Jobs) -> None:
    early = ["training.batch_size=6", "training.max_steps=30", "training.micro_batch=3", "training.eval_every=1",
             "training.early_stopping=1", "training.learning_rate=0.5", "training.schedule=constant",
             "output.best=false"]  # fmt: skip
    whole, stopped = odd_jobs(*early), odd_jobs(*early)
    assert_all(whole.go(2), 0)
    evaluated = metric(whole.run, "eval_loss")
    assert len(evaluated) < 30, "the job was meant to stop early"
    last = Fault("finetune.training.eval_loss:EvalLoss.value", nth=len(evaluated), action="SIGTERM")
    assert_all(stopped.go(2, {1: last}), 143)
    assert stopped.run.saved_steps[-1] == whole.run.steps_done
    assert_all(stopped.go(2), 0)
    assert metric(stopped.run, "eval_loss") == evaluated
    assert same_weights(stopped.run, whole.run)


def test_processes_are_refused_where_another_one_trains(odd_jobs: Jobs) -> None:
    """By the first of them, which tells the others."""
    held = odd_jobs(*COPIES, *UNEVALUATED)
    [other] = held.start(1, {0: Fault(STEP, action="SIGSTOP")})
    other.wait_until_stopped()
    assert_refused(held.go(2), 4, f"in use by process {other.pid}")
    other.send(signal.SIGKILL)
    other.wait()


def test_a_run_starts_no_process_that_could_be_lost_and_frees_the_model_before_the_ranks_part(
    quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are collated in the process that trains.

    A model that is freed afterwards ends the process group with Python's lock held, and a rank now and then never
    ended.
    """
    before = {*psutil.Process().children()}  # of earlier tests: some may be at their end
    new: list[set[psutil.Process]] = []
    steps: list[weakref.ref[Step]] = []
    left: list[Step | None] = []

    def look(loop: Loop) -> None:
        new.append({*psutil.Process().children()} - before)
        steps.append(weakref.ref(loop.step))

    before_each_step(monkeypatch, look)
    monkeypatch.setattr(ranks, "leave", lambda: left.append(steps[0]()))
    assert finetune.train(quick("training.max_steps=1")).run.finished
    assert new == [set()]
    assert left == [None]
