"""What keys of other tools are called here: those of Axolotl, LLaMA-Factory, Unsloth, TRL, transformers and PEFT.

A key that is none of ours but one of theirs is refused with the key to write; nothing is taken silently, since a name
that they share may not mean the same. `finetune init --from` translates a whole config by the same table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
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
    "flex_attention": "`model.attention: flex`",
    # -- quantization
    "load_in_4bit": "`quantization.kind: nf4`",
    "load_in_8bit": "`quantization.kind: int8`",
    "quantization_bit": "`quantization.kind: nf4` for 4 bits, `quantization.kind: int8` for 8",
    "quantization_type": "`quantization.kind`",
    "bnb_4bit_quant_type": "`quantization.kind`",
    "bnb_4bit_use_double_quant": "`quantization.double`",
    "use_bnb_nested_quant": "`quantization.double`",
    "double_quantization": "`quantization.double`",
    "bnb_4bit_compute_dtype": "`training.precision`",
    # -- the adapter
    "lora_r": "`adapter.rank`",
    "lora_rank": "`adapter.rank`",
    "r": "`adapter.rank`",
    **dict.fromkeys(("rank_pattern", "lora_rank_pattern"), "`adapter.ranks`"),
    "lora_alpha": "`adapter.alpha`",
    **dict.fromkeys(
        ("alpha_pattern", "lora_alpha_pattern"),
        "leave it out: `adapter.alpha` is one for all, divided by each layer's rank in `adapter.ranks`",
    ),
    "lora_dropout": "`adapter.dropout`",
    "lora_target": "`adapter.targets`",
    "lora_target_modules": "`adapter.targets`",
    "target_modules": "`adapter.targets`",
    "lora_target_linear": "`adapter.targets: all-linear`",
    "lora_target_parameters": "`adapter.targets`, which takes fused experts too (experts.gate_up_proj)",
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
    **dict.fromkeys(("init_lora_weights", "peft_init_lora_weights"), "`adapter.init`"),
    "lora_model_dir": "`adapter.start_from`",
    "adapter_name_or_path": "`adapter.start_from`",
    "adapter": "`adapter.kind`",
    "finetuning_type": "`adapter.kind`",
    "use_peft": "`adapter.kind: lora`, which is the default",
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
    **dict.fromkeys(("template", "chat_template", "chat_template_path"), "`data.chat_template`"),
    "chat_template_jinja": "`data.chat_template` with the name of a .jinja file",
    "max_length": "`data.max_length`",
    "max_seq_length": "`data.max_length`",
    "max_seq_len": "`data.max_length`",
    "sequence_len": "`data.max_length`",
    "cutoff_len": "`data.max_length`",
    "model_max_length": "`data.max_length`",
    "excess_length_strategy": "`data.too_long`",
    "sample_packing": "`data.packing`",
    "packing": "`data.packing`",
    "neat_packing": "`data.packing`",
    "train_on_inputs": "`data.loss_on: all`",
    "train_on_prompt": "`data.loss_on: all`",
    "mask_history": "`data.loss_on: last`",
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
    "float16": "`training.precision: fp16`",
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
    "early_stopping_steps": "`training.early_stopping`",
    "cosine_min_lr_ratio": "`training.schedule: cosine_to_tenth` for a tenth",
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
    "disable_gradient_checkpointing": "`memory.checkpointing: none`",
    "activation_offloading": "`memory.offload: checkpoints`",
    "enable_activation_offloading": "`memory.offload: checkpoints`",
    "torch_compile": "`kernels.compile: layers`",
    **dict.fromkeys(
        (
            "use_liger_kernel",
            "enable_liger_kernel",
            "use_unsloth",
            "lora_mlp_kernel",
            "lora_qkv_kernel",
            "lora_o_kernel",
            "liger_rope",
            "liger_rms_norm",
            "liger_rms_norm_gated",
            "liger_layer_norm",
            "liger_glu_activation",
            "liger_cross_entropy",
            "liger_fused_linear_cross_entropy",
        ),
        "`kernels.fused: auto`",
    ),
    # -- several ranks
    "deepspeed": "`distributed.kind: deepspeed`, with `distributed.stage` and `distributed.offload`",
    **dict.fromkeys(
        ("fsdp", "fsdp_config"), "`distributed.kind: fsdp`, with `distributed.stage` and `distributed.offload`"
    ),
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
    "dataset_num_proc": _NO_NEED,
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
    "adamw_torch_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "lion": "lion_32bit",
    "ademamix": "ademamix_32bit",
    "constant_with_warmup": "constant",
    "fa2": "flash_attention_2",
    "flex_attention": "flex",
    "sft": "supervised",
    "phi_3": "phi3",
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


_WITHOUT_EFFECT = re.compile(
    r"tf32|strict|debug|ddp|local_rank|world_size|device(_map)?|model_type|type_of_model|is_\w+_derived_model|cache_dir"
    r"|tokenizer_(type|use_fast|legacy|save_jinja_files)|use_fast_tokenizer|pad_to_(sequence_len|multiple_of)|pad_token"
    r"|(gradient|activation)_checkpointing_kwargs|use_reentrant_gc|low_cpu_mem_usage|lora_(on_cpu|task_type|fan_in_fan_out)"
    r"|save_(only_model|safetensors|strategy|first_step|on_each_node)|eval(uation)?_strategy|do_eval|eval_(on_start"
    r"|table_size|max_new_tokens|delay|accumulation_steps|packing|do_concat_batches|use_gather_object)|pissa_convert"
    r"|(hub|push|wandb|swanlab|mlflow|comet|trackio|gradio|logging|log|ddp|dataloader|ray|otel|profiler|loss_watchdog"
    r"|gc|include|experimental|torch_compile|chunked_cross_entropy|tiled_mlp|preprocessing|generation|num_generation)_\w+"
    r"|use_(swanlab|mlflow|comet|tensorboard|trackio|ray|otel_metrics|cache|kernels|scattermoe|sonicmoe)"
    r"|hf_(use_auth|hub)_token|disable_tqdm|resources_per_worker|average_tokens_across_devices|skip_memory_metrics"
    r"|dataset_(keep_in_memory|streaming|test_split)|streaming|auto_find_batch_size|torch_empty_cache_steps|max_memory"
    r"|(dp|expert_parallel|overlap)_\w+|(tensor|pipeline|expert)_model_parallel_size|use_distributed_optimizer"
    r"|moe_(grouped_gemm|token_dispatcher_type)|do_causal_lm_eval|eval_causal_lm_metrics|base_model_ignore_patterns"
    r"|gemma4_hybrid_attn_impl|llama4_linearized_experts|use_\w+_kernels|streaming_multipack_buffer_size"
    r"|gpu_memory_limit|flash_attn_(cross_entropy|rms_norm|fuse_mlp)|flash_optimum|fused_attn_kernel|cut_cross_entropy"
    r"|xformers_attention|flex_attn_compile_kwargs|experts_implementation|fsdp_version|prediction_loss_only"
    r"|compute_accuracy|print_param_status|sample_packing_(eff_est|group_size|bin_size|mp_start_method)|padding_free"
    r"|packing_strategy|shuffle_merged_datasets|length_column_name|generate_samples|lora_embedding_kernel"
)


def without_effect(key: str, value: Any) -> bool:
    """Whether another tool's `key: value`, for which nothing is written here, leaves the trained weights as they are.

    A switch that is off asks for nothing. Any key that is not known to be harmless may change the result.
    """
    off = value is False or value in ("", [], {})
    return off or _WITHOUT_EFFECT.fullmatch(_spelt(key)) is not None


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


def _number(value: Any) -> float:
    """The value if it is a number, and otherwise none."""
    return value if type(value) in (int, float) else math.nan


def _dtype(value: Any) -> Settings | None:
    """Of the weights; what is not 16 bit is computed in the precision that `bf16` and `fp16` say."""
    known = {"bfloat16": "bf16", "float16": "fp16"}
    name = str(value).removeprefix("torch.")
    if name in ("auto", "float32"):
        return {}
    return {"training.precision": known[name]} if name in known else None


def _initial(value: Any) -> Settings | None:
    return {} if value is True else {"adapter.init": "pissa"} if str(value).startswith("pissa") else None


def _only_off(value: Any) -> Settings | None:
    return None if value else {}


def _noise(value: Any) -> Settings:
    return {"training.neftune_noise_alpha": value} if value else {}


def _held_out(value: Any) -> Settings | None:
    if type(value) in (int, float) and value == 0:
        return {"data.eval": "none"}
    return {"data.eval_share": value} if isinstance(value, float) and value < 1 else None


def _template(value: Any) -> Settings | None:
    return {} if value == "tokenizer_default" else {"data.chat_template": name_here(str(value))}


def _deepspeed(value: Any) -> Settings | None:
    """ZeRO's stage by the name of its file, such as deepspeed_configs/zero2.json or ds_z3_offload_config.json."""
    name = str(value).lower()
    found = re.search(r"(?:zero|z|stage)[-_]?([0-3])", name.rpartition("/")[2])
    if not isinstance(value, str) or not found:
        return None
    if found[1] == "0":
        return {}
    stage = {"1": "optimizer", "2": "gradients", "3": "weights"}[found[1]]
    offload = {"distributed.offload": "cpu"} if "offload" in name else {}
    return {"distributed.kind": "deepspeed", "distributed.stage": stage, **offload}


