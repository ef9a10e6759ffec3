"""The held-out loss: that of the model as it will be used, and a mean over tokens."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import in_fp32, mixture, sampled, write_rows
from steps import ready

from finetune.data.batching import MicroBatching
from finetune.data.encoded import ANSWER, MISMATCHED, RowLayout
from finetune.model.source.tokenizer import load_tokenizer
from finetune.objectives import OBJECTIVES, Objective
from finetune.training import eval_loss
from finetune.training.collator import StepCollator
from finetune.training.eval_loss import DoesNotFit, EvalLoss, HeldOut
from finetune.training.loop import Loop


@pytest.fixture
def loop(quick) -> Loop:
    return ready(quick("data.eval_share=0.5", "adapter.dropout=0.5", "quantization.kind=none"))


def test_an_evaluation_drops_nothing_and_leaves_the_model_as_it_was(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that it gathered are released."""
    model, released = loop.step.model, []
    monkeypatch.setattr(eval_loss, "release_gathered", released.append)
    loop.evaluation.sums()
    assert released == [model]
    for training in (True, False):
        model.train(training)
        first, second = loop.evaluation.sums(), loop.evaluation.sums()
        assert torch.equal(first, second)
        assert model.training is training
        assert all(module.training is training for module in model.modules())


def test_the_held_out_loss_is_the_mean_over_the_trained_tokens_of_all_rows_or_of_those_of_some_steps(
    loop: Loop,
) -> None:
    loss, tokens = loop.evaluation.sums().tolist()
    labels = [label for row in loop.evaluation.rows for label in row["labels"][1:]]
    assert tokens == sum(label != -100 for label in labels)
    assert loop.evaluation.value() == pytest.approx(loss / tokens)
    first, *others = loop.evaluation.batches()
    assert others
    loss_of_first, tokens_of_first = loop.evaluation.sums([first]).tolist()
    assert loop.evaluation.value([first]) == pytest.approx(loss_of_first / tokens_of_first)
    assert loop.evaluation.value([first]) != pytest.approx(loss / tokens)


