"""Translate another tool's config into ours, and name the keys without a counterpart.

What single keys and values are called here is in `finetune.config.other_names`; `CONVERTED` has the keys whose values
need more than another name, and `TOOLS` what each tool does where its config says nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune.choices import CHOICES
from finetune.config import AdapterSection, other_names, strict_yaml
from finetune.config.load import ignored_keys, text_of
from finetune.config.other_names import name_here
from finetune.config.rules import contradictions
from finetune.config.sections import SHARDED
from finetune.errors import ConfigError
from finetune.extras.init.draft import Draft
from finetune.objectives import OBJECTIVES

KeyValues = dict[str, Any]
"""Values by `section.key`."""


@dataclass(frozen=True)
class Tool:
    """A tool whose config has the key `model`.

    `rows`: of a micro-batch by default. `defaults`: the values of its keys that differ from ours, and `objectives`
    those that an objective adds. `full`: the key without which every weight is trained. `own`: keys that tell its
    config from that of another tool with the same key `model`.
    """

    model: str
    rows: int
    defaults: KeyValues
    full: str | None = None
    own: Sequence[str] = ()
    objectives: Mapping[str, KeyValues] = field(default_factory=dict)


TOOLS = {
    # src/axolotl/utils/schemas/ and core/builders/rl.py
    "Axolotl": Tool(
        "base_model", 1, {"sequence_len": 512, "optimizer": "adamw_torch_fused", "excess_length_strategy": "drop"},
        full="adapter", objectives={"simpo": {"rl_beta": 0.1, "simpo_gamma": 0.5, "cpo_alpha": 1.0}},
    ),
    # src/llamafactory/hparams/, train/dpo/trainer.py and transformers' TrainingArguments
    "LLaMA-Factory": Tool(
        "model_name_or_path", 8,
        {
            "lora_rank": 8, "cutoff_len": 2048, "learning_rate": 5e-05, "num_train_epochs": 3, "warmup_ratio": 0,
            "lr_scheduler_type": "linear", "optim": "adamw_torch",
        },
        own=(
            "stage", "finetuning_type", "template", "cutoff_len", "lora_rank", "lora_target", "dataset", "dataset_dir",
            "quantization_bit", "val_size", "neat_packing", "adapter_name_or_path", "enable_liger_kernel", "flash_attn",
            "rope_scaling", "pissa_init", "pure_bf16",
        ),
        objectives={"simpo": {"pref_beta": 0.1, "simpo_gamma": 0.5}},
    ),
    # trl/scripts/utils.py, trl/trainer/model_config.py, sft_config.py, dpo_config.py and reward_config.py
    "TRL": Tool(
        "model_name_or_path", 8,
        {
            "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "max_length": 1024, "learning_rate": 2e-05,
            "num_train_epochs": 3, "warmup_steps": 0, "lr_scheduler_type": "linear", "optim": "adamw_torch_fused",
        },
        full="use_peft",
        own=(
            "use_peft", "lora_r", "lora_target_modules", "lora_target_parameters", "dataset_name", "dataset_config",
            "dataset_train_split", "dataset_test_split", "datasets", "max_length", "max_seq_length", "load_in_4bit",
            "load_in_8bit", "attn_implementation", "dtype", "torch_dtype", "assistant_only_loss",
            "completion_only_loss", "dataset_text_field", "padding_free", "eos_token",
        ),
        objectives={
            **{key: {"learning_rate": 1e-06} for key in ("dpo", "ipo")},
            "robust_dpo": {"learning_rate": 1e-06, "label_smoothing": 0}, "reward": {"learning_rate": 1e-04},
        },
    ),
}  # fmt: skip

_SAMPLED = other_names.advice("training.objective", "grpo")
# Keys that ask for another kind of training, by pattern. A comment in the translated config would not do: the job would
# run as a supervised one, and few read on.
_REFUSED = {
    "diffusion": "text is generated token by token here; train such a model with the tool of this config",
    "ref_model(_adapters)?": "the reference is the model that training starts from; if it is that, remove the key",
    "loss_weights": "one loss is minimised here; for `sft` beside it, write `preference.nll_weight`",
    "reward_model\\w*|reward_(funcs|weights)|num_generations|max_completion_length": _SAMPLED,
    "process_reward_model": other_names.advice("training.objective", "prm"),
    "processor_(type|kwargs)|(image|video|audio)_\\w+|freeze_(vision_tower|multi_modal_projector|mm_modules)"
    "|freeze_language_model": "training on images, video and sound is not translated; if the rows are of text alone, "
    "remove the key",
    "export_dir|do_predict|predict_with_generate|infer_backend": "that is no training; to merge an adapter or to test "
    "it, see `finetune merge` and `finetune eval`",
}

_ROWS = ("micro_batch_size", "per_device_train_batch_size")
_COUNTS = (*_ROWS, "gradient_accumulation_steps", "batch_size")
_MOST_ROWS = 2**20
"""The rows of a step that a config may have."""
_DATA = ("datasets", "dataset", "dataset_name", "pretraining_dataset", "dataset_dir", "test_datasets", "eval_dataset")
_OBJECTIVE = ("rl", "stage", "pref_loss", "loss_type", "reward_model")
_FUSED = "lora_target_parameters"
_OF_ADAPTERS = {f"adapter.{key}" for key in AdapterSection.model_fields if key != "kind"}
_LONGEST = 60


# -- the values of a key -------------------------------------------------------------------------------------------


def _rope_scaling(value: Any) -> KeyValues | None:
    """A type without a factor, as LLaMA-Factory has it, gets one from the length of the rows there."""
    kind = value.get("rope_type", value.get("type")) if isinstance(value, dict) else None
    return {"model.rope_scaling": {"rope_type": kind, "factor": value.get("factor")}} if kind else None


def _targets(value: Any) -> KeyValues:
    if value in ("all", "all-linear"):
        return {"adapter.targets": "all-linear"}
    return {"adapter.targets": [name.strip() for name in value.split(",")] if isinstance(value, str) else value}


def _held_out(value: Any) -> KeyValues | None:
    if type(value) in (int, float) and value == 0:
        return {"data.eval": "none"}
    return {"data.eval_share": value} if isinstance(value, float) and value < 1 else None


def _zero_by_file(value: Any) -> KeyValues | None:
    """How ranks share by the name of ZeRO's file, such as configs/zero2.json or ds_z3_offload_config.json."""
    name = str(value).lower()
    stage_of = re.search(r"(?:zero|z|stage)[-_]?([0-3])", name.rpartition("/")[2])
    if not isinstance(value, str) or not stage_of:
        return None
    if stage_of[1] == "0":
        return {}
    stage = {"1": "optimizer", "2": "gradients", "3": "weights"}[stage_of[1]]
    offload = {"distributed.offload": "cpu"} if "offload" in name else {}
    return {"distributed.stage": stage, **offload}