def _fsdp(value: Any) -> Settings | None:
    """From words such as `full_shard auto_wrap`, or from a mapping whose keys may begin with `fsdp_`."""
    if not value:
        return {}
    if isinstance(value, Mapping):
        keys = {str(key).removeprefix("fsdp_"): given for key, given in value.items()}
    else:
        words = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
        keys = {"offload_params": "offload" in words, "reshard_after_forward": "shard_grad_op" not in words}
    kept = str(keys.get("reshard_after_forward", True)).lower() in ("false", "shard_grad_op")
    found = {"distributed.kind": "fsdp", "distributed.stage": "gradients" if kept else "weights"}
    return found | ({"distributed.offload": "cpu"} if keys.get("offload_params") is True else {})


def _plugins(value: Any) -> Settings | None:
    """Axolotl's: those of fast kernels do not change the result."""
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    if not all(re.search("liger|cut_cross_entropy|kernels|swanlab", name) for name in names):
        return None
    return {"kernels.fused": "auto"} if any("liger" in name for name in names) else {}


def _checkpointing(value: Any) -> Settings | None:
    known = {"offload": {"memory.checkpointing": "all", "memory.offload": "checkpoints"}}
    if isinstance(value, bool) or value == "unsloth":
        return {"memory.checkpointing": "all" if value else "none"}
    return known.get(str(value))


