"""Greedy generation, which makes the answers of two models comparable."""

from __future__ import annotations

from typing import Any

import torch

from finetune.data import chat, formats
from finetune.errors import ArtifactError, ConfigError, NumbersError
from finetune.model import bounds, chat_template
from finetune.runtime import libraries


class TooLong(ConfigError):
    """A prompt that leaves no position for an answer."""


def prompt_ids(example: formats.Example, tokenizer: Any, control_tokens: chat.ControlTokens) -> list[int]:
    """Token ids of a prompt, rendered as in training (`control_tokens` is `data.control_tokens`); never empty.

    Raises ArtifactError if the chat template cannot render it.
    """
    try:
        ids = chat.prompt_ids(example, tokenizer, control_tokens)
    except formats.RowError as error:
        raise ArtifactError(f"the chat template cannot render the prompt: {error}") from None
    return ids or [tokenizer.eos_token_id]  # an empty prompt, and a tokenizer without BOS


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, prompt: list[int], max_new_tokens: int = 128) -> str:
    """The model's greedy continuation of the token ids in `prompt`, decoded without special tokens.

    It is limited by the model's positions. Raises TooLong if the prompt uses all of them, NumbersError if logits are
    NaN.
    """
    from transformers import LogitsProcessorList

    was_training = model.training
    model.eval()
    try:
        if (known := bounds.table_size(model)) is not None:
            max_new_tokens = min(max_new_tokens, known - len(prompt))
            if max_new_tokens < 1:
                raise TooLong(
                    f"the prompt has {len(prompt)} tokens, but the base only {known} positions; shorten the prompt"
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
        raise NumbersError("the model's logits are NaN: its weights are damaged")
    return logits
