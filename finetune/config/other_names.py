"""What keys of other tools are called here: those of Axolotl, LLaMA-Factory, Unsloth, TRL, transformers and PEFT.

A key that is none of ours but one of theirs is refused with the key to write; nothing is taken silently, since a name
that they share may not mean the same. `finetune init --from` translates a whole config by the same table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from finetune.config import not_offered

_ALWAYS = "leave it out: this is always so here"
_NO_NEED = "leave it out: it does not change the result, and is chosen by itself here"
_NO_TENSOR = (
    "leave it out: tensor parallelism is not offered, because transformers has it neither for quantized weights nor "
    "for adapters on every layer; `distributed.kind: fsdp` divides weights among ranks, and `distributed.context` rows"
)
_NO_PIPELINE = (
    "leave it out: pipeline parallelism is not offered for training, because transformers has it for inference alone; "
    "`distributed.kind: fsdp` divides weights among ranks"
)

NAMES: dict[str, str] = {
    # -- the model
    "base_model": "`model.name`",
    "model_name": "`model.name`",
    "model_id": "`model.name`",
    "model_name_or_path": "`model.name`",
    "model_path": "`model.name`",
    "pretrained_model_name_or_path": "`model.name`",
    "model_revision": "`model.revision`",
    "revision_of_model": "`model.revision`",
    "tokenizer_name": "`model.tokenizer`",
    "tokenizer_config": "`model.tokenizer`",
    "trust_remote_code": "`model.trust_remote_code`",
    "rope_scaling": "`model.rope_scaling`, such as `{rope_type: yarn, factor: 4}`",
    "attn_implementation": "`model.attention`",
    "flash_attention": "`model.attention`",
    "flash_attn": "`model.attention`",
    "sdp_attention": "`model.attention: sdpa`",
    "eager_attention": "`model.attention: eager`",
    # -- quantization
    "load_in_4bit": "`quantization.kind: nf4`",
    "load_in_8bit": "`quantization.kind: int8`",
    "quantization_bit": "`quantization.kind: nf4` for 4 bits, `quantization.kind: int8` for 8",
    "bnb_4bit_quant_type": "`quantization.kind`",
    "bnb_4bit_use_double_quant": "`quantization.double`",
    "double_quantization": "`quantization.double`",
    "bnb_4bit_compute_dtype": "`training.precision`",
    # -- the adapter
    "lora_r": "`adapter.rank`",
    "lora_rank": "`adapter.rank`",
    "r": "`adapter.rank`",
    "rank_pattern": "`adapter.ranks`",
    "lora_alpha": "`adapter.alpha`",
    "alpha_pattern": "leave it out: `adapter.alpha` is one for all, divided by each layer's rank in `adapter.ranks`",
    "lora_dropout": "`adapter.dropout`",
    "lora_target": "`adapter.targets`",
    "lora_target_modules": "`adapter.targets`",
    "target_modules": "`adapter.targets`",
    "lora_target_linear": "`adapter.targets: all-linear`",
    "lora_modules_to_save": "`adapter.extra_modules`",
    "modules_to_save": "`adapter.extra_modules`",
    "additional_target": "`adapter.extra_modules`",
    "use_rslora": "`adapter.rslora`",
    "lora_use_rslora": "`adapter.rslora`",
    "peft_use_rslora": "`adapter.rslora`",
    "use_dora": "`adapter.dora`",
    "lora_use_dora": "`adapter.dora`",
    "peft_use_dora": "`adapter.dora`",
    "pissa_init": "`adapter.init: pissa`",
    "init_lora_weights": "`adapter.init`",
    "lora_model_dir": "`adapter.start_from`",
    "adapter_name_or_path": "`adapter.start_from`",
    "adapter": "`adapter.kind`",
    "finetuning_type": "`adapter.kind`",
    "peft_type": "`adapter.kind`",
    "qlora": "`quantization.kind: nf4` and `adapter.kind: lora`, which are the defaults",
    "lora": "`adapter.kind: lora`, which is the default",
    # -- the data
    "dataset": "`data.train`",
    "datasets": "`data.train`",
    "dataset_name": "`data.train`",
    "dataset_path": "`data.train`",
    "train_file": "`data.train`",
    "data_path": "`data.train`",
    "eval_dataset": "`data.eval`",
    "test_datasets": "`data.eval`",
    "val_size": "`data.eval_share`",
    "val_set_size": "`data.eval_share`",
    "validation_split": "`data.eval_share`",
    "template": "`data.chat_template`",
    "chat_template_jinja": "`data.chat_template` with the name of a .jinja file",
    "max_seq_length": "`data.max_length`",
    "max_seq_len": "`data.max_length`",
    "sequence_len": "`data.max_length`",
    "cutoff_len": "`data.max_length`",
    "model_max_length": "`data.max_length`",
    "excess_length_strategy": "`data.too_long`",
    "sample_packing": "`data.packing`",
    "packing": "`data.packing`",
    "train_on_inputs": "`data.loss_on: all`",
    "train_on_prompt": "`data.loss_on: all`",
    "assistant_only_loss": "`data.loss_on: assistant`, which is the default",
    "completion_only_loss": "`data.loss_on: assistant`, which is the default",
    "train_on_responses_only": "`data.loss_on: assistant`, which is the default",
    "dataset_text_field": "`data.columns` as `{text: NAME}`",
    "field": "`data.columns` as `{text: NAME}`",
    # -- the steps
    **dict.fromkeys(("stage", "rl"), "`training.objective: supervised`, which is the default"),
    "lr": "`training.learning_rate`",
    "learning_rate": "`training.learning_rate`",
    "per_device_train_batch_size": "`training.micro_batch`, and the rows of a whole step as `training.batch_size`",
    "micro_batch_size": "`training.micro_batch`",
    "train_batch_size": "`training.batch_size`, the rows of a whole step over all ranks",
    "gradient_accumulation_steps": "`training.batch_size`, the rows of a whole step; accumulation follows from it",
    "num_epochs": "`training.epochs`",
    "num_train_epochs": "`training.epochs`",
    "max_steps": "`training.max_steps`",
    "lr_scheduler": "`training.schedule`",
    "lr_scheduler_type": "`training.schedule`",
    "warmup_steps": "`training.warmup`",
    "warmup_ratio": "`training.warmup`",
    "num_warmup_steps": "`training.warmup`",
    "max_grad_norm": "`training.max_grad_norm`",
    "clip_grad_norm": "`training.max_grad_norm`",
    "group_by_length": "`training.group_by_length`",
    "train_sampling_strategy": "`training.group_by_length`",
    "bf16": "`training.precision: bf16`",
    "fp16": "`training.precision: fp16`",
    "bfloat16": "`training.precision: bf16`",
    "dtype": "`training.precision`",
    "torch_dtype": "`training.precision`",
    **dict.fromkeys(
        ("neftune_noise_alpha", "neftune_alpha", "noisy_embedding_alpha"), "`training.neftune_noise_alpha`"
    ),
    "seed": "`training.seed`",
    "random_state": "`training.seed`",
    "eval_steps": "`training.eval_every`",
    "evals_per_epoch": "`training.eval_every`, in steps",
    "early_stopping_patience": "`training.early_stopping`",
    # -- the optimizer
    "optim": "`optimizer.kind`",
    "optimizer": "`optimizer.kind`",
    "weight_decay": "`optimizer.weight_decay`",
    "loraplus_lr_ratio": "`optimizer.lora_plus`",
    "adam_beta1": "`optimizer.beta1`",
    "adam_beta2": "`optimizer.beta2`",
    "adam_epsilon": "`optimizer.epsilon`",
    # -- memory and speed
    "gradient_checkpointing": "`memory.checkpointing`",
    "activation_checkpointing": "`memory.checkpointing`",
    "enable_activation_checkpointing": "`memory.checkpointing`",
    "use_gradient_checkpointing": "`memory.checkpointing`",
    "activation_offloading": "`memory.offload: checkpoints`",
    "enable_activation_offloading": "`memory.offload: checkpoints`",
    "torch_compile": "`kernels.compile: layers`",
    "use_liger_kernel": "`kernels.fused: auto`",
    "use_unsloth": "`kernels.fused: auto`",
    "lora_mlp_kernel": "`kernels.fused: auto`",
    "lora_qkv_kernel": "`kernels.fused: auto`",
    # -- several ranks
    "context_parallel_size": "`distributed.context`",
    "sequence_parallel_degree": "`distributed.context`",
    "sequence_parallel_size": "`distributed.context`",
    "cp_size": "`distributed.context`",
    "sp_size": "`distributed.context`",
    "tensor": _NO_TENSOR,
    "tensor_parallel": _NO_TENSOR,
    "tensor_parallel_size": _NO_TENSOR,
    "tp_size": _NO_TENSOR,
    "pipeline": _NO_PIPELINE,
    "pipeline_parallel_size": _NO_PIPELINE,
    "pp_size": _NO_PIPELINE,
    # -- output
    "output_dir": "`output.dir`",
    "save_steps": "`output.save_every`",
    "saves_per_epoch": "`output.save_every`, in steps",
    "save_total_limit": "`output.keep`",
    "load_best_model_at_end": "`output.best`",
    "report_to": "`tracking.to`",
    "use_wandb": "`tracking.to: wandb`",
    "wandb_project": "`tracking.project`",
    "wandb_name": "`tracking.name`",
    "wandb_run_name": "`tracking.name`",
    "run_name": "`tracking.name`",
    "mlflow_experiment_name": "`tracking.project`",
    "logging_steps": "`tracking.log_every`; the run directory has every step",
    "overwrite_output_dir": "leave it out, and give the command `--fresh` to start over",
    "resume_from_checkpoint": "leave it out: the same command resumes a run",
    "auto_resume_from_checkpoints": _ALWAYS,
    "dataloader_pin_memory": _ALWAYS,
    "remove_unused_columns": _ALWAYS,
    "do_train": _ALWAYS,
    "plot_loss": _ALWAYS,
    "ddp_timeout": _NO_NEED,
    "overwrite_cache": _NO_NEED,
    "dataset_prepared_path": _NO_NEED,
    "dataset_processes": _NO_NEED,
    "preprocessing_num_workers": _NO_NEED,
    "dataloader_num_workers": _NO_NEED,
    "per_device_eval_batch_size": _NO_NEED,
    "eval_batch_size": _NO_NEED,
    "eval_sample_packing": _NO_NEED,
}
"""By another tool's key, in lower case: what to write, with our keys between backticks."""