def _divided(value: Any) -> KeyValues | None:
    """How ranks share by words such as `full_shard auto_wrap`, or by a mapping whose keys may begin with `fsdp_`."""
    if not value:
        return {}
    if isinstance(value, Mapping):
        keys = {str(key).removeprefix("fsdp_"): given for key, given in value.items()}
    else:
        words = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
        keys = {"offload_params": "offload" in words, "reshard_after_forward": "shard_grad_op" not in words}
    kept = str(keys.get("reshard_after_forward", True)).lower() in ("false", "shard_grad_op")
    offload = {"distributed.offload": "cpu"} if keys.get("offload_params") is True else {}
    return {"distributed.stage": "gradients" if kept else "weights", **offload}


def _plugins(value: Any) -> KeyValues | None:
    """Axolotl's plugins; those of fast kernels do not change the result."""
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    if not all(re.search("liger|cut_cross_entropy|kernels|swanlab", name) for name in names):
        return None
    return {"kernels.fused": "auto"} if any("liger" in name for name in names) else {}


def _count(key: str, least: int = 1) -> Callable[[Any], KeyValues | None]:
    """Converts a whole number: below 1 there is no limit. A share of the run has no counterpart."""
    return lambda value: ({key: max(least, value)} if value > 0 else {}) if type(value) is int else None


