"""Our names for what other tools have: Axolotl, LLaMA-Factory, Unsloth, TRL, transformers and PEFT.

A key that only they have is refused with the key to write; nothing is renamed silently, since two tools may mean
different things by one name. `finetune init --from` translates a whole config by the same table, `other_names.json`:
what to write here, with the names that other tools have for it. Keys that need more than another name are converted by
the functions below.

`not_offered.json` lists values that other tools offer and this one does not: for each of our keys, the advice with the
patterns of values (in lower case) that it is for. They are what people know and try first, so the nearest name that is
offered (`fp4` for `fp8`) would mislead them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any


def _read(name: str) -> Any:
    return json.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


_TABLE = _read("other_names.json")
_NOT_OFFERED: dict[str, dict[str, list[str]]] = _read("not_offered.json")

NAMES: dict[str, str] = {
    name: here for topic in _TABLE["keys"].values() for here, names in topic.items() for name in names
}
"""By another tool's key, in lower case: what to write, with our keys between backticks."""

_VALUES: dict[str, str] = {name: here for here, names in _TABLE["values"].items() for name in names}
_WITHOUT_EFFECT = re.compile("|".join(_TABLE["keys without effect"]))


def meant(key: str, value: object = None) -> str | None:
    """Our equivalent of another tool's `key: value`; None for an unknown key."""
    text = NAMES.get(_spelt(key))
    ours = re.findall(r"`(\w+\.\w+)", text or "")
    cure = not_offered(ours[0], value) if ours and isinstance(value, str) and name_here(value) == value else None
    return f"`{ours[0]}`; {cure}" if cure else text


def _spelt(key: str) -> str:
    return key.lower().replace("-", "_")


def name_here(value: str) -> str:
    """Our name for another tool's `value`; `value` itself where no other name is known."""
    return _VALUES.get(value.lower(), value)


def advice(key: str, value: object) -> str | None:
    """Advice for a `value` that `section.key` does not accept; None if there is none."""
    if not isinstance(value, str):
        return None
    patterns = [(text, pattern) for text, listed in _NOT_OFFERED.get(key, {}).items() for pattern in listed]
    return next((text for text, pattern in patterns if re.fullmatch(pattern, value.lower())), None)


def not_offered(key: str, value: object) -> str | None:
    """The advice as a sentence that says that `section.key` has no such `value`; None where none is known."""
    text = advice(key, value)
    return text and f"`{value}` is not offered: {text}"


def without_effect(key: str, value: Any) -> bool:
    """Whether leaving out another tool's `key: value` is known not to change the trained weights."""
    off = value is False or value in ("", [], {})
    return off or _WITHOUT_EFFECT.fullmatch(_spelt(key)) is not None


KeyValues = dict[str, Any]
"""Values by `section.key`."""


def taken(key: str, value: Any) -> KeyValues | None:
    """Our settings for another tool's `key: value`, empty if none are needed; None without a counterpart."""
    key = _spelt(key)
    if key in _CONVERTED:
        return _CONVERTED[key](value)
    if (text := NAMES.get(key)) is None:
        return None
    if text.startswith("leave"):
        return {}
    [ours, fixed] = re.findall(r"`(\w+\.\w+)(?:: ([^`]+))?`", text)[0]
    if fixed:
        if value == "auto" and ours == "training.precision":
            return {ours: value}
        return {ours: fixed} if value in (True, "auto") else {}
    return {ours: name_here(value) if isinstance(value, str) else value}


def _method(value: Any) -> KeyValues | None:
    full = {"adapter.kind": "none", "quantization.kind": "none"}
    return {"lora": {}, "qlora": {"quantization.kind": "nf4"}, "full": full}.get(str(value))


def _bits(value: Any) -> KeyValues | None:
    return {"4": {"quantization.kind": "nf4"}, "8": {"quantization.kind": "int8"}}.get(str(value))


