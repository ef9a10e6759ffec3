"""Probes: short forward passes that reveal how a model treats its inputs."""

from __future__ import annotations

from typing import Any

import torch

from finetune.model.distributed.placement import release_gathered

TOKENS = 16


def rows(count: int, tokens: int, model: Any) -> tuple[torch.Tensor, ...]:
    """`count` rows (1, tokens) of random ids, the same for all models with the same vocabulary size."""
    words = model.config.get_text_config().vocab_size
    return (
        torch.randint(words, (count, 1, tokens), generator=torch.Generator().manual_seed(0)).to(model.device).unbind()
    )


@torch.no_grad()
def logits(model: Any, **inputs: Any) -> torch.Tensor:
    """Logits (1, tokens, vocabulary) in eval mode, minus their mean, which does not affect softmax."""
    was_training = model.training
    model.eval()
    found = model(use_cache=False, **inputs).logits.float()
    model.train(was_training)
    release_gathered(model)
    return found - found.mean(-1, keepdim=True)
