"""Optimizers. A new one is one entry in OPTIMIZERS; config, help and tests derive from the table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from finetune.config import OptimizerSection
from finetune.errors import ConfigError

if TYPE_CHECKING:
    import torch

Built = tuple[type, dict[str, Any]]

# The adapter's B in PEFT's names.
_B = re.compile(r"[.]lora_(embedding_)?B[.]")
# As in transformers (5.24, `Trainer.get_decay_parameter_names`).
_NOT_DECAYED = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


@dataclass(frozen=True)
class Optimizer:
    """One optimizer: `build` returns its class and arguments, `unpaged` names the one without paging, and `ignores`
    are the keys of the section that do not apply to it, and that a config must not set. `updates`: the smallest part of
    a weight that it can update without the rest: rows, or any number by itself, with states in torch's form. `rate`:
    its usual learning rate over AdamW's, None where no sweep tells it."""

    help: str
    build: Callable[[OptimizerSection], Built]
    unpaged: str | None = None
    ignores: tuple[str, ...] = ()
    updates: Literal["weight", "row", "number"] = "row"
    rate: float | None = 1.0

    def can_update(self, part: Literal["weight", "row", "number"]) -> bool:
        """Whether the optimizer can update this part of a weight without the rest."""
        sizes = ("number", "row", "weight")
        return sizes.index(self.updates) <= sizes.index(part)


BLOCK = 256
"""How many numbers share a scale in 8-bit states (bitsandbytes 0.50)."""
STATES: dict[str, int | None] = {"absmax1": BLOCK, "absmax2": BLOCK, "step": None, "qmap1": None, "qmap2": None}
"""How many numbers of a weight share one of a state, by the key of the state in an optimizer that can update rows; None
for a state that belongs to no number. Those that are not listed have one for each number."""
_LEAST_8_BIT = 4096
"""How many numbers a weight must have for 8-bit states (bitsandbytes 0.50, `min_8bit_size`)."""


def choose(section: OptimizerSection, device_type: str, *, managed_memory: bool = True) -> tuple[str, str | None]:
    """The optimizer for this device, and a one-line note if it is not the configured one.

    `managed_memory`: whether host and GPU can share memory (`runtime.driver.shares_managed_memory`).
    """
    replacement = OPTIMIZERS[section.kind].unpaged
    if replacement is None or (device_type == "cuda" and managed_memory):
        return section.kind, None
    reason = "this GPU's driver cannot page" if device_type == "cuda" else "paging is unnecessary on a CPU"
    return replacement, f"optimizer {section.kind}: {reason}; using {replacement}"


def make(name: str, section: OptimizerSection, learning_rate: float, model: Any) -> torch.optim.Optimizer:
    """The optimizer for the trained weights of `model`.

    Of a sharded model, each rank updates its shards as a single process updates the whole. Raises ConfigError where
    that is impossible.
    """
    import bitsandbytes

    from finetune.model.distributed import sharding

    trained = [
        (name, sharding.updated_by_optimizer(weight))
        for name, weight in model.named_parameters()
        if weight.requires_grad
    ]
    kind, arguments = OPTIMIZERS[name].build(section)
    groups = _groups(model, trained, section, learning_rate)
    optimizer: torch.optim.Optimizer = kind(groups, lr=learning_rate, **arguments)
    if isinstance(optimizer, bitsandbytes.optim.optimizer.Optimizer8bit):
        _set_bits(optimizer, model, trained, arguments["optim_bits"])
    sharding.connect(optimizer)
    return optimizer


def _groups(
    model: Any, trained: list[tuple[str, Any]], section: OptimizerSection, learning_rate: float
) -> list[dict[str, Any]]:
    """The `trained` weights by their settings: biases and norms do not decay, and with `lora_plus` the B of an adapter
    has its own rate.
    """
    import torch
    from transformers.trainer_pt_utils import get_parameter_names

    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], _NOT_DECAYED))
    groups: list[dict[str, Any]] = [
        {"params": [weight for name, weight in trained if name in decayed], "weight_decay": section.weight_decay},
        {"params": [weight for name, weight in trained if name not in decayed], "weight_decay": 0.0},
    ]
    if section.lora_plus:
        second = {id(weight) for name, weight in trained if _B.search(name)}
        rate = learning_rate * section.lora_plus
        groups[:1] = [
            {**groups[0], "params": [weight for weight in groups[0]["params"] if id(weight) not in second]},
            {**groups[0], "params": [weight for weight in groups[0]["params"] if id(weight) in second], "lr": rate},
        ]
    return groups


