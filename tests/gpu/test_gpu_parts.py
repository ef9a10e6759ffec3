"""The parts of a step on a CUDA device: optimizers, checkpointing, attention, and building random 4-bit weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config import AdapterSection, MemorySection, ModelSection, OptimizerSection, QuantizationSection
from finetune.data.batching import MicroBatching
from finetune.kernels.head import Tile, log_probs
from finetune.model.adapters import adapter
from finetune.model.attention import backends, packing
from finetune.model.base import load_architecture, load_base
from finetune.model.distributed import optimizer_states
from finetune.model.distributed.engine import OneProcess
from finetune.model.probes import packed_rows
from finetune.model.recompute import checkpointing
from finetune.model.skeleton import random_base
from finetune.runtime import libraries, segments
from finetune.training import optimizers, state
from finetune.training.collator import StepCollator

pytestmark = pytest.mark.gpu

OnCard = AbstractContextManager[None]

CPU = torch.device("cpu")

# bfloat16 keeps 8 bits of a significand; a recomputed or reordered sum may differ in the last of them.
BF16_TOLERANCE = 2.0**-7

# From this number of elements bitsandbytes pages a state (Optimizer8bit.get_state_buffer).
PAGED_ELEMENTS = 100_000


def tiny(device: torch.device, implementation: str = "sdpa", kind: str = "nf4") -> Any:
    """The built-in base on `device`."""
    architecture = load_architecture(ModelSection())
    return load_base(
        ModelSection(), QuantizationSection(kind=kind), architecture, attention=implementation, dtype=torch.bfloat16,
        device=device,
    )  # fmt: skip


def batch(device: torch.device) -> dict[str, torch.Tensor]:
    """Two rows of 96 tokens, the second with 16 places of padding at its end."""
    ids = torch.randint(4, 2048, (2, 96), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 80:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {
        name: value.to(device) for name, value in (("input_ids", ids), ("attention_mask", mask), ("labels", labels))
    }


def adapted(base: Any) -> Any:
    """`base` with an adapter whose update is not zero, so that both of its matrices have a gradient."""
    model = adapter.attach(base, AdapterSection(), "builtin:tiny-llama", 0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model.train()


def loss_and_gradient(model: Any, device: torch.device) -> tuple[float, torch.Tensor]:
    """Loss in nats per token and the gradient of all trained weights in one vector, under autocast as in training."""
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = model(**batch(device)).loss
    loss.backward()
    gradients = [parameter.grad.float().flatten() for parameter in model.parameters() if parameter.requires_grad]
    return loss.item(), torch.cat(gradients)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative distance of two vectors."""
    return float((one - other).norm() / other.norm())


# -- packing -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("implementation", [packing.VARLEN, packing.EACH, packing.EAGER])
@pytest.mark.parametrize("window", [None, 8])
def test_packed_rows_keep_apart_on_a_card(
    implementation: str, window: int | None, cuda: torch.device, on_card: OnCard
) -> None:
    """Each row's logits are its own, with and without a sliding window; and the same with every implementation."""
    config = AutoConfig.for_model(
        "mistral", vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, sliding_window=window,
    )  # fmt: skip
    packing.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.bfloat16).to(cuda)
    packed_rows.prove(model)
    lengths = [5, 40, 1, 18]
    rows = [torch.randint(3, 64, (length,)).tolist() for length in lengths]
    collated = StepCollator(MicroBatching(1, 1000, packed=True), 0).micro_batch(
        [{"input_ids": row, "labels": row} for row in rows]
    )
    inputs = send_to_device({name: value for name, value in collated.items() if name != "labels"}, cuda)
    together = model(**inputs, use_cache=False).logits[0].float().split(lengths)
    model.set_attn_implementation("eager")
    for row, ours in zip(rows, together, strict=True):
        ids = torch.tensor([row], device=cuda)
        alone = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()
        with on_card:
            assert distance(ours, alone) < 4 * BF16_TOLERANCE


# -- optimizers --------------------------------------------------------------------------------------------------------


def stepped(kind: str, device: torch.device, steps: int = 5) -> tuple[Any, nn.Parameter, nn.Parameter]:
    """An optimizer after so many steps down a quadratic, with a large and a small parameter."""
    generator = torch.Generator().manual_seed(0)
    large, small = (
        nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in ((512, 512), (128, 64))
    )
    assert small.numel() < PAGED_ELEMENTS < large.numel()
    kind, _ = optimizers.choose(OptimizerSection(kind=kind), device.type)
    optimizer_class, arguments = optimizers.OPTIMIZERS[kind].build(OptimizerSection(kind=kind))
    optimizer = optimizer_class([large, small], lr=1e-2, **arguments)
    for _ in range(steps):
        optimizer.zero_grad()
        (large.square().sum() + small.square().sum()).backward()
        optimizer.step()
    return optimizer, large, small


