"""Values that other tools offer and this one does not: what to write or use instead.

They are what people know and try first, so the nearest name that is offered (`fp4` for `fp8`) would mislead them.
"""

from __future__ import annotations

import re

PREFERENCES = (
    "training is supervised here; use TRL, which can start from the model that `finetune merge` writes, or train on "
    "good answers alone"
)
REWARDS = "no reward model is trained or used here; use TRL"
_SAME_BITS = "write `nf4`, which takes as much memory"
_MATRICES = "it is made for training all weights; for adapters, `adamw_torch_fused` or `paged_adamw_8bit`"
_LORA = "adapters are LoRA here, or its variants `rslora`, `dora`, and `init: pissa` or `loftq`; use PEFT with TRL"
_TEMPLATES = "write `auto` for the model's own template, or name a .jinja file"

_VALUES: dict[str, dict[str, str]] = {
    "training.objective": {
        "dpo|ipo|kto|orpo|cpo|simpo|bco|apo|sigmoid|hinge|robust|rpo|ebft|preference": PREFERENCES,
        "grpo|gdpo|gspo|dapo|rloo|ppo|reinforce|online_dpo|nash_md|xpo|rl|rm|prm|reward": REWARDS,
        "gkd|minillm|kd|distillation": "nothing is learnt from a larger model here; use TRL, or train on its answers",
        "pt|pretrain|pretraining|cpt": "write `supervised`, and `data.format: text`, of which all tokens are trained",
        "clm|causal_lm|instruction": "write `supervised`",
        "classification|seq_cls": "no classifier is trained here; use transformers, or train on the classes as answers",
    },
    "quantization.kind": {
        "fp8|float8|mxfp8|fbgemm_fp8": "write `int8`, which takes as much memory",
        "mxfp4|nvfp4|gptq|awq|aqlm|hqq|quanto|torchao|gguf|q4_k_m|compressed[-_]tensors": _SAME_BITS,
        "eetq|llm\\.int8": "write `int8`",
        "int[23]|[23]-?bit|bitnet": "`nf4` is the smallest",
        "bf16|fp16|bfloat16|float16|16-?bit|full": "write `none`: the base is then in `training.precision`",
    },
    "adapter.kind": {
        "full|full_finetuning": "write `none`, which trains every weight, with `quantization.kind: none`",
        "qlora": "write `lora`; a base in 4 bit is the default",
        "dora": "write `lora`, with `dora: true`",
        "rslora": "write `lora`, with `rslora: true`",
        "pissa|loftq": "write `lora`, and that as `init`",
        "adalora|loha|lokr|vera|ia3|oft|boft|hra|randlora|fourierft|xlora|relora|llama-adapter|freeze|bitfit": _LORA,
        "(prefix|prompt|p)[-_]?tuning": _LORA,
    },
    "adapter.init": {
        "pissa_niter_\\d+": "write `pissa`",
        "gaussian|orthogonal|olora|eva|corda|lora_ga": "write `default`, `pissa` or `loftq`",
    },
    "optimizer.kind": {
        "muon|dion|galore.*|q_galore.*|apollo.*|lomo|adalomo|shampoo|soap|adam_?mini|badam|sinkgd": _MATRICES,
        "adam|adamax|nadam|adagrad|rmsprop(_.*)?|lamb|lars|radam": "write `adamw_torch_fused`, or `sgd`",
        "sophia|came(_.*)?|adopt_adamw|prodigy|grokadamw|stable_adamw|schedule_free.*": "write `adamw_torch_fused`",
        "adamw_(apex_fused|anyprecision|torch_xla|torch_npu_fused)|optimi_adamw|flash_adamw?": (
            "write `adamw_torch_fused`"
        ),
        "adamw_torch_[48]bit|ao_adamw_.*": "write `adamw_8bit`",
    },
    "training.schedule": {
        "cosine_with_min_lr|cosine_warmup_with_min_lr": "write `cosine_to_tenth`, which ends at a tenth of the peak",
        "cosine_with_restarts|cosine_annealing|one_cycle|rex": "write `cosine`",
        "reduce_lr_on_plateau|greedy": "write `constant`, and `training.early_stopping`",
        "wsd|warmup_stable_decay": "write `constant` or `linear`",
    },
    "training.precision": {
        "fp8|float8|int8|fp4|nvfp4": "arithmetic is in `bf16`, `fp16` or `fp32` here; `quantization.kind` saves memory",
        "tf32": "write `fp32`",
        "no": "write `fp32`",
    },
    "model.attention": {
        "xformers|sage|sageattention|flash_attention_4|paged.*|s2|ring": "write `auto`, the fastest that works here",
        "kernels-community/.*": "write `auto`; no code is fetched from the hub",
    },
    "distributed.kind": {
        "tp|pp|tensor|pipeline|megatron|3d": "write `fsdp`, which divides weights among ranks",
        "zero[123]|zero-[123]": "write `deepspeed`, with `stage: optimizer`, `gradients` or `weights` for ZeRO 1, 2, 3",
    },
    "data.format": {
        "chatml|openai|conversational|chat": "write `messages`",
        "completion|pretrain|raw": "write `text`",
        "instruction|instruct": "write `alpaca`, or `auto`",
        "kto|ranking|image|images|vision|multimodal": "rows are conversations, answers or text; use TRL",
    },
    "data.encoding": {
        "utf[-_]?8([-_]?(sig|bom))?": "leave it out; UTF-8 needs no key, with a byte order mark or without",
        "utf[-_]?(16|32).*": "convert the file with `iconv`, such as `iconv -f UTF-16 -t UTF-8`",
        "latin[-_]?1|l1|iso[-_]?8859[-_]?1|windows[-_]?1252|ansi|mbcs": "write `cp1252`, which has the same letters",
        "windows[-_]?125[013457]": "write it as Python does, such as `cp1251`",
    },
    "data.chat_template": {
        "tokenizer_default|default|jinja": _TEMPLATES,
        "(?!(llama[23]|mistral|gemma|phi3)$)(qwen|gemma|llama|mistral|phi|deepseek|glm|gpt)[\\w.-]*": _TEMPLATES,
        "(cohere|command|vicuna|zephyr|alpaca|unsloth)[\\w.-]*": _TEMPLATES,
    },
    "tracking.to": {
        "comet(_ml)?|clearml|neptune|swanlab|dvclive|aim|azure_ml|codecarbon|flyte": (
            "take `wandb`, `mlflow`, `trackio` or `tensorboard`; every step is in metrics.jsonl besides"
        ),
        "none|all": "name the trackers; without any, write nothing",
    },
}
"""By our key, patterns of values in lower case, and the cure."""


def cure(key: str, value: object) -> str | None:
    """Say that `section.key` has no such `value`, and what to write or use instead; None where that is not known."""
    if not isinstance(value, str):
        return None
    patterns = _VALUES.get(key, {}).items()
    found = next((text for pattern, text in patterns if re.fullmatch(pattern, value.lower())), None)
    return found and f"`{value}` is not offered: {found}"
