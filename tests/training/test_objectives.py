"""Objectives: sums and counts that add up, and a new one in twenty lines."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import every_architecture
import pytest
import torch
from messages import refusal
from steps import assert_gradients_close, gradients, micro_batches, ready
from torch.nn.functional import cross_entropy

from finetune.choices import load_config
from finetune.data.encoded import RowLayout
from finetune.errors import ConfigError
from finetune.objectives import (
    OBJECTIVES,
    Objective,
    by_sequence,
    log_probs,
    scored,
    supervised,
    trained_rows,
    trained_tokens,
    with_balancing,
)
from finetune.training.collator import StepCollator
from finetune.training.loop import Loop

EXACT = ["quantization.kind=none", "training.precision=fp32", "data.eval=none", "training.eval_every=null",
         "training.batch_size=8", "training.micro_batch=8", "memory.checkpointing=none",
         "adapter.targets=[q_proj, down_proj]"]  # fmt: skip


def dynamic(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic fine-tuning (arXiv 2508.05629, equation 9): each token's loss is weighted by its probability."""
    scores = model(**batch, fused_lm_head=True)
    total = -(scores.log_probs.exp().detach() * scores.log_probs).sum()
    return with_balancing(total, scores.label_mask.sum(), model, scores)


DYNAMIC = Objective("tokens by their probability", dynamic, trained_tokens)


def margin(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The nats by which the second answer is likelier than the first."""
    first, second = by_sequence(scored(model, batch).log_probs, batch).view(-1, 2).unbind(1)
    kept = trained_rows(batch, 2)
    return torch.where(kept, second - first, 0).sum(), kept.sum()


MARGIN = Objective("pairs", margin, lambda batch: trained_rows(batch, 2).sum(), RowLayout(("first", "second")))


def token_losses(model: Any, batch: Any) -> torch.Tensor:
    """Cross-entropy of every trained token, from the whole logits."""
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return cross_entropy(logits[labels != -100].float(), labels[labels != -100], reduction="none")


def test_sums_are_those_of_the_whole_logits_and_counts_those_of_the_labels(quick) -> None:
    loop = ready(quick(*EXACT))
    (batch,) = micro_batches(loop, range(8), 8)
    with torch.no_grad():
        losses = token_losses(loop.step.model, batch)
        found = {loss: loss(loop.step.model, batch) for loss in (supervised, dynamic)}
    expected = {supervised: losses.sum(), dynamic: (losses * torch.exp(-losses)).sum()}
    for loss, (total, count) in found.items():
        torch.testing.assert_close(total, expected[loss], rtol=1e-5, atol=0)
        assert int(count) == int(trained_tokens(batch)) == len(losses)


def give_rows(loop: Loop, layout: RowLayout) -> None:
    """Let the rows of `loop` have this layout: segments are rows that it had, values 1, 2, ..., a teacher one token."""
    rows, segments = list(loop.steps.rows), layout.sequences
    joined = []
    for number in range(len(rows)):
        several = [rows[(number + other) % len(rows)] for other in range(segments)]
        row = {name: [one for each in several for one in each[name]] for name in ("input_ids", "labels")}
        row |= dict.fromkeys(layout.values, number + 1.0)
        if layout.teacher:
            row |= {"teacher_ids": [one + 1 for one in row["input_ids"]]}
            row |= {"teacher_log_probs": [-1.0 / (1 + one % 3) for one in row["input_ids"]]}
        joined.append({**row, "segments": [len(each["input_ids"]) for each in several]} if layout.segments else row)
    collate = StepCollator(replace(loop.steps.collate.way, layout=layout), pad_token_id=0)
    loop.steps = replace(loop.steps, rows=joined, collate=collate)


# One that scores sequences needs a model with a head for them: tests/objectives/test_rewards.py.
OF_TOKENS = {name: objective for name, objective in OBJECTIVES.items() if not objective.layout.scored}


@pytest.mark.slow
def test_the_count_and_the_gradient_of_every_objective_do_not_depend_on_the_micro_batch(
    quick, subtests: pytest.Subtests
) -> None:
    loop = ready(quick(*EXACT))
    steps = loop.steps
    for name, objective in {**OF_TOKENS, "new": DYNAMIC, "pairs": MARGIN}.items():
        with subtests.test(objective=name):
            loop.step, loop.steps = replace(loop.step, objective=objective), steps
            give_rows(loop, objective.layout)
            (whole,) = micro_batches(loop, range(8), 8)
            with torch.no_grad():
                mean = {"step_mean": torch.zeros(())} if objective.step_mean else {}
                _, count, *_ = objective.loss(loop.step.model, whole | mean)
            loss, expected = gradients(loop, [whole])
            sums = loop.step.sums
            rows, collate = [loop.steps.rows[row] for row in range(8)], loop.steps.collate
            packed = StepCollator(replace(collate.way, rows=1, tokens=4096, packed=True), pad_token_id=0)
            for parts in (micro_batches(loop, range(8), 3), packed(rows[:2]) + packed(rows[2:])):
                other, found = gradients(loop, parts)
                assert sum(int(objective.count(part)) for part in parts) == int(count)
                # Pairs subtract log-probabilities of 60 nats, between which float32 has steps of 4e-6.
                assert other == pytest.approx(loss, rel=1e-6, abs=4e-6 if objective.layout.segments else 0)
                assert_gradients_close(found, expected)
                torch.testing.assert_close(loop.step.sums, sums, rtol=1e-5, atol=1e-5)


def test_a_mixture_of_experts_adds_its_balancing_loss_to_that_of_each_token() -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(router_aux_loss_coef=0.25))
    model, of_ranks = SimpleNamespace(config=config), SimpleNamespace(module=SimpleNamespace(config=config))
    count, scores = torch.tensor(3), SimpleNamespace(aux_loss=torch.tensor(1.5))
    for one in (model, of_ranks):
        total, same = with_balancing(torch.tensor(4.0), count, one, scores)
        assert (float(total), int(same)) == (4 + 3 * 0.25 * 1.5, 3)
    for without in (SimpleNamespace(aux_loss=None), SimpleNamespace()):
        assert [float(value) for value in with_balancing(torch.tensor(4.0), count, model, without)] == [4, 3]


def test_a_loss_given_from_python_is_refused_where_it_would_see_slices_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, "python:mine", DYNAMIC)  # and so taken back

    def mine(model: Any, batch: Any) -> Any:
        """Never called."""

    with refusal(ConfigError, "`training.objective`"):
        load_config({"training": {"objective": mine}, "distributed": {"context": 2}})


def scores_of(model_type: str, dtype: torch.dtype) -> Any:
    """A model that scores labels, with logits as far apart as those of a trained one."""
    model = every_architecture.model(every_architecture.config(model_type)).to(dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    log_probs.attach(model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_logits_are_not_its_head_times_its_states_is_refused(dtype: torch.dtype) -> None:
    """Its loss would be that of another model. Scales and caps of logits are known."""
    for known in ("llama", "gemma2", "granite", "cohere", "mpt", "olmoe", "mamba", "gemma3"):
        log_probs.check(scores_of(known, dtype))
    for unknown in ("bert", "modernbert-decoder", "prophetnet", "inkling_text"):
        with refusal(ConfigError, "`model.name`"):
            log_probs.check(scores_of(unknown, dtype))
    with refusal(ConfigError, "RemBertForCausalLM", "RuntimeError"):
        log_probs.check(scores_of("rembert", dtype))