def meant(key: str, value: object = None) -> str | None:
    """What to write instead of another tool's `key: value`; None for a key of no tool."""
    text = NAMES.get(_spelt(key))
    ours = re.findall(r"`(\w+\.\w+)", text or "")
    cure = not_offered.cure(ours[0], value) if ours and name_here(str(value)) == value else None
    return f"`{ours[0]}`; {cure}" if cure else text


def _spelt(key: str) -> str:
    return key.lower().replace("-", "_")


# -- values ----------------------------------------------------------------------------------------------------------

_VALUES = {
    "adamw": "adamw_torch_fused",
    "adamw_torch": "adamw_torch_fused",
    "adamw_hf": "adamw_torch_fused",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "lion": "lion_32bit",
    "ademamix": "ademamix_32bit",
    "constant_with_warmup": "constant",
    "fa2": "flash_attention_2",
    "flex_attention": "flex",
    "sft": "supervised",
    "linear_with_warmup": "linear",
    "fsdp2": "fsdp",
    "tokenizer_default": "auto",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    **dict.fromkeys(("4bit", "4-bit", "int4", "bnb_4bit", "qlora"), "nf4"),
    **dict.fromkeys(("8bit", "8-bit"), "int8"),
}


def name_here(value: str) -> str:
    """What a value is called here that other tools call `value`; `value` itself if nothing else is known."""
    return _VALUES.get(value.lower(), value)


