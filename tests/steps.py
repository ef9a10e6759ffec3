"""A trainer that is ready for its first step, its steps by hand, and memory that runs out in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import finetune
from finetune.config import Config
from finetune.model import checkpointing
from finetune.training.collator import Inputs
from finetune.training.trainer import Trainer


class _Ready(Exception):
    pass


def ready(config: Config) -> Trainer:
    """The trainer of a run as it stands before the first step; its adapter's update is not zero."""

    def prepare(self: Trainer, *args: Any, **kwargs: Any) -> None:
        prepared(self, *args, **kwargs)
        raise _Ready(self)

    prepared = Trainer._prepare_for_training
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_prepare_for_training", prepare)
        with pytest.raises(_Ready) as stopped:
            finetune.train(config)
    trainer = stopped.value.args[0]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02, generator=generator)
    trainer.model.train()
    return trainer


def micro_batches(trainer: Trainer, rows: Sequence[int], size: int) -> list[Inputs]:
    """Rows of the training data as micro-batches of `size` rows, which the config's own must not be smaller than."""
    chosen = [trainer.train_dataset[row] for row in rows]
    return [part for at in range(0, len(chosen), size) for part in trainer.data_collator(chosen[at : at + size])]


def gradients(trainer: Trainer, inputs: list[Inputs], seed: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step."""
    torch.manual_seed(seed)
    trainer.model.zero_grad(set_to_none=True)
    loss = trainer.training_step(
        trainer.model_wrapped, inputs, trainer._get_num_items_in_batch([inputs], trainer.args.device)
    )
    found = {name: weight.grad for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    trainer.model.zero_grad(set_to_none=True)
    return float(loss), found


def assert_gradients_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal but for the order of sums in float32: to a few millionths of the largest gradient there is."""
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=5e-6 * largest)


@contextlib.contextmanager
def out_of_memory(trainer: Trainer, where: str, places: int) -> Iterator[list[int]]:
    """Out of memory in the third layer for micro-batches of more than `places`; the list has the places of each.

    `where`: in the `forward` pass, in the `backward` pass, or where that computes a checkpointed layer once more.
    """
    refused: list[int] = []

    def refuse(hidden: torch.Tensor) -> None:
        if hidden.shape[0] * hidden.shape[1] > places:
            refused.append(hidden.shape[0] * hidden.shape[1])
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")

    def before(module: Any, args: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward == (where == "recompute"):
            refuse(args[0])

    def after(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(refuse)

    layer = checkpointing.layers(trainer.model)[2]
    if where == "backward":
        hook = layer.register_forward_hook(after)
    else:
        # A hook on the layer itself would stay outside of its checkpoint.
        hook = layer.mlp.register_forward_pre_hook(before)
    try:
        yield refused
    finally:
        hook.remove()
