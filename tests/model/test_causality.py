"""The padding mask is left out where it changes nothing, and a model that looks ahead is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from messages import refusal
from steps import assert_gradients_close, gradients, micro_batches, ready
from test_packing import ARCHITECTURES, SHARED, model_of
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.choices import CHOICES
from finetune.errors import ArtifactError, NumbersError
from finetune.model.probes import causality
from finetune.training.collator import Inputs, for_model

# Rows of 9 and 4 tokens, padded on the right.
IDS = torch.tensor([[5, 9, 3, 7, 11, 4, 8, 6, 10], [7, 3, 9, 12, 0, 0, 0, 0, 0]])
MASK = (torch.arange(9) < torch.tensor([[9], [4]])).long()
MICRO_BATCH: Inputs = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)}

# Among them positions counted from the mask (opt), slopes by distance that are made from it (bloom), and padded states
# that it zeroes (mamba).
OTHERS = ("qwen3", "granite", "olmo2", "opt", "bloom", "mamba", "falcon_h1")


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *OTHERS])
def test_loss_and_gradients_without_the_mask_are_those_with_it(architecture: str) -> None:
    plain = architecture in ("gemma2", "bloom", "mamba")
    model = model_of(architecture, "eager" if plain else "sdpa")
    causality.prove(model)
    found = []
    for masked in (True, False):
        model.zero_grad()
        loss = model(**for_model(MICRO_BATCH, masked=masked), use_cache=False).loss
        loss.backward()
        found.append((loss.item(), {name: weight.grad.clone() for name, weight in model.named_parameters()
                                    if weight.grad is not None}))  # fmt: skip
    (with_mask, expected), (without, gradient) = found
    assert without == pytest.approx(with_mask, rel=1e-6)
    assert_gradients_close(gradient, expected)


def test_a_step_without_the_mask_is_the_step_with_it(quick) -> None:
    loop = ready(quick("quantization.kind=none", "training.precision=fp32"))
    inputs = micro_batches(loop, range(4), 2)
    assert any((part["attention_mask"] == 0).any() for part in inputs), "some row is padded"
    given: list[set[str]] = []
    loop.step.model.get_base_model().model.register_forward_pre_hook(
        lambda module, args, kwargs: given.append({name for name, value in kwargs.items() if value is not None}),
        with_kwargs=True,
    )
    loss, without = gradients(loop, inputs)
    assert all("attention_mask" not in names for names in given)
    loop.step = replace(loop.step, masked=True)
    masked_loss, expected = gradients(loop, inputs)
    assert "attention_mask" in given[-1]
    assert loss == pytest.approx(masked_loss, rel=1e-6)
    assert_gradients_close(without, expected)


def test_a_model_that_sees_the_next_token_is_refused() -> None:
    config = AutoConfig.for_model("bert", **{**SHARED, "is_decoder": False})
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    with refusal(ArtifactError, "sees the token it predicts"):
        causality.prove(model)


def test_the_mask_stays_where_it_is_needed() -> None:
    config = AutoConfig.for_model("llama", **SHARED)
    assert not causality.needs_mask(config, "bf16", None)
    assert not causality.needs_mask(config, "bf16", (9, 0))
    assert causality.needs_mask(config, "bf16", (7, 5)), "no flash kernel on this card"
    assert causality.needs_mask(config, "fp32", (9, 0)), "no flash kernel in this precision"
    balanced = AutoConfig.for_model("mixtral", **SHARED, output_router_logits=True)
    assert causality.needs_mask(balanced, "bf16", (9, 0)), "its balancing loss counts real tokens"


def test_cudnn_attention_is_off_wherever_a_model_runs_outside_of_training(request: pytest.FixtureRequest) -> None:
    from datasets import Dataset

    from finetune.config import Config, ModelSection
    from finetune.export import proof
    from finetune.generation.answering import answers
    from finetune.generation.settings import Settings
    from finetune.model.source.tokenizer import load_tokenizer
    from finetune.training.eval_loss import HeldOut

    given = {
        "data": {"train": "rows.jsonl"}, "model": {"tokenizer": "builtin:tiny-llama"},
        "training": {"precision": "bf16"},
    }  # fmt: skip
    tokenizer = load_tokenizer(ModelSection(tokenizer="builtin:tiny-llama"))
    config = AutoConfig.for_model("llama", **{**SHARED, "vocab_size": len(tokenizer)})
    model = AutoModelForCausalLM.from_config(config).eval()
    before = torch.backends.cuda.cudnn_sdp_enabled()
    request.addfinalizer(lambda: torch.backends.cuda.enable_cudnn_sdp(before))
    torch.backends.cuda.enable_cudnn_sdp(True)  # as torch has it
    seen: list[bool] = []
    model.model.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]], "labels": [[5, 6, 7, 8]]})

    def runs(work: Callable[[], object]) -> None:
        seen.clear()
        work()
        assert seen
        assert not any(seen)
        assert torch.backends.cuda.cudnn_sdp_enabled(), "as before"

    runs(lambda: proof.logits(model, [[5, 6, 7]]))
    runs(lambda: list(answers(model, tokenizer, [[5, 6, 7]], Settings(2))))
    config = Config.model_validate(given, context={"choices": CHOICES})
    runs(lambda: HeldOut(model, tokenizer, config).loss(rows))


def test_a_model_with_few_positions_is_asked_within_them() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=12)
    causality.prove(AutoModelForCausalLM.from_config(config).eval())


def test_a_head_of_zeros_says_the_same_of_every_token_and_looks_at_none() -> None:
    model = model_of("llama", "sdpa")
    torch.nn.init.zeros_(model.lm_head.weight)
    causality.prove(model)


def test_logits_that_are_not_numbers_do_not_count_as_looking_ahead() -> None:
    model = model_of("llama", "sdpa")
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    with refusal(NumbersError, "logits are not finite"):
        causality.prove(model)
