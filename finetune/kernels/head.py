"""Log-probabilities of labels by a model's head, and their gradient, in tiles of logits.

A logit is `softcap * tanh(scale * y / softcap) / temperature`, of y = h wᵀ + b, and without a cap `scale * y /
temperature`. No more than a tile of logits exists at a time, and what becomes of a tile is two operators
(`ops.fold_logits_`, `ops.unfold_logits_`): a Triton kernel each on CUDA.

The logits are computed again in the backward pass, a third product with the head. Where the head is frozen, this can
be saved: the gradient of a label's log-probability with respect to its hidden state depends on that token alone, so
that it is computed while the logits exist. It is kept instead of the hidden states, in as many bytes, and the backward
pass only scales it. The tile then has all columns and fewer tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.kernels import ops

# The product of fewer tokens with the whole vocabulary waits for the head's weights to be read (H100: 295 operations a
# byte).
_LEAST_TOKENS = 512
# In fp16 the gradient is kept multiplied by this, because it is computed before the loss is scaled: values below 6e-8,
# as for tokens that the model is sure of, would be lost.
_FP16_SCALE = 256.0


@dataclass(frozen=True)
class Tile:
    """The largest tile of logits; `ahead`: a frozen head's gradient is computed with the log-probabilities."""

    tokens: int = 4096
    columns: int = 32768
    ahead: bool = False


@dataclass(frozen=True)
class Logits:
    """What becomes of the product of hidden states and head before the softmax."""

    softcap: float | None = None
    scale: float = 1.0
    temperature: float = 1.0


def log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, logits: Logits | None = None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Log-probabilities (tokens,) of `labels` (tokens,), in nats: float64 for such hidden states, else float32.

    `hidden` (tokens, width), the head's `weight` (vocabulary, width) and `bias` (vocabulary,) may each have a gradient.
    Under autocast products are in its type. A label must be an id of the vocabulary.
    """
    tile, dtype = tile or Tile(), dtype_of(hidden)
    frozen = not any(one is not None and one.requires_grad for one in (weight, bias))
    ahead = tile.ahead and frozen and weight.dtype is dtype and hidden.requires_grad and torch.is_grad_enabled()
    function = _Ahead if ahead else _Recomputed
    with torch.autocast(hidden.device.type, enabled=False):
        found: Tensor = function.apply(hidden, weight, bias, labels, dtype, logits or Logits(), tile)
    return found


def log_probs_of_words(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, logits: Logits, tile: Tile,
    of_labels: Tensor, words: Tensor,
) -> Tensor:  # fmt: skip
    """Log-probabilities (tokens, k), float32, of `words` (tokens, k), from those `of_labels` and what they are from.

    A word's logit is a product of the hidden state with one row of the head, and the difference of two logits is that
    of their log-probabilities.
    """
    chosen = torch.cat([words, labels.unsqueeze(1).to(words.dtype)], 1)
    each = max(1, tile.tokens * tile.columns // (chosen.shape[1] * weight.shape[1]))
    z = _LogitsOfWords.apply(hidden, weight, chosen, dtype_of(hidden), each)
    if bias is not None:
        z = z + bias[chosen]
    z = z * logits.scale
    if logits.softcap is not None:
        z = logits.softcap * torch.tanh(z / logits.softcap)
    of_words, of_label = (z / logits.temperature).split([words.shape[1], 1], 1)
    return of_words - of_label + of_labels.unsqueeze(1)


def dtype_of(hidden: Tensor) -> torch.dtype:
    """The type in which the logits of `hidden` are computed."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, dtype: torch.dtype,
        logits: Logits, tile: Tile,
    ) -> Tensor:  # fmt: skip
        sums = _no_sums(hidden, dtype)
        for part, words, _, _, block in _tiles(hidden, weight, bias, dtype, tile):
            ops.fold_logits_(sums[:, part], block, labels[part], words.start, *_constants(logits))
        found, log_z = _finished(sums)
        ctx.save_for_backward(hidden, weight, bias, labels, log_z)
        ctx.given = dtype, logits, tile
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_z = ctx.saved_tensors
        dtype, logits, tile = ctx.given
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        outer, wide = outer.contiguous(), log_z.dtype
        d_hidden = torch.empty_like(hidden) if of_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if of_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part, words, states, some, block in _tiles(hidden, weight, bias, dtype, tile):
                ops.unfold_logits_(block, labels[part], log_z[part], outer[part], words.start, *_constants(logits))
                # Sums over tiles are not rounded to 16 bit before the end, which would bias them.
                if d_hidden is not None:
                    if words.start == 0:
                        total = d_hidden.new_zeros(len(block), hidden.shape[1], dtype=wide)
                    ops.add_product_(total, block, some)
                    if words.stop == len(weight):
                        d_hidden[part] = total
                if d_weight is not None:
                    ops.add_product_(d_weight[words], block.t(), states)
                if d_bias is not None:
                    d_bias[words] += block.sum(0, dtype=wide)
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return d_hidden, d_weight, d_bias if d_bias is None else d_bias.to(bias.dtype), *[None] * 4