def _set_bits(optimizer: Any, model: Any, trained: list[tuple[str, Any]], bits: int) -> None:
    """Have a bitsandbytes optimizer with 8-bit states keep those of embeddings in 32 bit (arXiv 2110.02861, 2.3).

    A shard has 8-bit states if the whole weight would. Raises ConfigError if a shard would begin within a block, whose
    scale would then differ.
    """
    import bitsandbytes
    import torch

    from finetune.model.distributed import sharding

    # bitsandbytes 0.50 records these exceptions globally, by parameter index: a later model's weight with the same
    # index would inherit them, and this model's embeddings would never be freed. So they are cleared here.
    exceptions = bitsandbytes.optim.GlobalOptimManager.get_instance()
    exceptions.initialize()
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)] if bits == 8 else []
    for module in embeddings:
        exceptions.register_module_override(module, "weight", {"optim_bits": 32})
    optimizer.check_overrides()
    exceptions.module_weight_config_triple.clear()
    if bits != 8:
        return

    in_32_bit = {module.weight for module in embeddings}
    for name, weight in trained:
        whole = sharding.whole_of(weight)
        if whole is weight:
            continue
        if whole.numel() < _LEAST_8_BIT or whole in in_32_bit:
            exceptions.override_config(weight, key_value_dict={"optim_bits": 32})
            continue
        shards = sharding.shards_of(whole)
        assert shards
        if shards.each < shards.rows and shards.each * (whole.numel() // shards.rows) % BLOCK:
            raise ConfigError(
                f"`optimizer.kind`: {shards.mesh.size()} ranks would cut `{name}`, {tuple(whole.shape)}, within blocks "
                f"of {BLOCK} numbers, whose 8-bit states share a scale; choose an optimizer with 32-bit states, or "
                "start another number of ranks"
            )
        exceptions.override_config(weight, key_value_dict={"min_8bit_size": 0})


def _betas(section: OptimizerSection) -> dict[str, Any]:
    return {"betas": (section.beta1, section.beta2), "eps": section.epsilon}


def _bitsandbytes(kind: str, bits: int, paged: bool = False) -> Callable[[OptimizerSection], Built]:
    def build(section: OptimizerSection) -> Built:
        import bitsandbytes

        arguments: dict[str, Any] = {"optim_bits": bits, "is_paged": paged}
        if kind == "Lion":
            arguments["betas"] = (section.beta1, section.beta2)
        elif kind == "AdEMAMix":
            # beta3 and alpha as in the paper (arXiv 2409.03137, section 4).
            arguments |= {"betas": (section.beta1, section.beta2, 0.9999), "alpha": 5.0, "eps": section.epsilon}
        else:
            arguments |= _betas(section)
        return getattr(bitsandbytes.optim, kind), arguments

    return build


def _torch_adamw(section: OptimizerSection) -> Built:
    import torch

    return torch.optim.AdamW, {**_betas(section), "fused": True}


def _sgd(section: OptimizerSection) -> Built:
    import torch

    return torch.optim.SGD, {"momentum": section.beta1}


def _adafactor(section: OptimizerSection) -> Built:
    from transformers.optimization import Adafactor

    return Adafactor, {"scale_parameter": False, "relative_step": False}


_LION_IGNORES = ("epsilon",)
# 3 to 10 times lower than AdamW's (arXiv 2302.06675, section 5).
_LION_RATE = 0.2

OPTIMIZERS: dict[str, Optimizer] = {
    "paged_adamw_8bit": Optimizer(
        "AdamW, 8-bit states paged to the host under memory pressure (QLoRA)",
        _bitsandbytes("AdamW", 8, True),
        "adamw_8bit",
    ),
    "paged_adamw_32bit": Optimizer(
        "AdamW, 32-bit states paged to the host under memory pressure", _bitsandbytes("AdamW", 32, True), "adamw_32bit"
    ),
    "adamw_8bit": Optimizer("AdamW, 8-bit states (arXiv 2110.02861)", _bitsandbytes("AdamW", 8)),
    "adamw_32bit": Optimizer("AdamW, 32-bit states, bitsandbytes' kernel", _bitsandbytes("AdamW", 32)),
    "adamw_torch_fused": Optimizer("PyTorch's fused AdamW", _torch_adamw, updates="number"),
    "paged_lion_8bit": Optimizer(
        "Lion, one 8-bit state paged to the host under memory pressure",
        _bitsandbytes("Lion", 8, True),
        "lion_8bit",
        ignores=_LION_IGNORES,
        rate=_LION_RATE,
    ),
    "paged_lion_32bit": Optimizer(
        "Lion, one 32-bit state paged to the host under memory pressure",
        _bitsandbytes("Lion", 32, True),
        "lion_32bit",
        ignores=_LION_IGNORES,
        rate=_LION_RATE,
    ),
    "lion_8bit": Optimizer(
        "Lion, one 8-bit state (arXiv 2302.06675)", _bitsandbytes("Lion", 8), ignores=_LION_IGNORES, rate=_LION_RATE
    ),
    "lion_32bit": Optimizer(
        "Lion, one 32-bit state", _bitsandbytes("Lion", 32), ignores=_LION_IGNORES, rate=_LION_RATE
    ),
    "adafactor": Optimizer(
        "Adafactor, factored second moment (arXiv 1804.04235)",
        _adafactor,
        ignores=("beta1", "beta2", "epsilon"),
        updates="weight",
    ),
    "sgd": Optimizer("SGD with momentum `beta1`", _sgd, ignores=("beta2", "epsilon"), updates="number", rate=None),
    "paged_ademamix_8bit": Optimizer(
        "AdEMAMix, 8-bit states paged to the host under memory pressure",
        _bitsandbytes("AdEMAMix", 8, True),
        "ademamix_8bit",
        updates="weight",
    ),
    "ademamix_8bit": Optimizer(
        "AdEMAMix, 8-bit states (arXiv 2409.03137)", _bitsandbytes("AdEMAMix", 8), updates="weight"
    ),
    "ademamix_32bit": Optimizer("AdEMAMix, 32-bit states", _bitsandbytes("AdEMAMix", 32), updates="weight"),
}
