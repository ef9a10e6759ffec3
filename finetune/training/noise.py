"""NEFTune: uniform noise on the input embeddings of a training step (arXiv 2310.05914, algorithm 1).

A sequence of L tokens gets noise in [-1, 1] times alpha / sqrt(L d), where d is the number of channels; padding gets
none, and each packed sequence has its own L. The noise is drawn from a seed made of the run's seed, the step and the
tokens of the sequence. So it depends neither on how a step is split among micro-batches and ranks, nor on what ran
before: a run that resumes, or repeats a step after running out of memory, draws the same noise. (transformers'
`neftune_noise_alpha` uses the padded length of a micro-batch for L, and the current state of torch's generator.)
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finetune.errors import ConfigError
from finetune.training.collator import Inputs, token_ids


@dataclass(frozen=True)
class NoiseSpan:
    """The start of a sequence among all positions of a micro-batch, its length in tokens, and the seed of its noise."""

    start: int
    length: int
    seed: int


class Noise:
    """Noise of strength `alpha` for `model`, wrapped or not, from the `seed` of the run."""

    def __init__(self, model: Any, alpha: float, seed: int) -> None:
        self._embeddings: torch.nn.Module = model.get_input_embeddings()
        self._alpha = alpha
        self._seed = seed

    @contextlib.contextmanager
    def added(self, inputs: Inputs, step: int) -> Iterator[None]:
        """In the block, a forward pass over the micro-batch `inputs`, in host memory, has the noise of `step`."""
        rows = self.rows(inputs, step)
        added = False

        def add(module: Any, args: Any, output: Tensor) -> Tensor:
            nonlocal added
            added = True
            return noise_like(output, rows, self._alpha).add_(output)

        hook = self._embeddings.register_forward_hook(add)
        try:
            yield
        finally:
            hook.remove()
        if not added:
            raise ConfigError(
                "`training.neftune_noise_alpha`: this model does not call its input embeddings, so that they get no "
                "noise; remove it"
            )

    def rows(self, inputs: Inputs, step: int) -> list[NoiseSpan]:
        """The sequences of a micro-batch. Equal sequences get equal noise in a step."""
        packed = "cu_seq_lens_q" in inputs
        spans = []
        start = 0
        for number, ids in enumerate(token_ids(inputs)):
            if not packed:
                start = number * inputs["input_ids"].shape[1]
            identity = f"{self._seed} {step} ".encode() + ids.numpy().tobytes()
            seed = int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")
            spans.append(NoiseSpan(start, len(ids), seed))
            start += len(ids)
        return spans


@torch.no_grad()
def noise_like(embeddings: Tensor, rows: list[NoiseSpan], alpha: float) -> Tensor:
    """The noise of a micro-batch, of the shape of its embeddings (rows, tokens, channels); 0 on padding."""
    generator = torch.Generator(embeddings.device)
    noise = torch.zeros_like(embeddings, memory_format=torch.contiguous_format)
    by_place = noise.view(-1, embeddings.shape[-1])  # (positions, channels)
    for row in rows:
        bound = alpha / math.sqrt(row.length * embeddings.shape[-1])
        # Drawn in float32: in 16 bit, torch draws only a few hundred different numbers between two bounds.
        drawn = torch.empty(row.length, embeddings.shape[-1], device=embeddings.device)
        drawn.uniform_(-bound, bound, generator=generator.manual_seed(row.seed))
        by_place[row.start : row.start + row.length] = drawn
    return noise
