"""On a GPU: a real cap on its memory, loss scaling, and warm-up with the largest batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from steps import gradients, micro_batches, ready, spoil_losses

from finetune import recipe
from finetune.config import Config
from finetune.errors import NumbersError
from finetune.forecast import devices
from finetune.storage.rundir import RunDirectory
from finetune.training import warm_up

pytestmark = pytest.mark.gpu

OnCard = AbstractContextManager[None]

Configure = Callable[..., Config]
BesideContext = Callable[[int], int]

# Of the largest gradient: float32, but other kernels and another order of sums at another number of rows.
TOLERANCE = 1e-4


@pytest.mark.parametrize("checkpointing", ["none", "all"])
def test_gradients_under_a_real_cap_equal_those_without(
    configure: Configure, cuda: torch.device, on_card: OnCard, beside_context: BesideContext, checkpointing: str
) -> None:
    loop = ready(
        configure(training__precision="fp32", quantization__kind="none", data__max_length=512, training__batch_size=32,
                  training__micro_batch=32, memory__check="off", memory__checkpointing=checkpointing)
    )  # fmt: skip
    inputs = micro_batches(loop, range(32), 32)
    gradients(loop, inputs)  # libraries' first use
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    loss, expected = gradients(loop, inputs)
    needed = torch.cuda.max_memory_reserved() - before
    torch.cuda.empty_cache()
    try:
        devices.cap(beside_context(torch.cuda.memory_reserved() + int(0.7 * needed)), cuda)
        healed_loss, healed = gradients(loop, inputs)
    finally:
        devices.cap(None, cuda)
    with on_card:
        assert loop.recorder.outlets.run.events()[-1]["event"] == "micro_batch_split"
    with on_card:
        assert healed_loss == pytest.approx(loss, rel=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(healed[name], gradient, rtol=0, atol=TOLERANCE * largest)


@pytest.mark.parametrize("kind", ["paged_adamw_8bit", "paged_adamw_32bit", "adamw_torch_fused"])
def test_the_worst_first_puts_everything_back(configure: Configure, device: torch.device, kind: str) -> None:
    """Paged states are large from 100,000 numbers on, which the whole tiny model has and its adapter has not."""
    loop = ready(
        configure(adapter__kind="none", quantization__kind="none", optimizer__kind=kind, optimizer__weight_decay=0.1,
                  memory__check="off")
    )  # fmt: skip

    def state() -> dict[str, torch.Tensor]:
        found = {name: weight.detach() for name, weight in loop.step.model.named_parameters()}
        for number, values in enumerate(loop.step.engine.optimizer.state.values()):
            found |= {f"{number}.{name}": torch.as_tensor(value) for name, value in values.items()}
        return {name: value.cpu().clone() for name, value in found.items()}

    for weight in loop.step.model.parameters():
        weight.grad = torch.randn_like(weight)
    loop.step.update()
    loop.step.model.zero_grad()
    before, addresses = state(), [tensor.data_ptr() for tensor in loop.step.model.parameters()]
    warm_up.warm_up(loop.step, loop.steps, loop.retry, loop.evaluation)
    after = state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert addresses == [tensor.data_ptr() for tensor in loop.step.model.parameters()]
    assert all(weight.grad is None for weight in loop.step.model.parameters())


@pytest.mark.parametrize("kind", ["paged_adamw_8bit", "adamw_torch_fused"])
def test_the_scaler_backs_off_from_a_nan_in_fp16(
    configure: Configure, cuda: torch.device, on_card: OnCard, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    spoil_losses(monkeypatch, 5, 6)
    run = recipe.train(configure(training__precision="fp16", optimizer__kind=kind)).run
    lines = run.metrics()
    with on_card:
        assert [line["step"] for line in lines if line["loss"] is None] == [5, 6]
    with on_card:
        assert all(line["loss"] > 0 for line in lines if line["loss"] is not None)
    skipped = [line["step"] for line in lines if line.get("skipped")]
    with on_card:
        assert {5, 6} <= set(skipped)
    # The schedule waits for each: a later line's rate is that of as many steps before.
    rates = [line["learning_rate"] for line in lines]
    with on_card:
        assert rates[4] == rates[5] == rates[6]
    (checkpoint,) = run.complete_checkpoints()
    scaler = json.loads((checkpoint / "state.json").read_text())["scaler"]
    with on_card:
        assert scaler["scale"] == 2.0 ** (16 - len(skipped))


def test_a_nan_that_stays_in_fp16_stops(configure: Configure, cuda: torch.device, on_card: OnCard, monkeypatch) -> None:
    spoil_losses(monkeypatch, *range(2, 61))
    config = configure(training__precision="fp16", training__max_steps=60)
    with pytest.raises(NumbersError):
        recipe.train(config)
    lines = RunDirectory(Path(str(config.output.dir))).metrics()
    with on_card:
        assert 17 <= len(lines) <= 18
