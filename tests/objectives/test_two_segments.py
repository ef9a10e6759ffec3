"""An objective on pairs, which touches a format, an objective and two config keys: the rest knows rows in segments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import EIGHT, in_fp32, metric, same_adapter, sampled, write_rows
from messages import refusal
from steps import (
    assert_gradients_close,
    assert_split_with_the_same_mean,
    forecast_that_held,
    gradients,
    micro_batches,
    ready,
    stopped_and_resumed,
)
from torch.nn.functional import logsigmoid

import finetune
from finetune import settings
from finetune.data import fields as row
from finetune.data.encoded import RowLayout
from finetune.data.examples import Completion, Several
from finetune.data.formats import FORMATS, RowFormat
from finetune.data.prepare import prepare
from finetune.errors import ConfigError, DataError
from finetune.model.source.tokenizer import load_tokenizer
from finetune.objectives import OBJECTIVES, Objective, by_sequence, contract, scored, trained_rows
from finetune.training.collator import row_count

# -- what such an objective consists of -------------------------------------------------------------------------------

BETA = 0.5
LAYOUT = RowLayout(("chosen", "rejected"), ("margin",))


def read_pair(fields: row.Fields) -> Several:
    """`prompt`, `chosen` and `rejected` as text, and the `margin` that the chosen answer should win by."""
    prompt = row.text(fields, "prompt")
    answers = {name: Completion(prompt, row.text(fields, name)) for name in LAYOUT.segments}
    return Several(answers, {"margin": float(fields.get("margin", 0))})


def preference(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """-log sigmoid of how much more probable the chosen answer is than the rejected one, less the margin."""
    chosen, rejected = by_sequence(scored(model, batch).log_probs, batch).view(-1, 2).unbind(1)
    kept = trained_rows(batch, 2)
    return torch.where(kept, -logsigmoid(BETA * (chosen - rejected) - batch["margin"]), 0).sum(), kept.sum()


def count(batch: Any) -> torch.Tensor:
    return trained_rows(batch, 2).sum()


# -- what it gets for that --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = RowFormat("pairs of answers", ("prompt", "chosen", "rejected"), read_pair, ("margin",))
    monkeypatch.setitem(FORMATS, "pairs", pairs)
    monkeypatch.setitem(OBJECTIVES, "preference", Objective("pairs", preference, count, LAYOUT, preference))
    monkeypatch.setitem(settings.CHOICES, "data.format", {**settings.CHOICES["data.format"], **FORMATS})


def pairs(number: int) -> list[dict[str, Any]]:
    """Rows with answers of different lengths."""
    return [
        {
            "prompt": f"To {n}. ",
            "chosen": "yes " * (1 + n % 5),
            "rejected": "no " * (3 + 2 * (n % 5)),
            "margin": n / 9 + 1,
        }
        for n in range(number)
    ]


@pytest.fixture
def job(tmp_path: Path, quick):
    """A function from overrides to a job on pairs, in fp32."""
    file = write_rows(tmp_path / "pairs.jsonl", pairs(24))
    return in_fp32(quick, file, "data.format=pairs", "training.objective=preference")


@torch.no_grad()
def reference(model: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    """The mean loss of pairs, each answer by itself from the whole logits."""
    losses = []
    for each in rows:
        sums = []
        ids, labels = torch.tensor(each["input_ids"]), torch.tensor(each["labels"])
        for own, wanted in zip(ids.split(each["segments"]), labels.split(each["segments"]), strict=True):
            log_probs = model(input_ids=own[None]).logits[0, :-1].float().log_softmax(-1)
            sums.append(log_probs.gather(1, own[1:, None])[wanted[1:] != -100].sum())
        losses.append(-logsigmoid(BETA * (sums[0] - sums[1]) - each["margin"]))
    return torch.stack(losses).mean()


@pytest.mark.slow
def test_the_gradient_is_that_of_the_formula_however_the_step_is_split(job) -> None:
    loop = ready(job(*EIGHT, "kernels.fused=off"))
    (whole,) = micro_batches(loop, range(8), 8)
    assert whole["row"].tolist() == [number for number in range(8) for _ in range(2)]
    loss, expected = gradients(loop, [whole])
    assert loss == pytest.approx(float(reference(loop.step.model, [loop.steps.rows[n] for n in range(8)])), rel=1e-5)
    for size in (4, 3, 1):
        parts = micro_batches(loop, range(8), size)
        assert all(len(part["input_ids"]) == 2 * row_count(part) for part in parts)
        other, found = gradients(loop, parts)
        assert other == pytest.approx(loss, rel=1e-6)
        assert_gradients_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["data.packing=true", "training.micro_batch_tokens=64"])
def test_packed_rows_and_rows_by_tokens_have_the_same_gradient(job, way: str) -> None:
    plain, other = ready(job(*EIGHT)), ready(job(*EIGHT, "data.max_length=64", way, run="other"))
    loss, expected = gradients(plain, micro_batches(plain, range(8), 8))
    for size in (8, 2):
        parts = micro_batches(other, range(8), size)
        again, found = gradients(other, parts)
        assert again == pytest.approx(loss, rel=1e-5)
        assert_gradients_close(found, expected)
        assert sum(map(row_count, parts)) == 8


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["false", "true"])
def test_a_micro_batch_that_does_not_fit_is_split_between_rows(job, packing: str) -> None:
    loop = ready(job(*EIGHT, "model.name=builtin:tiny-llama", f"data.packing={packing}", "data.max_length=64"))
    (whole,) = micro_batches(loop, range(8), 8)
    assert_split_with_the_same_mean(loop, whole, "forward")


def test_a_row_without_labels_adds_nothing(job) -> None:
    loop = ready(job(*EIGHT))
    idle = loop.steps.collate.idle()
    assert sorted(idle) == sorted(micro_batches(loop, range(2), 2)[0])
    with torch.no_grad():
        total, counted = preference(loop.step.model, idle)
    assert (float(total), int(counted)) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("packing", sampled(["false", "true"], "false"))
def test_a_run_learns_the_pairs_and_resumes_to_the_same_bits(job, tmp_path: Path, packing: str) -> None:
    keys = ["training.max_steps=6", "training.eval_every=3", "memory.check=warn",
            f"data.packing={packing}", "data.max_length=64", "training.learning_rate=0.01"]  # fmt: skip
    whole = finetune.train(job(*keys, run="whole")).run
    losses, held_out = metric(whole, "loss"), metric(whole, "eval_loss")
    assert losses[-1] < losses[0]
    assert held_out[-1] < held_out[0], "the objective's own loss, by pair"
    assert forecast_that_held(whole)["batch"]["segments"] == 2
    if packing == "true":  # of padded rows test_steps.py shows it
        halted = stopped_and_resumed(job(*keys, "memory.check=off", "output.save_every=3", run="halted"), 4)
        assert same_adapter(whole, halted)


def test_the_look_at_the_data_has_both_answers(job, call, tmp_path: Path) -> None:
    config = job()
    (tmp_path / "job.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    code, out, err = call("data", tmp_path / "job.yaml", "--json")
    assert code == 0, err
    found = json.loads(out)
    first, second = found["samples"][:2]
    assert [first["place"].rsplit(", ")[-1], second["place"].rsplit(", ")[-1]] == ["chosen", "rejected"]
    assert "".join(piece["text"] for piece in second["pieces"] if piece["trained"]).startswith("no ")
    assert sum(found["train"]["segments"].values()) == found["train"]["tokens"]
    assert found["worst_batch"]["segments"] == 2


def test_rows_that_do_not_suit_the_objective_are_refused(job, tmp_path: Path) -> None:
    with refusal(ConfigError, "`preference`", "`chosen`", "`rejected`", "`margin`"):
        contract.check_rows("preference", RowLayout(), 1)
    with refusal(ConfigError, "distributed.context"):
        contract.check_rows("preference", LAYOUT, 2)
    with refusal(ConfigError, "trains rows of one sequence"):
        finetune.train(job("training.objective=supervised"))
    with refusal(ConfigError, "trains rows of one sequence"):
        finetune.plan(job("training.objective=supervised"))


def prepared(job, *overrides: str) -> Any:
    config = job(*overrides)
    return prepare(config.data, load_tokenizer(config.model, config.data))


def test_a_pair_with_one_answer_too_long_is_dropped_and_never_cut(job) -> None:
    whole = prepared(job, "data.eval=none")
    longest = whole.train_counts.longest
    assert longest == max(max(each["segments"]) for each in whole.train)
    shorter = [f"data.max_length={longest - 1}", "data.eval=none"]
    found = prepared(job, *shorter, "data.too_long=drop")
    assert 0 < found.train_counts.dropped == len(whole.train) - len(found.train)
    assert all(max(each["segments"]) < longest for each in found.train)
    for policy in ("truncate", "split", "error"):
        with refusal(DataError, "one of several segments is not cut alone"):
            prepared(job, *shorter, f"data.too_long={policy}")


def test_rows_of_one_sequence_and_of_two_are_not_mixed(job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def either(fields: row.Fields) -> Any:
        return read_pair(fields) if fields["margin"] else Completion("a", "b")

    monkeypatch.setitem(FORMATS, "pairs", RowFormat("either", ("prompt",), either))
    rows = pairs(3)
    rows[1]["margin"] = 0
    write_rows(tmp_path / "pairs.jsonl", rows)
    with refusal(DataError, "pairs.jsonl:2"):
        prepared(job, "data.eval=none")