_FULL = {"adapter.kind": "none", "quantization.kind": "none"}
_METHODS = {"lora": {}, "qlora": {"quantization.kind": "nf4"}, "full": _FULL, "none": {}}
_DTYPES = {
    "bfloat16": {"training.precision": "bf16"}, "float16": {"training.precision": "fp16"},
    # The type of the weights; `bf16` and `fp16` say the precision of the arithmetic.
    "auto": {}, "float32": {},
}  # fmt: skip
_CHECKPOINTING = {
    **{key: {"memory.checkpointing": "all"} for key in ("true", "unsloth")},
    "false": {"memory.checkpointing": "none"},
    "offload": {"memory.checkpointing": "all", "memory.offload": "checkpoints"},
}

CONVERTED: dict[str, Mapping[str, KeyValues] | Callable[[Any], KeyValues | None]] = {
    **dict.fromkeys(("adapter", "finetuning_type"), _METHODS),
    "use_peft": {"true": {}, "false": _FULL},
    "stage": {"sft": {}, "pt": {"data.format": "text", "data.too_long": "split"}},
    "loss_type": {"nll": {}},
    **{key: {} for key in ("rl", "pref_loss", "reward_model", "alpha_pattern", "lora_alpha_pattern")},
    "num_labels": {"1": {}},
    "precompute_ref_log_probs": {"true": {"preference.reference": "cached"}, "false": {}},
    "quantization_bit": {"4": {"quantization.kind": "nf4"}, "8": {"quantization.kind": "int8"}},
    "quantization_method": {"bnb": {}, "bitsandbytes": {}},
    "rope_scaling": _rope_scaling,
    "enable_thinking": lambda value: {"data.template_arguments": {"enable_thinking": value}},
    "adapter_name_or_path": lambda value: None if "," in str(value) else {"adapter.start_from": value},
    **dict.fromkeys(
        ("neftune_noise_alpha", "neftune_alpha", "noisy_embedding_alpha"),
        lambda value: {"training.neftune_noise_alpha": value} if value else {},
    ),
    **dict.fromkeys(("lora_target", "lora_target_modules"), _targets),
    **dict.fromkeys(("val_size", "val_set_size"), _held_out),
    "gradient_checkpointing": _CHECKPOINTING,
    **dict.fromkeys(
        ("template", "chat_template", "chat_template_path"),
        lambda value: {} if value == "tokenizer_default" else {"data.chat_template": name_here(str(value))},
    ),
    "excess_length_strategy": lambda value: {"data.too_long": "error" if value == "raise" else value},
    "cosine_min_lr_ratio": {"0": {}, "0.0": {}, "0.1": {"training.schedule": "cosine_to_tenth"}},
    "warmup_ratio": lambda value: (
        {"training.warmup": value} if type(value) in (int, float) and 0 <= value < 1 else None
    ),
    "plugins": _plugins,
    "special_tokens": lambda value: {} if isinstance(value, dict) and value.keys() <= {"pad_token"} else None,
    "model_revision": lambda value: {} if value == "main" else {"model.revision": value},
    **dict.fromkeys(("dtype", "torch_dtype"), lambda value: _DTYPES.get(str(value).removeprefix("torch."))),
    "flash_attention": {"true": {}, "auto": {}},
    "flash_attn": lambda value: {} if value == "auto" else {"model.attention": name_here(str(value))},
    "max_steps": _count("training.max_steps"),
    "eval_steps": _count("training.eval_every"),
    "save_steps": _count("output.save_every"),
    **{key: {"0": {}} for key in ("evals_per_epoch", "saves_per_epoch")},
    "save_total_limit": _count("output.keep", least=2),
    "report_to": lambda value: {} if value == "none" else {"tracking.to": [value] if isinstance(value, str) else value},
    "wandb_project": lambda value: {"tracking.to": ["wandb"], "tracking.project": value},
    "use_wandb": {"true": {"tracking.to": ["wandb"]}, "false": {}},
    **{
        key: {"true": {}, "pissa": {"adapter.init": "pissa"}} for key in ("init_lora_weights", "peft_init_lora_weights")
    },
    "dataset_train_split": {"train": {}},
    "dataset_test_split": {"test": {}},
}
"""By another tool's key: our settings by the value it has as text, in lower case, or a function of the value."""


