"""Answers from a model: greedy, so that two models can be compared."""

from __future__ import annotations

from typing import Any

import torch

from finetune.errors import ConfigError, NumbersError
from finetune.model import bounds, chat_template
from finetune.runtime import libraries


class TooLong(ConfigError):
    """A prompt that leaves no position for an answer."""


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, prompt: list[int], max_new_tokens: int = 128) -> str:
    """What the model writes after the tokens of `prompt`, decoded greedily, without special tokens.

    It ends where the model's positions do. Raises TooLong where the prompt takes them all, NumbersError where the
    model has nothing but NaN to say.
    """
    from transformers import LogitsProcessorList

    was_training = model.training
    model.eval()
    try:
        if (known := bounds.table_size(model)) is not None:
            max_new_tokens = min(max_new_tokens, known - len(prompt))
            if max_new_tokens < 1:
                raise TooLong(
                    f"the prompt has {len(prompt)} tokens, and the base {known} positions; ask something shorter"
                )
        input_ids = torch.tensor([prompt], device=model.device)  # (rows, tokens)
        with libraries.without_cudnn_attention():
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
                eos_token_id=chat_template.stop_ids(tokenizer),
                logits_processor=LogitsProcessorList([_refuse_nan]),
            )
    finally:
        model.train(was_training)
    return tokenizer.decode(generated[0, len(prompt) :], skip_special_tokens=True).strip()


def _refuse_nan(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    if logits.isnan().any():
        raise NumbersError("the model's logits are not numbers (NaN): its weights are damaged")
    return logits
