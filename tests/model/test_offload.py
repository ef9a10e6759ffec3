"""Layer inputs on the host: copied there and back beside the arithmetic, and never read or overwritten too early."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch

from finetune.config import MemorySection
from finetune.model.recompute import checkpointing, offload

LAYERS = 4
IDS = torch.randint(3, 256, (2, 16), generator=torch.Generator().manual_seed(0))


class LateCopies(offload.Copies):
    """A stream that does nothing before it is waited for: a tensor that is read earlier holds no numbers."""

    def __init__(self) -> None:
        self.queue: list[tuple[int, Any, Any]] = []
        self.log: list[str] = []
        self.hosts: list[weakref.ref[torch.Tensor]] = []

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        host = torch.full_like(tensor, math.nan)
        self.hosts.append(weakref.ref(host))
        # Pinned memory is not reused before its copies are done, memory of the device is.
        return host, self._queued("out", weakref.ref(tensor), lambda: host)

    def to_device(self, host: torch.Tensor) -> tuple[torch.Tensor, int]:
        tensor = torch.full_like(host, math.nan)
        return tensor, self._queued("in", lambda: host, weakref.ref(tensor))

    def wait(self, copy: int) -> None:
        self.log.append(f"wait {copy}")
        while self.queue and self.queue[0][0] <= copy:
            _, source, target = self.queue.pop(0)
            assert source() is not None, "freed before it was copied"
            assert target() is not None, "freed before it was written"
            target().copy_(source())

    def _queued(self, way: str, source: Any, target: Any) -> int:
        number = sum(line.startswith(("in", "out")) for line in self.log)
        self.queue.append((number, source, target))
        self.log.append(f"{way} {number}")
        return number


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateCopies]:
    copies = LateCopies()
    monkeypatch.setattr(offload, "copies_of", lambda device: copies)
    yield copies
    assert not copies.queue


def model(checkpoints: str | int = "all", *, offloaded: bool) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(tiny_models.architecture(layers=LAYERS)).train()
    section = MemorySection(checkpointing=checkpoints, offload="checkpoints" if offloaded else "none")
    checkpointing.apply(made, section, "cuda")
    return made


def gradients(made: Any) -> list[torch.Tensor]:
    made.zero_grad(set_to_none=True)
    made(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return [weight.grad for weight in made.parameters()]


@pytest.mark.parametrize("checkpoints", ["all", "every-2", 3])
def test_gradients_are_the_same_to_the_bit(checkpoints: str | int, late: LateCopies) -> None:
    plain, offloaded = gradients(model(checkpoints, offloaded=False)), model(checkpoints, offloaded=True)
    for _ in range(2):
        assert all(map(torch.equal, gradients(offloaded), plain))
    layers = checkpointing.checkpointed(offloaded)
    assert [line.split()[0] for line in late.log if "wait" not in line] == 2 * (["out"] * layers + ["in"] * layers)
    assert not any(host() is not None for host in late.hosts), "freed with the graph"


def test_an_input_is_fetched_while_the_layer_above_is_computed(late: LateCopies) -> None:
    made = model(offloaded=True)
    for number, layer in enumerate(checkpointing.layers(made)):
        layer.mlp.register_forward_pre_hook(lambda module, args, number=number: late.log.append(f"layer {number}"))
    gradients(made)
    assert late.log == [
        "out 0", "layer 0", "wait 0", "out 1", "layer 1", "wait 1", "out 2", "layer 2", "wait 2", "out 3", "layer 3",
        "wait 3", "in 4", "wait 4", "in 5", "layer 3", "wait 5", "in 6", "layer 2", "wait 6", "in 7", "layer 1",
        "wait 7", "layer 0",
    ]  # fmt: skip


def test_an_empty_tensor_that_is_saved_first_is_not_taken_for_the_input(late: LateCopies) -> None:
    """torch 2.11 saves one before a checkpoint's inputs."""
    hooks, empty, inputs = offload.Offload(), torch.empty(0), [torch.ones(2), torch.ones(3)]
    packed = []
    for each in inputs:
        with hooks:
            packed.append((hooks.pack_hook(empty), hooks.pack_hook(each)))
    assert late.log == ["out 0", "wait 0", "out 1", "wait 1"]
    assert hooks.unpack_hook(packed[1][0]) is empty
    assert torch.equal(hooks.unpack_hook(packed[1][1]), inputs[1])
    assert late.log[4:] == ["in 2", "wait 2", "in 3"], "the input below is fetched ahead"
    assert torch.equal(hooks.unpack_hook(packed[0][1]), inputs[0])
    assert late.log[7:] == ["wait 3"]


def test_a_backward_pass_that_ends_early_leaves_nothing_behind(late: LateCopies) -> None:
    plain, made = gradients(model(offloaded=False)), model(offloaded=True)

    def fail(module: Any, args: Any) -> None:
        if late.log[-1].startswith("in"):  # while its input is computed again
            raise MemoryError

    hook = checkpointing.layers(made)[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        gradients(made)
    assert late.queue, "the input of the layer below was on its way"
    hook.remove()
    assert all(map(torch.equal, gradients(made), plain))


def test_without_gradients_nothing_is_copied(late: LateCopies) -> None:
    with torch.no_grad():
        model(offloaded=True)(input_ids=IDS, use_cache=False)
    model(offloaded=True).eval()(input_ids=IDS, use_cache=False).logits.sum().backward()
    assert late.log == []


def test_a_cpu_copies_at_once() -> None:
    plain, offloaded = gradients(model(offloaded=False)), model(offloaded=True)
    assert all(map(torch.equal, gradients(offloaded), plain))
