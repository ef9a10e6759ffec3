"""Log-probabilities under the reference of a preference objective: the model as it was before the first step.

Where the adapter started at zero, that is the base with the adapter switched off, and takes no memory of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from finetune.objectives.objective import Batch, by_sequence, scored
from finetune.runtime import patches


@contextlib.contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """In the block, `model` is the base without its adapter, and without dropout.

    PEFT's own context also clears `requires_grad` of the adapter's weights, on which the gradients of several ranks
    depend.
    """
    was_training = model.training
    with contextlib.ExitStack() as stack:
        stack.callback(model.train, was_training)
        model.eval()
        for module in model.modules():
            if hasattr(module, "_disable_adapters"):
                stack.enter_context(patches.DISABLED_ADAPTER.by(True, module))
        yield


@torch.no_grad()
def reference_log_probs(model: Any, batch: Batch) -> torch.Tensor:
    """Summed log-probability (sequences,), float32, of the trained tokens of each sequence under the reference.

    `model`, wrapped by DistributedDataParallel or not, has an adapter that started at zero. The same sequences are
    computed by the same kernels, so that as long as the update is zero the sums are those of the model, bit by bit.
    """
    model = getattr(model, "module", model)
    with adapter_off(model):
        return by_sequence(scored(model, batch).log_probs, batch)
