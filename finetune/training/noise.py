"""NEFTune: uniform noise on the input embeddings of a training step (arXiv 2310.05914, algorithm 1).

A row of L tokens gets noise in [-1, 1] times alpha / sqrt(L d), where d is the number of channels; its padding gets
none, and of packed rows each has its own L. The noise follows from seed, step and the tokens of the row, so that it
depends neither on how a step is split among micro-batches and ranks, nor on what ran before: a run that resumes, or
that repeats a step after running out of memory, draws it again. (transformers' `neftune_noise_alpha` takes the padded
length of a micro-batch for L, and torch's generator as it stands.)
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
    """Where a row begins among all positions of a micro-batch, its length in tokens, and the seed of its noise."""

    start: int
    length: int
    seed: int


class Noise:
    """The noise for `model`, wrapped or not, of strength `alpha`; `seed` is that of the run."""

    def __init__(self, model: Any, alpha: float, seed: int) -> None:
        self._embeddings: torch.nn.Module = model.get_input_embeddings()
        self._alpha = alpha
        self._seed = seed

    @contextlib.contextmanager
    def added(self, inputs: Inputs, step: int) -> Iterator[None]:
        """In the block, a forward pass over the micro-batch `inputs` has the noise of `step`.

        `inputs` is in host memory. Raises ConfigError for a model that looks its embeddings up by other means.
        """
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
        """The rows of a micro-batch. Those of equal tokens get equal noise in a step."""
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
        # In float32: of 16-bit numbers between two bounds torch draws but a few hundred.
        drawn = torch.empty(row.length, embeddings.shape[-1], device=embeddings.device)
        drawn.uniform_(-bound, bound, generator=generator.manual_seed(row.seed))
        by_place[row.start : row.start + row.length] = drawn
    return noise