def test_what_a_loss_needs_the_mean_of_over_all_rows_is_taken_before_it(loop: Loop) -> None:
    def first_tokens(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch["input_ids"][:, 0].double()
        return ids.sum(), torch.tensor(len(ids))

    def squares(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch["input_ids"][:, 0].double()
        return (ids - batch["step_mean"]).square().sum(), torch.tensor(len(ids))

    layout = RowLayout((ANSWER, MISMATCHED))
    rows = [
        {"input_ids": [first, 1, apart, 1], "labels": [1] * 4, "segments": [2, 2]}
        for first, apart in ((1, 10), (2, 20), (5, 60))
    ]
    collate = StepCollator(MicroBatching(2, layout=layout), 0)
    objective = Objective("", squares, layout=layout, evaluated=squares, step_mean=first_tokens)
    evaluation = replace(loop.evaluation, step=replace(loop.step, objective=objective))
    assert evaluation.value([collate(rows[:2]), collate(rows[2:])]) == pytest.approx((29**2 + 28**2 + 25**2) / 3)


def test_the_held_out_loss_is_the_quotient_of_its_rows_packed_or_padded(quick) -> None:
    config = quick("data.eval_share=0.5", "quantization.kind=none")
    loop, tokenizer, found = ready(config), load_tokenizer(config.model), {}
    for packing in (False, True):
        held_out = HeldOut(loop.step.model, tokenizer, config.changed({"data.packing": packing}))
        loss, rows = held_out.loss(loop.evaluation.rows)
        assert rows.shape == (len(loop.evaluation.rows), 2)
        assert loss == pytest.approx(float(rows[:, 0].sum() / rows[:, 1].sum()))
        found[packing] = sorted(rows.tolist())
    assert sorted(count for _, count in found[False]) == sorted(loop.evaluation.rows["trained"])
    assert found[True] == [pytest.approx(row, rel=1e-5) for row in found[False]]


# What a model without an update has on any rows, by the formula of each loss; None where it depends on the rows.
UNTRAINED = {
    "supervised": None, "dpo": math.log(2), "robust_dpo": math.log(2), "ipo": 25.0, "simpo": None, "orpo": None,
    "kto": 0.5, "reward": math.log(2), "classification": math.log(2), "distillation": None,
}  # fmt: skip


def rows_of(objective: str) -> list[dict[str, Any]]:
    """Rows of different lengths."""
    layout = OBJECTIVES[objective].layout
    made: list[dict[str, Any]] = []
    for n in range(12):
        prompt, answer = f"To {n}{' and on' * (n % 5)}.", "yes " * (1 + n % 4)
        if layout.teacher:
            ids = [10 + n, *range(20, 24 + n % 3)]
            likely = [[one + 1, one + 2] for one in ids]
            made.append(
                {"input_ids": ids, "labels": ids, "teacher_ids": likely, "teacher_logprobs": [[-1, -2]] * len(ids)}
            )
        elif objective == "classification":
            made.append({"text": prompt + answer, "label": "ab"[n % 2]})
        elif "chosen" in layout.segments:
            made.append({"prompt": prompt, "chosen": answer, "rejected": "no " * (1 + n % 3)})
        else:
            made.append({"prompt": prompt, "completion": answer, **({"label": n % 3 > 0} if layout.segments else {})})
    return made


@pytest.mark.parametrize("objective", sampled(OBJECTIVES, "supervised", "kto", "classification", "distillation"))
def test_the_held_out_loss_of_a_mixture_is_that_of_its_rows_alone_however_they_are_batched(
    quick, tmp_path: Path, objective: str
) -> None:
    """Without the load-balancing loss, which is taken over micro-batches, and which training adds."""
    job = in_fp32(quick, write_rows(tmp_path / "rows.jsonl", rows_of(objective)), f"training.objective={objective}")
    settings = ["data.eval_share=0.5", "training.batch_size=4", "training.micro_batch=4"]
    settings += ["data.teacher_tokens=2"] if objective == "distillation" else []
    settings += ["preference.reference=in_step"] if OBJECTIVES[objective].reference else []
    loop = ready(job(*settings, *mixture(tmp_path / "mixture")))
    config = loop.step.model.config
    loss = loop.evaluation.value()
    assert config.output_router_logits, "training goes on with it"
    collate = loop.evaluation.collate
    for way in (replace(collate.way, rows=1), replace(collate.way, packed=True)):
        other = StepCollator(way, collate._pad_token_id)
        assert replace(loop.evaluation, collate=other).value() == pytest.approx(loss, rel=2e-6)
    config.router_aux_loss_coef = 0.0
    assert loop.evaluation.value() == loss
    if UNTRAINED[objective] is None:
        return
    with torch.no_grad():
        for name, weight in loop.step.model.named_parameters():
            if "lora_B" in name or "score" in name:
                weight.zero_()
    config.router_aux_loss_coef = 0.5
    assert loop.evaluation.value() == pytest.approx(UNTRAINED[objective], rel=1e-6)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_row_that_does_not_fit_costs_one_process_its_loss_and_several_the_run(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """That cannot catch up: the others wait for this one's sums."""
    inputs, skipped = {"input_ids": torch.zeros(1, 9), "attention_mask": torch.ones(1, 9, dtype=torch.int64)}, []

    def exhausted(self: EvalLoss, *arguments: object) -> torch.Tensor:
        raise DoesNotFit(inputs, "no memory left")

    monkeypatch.setattr(EvalLoss, "sums", exhausted)
    report = SimpleNamespace(skip=skipped.append, not_repeatable=lambda error, inputs: error)
    monkeypatch.setattr(loop.evaluation, "report", report)
    monkeypatch.setattr(loop.step.engine, "repeatable", processes == 1)
    if processes == 1:
        assert loop.evaluation.value() is None
        assert skipped == [inputs]
    else:
        with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
            loop.evaluation.value()
        assert not skipped
