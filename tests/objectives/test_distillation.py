"""Distillation: rows with a teacher's log-probabilities, the divergence from them, and that it is trained on."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import EIGHT, in_fp32, metric, sampled, write_rows
from messages import refusal
from objective_jobs import PLAIN, eight_rows, whole_and_split
from steps import assert_gradients_close, forecast_that_held, gradients, micro_batches, ready
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

import finetune
from finetune.data.prepare import prepare
from finetune.errors import DataError
from finetune.model.source.tokenizer import load_tokenizer
from finetune.objectives.distillation import divergence
from finetune.storage.rundir import RunDirectory

K = 4


def rows(number: int) -> list[dict[str, Any]]:
    """Random tokens, of which the first two are a prompt, and three or four likely ones for each of the others."""
    source = random.Random(0)
    made = []
    for at in range(number):
        ids = [source.randrange(10, 300) for _ in range(5 + at % 7)]
        likely = [[], [], *(source.sample(range(10, 300), 3 + at % 2) for _ in ids[2:])]
        log_probs = [[math.log(each) for each in (0.5, 0.2, 0.1, 0.05)[: len(own)]] for own in likely]
        labels = [-100, -100, *ids[2:]]
        made.append({"input_ids": ids, "labels": labels, "teacher_ids": likely, "teacher_logprobs": log_probs})
    return made


@pytest.fixture
def job(tmp_path: Path, quick):
    """A function from overrides to a distillation of random rows, in fp32."""
    file = write_rows(tmp_path / "rows.jsonl", rows(24))
    return in_fp32(quick, file, "training.objective=distillation", f"data.teacher_tokens={K}", "data.max_length=64")


# -- the divergence ---------------------------------------------------------------------------------------------------


def test_the_divergence_has_the_values_of_its_formula() -> None:
    def of(teacher: list[float], model: list[float]) -> float:
        return float(divergence(*(torch.tensor([each]).log() for each in (teacher, model))))

    ln2 = math.log(2)
    assert of([0.5, 0.25], [0.25, 0.25]) == pytest.approx(0.5 * ln2 - 0.25 * ln2, abs=1e-6), "of the rest as well"
    assert of([0.5, 0.5], [0.25, 0.25]) == pytest.approx(ln2, abs=1e-6), "nothing is left"
    assert of([0.5, 0.0], [0.25, 0.3]) == pytest.approx(0.5 * ln2 + 0.5 * math.log(0.5 / 0.75), abs=1e-6), "no token"
    for same in ([0.5, 0.25], [0.9, 0.1], [1e-4, 1e-5], [0.7, 0.0]):
        assert of(same, same) == pytest.approx(0, abs=1e-6)


def by_whole_logits(model: Any, content: list[dict[str, Any]], nll_weight: float) -> torch.Tensor:
    """The summed loss of prepared rows from all logits, over a vocabulary in which the other tokens are one."""
    total = torch.zeros(())
    for row in content:
        ids = torch.tensor([row["input_ids"]])
        likely = model(input_ids=ids).logits[0].float().softmax(-1)
        teacher_ids, log_probs = (torch.tensor(row[name]).view(-1, K) for name in ("teacher_ids", "teacher_log_probs"))
        for at, label in enumerate(row["labels"]):
            if label == -100 or not at:
                continue
            there = log_probs[at].exp() > 0
            teacher, own = log_probs[at][there].exp(), likely[at - 1][teacher_ids[at][there].long()]
            teacher, own = (torch.cat([each, 1 - each.sum(0, keepdim=True)]) for each in (teacher, own))
            total = total + (teacher * (teacher / own).log()).sum() - nll_weight * likely[at - 1, label].log()
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ["preference.nll_weight=0.5", "data.packing=true"], ["kernels.fused=off", "memory.loss_tokens=8"],
        ["adapter.kind=none", "training.learning_rate=1e-4"],
    ],
    ids=["packed with labels", "tiles", "whole"],
)  # fmt: skip
def test_loss_and_gradient_are_those_of_the_whole_logits_however_the_step_is_split(job, keys: list[str]) -> None:
    loop = ready(job(*EIGHT, *keys))
    content = eight_rows(loop)
    loss, found = whole_and_split(loop, rel=1e-5)
    model, weight = loop.step.model, 0.5 if "nll" in keys[0] else 0
    total = by_whole_logits(model, content, weight) / sum(row["trained"] for row in content)
    total.backward()
    expected = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    assert loss == pytest.approx(float(total.detach()), rel=1e-5)
    assert_gradients_close(found, expected)


def test_a_head_that_scales_and_caps_its_logits_has_the_same_divergence(job, tmp_path: Path) -> None:
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=2048, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, intermediate_size=64, eos_token_id=2, pad_token_id=3, final_logit_softcapping=0.5,
            initializer_range=0.2,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path / "capped")
    loop = ready(job(*EIGHT, f"model.name={tmp_path / 'capped'}", "model.tokenizer=builtin:tiny-llama"))
    content = eight_rows(loop)
    loss, _ = gradients(loop, micro_batches(loop, range(8), 8))
    with torch.no_grad():
        total = by_whole_logits(loop.step.model, content, 0)
    assert loss == pytest.approx(float(total) / sum(row["trained"] for row in content), rel=1e-5)


def test_a_teacher_that_is_the_base_has_nothing_to_teach(job, tmp_path: Path) -> None:
    config = job()
    base = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32).eval()
    content = rows(24)
    for row in content:
        with torch.no_grad():
            likely = base(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1).topk(K)
        row["teacher_ids"] = [[], *likely.indices.tolist()[:-1]]
        row["teacher_logprobs"] = [[], *likely.values.tolist()[:-1]]
    finetune.train(job(f"data.train={write_rows(tmp_path / 'own.jsonl', content)}", "training.max_steps=1"))
    first, *_ = metric(RunDirectory(tmp_path / "run"), "eval_loss")
    assert first == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("packing", sampled(["false", "true"], "false"))
def test_a_teacher_is_learnt_from_as_forecast(job, packing: str) -> None:
    keys = ["training.max_steps=6", "training.eval_every=3", "training.learning_rate=0.01", *PLAIN]
    run = finetune.train(job(*keys, "memory.check=warn", f"data.packing={packing}")).run
    evaluations = metric(run, "eval_loss")
    assert evaluations[-1] < evaluations[0]
    assert all(value > 0 for value in metric(run, "cross_entropy"))
    forecast_that_held(run)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_of_vllm_are_read_as_lists_are_and_the_likeliest_tokens_are_kept(job, tmp_path: Path) -> None:
    content = rows(4)
    of_vllm = [
        {
            **{name: row[name] for name in ("input_ids", "labels")},
            "prompt_logprobs": [
                {str(token): {"logprob": value, "rank": 1} for token, value in zip(ids, values, strict=True)} or None
                for ids, values in zip(row["teacher_ids"], row["teacher_logprobs"], strict=True)
            ],
        }
        for row in content
    ]
    found = []
    for name, each in (("lists", content), ("vllm", of_vllm)):
        config = job(
            f"data.train={write_rows(tmp_path / f'{name}.jsonl', each)}", "data.eval=none", "data.teacher_tokens=2"
        )
        found.append(prepare(config.data, load_tokenizer(config.model, config.data)).train)
    for column in ("input_ids", "labels", "teacher_ids", "teacher_log_probs"):
        assert found[0][column][:] == found[1][column][:]
    for row, ids, log_probs in zip(
        content, *(found[0][f"teacher_{name}"] for name in ("ids", "log_probs")), strict=True
    ):
        assert ids == [one for own in row["teacher_ids"] for one in (own[:2] if own else [0, 0])]
        assert log_probs[:4] == [-math.inf] * 4
        assert log_probs[4:6] == pytest.approx([math.log(0.5), math.log(0.2)])


@pytest.mark.parametrize("policy", ["truncate", "split"])
def test_a_row_that_is_cut_keeps_the_teacher_of_each_token(job, tmp_path: Path, policy: str) -> None:
    ids = list(range(20, 40))
    row = {"input_ids": ids, "teacher_ids": [[id + 100] for id in ids], "teacher_logprobs": [[-1.0]] * len(ids)}
    config = job(
        f"data.train={write_rows(tmp_path / 'long.jsonl', [row])}", "data.eval=none", "data.max_length=8",
        "data.teacher_tokens=1", f"data.too_long={policy}",
    )  # fmt: skip
    pieces = prepare(config.data, load_tokenizer(config.model, config.data)).train
    assert len(pieces) == (1 if policy == "truncate" else 3)
    for piece in pieces:
        assert piece["teacher_ids"] == [id + 100 for id in piece["input_ids"]]


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("`teacher_ids`", {"teacher_ids": None}),
        ("`teacher_logprobs` has 4", {"teacher_logprobs": [[-1.0]] * 4}),
        ("`teacher_ids[4]`", {"teacher_ids": [[], [], [20], [20], []]}),
        ("[4]", {"teacher_ids": [[], [], [20], [20], [20.5]]}),
        ("[4]", {"teacher_ids": [[], [], [20], [20], [-1]]}),
        ("1000000", {"teacher_ids": [[], [], [20], [20], [10**6]]}),
        ("[4]", {"teacher_logprobs": [[], [], [-1.0], [-1.0], [0.5]]}),
        ("[4]", {"teacher_logprobs": [[], [], [-1.0], [-1.0], [True]]}),
        ("7", {"teacher_ids": [[], [], [2], [2], [7, 7]], "teacher_logprobs": [[], [], [-1], [-1], [-2, -2]]}),
        ("add up", {"teacher_ids": [[], [], [2], [2], [7, 8]], "teacher_logprobs": [[], [], [-1], [-1], [-0.1, 0]]}),
        ("token 1", {"labels": [5, 6, 7, 8, 9]}),
        ("`prompt_logprobs[1]`", {"prompt_logprobs": [None, 3, None, None, None]}),
    ],
)
def test_a_row_that_is_wrong_is_named(job, tmp_path: Path, key: str, change: dict[str, Any]) -> None:
    row = {
        "input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, 9], "teacher_ids": [[], [], [20], [20], [20]],
        "teacher_logprobs": [[], [], [-1.0], [-1.0], [-1.0]],
    }  # fmt: skip
    file = write_rows(tmp_path / "rows.jsonl", [{**row, **change}])
    config = job(f"data.train={file}", "data.eval=none")
    with refusal(DataError, "rows.jsonl:1", key):
        prepare(config.data, load_tokenizer(config.model, config.data))
