"""The prompt of packed answers, computed once: as if each had its own."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from jobs import BF16, EIGHT, in_fp32, mixture, sampled, write_rows
from objective_jobs import PLAIN
from steps import (
    assert_gradients_close,
    assert_split_with_the_same_mean,
    forecast_that_held,
    gradients,
    micro_batches,
    ready,
)

import finetune
from finetune.data.batching import MicroBatching, Sizes, chosen_rows, worst_batches
from finetune.data.encoded import IGNORE, Encoded, Segment
from finetune.model.attention import packing
from finetune.model.probes import packed_rows
from finetune.objectives import log_probs, supervised
from finetune.objectives.preference import PAIRS
from finetune.storage.rundir import RunDirectory
from finetune.training import largest_batch
from finetune.training.collator import Inputs, StepCollator, cannot_share, first_row, halved
from finetune.training.loop import Loop


def pairs(number: int) -> list[dict[str, Any]]:
    """Rows whose prompts are as long as both answers, or longer, the shortest of one token."""
    return [
        {
            "prompt": f"To {n} " + "and so on " * (n % 6),
            "chosen": "yes " * (1 + n % 5),
            "rejected": "no " * (3 + 2 * (n % 4)),
        }
        for n in range(number)
    ]


@pytest.fixture
def job(tmp_path: Path, quick):
    """A function from overrides to a job on packed pairs in fp32, eight a step."""
    file = write_rows(tmp_path / "pairs.jsonl", pairs(24))
    settings = ["training.objective=dpo", "preference.reference=in_step", "data.packing=true", "data.max_length=64"]
    return in_fp32(quick, file, *settings, *EIGHT)


def collated(loop: Loop, rows: list[int], *, shares: bool = True, packed: bool = True) -> Inputs:
    """Rows in one micro-batch, whose prompts are computed once or for each answer."""
    way = replace(loop.steps.collate.way, shares=shares, packed=packed)
    return StepCollator(way, 0).micro_batch([loop.steps.rows[row] for row in rows])


@pytest.mark.parametrize(
    ("segments", "shared"),
    [
        ([([1, 2, 3, 4], 3), ([1, 2, 3, 5, 6], 3)], 2),
        ([([1, 2, 3, 4], 2), ([1, 2, 3, 5, 6], 3)], 1),  # a token that is trained in one of them is not shared
        ([([1, 2, 3, 4], 3), ([1, 9, 3, 5, 6], 3)], 0),
        ([([9, 2, 3], 2), ([1, 2, 3], 2)], 0),
        ([([1, 2, 3], 2), ([1, 2, 3, 4], 3), ([1, 2, 5], 2)], 1),
        ([([1, 2, 3, 4], 3)], 0),
    ],
)
def test_segments_share_what_is_alike_and_untrained_but_for_the_token_that_predicts_the_answer(
    segments: list[tuple[list[int], int]], shared: int
) -> None:
    row = Encoded(tuple(Segment(ids, [IGNORE] * prompt + ids[prompt:]) for ids, prompt in segments))
    assert row.shared == shared


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        ["quantization.kind=nf4", "kernels.fused=on"],
        ["preference.nll_weight=0.5", "memory.checkpointing=keep-both"],
    ],
)
def test_loss_and_gradients_of_pairs_are_those_of_answers_with_prompts_of_their_own(job, way: list[str]) -> None:
    loop = ready(job(*way))
    rows = list(range(8))
    shared, packed = (collated(loop, rows, shares=shares) for shares in (True, False))
    padded = collated(loop, rows, shares=False, packed=False)
    assert shared["input_ids"].numel() < 0.8 * packed["input_ids"].numel()
    assert first_row(shared) == first_row(packed) == first_row(padded)
    assert [*itertools.chain(*first_row(shared))] == loop.steps.rows[0]["input_ids"]
    found_loss, found = gradients(loop, [shared])
    for inputs in (packed, padded):
        loss, expected = gradients(loop, [inputs])
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_gradients_close(found, expected)


def test_a_mixture_of_experts_balances_the_tokens_of_shared_prompts_as_often_as_there_are_answers(
    job, tmp_path: Path
) -> None:
    loop = ready(job(*mixture(tmp_path / "mixture")))
    rows = list(range(8))
    found_loss, found = gradients(loop, [collated(loop, rows)])
    for packed in (True, False):
        loss, expected = gradients(loop, [collated(loop, rows, shares=False, packed=packed)])
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_gradients_close(found, expected)


@pytest.mark.slow
def test_a_step_is_collated_to_shared_prompts_and_split_between_rows(job) -> None:
    loop = ready(job("model.name=builtin:tiny-llama"))
    assert "key_parts" in micro_batches(loop, range(8), 8)[0]
    whole = collated(loop, list(range(8)))
    halves = halved(whole)
    assert halves is not None
    for half, rows in zip(halves, (range(4), range(4, 8)), strict=True):
        again = collated(loop, list(rows))
        assert half.keys() == again.keys()
        for name, value in half.items():
            same = torch.equal(value, again[name]) if isinstance(value, torch.Tensor) else value == again[name]
            assert same, name
    assert_split_with_the_same_mean(loop, whole, "backward")


@pytest.mark.slow
@pytest.mark.parametrize("reference", sampled(["in_step", "cached"], "cached"))
def test_a_run_takes_the_memory_of_its_forecast_and_learns_what_padded_pairs_teach(
    job, tmp_path: Path, reference: str
) -> None:
    keys = [
        "training.max_steps=2", "training.group_by_length=false", *PLAIN,
        f"preference.reference={reference}",
    ]  # fmt: skip
    finetune.train(job(*keys, "memory.check=warn", "training.micro_batch=2"))
    finetune.train(job(*keys, "data.packing=false", run="padded"))
    packed, padded = (RunDirectory(tmp_path / name) for name in ("run", "padded"))
    for own, other in zip(packed.metrics(), padded.metrics(), strict=True):
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert own["tokens"] < 0.85 * other["tokens"], "what is computed"
    forecast = forecast_that_held(packed)
    assert sum(forecast["batch"]["shared"])
    if reference == "cached":
        assert "reference" in [each["phase"] for each in forecast["differences"]]
        assert forecast["reference"]["rows"] == 24
        seconds, in_steps = (forecast["reference"][name] for name in ("seconds", "in_step_seconds"))
        assert seconds / in_steps == pytest.approx(24 / 16, rel=0.1), "two steps have 16 rows"


def test_the_rows_that_share_most_are_a_largest_micro_batch_beside_the_longest() -> None:
    way = MicroBatching(1, 60, packed=True, layout=PAIRS, shares=True)
    segments, shared = [[10, 40], [18, 20], [18, 20], [30, 20]], [2, 15, 15, 5]
    computed = [way.computed(*each) for each in zip(segments, shared, strict=True)]
    sizes = Sizes([*map(sum, computed)], [4] * 4, computed, shared)
    longest, most = worst_batches(sizes, way, 4, "here")
    assert (longest.by_row[0], longest.shared[0]) == ((10, 38), 2)
    assert (most.by_row, most.shared) == ([(18, 5), (18, 5), (1, 1)], (15, 15, 1))
    assert longest.positions == most.positions == 48
    assert most.keys == 48 + 31
    assert chosen_rows(sizes, longest)[0] == 0
    assert chosen_rows(sizes, most) == [1, 2, 3]


def test_where_a_step_has_few_rows_those_with_the_most_keys_are_a_largest_micro_batch() -> None:
    """The rows of which the largest part is shared are short; the longest share nothing."""
    way = MicroBatching(1, 10_000, packed=True, layout=PAIRS, shares=True)
    segments, shared = [[500, 500], [950, 960], [8, 8]] * 2, [0, 940, 7] * 2
    computed = [way.computed(*each) for each in zip(segments, shared, strict=True)]
    sizes = Sizes([*map(sum, computed)], [4] * 6, computed, shared)
    longest, most = worst_batches(sizes, way, 2, "here")
    assert (longest.positions, longest.keys) == (2000, 2000)
    assert (most.positions, most.keys) == (1940, 2 * (950 + 960))
    assert chosen_rows(sizes, most) == [1, 4]


def test_labels_that_a_larger_batch_may_have_are_not_put_on_what_is_computed_elsewhere(job) -> None:
    ids = [5, 6, 7, 8]
    row = {"input_ids": [*ids, *ids], "labels": [IGNORE] * 8, "segments": [4, 4], "shared": 2}
    [labelled] = largest_batch.labelled([row], 8)
    assert labelled["labels"] == [IGNORE, 6, 7, 8, IGNORE, IGNORE, IGNORE, 8]


@pytest.mark.parametrize(
    ("way", "why"),
    [("kernels.compile=layers", "compiled anew"), ("model.attention=flex", "flex_attention has masks of its own")],
)
def test_the_reason_why_prompts_are_not_shared_is_noted(way: str, why: str) -> None:
    for config, name, reason in ((BF16.changed(dict([way.split("=")])), "smollm3", why), (BF16, "llama4", "in chunks")):
        found = cannot_share(config.training, config.kernels, config.model.attention, families.architecture(name))
        assert reason in str(found)


def test_a_model_that_fails_the_proof_computes_each_prompt(job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "whole", lambda parts, tokens, dim: tokens)
    loop = ready(job())
    assert not loop.steps.collate.way.shares
    assert "key_parts" not in micro_batches(loop, range(8), 8)[0]


@pytest.mark.parametrize(
    "model_type", sampled(["deepseek_v3", "olmo3", "mistral3", "minimax_m2", "gemma4"], "deepseek_v3", "gemma4")
)
def test_a_step_of_this_years_architectures_is_that_of_whole_sequences(model_type: str) -> None:
    """With latent attention, windows, experts, and keys of earlier layers."""
    model = families.adapted(families.architecture(model_type), packed=True, recomputed=False)
    assert packed_rows.prove_shared(model) is None
    rows = []
    for row in families.rows():
        ids, prompt = row["input_ids"], len(row["input_ids"]) // 3
        other = [*ids[:prompt], *reversed(ids[prompt:-3])]
        labels = [*row["labels"], *[IGNORE] * prompt, *other[prompt:]]
        lengths = [len(ids), len(other)]
        rows.append({"input_ids": [*ids, *other], "labels": labels, "segments": lengths, "shared": prompt - 1})
    results = []
    for shares in (True, False):
        batch = StepCollator(MicroBatching(1, 1000, packed=True, layout=PAIRS, shares=shares), 3).micro_batch(rows)
        del batch["row"]
        model.zero_grad(set_to_none=True)
        with packing.known(batch), log_probs.tiles(64, fused=True):
            total, count = supervised(model, batch)
            (total / count).backward()
        grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        results.append((float(total.detach()), grads))
    (loss, found), (expected_loss, expected) = results
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_gradients_close(found, expected)
