"""Noise on embeddings (NEFTune): its formula, what it depends on, and that only training has it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tiny_models
import torch
from jobs import sampled
from messages import refusal
from traces import events

from finetune.data.batching import LargestBatch, MicroBatching
from finetune.errors import ConfigError
from finetune.training.collator import Inputs, StepCollator, halved
from finetune.training.noise import Noise, noise_like

CHANNELS, ALPHA = 64, 5.0
LONG, SHORT = list(range(1, 101)), [7, 8, 9]


class Model(torch.nn.Module):
    """Embeddings alone, or a table that is read by other means."""

    def __init__(self, *, calls: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embeddings = torch.nn.Embedding(128, CHANNELS, dtype=dtype)
        self._calls = calls

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embeddings

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embeddings(ids) if self._calls else self.embeddings.weight[ids]


def collated(*rows: list[int], packed: bool = False) -> Inputs:
    collate = StepCollator(MicroBatching(1, 1000, packed=True) if packed else MicroBatching(8), pad_token_id=0)
    return collate.micro_batch([{"input_ids": row, "labels": row} for row in rows])


def noise_of(inputs: Inputs, step: int = 3, seed: int = 42, **model: Any) -> torch.Tensor:
    """What a forward pass over a micro-batch adds to the embeddings: (rows, tokens, channels)."""
    made = Model(**model)
    plain = made(inputs["input_ids"])
    with Noise(made, ALPHA, seed).added(inputs, step):
        noised = made(inputs["input_ids"])
    assert torch.equal(made(inputs["input_ids"]), plain), "there is none afterwards"
    return (noised - plain).detach()


def test_the_noise_of_a_row_is_uniform_within_alpha_over_the_root_of_its_length_times_its_channels() -> None:
    noise = noise_of(collated(LONG))[0]
    bound = ALPHA / math.sqrt(len(LONG) * CHANNELS)
    assert noise.shape == (len(LONG), CHANNELS)
    assert 0.99 * bound < noise.abs().max() <= bound * (1 + 1e-4)
    assert float(noise.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert float(noise.mean()) == pytest.approx(0, abs=0.02 * bound)


def test_a_row_has_the_same_noise_alone_padded_packed_and_after_a_split() -> None:
    [alone] = noise_of(collated(SHORT))
    padded = noise_of(collated(LONG, SHORT))[1]
    torch.testing.assert_close(padded[: len(SHORT)], alone)
    assert torch.equal(padded[len(SHORT) :], torch.zeros(len(LONG) - len(SHORT), CHANNELS)), "none on padding"
    [packed] = noise_of(collated(LONG, SHORT, packed=True))
    torch.testing.assert_close(packed[len(LONG) :], alone)
    halves = halved(collated(LONG, SHORT))
    assert halves is not None
    torch.testing.assert_close(noise_of(halves[1])[0], alone)
    # Its length is that of the row, of which the bound is made, and not of the micro-batch.
    assert alone.abs().max() > 2 * ALPHA / math.sqrt(len(LONG) * CHANNELS)


def test_the_noise_follows_from_step_seed_and_tokens_and_draws_nothing_from_the_generator_of_dropout() -> None:
    first = noise_of(collated(SHORT))
    torch.manual_seed(1)
    torch.testing.assert_close(noise_of(collated(SHORT)), first)
    with Noise(made := Model(), ALPHA, 42).added(collated(SHORT), 0):
        before = torch.get_rng_state()
        made(collated(SHORT)["input_ids"])
    assert torch.equal(torch.get_rng_state(), before)
    others = noise_of(collated(SHORT), step=4), noise_of(collated(SHORT), seed=43), noise_of(collated([7, 8, 10]))
    for other in others:
        assert (other - first).abs().max() > 0.1 * first.abs().max()


def test_in_16_bit_it_is_rounded_and_not_drawn() -> None:
    inputs = collated(LONG)
    rows = Noise(Model(), ALPHA, 42).rows(inputs, 3)
    exact = noise_like(torch.zeros(1, len(LONG), CHANNELS), rows, ALPHA)
    half = noise_like(torch.zeros(1, len(LONG), CHANNELS, dtype=torch.bfloat16), rows, ALPHA)
    assert torch.equal(half, exact.bfloat16())


def test_trained_embeddings_get_the_gradient_they_have_without_noise() -> None:
    model, inputs = Model(), collated(LONG, SHORT)
    gradients = []
    for alpha in (0.0, ALPHA):
        model.zero_grad()
        with Noise(model, alpha, 42).added(inputs, 0):
            model(inputs["input_ids"]).sum().backward()
        gradients.append(model.embeddings.weight.grad.clone())
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_model_that_reads_its_table_by_other_means_is_refused() -> None:
    with refusal(ConfigError, "does not call its input embeddings"):
        noise_of(collated(SHORT), calls=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch",
    sampled(
        [LargestBatch(2, 64, True, 96), LargestBatch(1, 64, False, 48, packed=(40, 24))],
        LargestBatch(1, 64, False, 48, packed=(40, 24)),
    ),
)
def test_a_traced_step_counts_its_memory(batch: LargestBatch) -> None:
    """It is drawn in float32, row by row, and held in the type of the embeddings."""

    def made(alpha: float | None) -> list[int]:
        changes = {"training__neftune_noise_alpha": alpha, "data__packing": bool(batch.packed)}
        attention = "packed_sdpa" if batch.packed else "sdpa"
        job = tiny_models.config(**changes)
        found = tiny_models.trace(job, tiny_models.architecture(layers=1), batch=batch, attention=attention)
        return sorted(size for phase, _, sign, size, _ in events(found) if phase == "forward" and sign > 0)

    with_noise = made(ALPHA)
    for size in made(None):
        with_noise.remove(size)
    rows = batch.packed or (batch.tokens,) * batch.rows
    drawn, noise = [4 * length * CHANNELS for length in rows], 2 * sum(rows) * CHANNELS
    assert with_noise == sorted([*drawn, noise])
