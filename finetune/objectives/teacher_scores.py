"""Log-probabilities that a model gives a teacher's tokens, without materialising all logits.

TRL's head returns that of each label alone. The logit of any other token is a product of the hidden state with one row
of the head, and the difference of two logits is that of their log-probabilities.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from finetune.kernels import head
from finetune.objectives.objective import Batch
from finetune.runtime import patches


@contextlib.contextmanager
def watched(batch: Batch) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """In the block, a pass of the model appends log-probabilities of a teacher's tokens to the list.

    Those of the teacher and those of the model, float32 (positions, k), and which positions are trained (positions,).
    """
    function = patches.HEAD_FUNCTION.value
    log_probs: list[tuple[Tensor, Tensor, Tensor]] = []

    def apply(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *rest: Any) -> Any:
        temperature, columns, softcap, scale, _ = rest
        per_token = function.apply(hidden, weight, bias, labels, *rest)
        trained = batch["labels"][:, 1:] != -100
        ids, teacher = batch["teacher_ids"][:, 1:], batch["teacher_log_probs"][:, 1:]
        if len(hidden) == trained.numel():  # all positions are scored
            trained, ids, teacher = trained.flatten(), ids.flatten(0, 1), teacher.flatten(0, 1)
        else:
            ids, teacher = ids[trained], teacher[trained]
            trained = torch.ones_like(labels, dtype=torch.bool)
        chosen = torch.cat([ids, labels.unsqueeze(1).to(ids.dtype)], 1)
        numbers = patches.TILE_TOKENS.value * columns
        logits = _Logits.apply(hidden, weight, chosen, max(1, numbers // (chosen.shape[1] * weight.shape[1])))
        if bias is not None:
            logits = logits + bias[chosen]
        logits = logits * (scale / temperature)
        if softcap is not None:
            logits = softcap * torch.tanh(logits * (temperature / softcap)) / temperature
        of_ids, of_label = logits.split([ids.shape[1], 1], 1)
        log_probs.append((teacher, of_ids - of_label + per_token[0].unsqueeze(1), trained))
        return per_token

    with patches.HEAD_FUNCTION.by(SimpleNamespace(apply=apply)):
        yield log_probs


class _Logits(torch.autograd.Function):
    """Logits, float32 (positions, k), of k ids at each position.

    `each` positions at a time: their rows of the head are as many numbers as a tile of logits, and are read again in
    the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, each: int) -> Tensor:
        """From hidden states (positions, width), the head's weight (vocabulary, width), and ids (positions, k)."""
        ctx.save_for_backward(hidden, weight, ids)
        ctx.each, ctx.dtype = each, head.dtype_of(hidden)
        logits = hidden.new_empty(ids.shape, dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for at in range(0, len(hidden), each):
                part = slice(at, min(at + each, len(hidden)))
                rows = weight[ids[part]].to(ctx.dtype)  # (positions, k, width)
                logits[part] = torch.bmm(rows, hidden[part].to(ctx.dtype).unsqueeze(2)).squeeze(2)
        return logits

    @staticmethod
    @torch.autograd.function.once_differentiable
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
        return of_hidden, of_weight if of_weight is None else of_weight.to(weight.dtype), None, None
