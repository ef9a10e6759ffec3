"""One row of 100,000 tokens; and the longest batch before all others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Fault
from jobs import same_adapter, sampled
from messages import refusal
from steps import ready, stopped_and_resumed

import finetune
from finetune.config import OptimizerSection
from finetune.data.batching import MicroBatching, Sizes, chosen_rows, worst_batches
from finetune.data.encoded import IGNORE
from finetune.errors import DataError
from finetune.model.distributed.engine import OneProcess
from finetune.training import largest_batch, optimizers, run, warm_up
from finetune.training.collator import Inputs
from finetune.training.loop import Loop
from finetune.training.step import Step

LONG = "data.max_length=200000"


@pytest.fixture
def one_long_row(tmp_path: Path, rows_file: Path) -> Path:
    """The rows, and as the eleventh one of 100,000 tokens and more."""
    file = tmp_path / "long.jsonl"
    lines = rows_file.read_text().splitlines()
    turns = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "7 x " * 34_000}]
    lines.insert(10, json.dumps({"messages": turns}))
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_row_over_max_length_is_found_before_training(quick, one_long_row: Path) -> None:
    config = quick(f"data.train={one_long_row}", "data.too_long=error")
    with refusal(DataError, f"{one_long_row}:11") as found:
        finetune.train(config)
    assert found.value.exit_code == 3


def test_a_row_that_does_not_fit_is_found_before_the_first_step(train_apart, one_long_row: Path) -> None:
    little = Fault("finetune.training.step:Step.forward_backward", memory_bytes=64 * 2**20)
    overrides = [f"data.train={one_long_row}", LONG, "data.eval=none", "training.eval_every=null"]
    run, ended = train_apart(little, *overrides)
    assert ended.code == 6, ended.output
    output = "".join(ended.output.split())  # a terminal breaks long lines
    assert f"{one_long_row}:11,1" in output, "the row and its hundred thousand tokens"
    assert "data.max_length=100000" in output, "the levers"
    assert run.metrics() == []
    events = [event["event"] for event in run.events()]
    assert events == ["started", "micro_batch_split", "row_does_not_fit", "out_of_memory"]


def micro_batch_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The rows and tokens of each micro-batch that is computed from now on."""
    seen: list[tuple[int, int]] = []

    def micro_step(self: Step, inputs: Inputs, *rest: Any) -> torch.Tensor:
        rows, tokens = inputs["input_ids"].shape
        seen.append((rows, tokens))
        return plain(self, inputs, *rest)

    plain = Step.micro_step
    monkeypatch.setattr(Step, "micro_step", micro_step)
    return seen


