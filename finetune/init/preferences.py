"""Which objective another tool's config asks for, by the keys that name it there.

Read in Axolotl's `utils/schemas/` and `core/builders/rl.py`, LLaMA-Factory's `hparams/finetuning_args.py` and
`train/dpo/trainer.py`, and TRL's `trainer/dpo_config.py` and `trainer/reward_config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.config import other_names
from finetune.objectives import OBJECTIVES

_NAMING = ("rl", "stage", "pref_loss", "loss_type", "reward_model")
# Keys that have no effect there and would have one here: TRL 1.16 smooths no labels of `sigmoid`.
_UNREAD = {("TRL", "dpo"): ("label_smoothing",)}
_SUPERVISED = ("", "none", "sft", "pt", "supervised")
_SUPERVISED_LOSSES = ("nll", "dft", "chunked_nll")
# Keys that more than one of TRL's trainers has, whose configs do not name the trainer.
_OF_SEVERAL = (
    "beta", "precompute_ref_log_probs", "label_smoothing", "f_divergence_type", "ld_alpha", "max_prompt_length",
)  # fmt: skip


def asked(given: Mapping[str, Any]) -> tuple[str, str] | None:
    """The key that asks for other training than supervised, and what it asks for, in our words if we have it."""
    if given.get("reward_model") is True:  # Axolotl's; in LLaMA-Factory it is the path of a reward model for PPO
        return "reward_model", "reward"
    for key in ("rl", "stage"):
        value = _word(given.get(key))
        if value in _SUPERVISED:
            continue
        if key == "stage" and value == "dpo" and "pref_loss" in given:
            return "pref_loss", _word(given["pref_loss"])
        return key, value
    losses = given.get("loss_type")
    if losses and _word(losses) not in _SUPERVISED_LOSSES:
        return "loss_type", _word(losses)
    return ("center_rewards_coefficient", "reward") if "center_rewards_coefficient" in given else None


def _word(value: Any) -> str:
    """Our name for a value, or for the only one in a list."""
    [value] = value if isinstance(value, list) and len(value) == 1 else [value]
    return other_names.name_here(str(value or "").lower())


def objective(given: Mapping[str, Any]) -> tuple[str, str] | None:
    """The key that asks for another objective than supervised training, and ours; None if that is not offered."""
    named = asked(given)
    return named if named and named[1] in OBJECTIVES else None


def read(given: Mapping[str, Any], tool: str, name: str) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """The keys of a config for the objective `name` that do not only name it, without those that have no effect in its
    tool, which follow with their values.
    """
    unread = [(key, given[key]) for key in _UNREAD.get((tool, name), ()) if given.get(key)]
    without = {*_NAMING, *_UNREAD.get((tool, name), ())}
    return {key: value for key, value in given.items() if key not in without}, unread


def refusal(given: Mapping[str, Any]) -> tuple[str, str] | None:
    """The key that asks for an objective that is not offered or not named, and the reason."""
    named = asked(given)
    if named and named[1] not in OBJECTIVES:
        key, name = named
        return key, other_names.not_offered("training.objective", name) or (
            f"`{name}` is not offered; `training.objective` is one of {', '.join(OBJECTIVES)}"
        )
    unclear = next((key for key in _OF_SEVERAL if key in given), None)
    if unclear and not named:
        return unclear, (
            "this config does not say which of TRL's trainers it is for; add `loss_type: sigmoid` for DPO, or remove "
            "the key if it is for supervised training"
        )
    return None