def _steps(key: str) -> Callable[[Any], Settings | None]:
    """A number of steps; a share of the run has no counterpart, and below 1 is no limit."""
    return lambda value: ({key: value} if value > 0 else {}) if type(value) is int else None


def _when(wanted: bool, found: Settings) -> Callable[[Any], Settings | None]:
    """Settings for a switch in one position, none in the other."""
    return lambda value: (found if value is wanted else {}) if isinstance(value, bool) else None


_CONVERTED: dict[str, Callable[[Any], Settings | None]] = {
    "adapter": _method,
    "finetuning_type": _method,
    "use_peft": _when(False, {"adapter.kind": "none", "quantization.kind": "none"}),
    "rl": _only_off,
    "stage": lambda value: {"sft": {}, "pt": {"data.format": "text", "data.too_long": "split"}}.get(str(value)),
    "quantization_bit": _bits,
    "quantization_method": lambda value: {} if value in ("bnb", "bitsandbytes") else None,
    "rope_scaling": _rope_scaling,
    "adapter_name_or_path": lambda value: None if "," in str(value) else {"adapter.start_from": value},
    "alpha_pattern": _only_off,
    "lora_alpha_pattern": _only_off,
    **dict.fromkeys(("neftune_noise_alpha", "neftune_alpha", "noisy_embedding_alpha"), _noise),
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
"""The keys whose value is not copied as it is."""
