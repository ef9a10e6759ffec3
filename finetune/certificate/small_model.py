"""A model of two layers of the job's kind with random weights, and passes through it."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from finetune.config import Config, MemorySection
from finetune.forecast import depth
from finetune.model import build
from finetune.model.adapters.adapter import casts_by_autocast
from finetune.model.precision import autocast
from finetune.objectives import log_probs
from finetune.runtime import libraries

# fp16 loses what is smaller than 6e-8; training multiplies its loss by more.
_LOSS_SCALE = 1024
_NOTHING_SAVED = MemorySection(checkpointing="none")


# With a smaller share of a GPU's memory free, other processes use it; this process's context takes part of the rest.
_FREE_IF_ALONE = 0.85


def is_shared(free_bytes: int, total_bytes: int) -> bool:
    """Whether other processes hold memory of a GPU that has `free_bytes`; False for a CPU, which has none of either."""
    return free_bytes < _FREE_IF_ALONE * total_bytes


@dataclass(frozen=True)
class TriedJob:
    """What a certificate is made for: a job's config and architecture, and `rows` of `tokens` in a micro-batch.

    `free_bytes` of the GPU's `total_bytes` were free before the child started.
    """

    config: Config
    architecture: Any
    attention: str
    device: torch.device
    rows: int
    tokens: int
    free_bytes: int = 0
    total_bytes: int = 0

    @cached_property
    def shortened(self) -> tuple[Config, Any]:
        """The job with a layer of each of its two most frequent kinds, or two of one, and its architecture."""
        section = self.config.adapter.model_copy(update={"init": "default", "start_from": None, "dropout": 0.0})

        def shorten(base: Any) -> None:
            nonlocal section
            named, inside = depth.adapted(base, section)
            kinds = list(zip(depth.kinds(base), inside, strict=True))
            kept = {kinds.index(kind) for kind, _ in Counter(kinds).most_common(2)}
            depth.keep(base, sorted(kept | {len(kinds) - 1} if len(kept) == 1 else kept))
            section = depth.renamed(section, base, named)

        bare = self.config.changed({"quantization.kind": "none", "model.weights": "random"})
        base = build.blueprint(bare, self.architecture, self.attention).weightless(shorten)
        config = self.config.changed({"model.weights": "random", "memory.loss_tokens": self._loss_tokens()})
        return config.model_copy(update={"adapter": section}), base.config

    def _loss_tokens(self) -> int:
        """Tokens of a tile of logits: two tiles at least in a micro-batch of any size."""
        return min(self.config.memory.loss_tokens, max(self.rows * self.tokens // 2, 1))

    def model(self, attention: str = "", memory: MemorySection = _NOTHING_SAVED) -> Any:
        """The shortened model, the same weights each time, with an adapter that is not zero."""
        config, architecture = self.shortened
        torch.manual_seed(0)
        base = build.blueprint(config, architecture, attention or self.attention).load(self.device)
        model = build.trainable(
            base, config.model, config.adapter, memory, seed=config.training.seed, device_type=self.device.type
        )
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * (0.5 / weight.shape[-1] ** 0.5))
        log_probs.attach(model)
        return model.train()

    def inputs(self, rows: int, tokens: int) -> dict[str, Tensor]:
        """`rows` of random ids, all of them trained; no longer than the model's positions."""
        text = self.architecture.get_text_config()
        tokens = min(tokens, getattr(text, "max_position_embeddings", None) or tokens)
        ids = torch.randint(text.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(1))
        ids = ids.to(self.device)
        return {"input_ids": ids, "labels": ids}

    @contextlib.contextmanager
    def passes(self, model: Any, *, fused_loss: bool = False) -> Iterator[None]:
        """A context for passes as a step of the job runs them."""
        precision = self.config.training.precision
        with (
            autocast(precision, self.device),
            libraries.without_cudnn_attention(),
            casts_by_autocast(model, self.config.adapter, precision),
            log_probs.tiles(self._loss_tokens(), fused=fused_loss),
        ):
            yield

    def loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """The mean cross-entropy of the trained tokens."""
        scores = model(**inputs, use_cache=False, fused_lm_head=True)
        mean: Tensor = -scores.log_probs.sum() / scores.label_mask.sum()
        return mean

    def results(self, model: Any, inputs: dict[str, Tensor], *, fused_loss: bool = False) -> dict[str, Tensor]:
        """The loss and the gradients of the adapter."""
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        with self.passes(model, fused_loss=fused_loss):
            loss = self.loss(model, inputs)
        gradients = torch.autograd.grad(loss * _LOSS_SCALE, list(trained.values()), allow_unused=True)
        named = zip(trained, gradients, strict=True)
        return {"output": loss.detach()[None], **{f"gradient of {name}": one for name, one in named if one is not None}}

    def seconds(self, work: Callable[[], object]) -> float:
        """The shortest of three timed runs after a warm-up."""
        return min(self.timed(work) for _ in range(4))

    def timed(self, work: Callable[[], object]) -> float:
        """The seconds that `work` takes, with all that it starts on the device."""
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    @property
    def has_triton(self) -> bool:
        """Whether Triton kernels run on a GPU; True for a CPU, whose code needs none."""
        return self.device.type != "cuda" or libraries.triton_obstacle() is None

    def wait(self) -> None:
        """Wait for the device. Raises what its kernels have raised meanwhile."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
