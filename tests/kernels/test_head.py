"""Log-probabilities in tiles, and their gradients, are those of the whole logits, and those of TRL's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_equality import Largest
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

from finetune.kernels import head, ops
from finetune.kernels.head import Logits, Tile

LOGITS = [Logits(), Logits(softcap=3.0, scale=0.5), Logits(temperature=0.7), Logits(3.0, 2.0, 1.5)]
CASES = [
    (*shape, LOGITS[number % 4], trained, biased)
    for number, shape in enumerate([(0, 3, 5), (1, 8, 1), (37, 24, 53), (64, 16, 64), (65, 7, 129), (130, 5, 1000)])
    for trained, biased in ((False, number % 2 == 0), (True, number % 2 == 1))
]
"""Tokens, width and vocabulary, the logits, and whether the head is trained and has a bias."""


def drawn(tokens: int, width: int, words: int, trained: bool, biased: bool, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weight, bias = normal(words, width).requires_grad_(trained), normal(words).requires_grad_(trained)
    return {
        "hidden": normal(tokens, width).requires_grad_(), "weight": weight, "bias": bias if biased else None,
        "labels": torch.randint(words, (tokens,), generator=generator),
    }  # fmt: skip


def results(function: Callable[..., Tensor], given: dict[str, Any]) -> list[Tensor]:
    """Log-probabilities, and the gradients of their sum, each with a weight of its own."""
    found = function(**given)
    outer = torch.rand(found.shape, generator=torch.Generator().manual_seed(1)).to(found)
    leaves = [one for one in given.values() if one is not None and one.requires_grad]
    return [found.detach(), *torch.autograd.grad(found, leaves, outer)]


def tiled(logits: Logits, tile: Tile) -> Callable[..., Tensor]:
    return lambda **given: head.log_probs(**given, logits=logits, tile=tile)


def whole(logits: Logits) -> Callable[..., Tensor]:
    def log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        z = torch.nn.functional.linear(hidden, weight, bias) * logits.scale
        if logits.softcap is not None:
            z = logits.softcap * torch.tanh(z / logits.softcap)
        return (z / logits.temperature).log_softmax(-1).gather(1, labels[:, None])[:, 0]

    return log_probs


def trl(logits: Logits) -> Callable[..., Tensor]:
    constants = logits.temperature, 32, logits.softcap, logits.scale, ("log_probs",)
    return lambda **given: ChunkedLogProbFunction.apply(*given.values(), *constants)[0]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("tokens", "width", "words", "logits", "trained", "biased"), CASES)
def test_they_are_those_of_the_whole_logits_and_of_trls_function(
    tokens: int, width: int, words: int, logits: Logits, trained: bool, biased: bool, ahead: bool
) -> None:
    tile = Tile(tokens * 3 // 5 + 1, words * 2 // 3 + 1, ahead)
    for reference, dtype, tolerance in ((whole, torch.float64, 1e-12), (trl, torch.float32, 1e-6)):
        given = drawn(tokens, width, words, trained, biased, dtype)
        expected, found = results(reference(logits), given), results(tiled(logits, tile), given)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype is dtype
            assert float((one - other).norm()) <= tolerance * float(other.norm())


@pytest.mark.parametrize("ahead", [False, True])
def test_words_that_cannot_follow_may_fill_a_tile(ahead: bool) -> None:
    given = drawn(5, 8, 21, trained=False, biased=True, dtype=torch.float64)
    given["bias"] = given["bias"].detach()
    given["weight"] = given["weight"].detach()
    given["bias"][:8], given["labels"] = -torch.inf, given["labels"].clamp(min=8)
    found = results(tiled(Logits(), Tile(2, 4, ahead)), given)
    for one, expected in zip(found, results(whole(Logits()), given), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tile", [Tile(1, 1), Tile(3, 40), Tile()])
@pytest.mark.parametrize("logits", LOGITS)
def test_those_of_other_words_are_too(logits: Logits, tile: Tile) -> None:
    given = drawn(9, 8, 30, True, True, torch.float32)
    words = torch.randint(30, (9, 3), generator=torch.Generator().manual_seed(2))

    def of_words(**given: Any) -> Tensor:
        of_labels = head.log_probs(**given, logits=logits, tile=tile)
        return head.log_probs_of_words(**given, logits=logits, tile=tile, of_labels=of_labels, words=words)

    def exact(labels: Tensor, **given: Any) -> Tensor:
        return torch.stack([whole(logits)(**given, labels=column) for column in words.unbind(1)], 1)

    for one, other in zip(results(of_words, given), results(exact, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", [False, True])
def test_nothing_is_larger_than_a_tile_the_states_or_the_head(trained: bool) -> None:
    with Largest() as largest:
        results(tiled(Logits(softcap=3.0), Tile(64, 500)), drawn(200, 8, 3000, trained, True, torch.float32))
    assert largest.numel <= max(64 * 500, 3000 * 8)


def test_a_gradient_ahead_has_a_tile_of_all_words_and_fewer_tokens() -> None:
    with Largest() as largest:
        results(tiled(Logits(), Tile(1000, 2400, ahead=True)), drawn(2000, 8, 4000, False, False, torch.float32))
    assert largest.numel == 600 * 4000


def test_in_bfloat16_gradients_are_as_near_to_those_in_float32_as_trls() -> None:
    exact = results(whole(Logits()), drawn(1300, 24, 50, False, False, torch.float32))[1]
    given = drawn(1300, 24, 50, False, False, torch.bfloat16)
    ways = trl(Logits()), tiled(Logits(), Tile(64)), tiled(Logits(), Tile(64, ahead=True))
    theirs, *ours = ((results(way, given)[1] - exact).norm() for way in ways)
    assert max(ours) < 1.1 * theirs


def test_in_float16_the_gradients_of_tokens_that_the_model_is_sure_of_are_as_near_as_trls() -> None:
    """They are below its least numbers, from which the loss scale keeps TRL's."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(2000, 64, generator=generator) / 50).half()
    labels = torch.arange(200)
    sure = (20 * weight[labels].float() / weight[labels].float().square().sum(1, keepdim=True)).half()

    def gradient(function: Callable[..., Tensor], dtype: torch.dtype, scale: float) -> Tensor:
        hidden = sure.to(dtype, copy=True).requires_grad_()
        found = function(hidden=hidden, weight=weight.to(dtype), bias=None, labels=labels)
        assert -1e-3 < found.mean() < 0
        (scale * found.sum()).backward()
        assert hidden.grad is not None
        return hidden.grad.float() / scale

    exact = gradient(whole(Logits()), torch.float32, 1.0)
    ways = trl(Logits()), tiled(Logits(), Tile()), tiled(Logits(), Tile(ahead=True))
    theirs, *ours = ((gradient(way, torch.float16, 32.0) - exact).norm() for way in ways)
    assert max(ours) < 1.1 * theirs


@pytest.mark.parametrize(("ahead", "products"), [(True, 2), (False, 3)])
def test_a_tile_of_logits_takes_as_many_products(ahead: bool, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Size] = []
    for name in ("multiply_", "add_product_"):
        plain = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda out, *given, plain=plain: (made.append(out.shape), plain(out, *given)))
    results(tiled(Logits(), Tile(64, ahead=ahead)), drawn(1300, 24, 50, False, False, torch.float32))
    assert len(made) == 21 * products
