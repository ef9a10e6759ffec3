"""Answers from a model: greedy, so that two models can be compared."""

from __future__ import annotations

from typing import Any

import torch

from finetune import template


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, prompt: list[int], max_new_tokens: int = 128) -> str:
    """What the model writes after the tokens of `prompt`, decoded greedily, without special tokens."""
    was_training = model.training
    model.eval()
    try:
        input_ids = torch.tensor([prompt], device=model.device)  # (rows, tokens)
        generated = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=template.stop_ids(tokenizer),
        )
    finally:
        model.train(was_training)
    return tokenizer.decode(generated[0, len(prompt) :], skip_special_tokens=True).strip()
