"""A frozen head's log-probabilities and their gradient are TRL's, made with two products instead of three."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trl.kernels import ChunkedLogProbFunction

from finetune.kernels import ops
from finetune.kernels.head import LogProbs
from finetune.objectives import log_probs

TOKENS, WIDTH, WORDS = 1300, 24, 50


def scores(
    function: Any, dtype: torch.dtype = torch.float32, *, tokens: int = TOKENS, trained: bool = False, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities, and the gradient of their sum, each with a weight of its own."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden, head, bias = drawn(tokens, WIDTH).requires_grad_(), drawn(WORDS, WIDTH), drawn(WORDS)
    labels = torch.randint(WORDS, (tokens,), generator=generator)
    weights = torch.rand(tokens, generator=generator)
    head.requires_grad_(trained)
    with log_probs.tiles(64):
        found, *others = function.apply(
            hidden, head, bias if given.get("biased") else None, labels, given.get("temperature", 1.0), 32,
            given.get("softcap"), given.get("scale", 1.0), given.get("outputs", ("log_probs",)),
        )  # fmt: skip
        (found * weights).sum().backward()
    assert len(others) == 4
    assert hidden.grad is not None
    return found.detach(), hidden.grad


@pytest.mark.parametrize(
    "given",
    [{}, {"biased": True}, {"softcap": 3.0, "scale": 0.5}, {"temperature": 0.7}, {"trained": True}, {"tokens": 0},
     {"outputs": ("log_probs", "entropy")}],
    ids=str,
)  # fmt: skip
def test_values_and_gradients_are_those_of_trl(given: dict[str, Any]) -> None:
    expected, found = scores(ChunkedLogProbFunction, **given), scores(LogProbs, **given)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_in_bfloat16_gradients_are_as_near_to_those_in_float32_as_trls() -> None:
    exact = scores(ChunkedLogProbFunction)[1]
    apart = [(scores(function, torch.bfloat16)[1] - exact).norm() for function in (ChunkedLogProbFunction, LogProbs)]
    assert apart[1] < 1.1 * apart[0]


def test_in_float16_the_gradients_of_tokens_that_the_model_is_sure_of_are_as_near_as_trls() -> None:
    """They are below its least numbers, from which the loss scale keeps TRL's."""
    generator = torch.Generator().manual_seed(0)
    head = (torch.randn(2000, 64, generator=generator) / 50).half()
    labels = torch.arange(200)
    sure = (20 * head[labels].float() / head[labels].float().square().sum(1, keepdim=True)).half()

    def gradient(function: Any, dtype: torch.dtype, scale: float) -> torch.Tensor:
        hidden = sure.to(dtype, copy=True).requires_grad_()
        found, *_ = function.apply(hidden, head.to(dtype), None, labels, 1.0, 8192, None, 1.0, ("log_probs",))
        assert -1e-3 < found.mean() < 0
        (scale * found.sum()).backward()
        assert hidden.grad is not None
        return hidden.grad.float() / scale

    exact = gradient(ChunkedLogProbFunction, torch.float32, 1.0)
    apart = [(gradient(each, torch.float16, 32.0) - exact).norm() for each in (ChunkedLogProbFunction, LogProbs)]
    assert apart[1] < 1.1 * apart[0]


def test_a_tile_of_logits_takes_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Size] = []
    multiply = ops.multiply_

    def counted(out: torch.Tensor, *given: Any) -> None:
        made.append(out.shape)
        multiply(out, *given)

    monkeypatch.setattr(ops, "multiply_", counted)
    monkeypatch.setattr(torch, "mm", None)
    scores(LogProbs)
    assert made == [(size, width) for size in (*[64] * 20, 20) for width in (WORDS, WIDTH)]
