"""The job of a run, and the outcome of its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.config import Config
from finetune.data.prepare import Prepared
from finetune.runtime.memory_monitor import Monitor
from finetune.runtime.signals import Signals
from finetune.storage.records import UpTo
from finetune.training.recorder import Outlets


@dataclass(frozen=True)
class Outcome:
    """The outcome of training: the last step, and the step of the best evaluation, if any."""

    steps: int
    best_step: int | None


@dataclass(frozen=True)
class Process:
    """The process of a rank: the device that it computes on, the memory used there, and the signals that it gets."""

    device: torch.device
    monitor: Monitor
    signals: Signals


@dataclass(frozen=True)
class TrainingJob:
    """Everything a run needs to train: the config of its `resolve.Job`, and the model built by it.

    `architecture` is transformers' config of the base, which publishing needs without its files. `provenance` is
    written into each checkpoint's manifest; `resume_from` is a verified checkpoint. `by_length`: what short
    micro-batches recompute, where that is less than the config says. `kernels_off`: fused kernels, or `loss`, that the
    device or the model itself rules out.
    """

    config: Config
    architecture: Any
    model: Any
    tokenizer: Any
    data: Prepared
    process: Process
    outlets: Outlets
    provenance: dict[str, Any]
    resume_from: Path | None = None
    by_length: Sequence[UpTo] = ()
    kernels_off: frozenset[str] = frozenset()
