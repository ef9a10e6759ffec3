"""Refuse what would become another kind of training: preferences, rewards, images and the like, each with its reason.

A comment in the translated config would not do: the job would run as a supervised one, and few read on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from finetune.config import other_names
from finetune.objectives import OBJECTIVES

_TEXT = "images, video and sound are not trained on here; if the rows are of text alone, remove the key"
_NO_TRAINING = "that is no training; to merge an adapter or to test it, see `finetune merge` and `finetune eval`"
_DIFFUSION = "text is generated token by token here; train such a model with the tool of this config"


def _objective(value: Any) -> str | None:
    name = str(value).lower()
    if not value or name in ("none", "sft", "pt"):
        return None
    if name in OBJECTIVES:
        return (
            f"`{name}` is not offered for configs of other tools: their keys of preferences are not translated. Write "
            f"a new config with `training.objective: {name}`, as configs/llama7b_dpo.yaml"
        )
    return (
        other_names.not_offered("training.objective", name) or f"`{name}` is not offered: training is supervised here"
    )


def _method(value: Any) -> str | None:
    name = str(value).lower()
    if name in ("lora", "qlora", "full", "none"):
        return None
    return other_names.not_offered("adapter.kind", name) or f"`{name}` is not offered: adapters are LoRA here"


def _given(text: str | None) -> Callable[[Any], str | None]:
    """The reason, unless the value turns the key off."""
    return lambda value: text if value not in (False, "", 0) else None


_KEYS: dict[str, Callable[[Any], str | None]] = {
    "rl": _objective,
    "stage": _objective,
    "adapter": _method,
    "finetuning_type": _method,
    "diffusion": _given(_DIFFUSION),
    # Keys of TRL's trainers of preferences and of rewards, whose configs do not name the trainer.
    "beta|loss_weights|precompute_ref_log_probs|(un)?desirable_weight|max_prompt_length|ref_model|pref_(beta|loss)": (
        _given(other_names.advice("training.objective", "cpo"))
    ),
    "reward_(funcs|weights|model\\w*)|process_reward_model|num_generations|max_completion_length|num_labels"
    "|center_rewards_coefficient": _given(other_names.advice("training.objective", "grpo")),
    "processor_(type|kwargs)|image_\\w+|video_\\w+|audio_\\w+|freeze_(vision_tower|multi_modal_projector|mm_modules)"
    "|freeze_language_model": lambda value: _TEXT,
    "export_dir|do_predict|predict_with_generate|infer_backend": _given(_NO_TRAINING),
}


def of(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The keys that ask for anything but supervised training on text, each with the message."""
    for key, value in given.items():
        for pattern, reason in _KEYS.items():
            if re.fullmatch(pattern, key) and (said := reason(value)):
                yield key, f"`{key}: {json.dumps(value, default=str)[:60]}`: {said}"
