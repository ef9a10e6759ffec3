"""Rows split over ranks: as one process computes them, whatever the architecture; others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from children import Children, connect
from test_packing import model_of
from torch import distributed as dist
from transformers import AutoConfig

from finetune.data.batching import MicroBatching
from finetune.errors import ConfigError
from finetune.model.attention import packing
from finetune.model.distributed import context
from finetune.model.probes import split_rows
from finetune.objectives import log_probs, supervised
from finetune.training.collator import StepCollator, for_model

RANKS, ROWS = 4, [list(range(1, 31)), list(range(20, 40))]


def computed(model: Any, batch: dict[str, Any], group: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    with context.split(model, group), packing.known(batch):
        total, count = supervised(model, dict(batch))
        total.backward()
    return total.detach(), count, [weight.grad.clone() for weight in model.parameters()]


def compare(model: Any, packed: bool, masked: bool, group: Any) -> tuple[float, float]:
    """The largest differences of losses and of summed gradients, whole and split, relative to their size."""
    collate = StepCollator(MicroBatching(2, 1000, packed=packed), 0, context=RANKS)
    batch = for_model(collate.micro_batch([{"input_ids": row, "labels": row} for row in ROWS]), masked=masked)
    total, count, gradients = computed(model, batch, None)
    mine, counted, parts = computed(model, batch, group)
    for part in (mine, counted, *parts):
        dist.all_reduce(part)
    assert counted == count
    off = max(
        float((one - other).abs().max() / other.abs().max().clamp(min=1e-3))
        for one, other in zip(parts, gradients, strict=True)
    )
    return float((mine - total).abs() / count), off


def as_rank(store: str) -> list[tuple[float, float]]:
    """Compute two padded rows or two packed ones of each model, whole and split."""
    connect(store)
    found = []
    for architecture, attention, packed, masked in JOBS:
        model = model_of(architecture, attention).train()
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        if hasattr(model.config, "router_aux_loss_coef"):
            model.config.router_aux_loss_coef = 1.0  # the load-balancing loss is as large as the other
        log_probs.attach(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        split_rows.prove(model, dist.group.WORLD)
        found.append(compare(model, packed, masked, dist.group.WORLD))
    dist.destroy_process_group()
    return found


# (architecture, attention, packed, with a padding mask)
JOBS = [
    ("llama", "sdpa", False, False),  # two heads of keys for four ranks
    ("llama", "packed_sdpa", True, False),
    ("llama", "eager", False, True),
    ("mistral", "sdpa", False, False),  # a window of 5 tokens
    ("mistral", "packed_sdpa", True, False),
    ("gemma2", "eager", False, False),  # soft caps, and windows in every other layer
    ("gemma3_text", "sdpa", False, True),
    ("qwen3_moe", "sdpa", False, True),  # a load-balancing loss, of whole rows
    ("qwen3_moe", "packed_sdpa", True, False),
    ("gpt2", "sdpa", False, False),  # a table of positions, as many key heads as query heads
]


@pytest.mark.long
def test_split_rows_have_the_loss_and_the_gradients_of_whole_ones(children: Children, tmp_path: Path) -> None:
    first, *_ = children.call(as_rank, str(tmp_path / "store"), ranks=RANKS)
    for job, (loss, gradients) in zip(JOBS, first, strict=True):
        assert loss < 1e-5, job
        assert gradients < 1e-4, job


def refused(size: int, architecture: str = "llama", **values: Any) -> str:
    config = AutoConfig.for_model(architecture, **values)
    context.check(config, 1)
    with pytest.raises(ConfigError) as refusal:
        context.check(config, size)
    return str(refusal.value)


def test_models_whose_rows_cannot_be_split_are_refused_before_weights_are_loaded() -> None:
    uneven = refused(4, num_attention_heads=6, hidden_size=192)
    assert "4 ranks cannot share 6 attention heads; choose one of 1, 2, 3, 6" in uneven
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "rope_theta": 1e4}
    long = refused(2, rope_parameters={**factors, "original_max_position_embeddings": 1024})
    assert "(`longrope`) depends on the longest row" in long
    assert "falcon models have attention functions of their own" in refused(2, "falcon")
    assert "mamba models are recurrent" in refused(2, "mamba")