def _rope_scaling(value: Any) -> KeyValues | None:
    """A type without a factor, as LLaMA-Factory has it, gets one from the length of the rows there."""
    kind = value.get("rope_type", value.get("type")) if isinstance(value, dict) else None
    return {"model.rope_scaling": {"rope_type": kind, "factor": value.get("factor")}} if kind else None


def _targets(value: Any) -> KeyValues:
    if value in ("all", "all-linear"):
        return {"adapter.targets": "all-linear"}
    return {"adapter.targets": [name.strip() for name in value.split(",")] if isinstance(value, str) else value}


def _number(value: Any) -> float:
    """The value if it is a number, else NaN."""
    return value if type(value) in (int, float) else math.nan


def _dtype(value: Any) -> KeyValues | None:
    """The type of the weights; for float32, `bf16` and `fp16` say the precision of the arithmetic."""
    known = {"bfloat16": "bf16", "float16": "fp16"}
    name = str(value).removeprefix("torch.")
    if name in ("auto", "float32"):
        return {}
    return {"training.precision": known[name]} if name in known else None


def _initial(value: Any) -> KeyValues | None:
    return {} if value is True else {"adapter.init": "pissa"} if str(value).startswith("pissa") else None


def _only_off(value: Any) -> KeyValues | None:
    return None if value else {}


def _held_out(value: Any) -> KeyValues | None:
    if type(value) in (int, float) and value == 0:
        return {"data.eval": "none"}
    return {"data.eval_share": value} if isinstance(value, float) and value < 1 else None


def _template(value: Any) -> KeyValues | None:
    return {} if value == "tokenizer_default" else {"data.chat_template": name_here(str(value))}


def _deepspeed(value: Any) -> KeyValues | None:
    """ZeRO's stage by the name of its file, such as deepspeed_configs/zero2.json or ds_z3_offload_config.json."""
    name = str(value).lower()
    stage_of = re.search(r"(?:zero|z|stage)[-_]?([0-3])", name.rpartition("/")[2])
    if not isinstance(value, str) or not stage_of:
        return None
    if stage_of[1] == "0":
        return {}
    stage = {"1": "optimizer", "2": "gradients", "3": "weights"}[stage_of[1]]
    offload = {"distributed.offload": "cpu"} if "offload" in name else {}
    return {"distributed.kind": "deepspeed", "distributed.stage": stage, **offload}


def _fsdp(value: Any) -> KeyValues | None:
    """From words such as `full_shard auto_wrap`, or from a mapping whose keys may begin with `fsdp_`."""
    if not value:
        return {}
    if isinstance(value, Mapping):
        keys = {str(key).removeprefix("fsdp_"): given for key, given in value.items()}
    else:
        words = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
        keys = {"offload_params": "offload" in words, "reshard_after_forward": "shard_grad_op" not in words}
    kept = str(keys.get("reshard_after_forward", True)).lower() in ("false", "shard_grad_op")
    settings = {"distributed.kind": "fsdp", "distributed.stage": "gradients" if kept else "weights"}
    return settings | ({"distributed.offload": "cpu"} if keys.get("offload_params") is True else {})


def _plugins(value: Any) -> KeyValues | None:
    """Axolotl's plugins; those of fast kernels do not change the result."""
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    if not all(re.search("liger|cut_cross_entropy|kernels|swanlab", name) for name in names):
        return None
    return {"kernels.fused": "auto"} if any("liger" in name for name in names) else {}


def _checkpointing(value: Any) -> KeyValues | None:
    known = {"offload": {"memory.checkpointing": "all", "memory.offload": "checkpoints"}}
    if isinstance(value, bool) or value == "unsloth":
        return {"memory.checkpointing": "all" if value else "none"}
    return known.get(str(value))


def _steps(key: str) -> Callable[[Any], KeyValues | None]:
    """Converts a number of steps: below 1 there is no limit, and a share of the run has no counterpart."""
    return lambda value: ({key: value} if value > 0 else {}) if type(value) is int else None