class _Ahead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, dtype: torch.dtype,
        logits: Logits, tile: Tile,
    ) -> Tensor:  # fmt: skip
        each = min(tile.tokens, max(tile.tokens * tile.columns // len(weight), _LEAST_TOKENS))
        whole = Tile(each, len(weight))
        sums, constants = _no_sums(hidden, dtype), _constants(logits)
        ctx.dtype, ctx.scale = hidden.dtype, _FP16_SCALE if dtype is torch.float16 else 1.0
        outer = torch.full_like(sums[0, :each], ctx.scale)
        gradient = torch.empty_like(hidden, dtype=dtype)
        for part, _, _, _, block in _tiles(hidden, weight, bias, dtype, whole):
            ops.fold_logits_(sums[:, part], block, labels[part], 0, *constants)
            _, log_z = _finished(sums[:, part])
            ops.unfold_logits_(block, labels[part], log_z, outer[: len(block)], 0, *constants)
            ops.multiply_(gradient[part], block, weight)
        ctx.save_for_backward(gradient)
        return _finished(sums)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        factor = (outer if ctx.scale == 1 else outer / ctx.scale).unsqueeze(1)
        d_hidden = torch.mul(gradient, factor, out=torch.empty_like(gradient)).to(ctx.dtype)
        return d_hidden, *[None] * 6


class _LogitsOfWords(torch.autograd.Function):
    """Logits, float32 (positions, k), of k ids at each position.

    `each` positions at a time: their rows of the head are as many numbers as a tile of logits, and are read again in
    the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, dtype: torch.dtype, each: int) -> Tensor:
        """From hidden states (positions, width), the head's weight (vocabulary, width), and ids (positions, k)."""
        ctx.save_for_backward(hidden, weight, ids)
        ctx.each, ctx.dtype = each, dtype
        logits = hidden.new_empty(ids.shape, dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for at in range(0, len(hidden), each):
                part = slice(at, min(at + each, len(hidden)))
                rows = weight[ids[part]].to(ctx.dtype)  # (positions, k, width)
                logits[part] = torch.bmm(rows, hidden[part].to(ctx.dtype).unsqueeze(2)).squeeze(2)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logits: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for at in range(0, len(hidden), ctx.each):
                part = slice(at, min(at + ctx.each, len(hidden)))
                outer = of_logits[part].unsqueeze(1).to(ctx.dtype)  # (positions, 1, k)
                if of_hidden is not None:
                    of_hidden[part] = torch.bmm(outer, weight[ids[part]].to(ctx.dtype)).squeeze(1)
                if of_weight is not None:
                    products = of_logits[part].unsqueeze(2) * hidden[part].float().unsqueeze(1)
                    of_weight.index_add_(0, ids[part].flatten(), products.flatten(0, 1))
        return of_hidden, of_weight if of_weight is None else of_weight.to(weight.dtype), None, None, None


def _tiles(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, tile: Tile
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Each tile of y: its tokens and its words, the states and the rows of the head, and y, over the one before."""
    vocabulary = len(weight)
    room = hidden.new_empty(min(len(hidden), tile.tokens), min(vocabulary, tile.columns), dtype=dtype)
    for at in range(0, len(hidden), tile.tokens):
        part = slice(at, min(at + tile.tokens, len(hidden)))
        states = hidden[part].to(dtype)
        for start in range(0, vocabulary, tile.columns):
            words = slice(start, min(start + tile.columns, vocabulary))
            some = weight[words].to(dtype)
            block = room[: part.stop - at, : words.stop - start]
            ops.multiply_(block, states, some.t(), None if bias is None else bias[words].to(dtype))
            yield part, words, states, some, block


def _no_sums(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What `ops.fold_logits_` starts with, (3, tokens)."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    sums = hidden.new_zeros(3, len(hidden), dtype=wide)
    sums[0] = torch.finfo(wide).min  # not infinite, which logits may be, so that differences are numbers
    return sums


def _finished(sums: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probabilities, and the logarithms of the sums of all exponentials."""
    largest, total, of_label = sums
    log_z = total.log().add_(largest)
    return of_label - log_z, log_z


def _constants(logits: Logits) -> tuple[float, float | None, float]:
    return logits.scale, logits.softcap, 1 / logits.temperature
