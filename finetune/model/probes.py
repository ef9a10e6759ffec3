"""Run a few tokens through a model to see how it treats them."""

from __future__ import annotations

from typing import Any

import torch

TOKENS = 16


def rows(count: int, tokens: int, model: Any) -> tuple[torch.Tensor, ...]:
    """`count` rows (1, tokens) of random ids, the same for each model with as many words."""
    words = model.config.get_text_config().vocab_size
    return (
        torch.randint(words, (count, 1, tokens), generator=torch.Generator().manual_seed(0)).to(model.device).unbind()
    )


@torch.no_grad()
def logits(model: Any, **inputs: Any) -> torch.Tensor:
    """(1, tokens, words) in evaluation mode, less their mean, which softmax does not see."""
    was_training = model.training
    model.eval()
    found = model(use_cache=False, **inputs).logits.float()
    model.train(was_training)
    return found - found.mean(-1, keepdim=True)