Settings = dict[str, Any]
"""Values by `section.key`."""


def taken(key: str, value: Any) -> Settings | None:
    """What another tool's `key: value` is here, empty if nothing need be written; None without a counterpart."""
    key = _spelt(key)
    if key in _CONVERTED:
        return _CONVERTED[key](value)
    if (text := NAMES.get(key)) is None:
        return None
    if text.startswith("leave"):
        return {}
    [ours, fixed] = re.findall(r"`(\w+\.\w+)(?:: ([^`]+))?`", text)[0]
    if fixed:
        return {ours: fixed} if value in (True, "auto") else {}
    return {ours: name_here(value) if isinstance(value, str) else value}


def _method(value: Any) -> Settings | None:
    full = {"adapter.kind": "none", "quantization.kind": "none"}
    known = {"lora": {}, "qlora": {"quantization.kind": "nf4"}, "full": full}
    return known.get(str(value))


def _bits(value: Any) -> Settings | None:
    return {"4": {"quantization.kind": "nf4"}, "8": {"quantization.kind": "int8"}}.get(str(value))


def _rope_scaling(value: Any) -> Settings | None:
    """A type without a factor, as LLaMA-Factory has it, gets one from the length of the rows there."""
    kind = value.get("rope_type", value.get("type")) if isinstance(value, dict) else None
    return {"model.rope_scaling": {"rope_type": kind, "factor": value.get("factor")}} if kind else None


