"""The learning rate that a config leaves to the evidence, and what the header says about a job by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import TINY
from messages import refusal

import finetune
from finetune.choices import load_config
from finetune.config import AdapterSection, Config
from finetune.data.counts import Counts
from finetune.data.encoded import ONE_SEQUENCE
from finetune.errors import ConfigError
from finetune.objectives import OBJECTIVES, layout_of
from finetune.resolve import resolve
from finetune.training import learning_rate


def of_width(width: int) -> Any:
    return SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=width))


@pytest.mark.parametrize(
    ("settings", "width", "rate"),
    [
        ([], 4096, 2e-4),
        ([], 8192, 2e-4),
        (["training.batch_size=64"], 4096, 4e-4),
        (["training.batch_size=4"], 4096, 1e-4),
        ([], 500, 9.8e-4),  # 2e-4 * 4 ** 1.15
        (["training.objective=dpo"], 4096, 1e-5),
        (["training.objective=kto"], 4096, 5e-6),
        (["training.objective=reward"], 4096, 1e-4),
        (["optimizer.kind=lion_8bit"], 4096, 4e-5),
        (["adapter.kind=none", "quantization.kind=none"], 4096, 2e-5),
    ],
)
def test_the_rate_follows_batch_width_objective_and_optimizer(settings: list[str], width: int, rate: float) -> None:
    config = load_config({}, settings)
    assert learning_rate.best_rate(config, of_width(width))[0] == rate
    note = learning_rate.evidence(config, of_width(width))
    assert note
    assert note.startswith(f"training.learning_rate: {rate:g}, ")


def test_a_given_rate_stays_and_one_that_the_evidence_calls_bad_is_noted() -> None:
    for rate, said in [("1e-3", None), ("5e-5", None), ("2e-5", "far below 0.0002"), ("3e-3", "far above 0.0002")]:
        note = learning_rate.evidence(load_config({}, [f"training.learning_rate={rate}"]), of_width(4096))
        assert said in note if note and said else note is said
    assert learning_rate.evidence(load_config({}, ["training.learning_rate=3e-2"]), of_width(192)) is None


def test_no_rate_is_guessed_for_an_optimizer_that_no_sweep_tells_of() -> None:
    with refusal(ConfigError, "`sgd`"):
        resolve(load_config({}, ["optimizer.kind=sgd"]), until="machine")
    with refusal(ConfigError, "`sgd`"):
        finetune.fit(load_config(TINY, ["optimizer.kind=sgd", "training.learning_rate=auto"]), "24GiB")
    with refusal(ConfigError, "`sgd`"):
        finetune.sweep({"data": {"train": "no rows"}}, {"optimizer.kind": ["adamw_torch_fused", "sgd"]})
    given = ["optimizer.kind=sgd", "training.learning_rate=0.1"]
    assert learning_rate.evidence(load_config({}, given), of_width(4096)) is None


def test_adapters_on_attention_alone_are_noted() -> None:
    for targets, told in [("[q_proj, v_proj]", True), ("[q_proj, down_proj]", False), ("all-linear", False)]:
        settings = ["training.learning_rate=2e-4", f"adapter.targets={targets}"]
        note = learning_rate.evidence(load_config({}, settings), of_width(4096))
        assert bool(note) == told


def test_the_capacity_names_a_rank_that_has_a_weight_for_each_token() -> None:
    model, adapter = torch.nn.Linear(100, 10, bias=False), AdapterSection()
    told = learning_rate.capacity(adapter, model, Counts(rows=4, trained_tokens=500), ONE_SEQUENCE)
    assert told == "2 adapter weights for each trained token of the rows"
    told = learning_rate.capacity(adapter, model, Counts(rows=4, trained_tokens=4000), ONE_SEQUENCE)
    assert "adapter.rank=64 has 1" in str(told)
    without = AdapterSection(kind="none")
    assert learning_rate.capacity(without, model, Counts(rows=4, trained_tokens=500), ONE_SEQUENCE) is None


def test_the_capacity_counts_what_the_loss_is_a_mean_over() -> None:
    model = torch.nn.Linear(100, 10, bias=False)
    for objective in OBJECTIVES:
        layout = layout_of(Config().changed({"training.objective": objective}))
        told = str(learning_rate.capacity(AdapterSection(), model, Counts(rows=100, trained_tokens=8000), layout))
        of_tokens = objective in ("supervised", "distillation")
        assert told.startswith("0.12 " if of_tokens else "10 adapter weights for each row"), objective


def test_a_run_is_recorded_with_its_rate_and_one_of_an_earlier_version_keeps_its_own(
    quick, capsys: pytest.CaptureFixture[str]
) -> None:
    config = quick("training.max_steps=1", "training.learning_rate=auto")
    run = finetune.train(config).run
    rate = run.config().training.learning_rate
    assert rate == 1.5e-3  # 2e-4 * (2000 / 192) ** 1.15 / 2
    run.config_file.write_text(run.config_file.read_text().replace("0.0015", "0.0002"))
    finetune.train(config)
    assert "is finished" in capsys.readouterr().out


def test_a_base_made_in_bfloat16_may_overflow_in_fp16() -> None:
    for made_in, precision, said in (("bfloat16", "fp16", 1), ("float16", "fp16", 0), ("bfloat16", "bf16", 0)):
        architecture = of_width(4096)
        architecture.dtype = getattr(torch, made_in)
        note = learning_rate.evidence(load_config({}, [f"training.precision={precision}"]), architecture)
        assert str(note).count("training.precision: fp16 ends at 65,504") == said, (made_in, precision)
