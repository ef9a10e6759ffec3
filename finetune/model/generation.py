"""Answers from a model: greedy, so that two models can be compared."""

from __future__ import annotations

from typing import Any

import torch

from finetune import template
from finetune.errors import ArtifactError, ConfigError, FinetuneError, NumbersError
from finetune.model import bounds


class TooLong(ConfigError):
    """A prompt that leaves no position for an answer."""


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, messages: list[dict[str, Any]], max_new_tokens: int = 128) -> str:
    """The model's next turn after `messages`, decoded greedily, without special tokens.

    It ends where the model's positions do. Raises TooLong where the prompt takes them all, NumbersError where the
    model has nothing but NaN to say.
    """
    from transformers import LogitsProcessorList

    was_training = model.training
    model.eval()
    try:
        inputs = _prompt(tokenizer, messages).to(model.device)
        prompt_length = inputs["input_ids"].shape[1]
        if (known := bounds.table_size(model)) is not None:
            max_new_tokens = min(max_new_tokens, known - prompt_length)
            if max_new_tokens < 1:
                raise TooLong(
                    f"the prompt has {prompt_length} tokens, and the base {known} positions; ask something shorter"
                )
        generated = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=template.stop_ids(tokenizer),
            logits_processor=LogitsProcessorList([_refuse_nan]),
        )
    finally:
        model.train(was_training)
    return tokenizer.decode(generated[0, prompt_length:], skip_special_tokens=True).strip()


def _refuse_nan(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    if logits.isnan().any():
        raise NumbersError("the model's logits are not numbers (NaN): its weights are damaged")
    return logits


def _prompt(tokenizer: Any, messages: list[dict[str, Any]]) -> Any:
    try:
        return template.render(tokenizer, messages, add_generation_prompt=True, return_tensors="pt")
    except FinetuneError:
        raise
    except Exception as error:  # of whatever kind a template raises
        raise ArtifactError(f"the chat template does not render this conversation: {error}") from None