def _targets(value: Any) -> Settings:
    if value in ("all", "all-linear"):
        return {"adapter.targets": "all-linear"}
    return {"adapter.targets": [name.strip() for name in value.split(",")] if isinstance(value, str) else value}


def _only_off(value: Any) -> Settings | None:
    return None if value else {}


def _noise(value: Any) -> Settings:
    return {"training.neftune_noise_alpha": value} if value else {}


def _held_out(value: Any) -> Settings | None:
    if value == 0:
        return {"data.eval": "none"}
    return {"data.eval_share": value} if isinstance(value, float) and value < 1 else None


def _checkpointing(value: Any) -> Settings | None:
    known = {"offload": {"memory.checkpointing": "all", "memory.offload": "checkpoints"}}
    if isinstance(value, bool) or value == "unsloth":
        return {"memory.checkpointing": "all" if value else "none"}
    return known.get(str(value))


def _steps(key: str) -> Callable[[Any], Settings | None]:
    """A number of steps; a share of the run has no counterpart, and below 1 is no limit."""
    return lambda value: ({key: value} if value > 0 else {}) if type(value) is int else None


_CONVERTED: dict[str, Callable[[Any], Settings | None]] = {
    "adapter": _method,
    "finetuning_type": _method,
    "stage": lambda value: {} if value == "sft" else None,
    "quantization_bit": _bits,
    "rope_scaling": _rope_scaling,
    "adapter_name_or_path": lambda value: None if "," in str(value) else {"adapter.start_from": value},
    "alpha_pattern": _only_off,
    **dict.fromkeys(("neftune_noise_alpha", "neftune_alpha", "noisy_embedding_alpha"), _noise),
    "lora_target": _targets,
    "lora_target_modules": _targets,
    "val_size": _held_out,
    "val_set_size": _held_out,
    "train_on_inputs": lambda value: {"data.loss_on": "all"} if value else {},
    "gradient_checkpointing": _checkpointing,
    "flash_attention": lambda value: {} if value in (True, "auto") else None,
    "flash_attn": lambda value: {} if value == "auto" else {"model.attention": name_here(str(value))},
    "max_steps": _steps("training.max_steps"),
    "eval_steps": _steps("training.eval_every"),
    "save_steps": _steps("output.save_every"),
    "evals_per_epoch": lambda value: None,
    "saves_per_epoch": lambda value: None,
    "save_total_limit": lambda value: {"output.keep": max(2, value)} if type(value) is int else None,
    "report_to": lambda value: {} if value == "none" else {"tracking.to": [value] if isinstance(value, str) else value},
    "wandb_project": lambda value: {"tracking.to": ["wandb"], "tracking.project": value},
    "use_wandb": lambda value: {"tracking.to": ["wandb"]} if value else {},
    "init_lora_weights": lambda value: {"adapter.init": "pissa"} if str(value).startswith("pissa") else None,
}
"""The keys whose value is not copied as it is."""