def _when(wanted: bool, settings: KeyValues) -> Callable[[Any], KeyValues | None]:
    """Settings for a switch in one position, none in the other."""
    return lambda value: (settings if value is wanted else {}) if isinstance(value, bool) else None


_CONVERTED: dict[str, Callable[[Any], KeyValues | None]] = {
    "adapter": _method,
    "finetuning_type": _method,
    "use_peft": _when(False, {"adapter.kind": "none", "quantization.kind": "none"}),
    "rl": _only_off,
    "stage": lambda value: {"sft": {}, "pt": {"data.format": "text", "data.too_long": "split"}}.get(str(value)),
    "pref_loss": lambda _: None,
    "loss_type": lambda value: {} if value == "nll" else None,
    "reward_model": _only_off,
    "num_labels": lambda value: {} if value == 1 else None,
    "precompute_ref_log_probs": _when(True, {"preference.reference": "cached"}),
    "quantization_bit": _bits,
    "quantization_method": lambda value: {} if value in ("bnb", "bitsandbytes") else None,
    "rope_scaling": _rope_scaling,
    "enable_thinking": lambda value: {"data.template_arguments": {"enable_thinking": value}},
    "adapter_name_or_path": lambda value: None if "," in str(value) else {"adapter.start_from": value},
    "alpha_pattern": _only_off,
    "lora_alpha_pattern": _only_off,
    **dict.fromkeys(
        ("neftune_noise_alpha", "neftune_alpha", "noisy_embedding_alpha"),
        lambda value: {"training.neftune_noise_alpha": value} if value else {},
    ),
    "lora_target": _targets,
    "lora_target_modules": _targets,
    "val_size": _held_out,
    "val_set_size": _held_out,
    "train_on_inputs": lambda value: {"data.loss_on": "all"} if value else {},
    "gradient_checkpointing": _checkpointing,
    "disable_gradient_checkpointing": _when(True, {"memory.checkpointing": "none"}),
    "mask_history": _when(True, {"data.loss_on": "last"}),
    **dict.fromkeys(("template", "chat_template", "chat_template_path"), _template),
    "excess_length_strategy": lambda value: {"data.too_long": "error" if value == "raise" else value},
    "cosine_min_lr_ratio": lambda value: {0: {}, 0.1: {"training.schedule": "cosine_to_tenth"}}.get(_number(value)),
    "warmup_ratio": lambda value: {"training.warmup": value} if 0 <= _number(value) < 1 else None,
    "deepspeed": _deepspeed,
    "fsdp": _fsdp,
    "fsdp_config": _fsdp,
    "plugins": _plugins,
    "special_tokens": lambda value: {} if isinstance(value, dict) and value.keys() <= {"pad_token"} else None,
    "model_revision": lambda value: {} if value == "main" else {"model.revision": value},
    "dtype": _dtype,
    "torch_dtype": _dtype,
    "flash_attention": lambda value: {} if value in (True, "auto") else None,
    "flash_attn": lambda value: {} if value == "auto" else {"model.attention": name_here(str(value))},
    "max_steps": _steps("training.max_steps"),
    "eval_steps": _steps("training.eval_every"),
    "save_steps": _steps("output.save_every"),
    **dict.fromkeys(("evals_per_epoch", "saves_per_epoch"), lambda value: {} if _number(value) == 0 else None),
    "save_total_limit": lambda value: {"output.keep": max(2, value)} if type(value) is int and value > 0 else None,
    "report_to": lambda value: {} if value == "none" else {"tracking.to": [value] if isinstance(value, str) else value},
    "wandb_project": lambda value: {"tracking.to": ["wandb"], "tracking.project": value},
    "use_wandb": lambda value: {"tracking.to": ["wandb"]} if value else {},
    **dict.fromkeys(("init_lora_weights", "peft_init_lora_weights"), _initial),
}
"""The keys whose values are converted."""
