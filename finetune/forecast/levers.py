"""Settings that would reduce memory: first those that do not change the result, cheapest first, then the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.config import AdapterSection, Config, DistributedSection, OutputSection, QuantizationSection
from finetune.config.serving import PACKED
from finetune.training import strategies

_SHORTEST = 64
_SMALLEST_TILE = 512


@dataclass(frozen=True)
class Lever:
    """A change of the config, by `section.key`, and what it costs."""

    changes: Mapping[str, Any]
    cost: str

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.changes.items())


def levers(config: Config, gpus: int = 1) -> list[Lever]:
    """The levers that `config` has not pulled yet, on this number of GPUs."""
    memory = config.memory
    left: list[Lever] = []
    if strategies.applies(config.distributed, gpus):
        left += _sharing(config.distributed, strategies.least_first(config)[-1], gpus)
    if config.output.merge:
        left.append(Lever({"output.merge": False}, "merged later, where there is more memory"))
    if memory.loss_tokens > _SMALLEST_TILE:
        left.append(Lever({"memory.loss_tokens": _SMALLEST_TILE}, "same loss, smaller products"))
    training, longest = config.training, config.data.max_length
    if training.micro_batch_tokens:
        if training.micro_batch_tokens > longest:
            half = max(training.micro_batch_tokens // 2, longest)
            left.append(Lever({"training.micro_batch_tokens": half}, "same gradient, more passes"))
    elif training.micro_batch != "auto" and training.rows > 1:
        rows = max(rows for rows in range(1, training.rows // 2 + 1) if training.batch_size % rows == 0)
        left.append(Lever({"training.micro_batch": rows}, "same gradient, more passes"))
    if memory.checkpointing != "all":
        left.append(Lever({"memory.checkpointing": "all"}, "about a third more time"))
    if memory.offload == "none" and config.kernels.compile == "none":
        left.append(Lever({"memory.checkpointing": "all", "memory.offload": "checkpoints"}, "copies to the host"))
    left += _weights(config.quantization, config.adapter, config.output)
    if longest > _SHORTEST:
        left.append(Lever({"data.max_length": longest // 2}, "longer rows are cut"))
    return left


def _weights(quantization: QuantizationSection, adapter: AdapterSection, output: OutputSection) -> Iterator[Lever]:
    """Smaller weights, trained or not."""
    as_served = output.serve is not None and output.way != "rounded"
    if quantization.kind not in ("nf4", *PACKED) and adapter.kind == "lora" and not as_served:
        yield Lever({"quantization.kind": "nf4"}, "weights in 4 bit")
    if adapter.kind == "none":
        yield Lever({"adapter.kind": "lora", "quantization.kind": "nf4"}, "an adapter instead of every weight")
    elif adapter.rank > 8:
        yield Lever({"adapter.rank": adapter.rank // 2}, "a smaller adapter")


def _sharing(section: DistributedSection, most: Mapping[str, str], gpus: int) -> Iterator[Lever]:
    """The next way in which ranks hold less, up to `most` sharding; how several GPUs share is chosen by the plan."""
    if section.kind == "ddp":
        if most["distributed.kind"] != "ddp":
            yield Lever(most, "layers are gathered as they compute")
    elif section.stage == "optimizer" and gpus > 1:
        yield Lever({"distributed.stage": "gradients"}, "gradients are sent in each micro-batch")
    elif section.stage == "gradients" and gpus > 1:
        yield Lever({"distributed.stage": "weights"}, "layers are gathered again in the backward pass")
    elif section.offload == "none":
        yield Lever({"distributed.offload": "cpu"}, "weights cross the bus in each pass, the CPU updates them")
