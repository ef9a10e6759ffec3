"""Which modules of a server the tensors of an adapter reach, by the server's own rules.

vLLM gives a tensor of an adapter the name that it gives one of the base's files: each rule of the class's
`hf_to_vllm_mapper` replaces the prefix of the name, if it has it, one rule after the other. It applies the tensor to
the module of that name, or to the part of a packed module (`packed_modules_mapping`), and ignores it without a word if
there is none. So a layer is served if its adapter's name becomes that of its weight.

Read at vllm-project/vllm: lora/utils.py (001e63a, `parse_fine_tuned_lora_name`), lora/lora_model.py (0306474), and of
model_executor/models: mistral3.py (02677fd), parts of qwen3_5.py (00def4f), and mllama4.py (00dd549) and idefics3.py
(00fb5b4), which have no rules: the names are those of the files. The rules of Gemma 3 and 4 and of Qwen's VL models are
from excerpts; vLLM was not run.
"""

from __future__ import annotations

from collections.abc import Iterable

from finetune.errors import ConfigError
from finetune.model.adapters.plain_form import FUSED

_NESTED = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
RULES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "gemma3", "mistral3"), _NESTED),
    **{name: {**_NESTED, "model.": "language_model.model."} for name in ("qwen2_vl", "qwen2_5_vl")},
    "gemma4": {**_NESTED, "model": "language_model.model"},
    "llama4": {},
    "idefics3": {},
}
"""Prefixes that vLLM replaces in names of the language model, by the `model_type` of composite checkpoints."""


def of_module(name: str, model_type: str) -> str:
    """The module of vLLM's class for `model_type` that a name in files or in an adapter stands for."""
    for prefix, new in RULES.get(model_type, {}).items():
        if name.startswith(prefix):
            name = name.replace(prefix, new, 1)
    return name


def served(adapted: Iterable[str], files: Iterable[str], model_type: str) -> int:
    """Count the layers `adapted` that a server finds by name. Raises ConfigError unless it finds all of them."""
    adapted = list(adapted)
    modules = {of_module(name.removesuffix(".weight"), model_type) for name in files}
    if model_type in FUSED:
        mixtures = {name.partition(".experts.")[0] + ".experts" for name in modules if ".experts." in name}
        modules |= mixtures | {f"{name}.base_layer" for name in mixtures}
    lost = [name for name in adapted if of_module(name, model_type) not in modules]
    if lost:
        raise ConfigError(
            f"of the {len(adapted)} layers that this adapter is on, a server of the base's files would find "
            f"{len(adapted) - len(lost)}, and ignore the rest without a word, such as `{lost[0]}`; export `merged` "
            "instead"
        )
    return len(adapted)
