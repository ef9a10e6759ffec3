"""Refuse what would become another kind of training: answers that are sampled, images and the like, with the reason.

A comment in the translated config would not do: the job would run as a supervised one, and few read on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from finetune.config import other_names
from finetune.init import preferences

_TEXT = "training on images, video and sound is not translated; if the rows are of text alone, remove the key"
_NO_TRAINING = "that is no training; to merge an adapter or to test it, see `finetune merge` and `finetune eval`"
_REFERENCE = "the reference is the model that training starts from; if it is that, remove the key"
_LOSSES = "one loss is minimised here; for `sft` beside it, write `preference.nll_weight`"
_DIFFUSION = "text is generated token by token here; train such a model with the tool of this config"


def _method(value: Any) -> str | None:
    name = str(value).lower()
    if name in ("lora", "qlora", "full", "none"):
        return None
    return other_names.not_offered("adapter.kind", name) or f"`{name}` is not offered: adapters are LoRA here"


_SAMPLED = other_names.advice("training.objective", "grpo")


def _given(text: str | None) -> Callable[[Any], str | None]:
    """The reason, unless the value turns the key off."""
    return lambda value: text if value not in (False, "", 0) else None


_KEYS: dict[str, Callable[[Any], str | None]] = {
    "adapter": _method,
    "finetuning_type": _method,
    "diffusion": _given(_DIFFUSION),
    "ref_model(_adapters)?": _given(_REFERENCE),
    "loss_weights": _given(_LOSSES),
    "reward_model\\w*": lambda value: None if value is True else _given(_SAMPLED)(value),
    "reward_(funcs|weights)|num_generations|max_completion_length": _given(_SAMPLED),
    "process_reward_model": _given(other_names.advice("training.objective", "prm")),
    "processor_(type|kwargs)|image_\\w+|video_\\w+|audio_\\w+|freeze_(vision_tower|multi_modal_projector|mm_modules)"
    "|freeze_language_model": lambda value: _TEXT,
    "export_dir|do_predict|predict_with_generate|infer_backend": _given(_NO_TRAINING),
}


def of(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the keys that ask for training that is not offered, with a message for each."""
    reasons = [preferences.refusal(given)]
    for key, value in given.items():
        for pattern, reason in _KEYS.items():
            if re.fullmatch(pattern, key) and (said := reason(value)):
                reasons.append((key, said))
    for key, said in filter(None, reasons):
        yield key, f"`{key}: {json.dumps(given[key], default=str)[:60]}`: {said}"