@pytest.mark.parametrize("kind", optimizers.OPTIMIZERS)
def test_every_optimizer_steps_downhill(kind: str, device: torch.device) -> None:
    _, before_large, before_small = stepped(kind, device, steps=0)
    _, large, small = stepped(kind, device)
    for before, after in ((before_large, large), (before_small, small)):
        assert torch.isfinite(after).all()
        assert after.square().sum() < before.square().sum()


@pytest.mark.parametrize("kind", [kind for kind in optimizers.OPTIMIZERS if kind.startswith("paged_")])
def test_paged_optimizers_page_their_large_states(kind: str, cuda: torch.device, on_card: OnCard) -> None:
    with on_card:
        assert optimizers.choose(OptimizerSection(kind=kind), "cuda") == (kind, None)
    optimizer, large, small = stepped(kind, cuda)
    with on_card:
        assert getattr(optimizer.state[large]["state1"], "is_paged", False)
    with on_card:
        assert not getattr(optimizer.state[small]["state1"], "is_paged", False)


def test_paged_states_are_outside_the_caching_allocator(cuda: torch.device, on_card: OnCard) -> None:
    def state_bytes(kind: str) -> int:
        before = torch.cuda.memory_allocated()
        held = stepped(kind, cuda)
        torch.cuda.synchronize()
        used = torch.cuda.memory_allocated() - before
        del held
        return used

    large_states_bytes = 2 * 512 * 512
    with on_card:
        assert state_bytes("adamw_8bit") - state_bytes("paged_adamw_8bit") >= large_states_bytes


# -- checkpointing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "layers"), [("all", 4), ("every-2", 2), (3, 3), ("keep-attention", 4), ("keep-both", 4)]
)
def test_checkpointing_does_not_change_the_gradient(mode: str | int, layers: int, device: torch.device) -> None:
    assert_same_gradient(MemorySection(checkpointing=mode), layers, device)


@pytest.mark.parametrize(("mode", "layers"), [("all", 4), (3, 3), ("keep-both", 4)])
def test_offloading_checkpoints_does_not_change_the_gradient(mode: str | int, layers: int, cuda: torch.device) -> None:
    assert_same_gradient(MemorySection(checkpointing=mode, offload="checkpoints"), layers, cuda)


def assert_same_gradient(section: MemorySection, layers: int, device: torch.device) -> None:
    loss, gradient = checkpointed_gradient(MemorySection(checkpointing="none"), 0, device)
    other_loss, other = checkpointed_gradient(section, layers, device)
    assert other_loss == pytest.approx(loss, rel=BF16_TOLERANCE)
    assert gradient.norm() > 0
    assert distance(other, gradient) < BF16_TOLERANCE


def checkpointed_gradient(section: MemorySection, layers: int, device: torch.device) -> tuple[float, torch.Tensor]:
    base = tiny(device)
    model = adapted(base)
    checkpointing.apply(base, section, base.device.type)
    assert checkpointing.checkpointed(base) == layers
    return loss_and_gradient(model, device)


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "eager", "flex"])
def test_attentions_agree_with_sdpa(name: str, device: torch.device) -> None:
    architecture = load_architecture(ModelSection())
    if name != "auto" and (obstacle := backends.ATTENTIONS[name].missing(architecture, device.type, "bf16")):
        pytest.skip(obstacle)
    implementation, _ = backends.choose(name, architecture, device.type, "bf16")
    loss, gradient = loss_and_gradient(adapted(tiny(device)), device)
    other_loss, other = loss_and_gradient(adapted(tiny(device, implementation)), device)
    assert other_loss == pytest.approx(loss, rel=1e-2)
    # Scores and weights are rounded to bfloat16 at other places, in each of four layers.
    assert distance(other, gradient) < 8 * BF16_TOLERANCE


# -- 8-bit weights -----------------------------------------------------------------------------------------------------


def test_8_bit_weights_compute_what_they_compute_on_a_cpu(device: torch.device) -> None:
    """In training, and in evaluation, where bitsandbytes' own layers would quantize what they are given."""
    model = adapted(tiny(device, kind="int8"))
    loss, gradient = loss_and_gradient(model, device)
    expected_loss, expected = loss_and_gradient(adapted(tiny(CPU, kind="int8")), CPU)
    assert loss == pytest.approx(expected_loss, rel=BF16_TOLERANCE)
    assert distance(gradient.cpu(), expected) < 8 * BF16_TOLERANCE
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        assert model(**batch(device)).loss.item() == pytest.approx(loss, rel=1e-5)