def test_the_longest_rows_come_first(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = micro_batch_shapes(monkeypatch)
    run = finetune.train(quick("data.eval=none", "training.eval_every=null", "training.max_steps=2")).run
    assert len(shapes) == 2 + 2 * 2, "two passes of the worst, as with accumulation, and two steps of two"
    assert shapes[0] == shapes[1] == max(shapes, key=lambda shape: shape[0] * shape[1])
    assert shapes[0][1] == max(length for _, length in shapes)
    assert [event["event"] for event in run.events()][:2] == ["started", "largest_batch_fits"]
    assert [line["step"] for line in run.metrics()] == [1, 2]


@pytest.mark.parametrize("tokens", [None, 60])
def test_the_rows_chosen_make_the_worst_batches(tokens: int | None) -> None:
    lengths = [10, 50, 20, 20, 19, 50, 3]
    way = MicroBatching(2, tokens)
    sizes = Sizes(lengths, lengths)
    for batch in worst_batches(sizes, way, 4, "the data's rows"):
        rows = chosen_rows(sizes, batch)
        assert (len(rows), max(lengths[row] for row in rows)) == (batch.rows, batch.tokens)


def test_the_longest_rows_get_the_labels_that_shorter_ones_may_have() -> None:
    ids = [5, 6, 7, 8]
    rows = [
        {"input_ids": ids, "labels": [IGNORE, IGNORE, IGNORE, 8], "length": 4},
        {"input_ids": [*ids, *ids], "labels": [IGNORE] * 8, "segments": [4, 4]},
    ]
    labels = [row["labels"] for row in largest_batch.labelled(rows, 7)]
    assert labels == [[IGNORE, 6, 7, 8], [IGNORE, 6, 7, 8, IGNORE, 6, IGNORE, IGNORE]], "never the first of a segment"
    assert [row["labels"] for row in largest_batch.labelled(rows, 0)] == [row["labels"] for row in rows]


def test_the_largest_packed_micro_batch_comes_first_to_the_last_token(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = micro_batch_shapes(monkeypatch)
    config = quick("data.packing=true", "training.micro_batch_tokens=70", "data.eval=none", "training.eval_every=null")
    finetune.train(config)
    assert shapes[0][1] == 70 >= max(length for _, length in shapes)


def as_it_stands(loop: Loop) -> dict[str, bytes]:
    """Every trained weight and optimizer state, bit by bit."""
    found = {name: weight.detach() for name, weight in loop.step.model.named_parameters() if weight.requires_grad}
    for number, values in enumerate(loop.step.engine.optimizer.state.values()):
        found |= {f"{number}.{name}": torch.as_tensor(value) for name, value in values.items() if value is not None}
    return {name: value.cpu().contiguous().numpy().tobytes() for name, value in found.items()}


def test_the_warm_up_leaves_every_optimizer_unchanged(quick) -> None:
    """With states from steps before, as in a resumed run, and with none."""
    few = ["training.micro_batch=1", "training.batch_size=1", "kernels.fused=off"]
    loop = ready(quick("data.eval=none", "training.eval_every=null", *few))
    trained, rate = loop.step.trained(), 1e-3

    def warm() -> None:
        warm_up.warm_up(loop.step, loop.steps, loop.retry, loop.evaluation)

    for kind in {optimizers.choose(OptimizerSection(kind=kind), "cpu")[0] for kind in optimizers.OPTIMIZERS}:
        optimizer = optimizers.make(kind, OptimizerSection(weight_decay=0.1), rate, loop.step.model)
        loop.step = replace(loop.step, engine=OneProcess(loop.step.model, optimizer))
        before = as_it_stands(loop)
        warm()
        after = as_it_stands(loop)
        assert all(after[name] == value for name, value in before.items()), kind
        for weight in trained:
            weight.grad = torch.randn_like(weight)
        loop.step.update()
        assert as_it_stands(loop) != after, kind
        before = as_it_stands(loop)
        warm()
        assert as_it_stands(loop) == before, kind
        assert {group["lr"] for group in loop.step.engine.optimizer.param_groups} == {rate}
        assert all(weight.grad is None for weight in trained)


def test_states_are_put_back_once_the_gpu_has_updated_them(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paged ones are written as host memory, and an update is only queued when it returns."""
    loop = ready(quick("data.eval=none", "training.eval_every=null"))
    kept = warm_up._BeforeWarmUp(loop.step)
    state = next(iter(loop.step.engine.optimizer.state.values()))["state1"]
    kept._device = torch.device("cuda")
    # The update takes effect as the GPU is waited for.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: state.fill_(1))
    kept.put_back()
    assert not state.any()


@pytest.mark.parametrize("kind", sampled(["adamw_8bit", "adamw_torch_fused"], "adamw_8bit"))
def test_everything_is_put_back_bit_by_bit(quick, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A run ends with the weights of one that does not try the worst first, with dropout; a resumed one, too."""
    overrides = [f"optimizer.kind={kind}", "adapter.dropout=0.1", "output.save_every=2", "output.best=false",
                 "training.eval_every=null"]  # fmt: skip

    found = stopped_and_resumed(quick(*overrides, run="with"), 3)
    assert [event["step"] for event in found.events() if event["event"] == "largest_batch_fits"] == [0, 2]
    monkeypatch.setattr(run, "warm_up", lambda *args: {})
    expected = finetune.train(quick(*overrides, run="without")).run
    assert same_adapter(found, expected)
    kept = ("step", "loss", "grad_norm", "learning_rate", "tokens", "padding_share", "eval_loss")
    lines = [[{name: line.get(name) for name in kept} for line in one.metrics()] for one in (expected, found)]
    assert lines[0] == lines[1]