def taken(key: str, value: Any) -> KeyValues | None:
    """Our settings for another tool's `key: value`, empty if none are needed; None without a counterpart."""
    converter = CONVERTED.get(key := other_names.spelt(key))
    if converter is not None:
        return converter(value) if callable(converter) else converter.get(str(value).lower())
    if (text := other_names.NAMES.get(key)) is None:
        return None
    if text.startswith("leave"):
        return {}
    [ours, fixed] = re.findall(r"`(\w+\.\w+)(?:: ([^`]+))?`", text)[0]
    if ours == "distributed.kind":
        shared = _divided(value) if fixed == "fsdp" else _zero_by_file(value)
        return shared and {ours: fixed, **shared}
    if fixed and value == "auto" and ours == "training.precision":
        return {ours: value}
    if fixed:
        return {ours: fixed} if value in (True, "auto") else {}
    return {ours: name_here(value) if isinstance(value, str) else value}


# -- a whole config ------------------------------------------------------------------------------------------------


def translate(path: Path) -> Draft:
    """The config at `path` in our keys.

    Raises ConfigError for one that cannot be read, is of no tool in TOOLS, or asks for another kind of training.
    """
    document = strict_yaml.parse(text_of(path))
    if document.problems:
        raise ConfigError("\n".join(f"{path}:{problem.line}: {problem.message}" for problem in document.problems))
    given = {str(key): value for key, value in document.values.items() if value is not None}
    name = _tool(given, path)
    if refused := [*_refusals(given)]:
        raise ConfigError(
            "\n".join(
                f"{path}:{document.lines.get((key,), 1)}: `{key}: {json.dumps(given[key], default=str)[:_LONGEST]}`: "
                f"{why}" for key, why in refused
            )
        )  # fmt: skip
    draft = Draft(f"Translated by `finetune init` from {path.name}, a config of {name}")
    tool, defaults = TOOLS[name], TOOLS[name].defaults
    if named := _objective(given):
        asking, ours = named
        draft.take("training.objective", ours, asking)
        defaults = {**defaults, **tool.objectives.get(ours, {})}
        given = {key: value for key, value in given.items() if key not in _OBJECTIVE}
        if (name, ours) == ("TRL", "dpo") and (smoothing := given.pop("label_smoothing", None)):  # TRL 1.16
            draft.notes.append(f"Left out, as TRL does not read it for `dpo`: label_smoothing: {smoothing}")

    left = [key for key in {**defaults, **given} if key not in (*_COUNTS, *_DATA, _FUSED)]
    owners: dict[str, str] = {}  # the given keys by ours
    for _ in range(2):  # a key may need one that comes later, as early stopping needs evaluations
        left = [key for key in left if not _take_key(draft, key, given, defaults, owners)]
    fused, targets = given.get(_FUSED, []), draft.values.get("adapter.targets", [])
    if isinstance(fused, list) and isinstance(targets, list):
        # There the end of a full name, such as mlp.experts.gate_up_proj; here the last two names of it.
        fused = [".".join(str(name).split(".")[-2:]) for name in fused]
        left += [] if not fused or _take(draft, {"adapter.targets": [*targets, *fused]}, _FUSED) else [_FUSED]
    else:
        left.append(_FUSED)
    others: list[str] = []  # what is unknown of the data sets
    left += [key for key in _DATA if key in given and not _take_data(draft, key, given, others)]
    rows = next((given[key] for key in _ROWS if key in given), tool.rows)
    steps = given.get("gradient_accumulation_steps") or max(1, given.get("batch_size", rows) // rows)
    _take(draft, {"training.batch_size": rows * steps}, f"{rows} x {steps} on one GPU")
    _take(draft, {"training.micro_batch": rows}, "")
    _apply_implicit_defaults(draft, name, given)
    _leave_out_ignored(draft, owners)
    _note_undecided(draft, name, given)
    _note_the_rest(draft, {key: given[key] for key in left if key in given}, others)
    draft.notes += [f"To be decided: `{key}`: {message}" for key, message in contradictions(draft.config)]
    return draft


def _tool(given: Mapping[str, Any], path: Path) -> str:
    """The tool a config is for: of those whose key for the model it has, the one with most keys in it."""
    names = [name for name, tool in TOOLS.items() if tool.model in given]
    if not names:
        raise ConfigError(
            f"{path}: a config to translate has `base_model` (Axolotl) or `model_name_or_path` (LLaMA-Factory, TRL); "
            "this one has neither"
        )
    own = {name: len(given.keys() & {*TOOLS[name].own}) for name in names}
    if len(names) > 1 and not any(own.values()):
        raise ConfigError(
            f"{path}: it may be a config of {' or '.join(names)}, whose defaults differ; add `finetuning_type: lora` "
            "for LLaMA-Factory, or `use_peft: true` for TRL"
        )
    return max(names, key=own.__getitem__)


def _objective(given: Mapping[str, Any]) -> tuple[str, str] | None:
    """The key that asks for other training than supervised, and what it asks for, in our words if we have it."""
    if given.get("reward_model") is True:  # Axolotl's; in LLaMA-Factory it is the path of a reward model for PPO
        return "reward_model", "reward"
    keys = ["rl", "pref_loss" if given.get("stage") == "dpo" and "pref_loss" in given else "stage", "loss_type"]
    for key in keys:
        value = given.get(key)
        [value] = value if isinstance(value, list) and len(value) == 1 else [value]
        name = name_here(str(value or "").lower())
        if name not in ("", "none", "supervised", "pt", "nll", "dft", "chunked_nll"):
            return key, name
    return ("center_rewards_coefficient", "reward") if "center_rewards_coefficient" in given else None


def _refusals(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The keys that ask for training that is not offered, and counts of the batch that are none, with the reason."""
    named = _objective(given)
    if named and named[1] not in OBJECTIVES:
        key, name = named
        offered = f"`{name}` is not offered; `training.objective` is one of {', '.join(OBJECTIVES)}"
        yield key, other_names.not_offered("training.objective", name) or offered
    for key, value in given.items():
        if key in ("adapter", "finetuning_type") and (name := str(value).lower()) not in _METHODS:
            yield key, other_names.not_offered("adapter.kind", name) or f"`{name}` is not offered: adapters are LoRA"
        if key in _COUNTS and (type(value) is not int or not 0 < value <= _MOST_ROWS):
            yield key, "a whole number above 0 is needed, such as 4"
        reason = next((why for pattern, why in _REFUSED.items() if re.fullmatch(pattern, key)), None)
        if reason and value not in (False, "", 0) and not (key == "reward_model" and value is True):
            yield key, reason


def _shown(key: str, value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return f"{key}: {text}" if len(text) <= _LONGEST else key


def _take_key(
    draft: Draft, key: str, given: Mapping[str, Any], defaults: Mapping[str, Any], owners: dict[str, str]
) -> bool:  # fmt: skip
    """Set our key for a given one or its default; the first of two wins."""
    settings = taken(key, given.get(key, defaults.get(key)))
    if settings is None:
        return False
    if key not in given:
        return _take(draft, settings, "its default there")
    # Targets are joined in the end.
    others = [ours for ours in settings if ours in owners and ours != "adapter.targets"]
    other = next((owners[ours] for ours in others if draft.values[ours] != settings[ours]), None)
    if other:
        draft.notes.append(f"To be decided: {_shown(key, given[key])}, beside {_shown(other, given[other])}")
        return True
    done = _take(draft, settings, key)
    owners |= dict.fromkeys(settings, key) if done else {}
    return done


def _take(draft: Draft, settings: KeyValues, reason: str) -> bool:
    """Add settings to the draft and return True, or return False where the config would not be valid with them."""
    more = Draft(values=draft.values | settings)
    try:
        _ = more.config
    except ValidationError:
        return False
    for key, value in settings.items():
        draft.take(key, value, "" if reason == key.partition(".")[2] else reason)
    return True


# -- its data sets -------------------------------------------------------------------------------------------------

_READERS = ("json", "csv", "parquet", "text", "arrow")
# What holds here without being written: formats are recognised by the fields of rows.
_KNOWN_OF_A_SET: dict[str, tuple[Any, ...]] = {
    "type": ("alpaca", "chat_template", "sharegpt", "completion", "pretrain", "alpaca_chat.load_qa"),
    "split": ("train",),
    "chat_template": ("tokenizer_default",),
    "roles_to_train": (["assistant"], ["gpt"], "assistant"),
    "train_on_eos": ("turn",),
    "text_column": ("text",),
    "field": ("text",),
    "field_messages": ("messages", "conversations"),
    "message_property_mappings": ({"role": "from", "content": "value"}, {"role": "role", "content": "content"}),
}


def _take_data(draft: Draft, key: str, given: Mapping[str, Any], others: list[str]) -> bool:
    """Set the data sets that a key names, as a text or as entries with a `path`; return whether it could be read. Other
    keys of the entries, which may change the result, are added to `others`.
    """
    value, sources = given[key], list[str]()
    if key == "dataset_dir":
        return True
    if isinstance(value, str):
        names = [value] if key == "dataset_name" else [name.strip() for name in value.split(",")]
        sources = [_registered(name, given) if key in ("dataset", "eval_dataset") else name for name in names]
    else:
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict) or not isinstance(one.get("path"), str):
                return False
            files = [files] if isinstance(files := one.get("data_files"), str) else files
            read = one["path"] in _READERS and isinstance(files, list) and all(isinstance(file, str) for file in files)
            sources += files if read and files else [one["path"]]
            for name, said in one.items():
                known = name in ("path", "ds_type", "trust_remote_code") or (read and name == "data_files")
                if not known and said is not None and said not in _KNOWN_OF_A_SET.get(name, ()):
                    others.append(f"{key}.{_shown(name, said)}")
    if not sources:
        return False
    if key == "pretraining_dataset":
        draft.take("data.format", "text", key)
        draft.take("data.too_long", "split", key)
    ours = "data.eval" if key in ("test_datasets", "eval_dataset") else "data.train"
    return _take(draft, {ours: sources[0] if len(sources) == 1 else sources}, key)


def _registered(name: str, given: Mapping[str, Any]) -> str:
    """The file or hub name of a data set in LLaMA-Factory's dataset_info.json, or `name` itself. Raises ConfigError."""
    folder = Path(str(given.get("dataset_dir", "data")))
    try:
        entry = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))[name]
        seen = entry.get("columns", {}).keys() & {"images", "videos", "audios"}
        source = str(folder / entry["file_name"]) if "file_name" in entry else str(entry["hf_hub_url"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return name
    if seen:
        raise ConfigError(f"{folder / 'dataset_info.json'}: `{name}` has {min(seen)}, which are not translated")
    return source


# -- what its config leaves open -----------------------------------------------------------------------------------


def _apply_implicit_defaults(draft: Draft, name: str, given: Mapping[str, Any]) -> None:
    """Apply the other tool's defaults: training of all weights, unquantized base, no evaluation set."""
    full = TOOLS[name].full
    if full and full not in given:
        draft.take("adapter.kind", "none", f"{name} trains every weight without `{full}`")
    if draft.values.get("adapter.kind") == "none":
        draft.values = {key: value for key, value in draft.values.items() if key not in _OF_ADAPTERS}
    elif given.get("lora_target_linear") is True:
        draft.take("adapter.targets", "all-linear", "lora_target_linear")
    if "adapter.alpha" not in draft.values and "adapter.rank" in draft.values:
        _take(draft, {"adapter.alpha": 2 * draft.values["adapter.rank"]}, "twice the rank")
    quantizes = any(given.get(key) for key in ("load_in_4bit", "load_in_8bit", "quantization_bit"))
    if not quantizes and given.get("adapter") != "qlora":
        draft.take("quantization.kind", "none", f"not quantized in {name}")
    if name == "TRL":
        if given.get("load_in_4bit") and "quantization.double" not in draft.values:
            draft.take("quantization.double", False, "its default there")
        if given.get("eval_strategy", "no") not in ("no", False):
            draft.values.setdefault("data.eval", "auto")
    if not {"data.eval", "data.eval_share"} & set(draft.values):
        draft.take("data.eval", "none", f"none in {name}")
    if given.get("bf16") is False and not any(given.get(key) for key in ("fp16", "float16", "bfloat16")):
        draft.take("training.precision", "fp32", "bf16: false")


def _leave_out_ignored(draft: Draft, owners: Mapping[str, str]) -> None:
    """Drop values that the config would ignore; those of a preference objective are noted."""
    ignored = [*ignored_keys(draft.config.model_dump(), CHOICES)]
    if draft.values.get("distributed.kind") in SHARDED:  # the result is the same without
        ignored += ["kernels.fused", "kernels.compile"]
    objective = draft.values.get("training.objective", "supervised")
    for key in ignored:
        value = draft.values.pop(key, None)
        if value and key.startswith("preference.") and key in owners:
            draft.notes.append(f"Left out, as `{objective}` ignores it: {_shown(owners[key], value)}")


def _note_undecided(draft: Draft, name: str, given: Mapping[str, Any]) -> None:
    """Note what the other tool's file leaves open and its defaults decide in another way than those here."""
    if "data.train" not in draft.values:
        draft.notes.append("No data set is named: write `data.train`")
    of_answers = any(given.get(key) for key in ("assistant_only_loss", "completion_only_loss"))
    if name == "TRL" and "training.objective" not in draft.values and not of_answers:
        draft.notes.append("To be decided: `data.loss_on`; of messages, TRL trains `all` tokens")
    if name == "TRL" and given.get("use_peft") and "adapter.targets" not in draft.values:
        draft.notes.append("To be decided: `adapter.targets`, which PEFT chooses there, often [q_proj, v_proj]")


def _note_the_rest(draft: Draft, left: Mapping[str, Any], others: list[str]) -> None:
    """Note the keys that were not taken: those with a counterpart, those that may change the result, harmless ones."""
    harmless, changing = list[str](), list[str]()
    for key, value in left.items():
        if other_names.without_effect(key, value):
            harmless.append(_shown(key, value))
        elif ours := other_names.meant(key, value):
            draft.notes.append(f"To be decided: {_shown(key, value)}, here {ours}")
        else:
            changing.append(_shown(key, value))
    if changing := [*dict.fromkeys([*changing, *others])]:
        draft.notes.append(f"May change the result, and has no counterpart here: {', '.join(changing)}")
    if any(other.partition(".")[2].startswith(("field", "message_", "type")) for other in others):
        draft.notes.append("Columns of other names are given in `data.columns`; `finetune data` shows what is read")
    if harmless:
        draft.notes.append(f"Left out, as it does not change the result: {', '.join(harmless)}")
