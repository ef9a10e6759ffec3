"""Scales and offsets of groups of weights with small weighted squares of errors, found by trying several.

The searches are those of llama.cpp (ggml/src/ggml-quants.c, whose function each names), for all groups at a time.
Shapes: groups and the weights of their squares are (..., columns of a group) in float32, results (...).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._subclasses import FakeTensor

# Values at a time on a CPU, so that the results of each pass stay in its cache, and elsewhere.
_PART, _DEVICE_PART = 2**17, 2**23


def scales(
    groups: torch.Tensor, weights: torch.Tensor, numerators: Sequence[float], nearest: Callable[..., torch.Tensor],
    *, signed: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Scales for `scale * level` (`make_qx_quants` with rmse_type 1, `quantize_row_iq4_nl_impl`).

    Each trial makes the group's value of largest size one of the `numerators`, rounds to `nearest` levels, and takes
    the scale that is best for these. Unless `signed`, it makes that value's size one of them, so that scales are
    positive.
    """

    def search(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = x.abs()
        largest = x.gather(-1, sizes.argmax(-1, keepdim=True)) if signed else sizes.amax(-1, keepdim=True)
        best, scale = torch.zeros_like(largest), torch.zeros_like(largest)
        for numerator in numerators:
            levels = nearest((x * (numerator / largest)).nan_to_num_(0.0, 0.0, 0.0))
            weighted = w * levels
            squares = levels.mul_(weighted).sum(-1, keepdim=True)
            products = weighted.mul_(x).sum(-1, keepdim=True)
            gain = products.square() / squares
            better = gain > best  # not where a square of zeros makes it nan
            best = torch.where(better, gain, best)
            scale = torch.where(better, products / squares, scale)
        return (scale,)

    return _in_parts(search, groups, weights)[0]


def scales_and_offsets(
    groups: torch.Tensor, weights: torch.Tensor, highest: int, extras: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets, neither negative, for `scale * code - offset` (`make_qkx2_quants`, `make_qkx3_quants`).

    Each trial makes the range from the best lowest value so far to the largest one `highest` and one of the `extras`
    steps, rounds, and takes the scale and the offset that are best for these codes.
    """

    def search(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low, high = x.amin(-1, keepdim=True).clamp_(max=0), x.amax(-1, keepdim=True)
        sum_w, sum_x = w.sum(-1, keepdim=True), (w * x).sum(-1, keepdim=True)
        scale = (high - low) / highest
        best = torch.full_like(low, torch.inf)
        for extra in (None, *extras):
            codes = ((x - low) * ((highest + (extra or 0.0)) / (high - low))).round_().clamp_(0, highest)
            if extra is None:
                new_scale, new_low = scale, low
            else:
                weighted = w * codes
                sum_codes = weighted.sum(-1, keepdim=True)
                squares = (weighted * codes).sum(-1, keepdim=True)
                products = weighted.mul_(x).sum(-1, keepdim=True)
                determinant = sum_w * squares - sum_codes.square()
                new_low = (squares * sum_x - sum_codes * products) / determinant
                new_scale = torch.where(
                    new_low > 0, products / squares, (sum_w * products - sum_x * sum_codes) / determinant
                )
                new_low.clamp_(max=0)
            error = codes.mul_(new_scale).add_(new_low).sub_(x).square_().mul_(w).sum(-1, keepdim=True)
            better = (error < best) & (new_scale > 0)  # not where equal codes make them nan
            best = torch.where(better, error, best)
            scale, low = torch.where(better, new_scale, scale), torch.where(better, new_low, low)
        return scale, -low

    first, second = _in_parts(search, groups, weights)
    return first, second


def units(numbers: torch.Tensor, weights: torch.Tensor, highest: int) -> torch.Tensor:
    """Units (...) whose multiples by integers up to `highest` approximate numbers (..., n) >= 0 (`make_qp_quants`)."""
    largest = numbers.amax(-1, keepdim=True)
    best, unit = torch.full_like(largest, torch.inf), largest / highest
    for trial in range(-4, 5):
        tried = largest / (highest + 0.1 * trial)
        for _ in range(3):  # rounding to the best unit of the last codes
            codes = (numbers / tried).nan_to_num_(0.0).round_().clamp_(max=highest)
            error = (codes * tried - numbers).square_().mul_(weights).sum(-1, keepdim=True)
            better = error < best
            best, unit = torch.where(better, error, best), torch.where(better, tried, unit)
            tried = (weights * codes * numbers).sum(-1, keepdim=True) / (weights * codes.square()).sum(-1, keepdim=True)
    return unit.squeeze(-1)


def _in_parts(
    search: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
    groups: torch.Tensor,
    weights: torch.Tensor,
) -> list[torch.Tensor]:
    """The results of `search`, which gets (groups, columns of a group) and gives (groups, 1)."""
    shape = groups.shape[:-1]
    part = (_PART if groups.device.type == "cpu" else _DEVICE_PART) // groups.shape[-1]
    rows = groups.reshape(-1, groups.shape[-1]).split(part), weights.reshape(-1, groups.shape[-1]).split(part)
    if isinstance(groups, FakeTensor):  # in a forecast: one part after the other takes the same memory
        return [one.new_empty(shape) for one in search(*(each[0] for each in rows))]
    results = [search(*some) for some in zip(*rows, strict=True)]
    return [torch.cat(each).view(shape) for each in zip(*results, strict=True)]