# -- random weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("nf4", False), ("int8", True)])
def test_random_quantized_weights_need_one_module_more_than_their_final_size(
    kind: str, double: bool, cuda: torch.device, on_card: OnCard
) -> None:
    from transformers import LlamaConfig

    hidden = 2048 if cuda.type == "cuda" else 256
    architecture = LlamaConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=2048, tie_word_embeddings=True,
    )  # fmt: skip
    # Libraries' first use (cuBLAS, code tables) is no part of it.
    tiny(cuda)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = random_base(
        architecture, QuantizationSection(kind=kind, double=double), attention="sdpa", dtype=torch.bfloat16, device=cuda
    )
    torch.cuda.synchronize()
    final = torch.cuda.memory_allocated() - before
    above = torch.cuda.max_memory_allocated() - before - final
    largest_module_bytes = 2 * hidden * 4 * hidden
    four_bit = kind == "nf4"
    kinds = {type(module).__name__ for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)}
    with on_card:
        assert kinds == {"Linear4bit" if four_bit else "Linear8bitLt"}
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(architecture).num_parameters()
    with on_card:
        assert final < (0.35 if four_bit else 0.6) * 2 * parameters
    # Beside the module itself: in 4 bit its float32 block constants, before they are quantized (4 bytes for 64
    # weights); in 8 bit the module in float16. The allocator may hand out a block up to 1 MiB larger than asked for.
    beside = largest_module_bytes * (4 / 64 / 2 if four_bit else 1)
    with on_card:
        assert above <= largest_module_bytes + beside + 4 * 2**20


def test_a_paged_state_comes_back_bit_for_bit_and_paged(device: torch.device) -> None:
    """And takes no more of the card's memory than before."""
    section = OptimizerSection(kind="paged_adamw_8bit")
    name, _ = optimizers.choose(section, device.type)

    def made() -> tuple[nn.Parameter, Any]:
        weight = nn.Parameter(torch.ones(PAGED_ELEMENTS * 2, device=device))
        kind, arguments = optimizers.OPTIMIZERS[name].build(section)
        return weight, kind([weight], lr=1e-3, **arguments)

    def step(weight: nn.Parameter, optimizer: Any) -> None:
        weight.grad = torch.linspace(-1, 1, weight.numel(), device=device)
        optimizer.step()

    weight, optimizer = made()
    step(weight, optimizer)
    described, live = optimizer_states.read(optimizer)
    stored = {key: tensor.to("cpu", copy=True) for key, tensor in live.items()}
    other, again = made()
    other.data.copy_(weight.data)
    state.restore_optimizer(OneProcess(None, again), described, stored)
    for key, value in optimizer.state[weight].items():
        restored = again.state[other][key]
        if isinstance(value, torch.Tensor):
            assert torch.equal(restored, value)
            assert getattr(restored, "is_paged", False) == getattr(value, "is_paged", False)
            assert restored.device == value.device
    step(weight, optimizer)
    step(other, again)
    assert torch.equal(weight, other)


def test_the_loss_by_tritons_kernels_is_that_of_torchs_operators(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cuda.type == "cuda" and (obstacle := libraries.triton_obstacle()):
        pytest.skip(f"Triton does not run here: {obstacle}")
    generator = torch.Generator(device=cuda).manual_seed(0)
    hidden = torch.randn(48, 64, device=cuda, generator=generator)  # (places, hidden)
    head = torch.randn(2048, 64, device=cuda, generator=generator)  # (words, hidden)
    targets = torch.randint(2048, (48,), device=cuda, generator=generator)

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = hidden.clone().requires_grad_()
        found = log_probs(leaf, head, None, targets, tile=Tile(32, 600)).sum()
        found.backward()
        return found.detach(), leaf.grad

    by_kernels = loss()
    monkeypatch.setattr(libraries, "triton_obstacle", lambda: "it is switched off")
    for mine, expected in zip(loss(), by_kernels, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_segments_grow_where_it_is_said_that_they_do(cuda: torch.device, on_card: OnCard) -> None:
    gpu = torch.cuda.current_device()
    segments.enable(gpu)
    torch.empty(2**20, device=cuda)
    with on_card:
        assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"] is segments.grow(gpu)
