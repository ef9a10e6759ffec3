"""Which adapters have a form that other programs read: plain LoRA on linear layers, and on experts as vLLM has it.

Training asks before it starts, and the export of an adapter again. What vLLM reads on experts is in
`finetune.export.server_experts`, with its sources.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from finetune.config import AdapterSection
from finetune.config.field_types import is_pattern
from finetune.model.adapters import adapter, adapter_files
from finetune.model.structure import experts

FUSED = frozenset({"gpt_oss", "qwen3_5_moe", "qwen3_vl_moe"})
"""The `model_type` of checkpoints whose class in vLLM takes all experts of a layer in one tensor."""
SEPARATE = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "glm4_moe", "glm_moe_dsa", "minimax_m2", "mixtral", "olmoe", "qwen2_moe",
        "qwen3_moe",
    }
)  # fmt: skip
"""Those whose class takes a pair for each projection of each expert."""
PROJECTIONS = {"gate_up_proj", "down_proj"}


@dataclass(frozen=True)
class Obstacle:
    """Why a model or its adapter cannot be served in a certain way, in one clause, and each change of the job that
    would cure it.
    """

    why: str
    cures: tuple[str, ...] = ()


def obstacle(
    section: AdapterSection, base: Any, model_type: str, *, largest_rank: int | None, stored: Collection[str] | None
) -> Obstacle | None:  # fmt: skip
    """What keeps an adapter on `base` from other programs, if anything.

    The base is without weights, or None if no experts have an adapter. `model_type` is that of its checkpoint, whose
    files have tensors named as `stored` (none: they are not known yet; None: it has no files); `largest_rank` is the
    largest that the program takes (None: any).
    """
    on_experts = {} if base is None else adapter.adapted_experts(base, section)
    if found := _beside_lora(section, on_experts) or _on_experts(section, on_experts, model_type, stored):
        return found
    published = adapter_files.published(section)
    ranks = {"rank": published.rank, "ranks": max(published.ranks.values(), default=0)}
    if on_experts:
        ranks["expert_rank"] = section.rank_of_experts(experts.active(base))
    key, rank = max(ranks.items(), key=lambda one: one[1])
    if largest_rank is None or rank <= largest_rank:
        return None
    return Obstacle(
        f"its rank is {rank}, and vLLM takes at most {largest_rank}",
        (f"set `adapter.{key}` to at most {largest_rank}",),
    )


def _beside_lora(section: AdapterSection, on_experts: Collection[str]) -> Obstacle | None:
    """What the adapter has beside LoRA on linear layers and on experts."""
    if section.dora:
        return Obstacle(
            "`adapter.dora` rescales whole weights, which no plain LoRA adapter expresses",
            ("set `adapter.dora: false`",),
        )
    if section.extra_modules:
        names = ", ".join(section.extra_modules)
        return Obstacle(
            f"`adapter.extra_modules` trained {names} as well, which these programs refuse",
            ("set `adapter.extra_modules: []`",),
        )
    if section.new_rows:
        return Obstacle(
            "`data.new_tokens` trained rows of the embedding and the head as well, which these programs refuse",
            ("set `data.new_tokens: []`",),
        )
    if section.init == "loftq":
        return Obstacle(
            "an adapter started by LoftQ belongs to the quantized base, which these programs do not load",
            ("set `adapter.init: default`",),
        )
    targets = [] if section.targets == "all-linear" else section.targets
    if parameters := [name for name in targets if "." in name and not is_pattern(name) and name not in on_experts]:
        return Obstacle(
            f"it is on parameters that are no linear layers, {', '.join(parameters)}",
            ("leave them out of `adapter.targets`",),
        )
    return None


def _on_experts(
    section: AdapterSection, on_experts: Collection[str], model_type: str, stored: Collection[str] | None
) -> Obstacle | None:  # fmt: skip
    if not on_experts:
        return None
    cure = without_experts(section)
    if model_type not in FUSED | SEPARATE:
        return Obstacle(
            f"it is on experts, for which the form that vLLM reads for `{model_type}` is unknown here", (cure,)
        )
    if missing := PROJECTIONS - {name.rpartition(".")[2] for name in on_experts}:
        name = missing.pop()
        return Obstacle(
            f"it is on experts without `{name}`, and vLLM takes all projections or none",
            (f"add `experts.{name}` to `adapter.targets`, or {cure}",),
        )
    if stored is None:
        why = "it is on experts, and the base has no safetensors files, by whose names vLLM finds them"
        return Obstacle(why, (cure,))
    if model_type in SEPARATE and any(experts.is_whole(name, stored) for name in on_experts):
        why = (
            "the base's files hold all experts of a layer in one tensor, and vLLM reads adapters on experts of "
            f"`{model_type}` one by one"
        )
        return Obstacle(why, (cure,))
    return None


def without_experts(section: AdapterSection) -> str:
    """How to leave experts without an adapter."""
    named = section.targets != "all-linear"
    return "leave experts out of `adapter.targets`" if named else "set `adapter.expert_rank: 0`"
