"""A traced step takes what the trained one took, and leaves no trace where it was traced."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
import torch
from accelerate.state import GradientState
from children import Children
from forecast_cpu import LARGEST_ERROR, SETTINGS, UNDER_PREDICTION, forecast, measure, relative_errors
from jobs import sampled
from traces import peaks

from finetune.config.field_types import LEVELS
from finetune.data.batching import LargestBatch, longest_batch
from finetune.forecast import extrapolate, job_forecast, replay, traced_step
from finetune.forecast.device import Device
from finetune.forecast.trace import Trace
from finetune.forecast.traced_step import Models
from finetune.model.attention import packing
from finetune.model.source import catalog
from finetune.training import optimizers

# A sample of the sweep (`make sweep`).
OFTEN = "small tiles, bf16, evaluated"  # the loss decides; in the others layers do
CHOSEN = {
    OFTEN,
    "doge, small tiles",  # a learnt mask, which is added to the scores in place
    "gemma2, no checkpointing",  # eager attention
    "small tiles, deep",  # layers are extrapolated
    "lfm2, small tiles",  # convolutions beside attention
    "glm_moe_dsa, small tiles",  # adapters that no gradient reaches
    "qwen3-vl nf4, text beside images",
}
assert {setting.name for setting in SETTINGS} >= CHOSEN, "they may have been renamed"
# What makes a trace short where the number of layers matters.
PLAIN = {"quantization__kind": "none", "adapter__targets": ["q_proj"]}
TWO = {"adapter__targets": ["q_proj", "up_proj"]}


def measured(name: str) -> dict[str, int]:
    """What the profiler counts while a setting trains; called in a process of its own."""
    return measure(next(setting for setting in SETTINGS if setting.name == name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled((each.name for each in SETTINGS if each.name in CHOSEN), OFTEN))
def test_the_forecast_holds_against_a_trained_step(name: str, children: Children) -> None:
    """Each phase by itself."""
    [setting] = (each for each in SETTINGS if each.name == name)
    errors = relative_errors(forecast(setting), *children.call(measured, name))
    assert {"load", "forward", "backward", "optimizer"} < errors.keys()
    outside = {phase: error for phase, error in errors.items() if not -UNDER_PREDICTION <= error <= LARGEST_ERROR}
    assert not outside, "forecast " + ", ".join(f"{phase} {100 * error:+.2f} %" for phase, error in outside.items())


# -- what is left behind -----------------------------------------------------------------------------------------------


def functions() -> list[Any]:
    """Those of libraries that tracing a step, for a CPU or for CUDA, replaces."""
    from peft.tuners.lora import dora
    from torch.nn.utils import clip_grad
    from transformers import masking_utils

    replaced: list[tuple[Any, str]] = [
        (masking_utils, "is_tracing"),
        (dora, "dequantize_module_weight"),
        (dora.DoraLinearLayer, "update_layer"),
        (torch, "is_autocast_enabled"),
        (clip_grad, "_has_foreach_support"),
    ]
    return [vars(owner).get(name, "missing") for owner, name in replaced]


def trace(
    layers: int = 1, where: Device | None = None, batch: LargestBatch = tiny_models.BATCH, **changes: Any
) -> Trace:
    """Of a tiny Llama."""
    return tiny_models.trace(
        tiny_models.config(**changes), tiny_models.architecture(layers=layers), where=where, batch=batch
    )


@pytest.mark.parametrize("type", ["cpu", "cuda"])
def test_functions_modes_and_random_numbers_are_as_before(
    type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = functions()
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    trace(where=tiny_models.cpu() if type == "cpu" else tiny_models.card(), adapter__dropout=0.1)
    assert functions() == before
    assert torch.equal(torch.random.get_rng_state(), state), "what trains afterwards draws the same numbers"
    assert torch.empty(1).untyped_storage().data_ptr(), "no fake mode is left on"
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert list(tmp_path.iterdir()) == [], "nothing is written beside the temporary folder"


def test_a_trace_that_fails_puts_the_functions_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    before, job, model = functions(), tiny_models.config(), tiny_models.architecture(layers=1)
    monkeypatch.setattr(traced_step, "summed_loss", fail)
    with pytest.raises(KeyboardInterrupt):
        tiny_models.trace(job, model, where=tiny_models.card(), evaluation=tiny_models.BATCH)
    assert functions() == before
    assert torch.empty(1).untyped_storage().data_ptr()


# -- what is traced ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_7b_model_is_traced_in_a_gibibyte_and_counted_right() -> None:
    name = "meta-llama/Llama-2-7b-hf"
    entry = catalog.find(name)
    job = tiny_models.config(
        model__name=name, training__micro_batch=1, training__batch_size=1, data__max_length=1024,
        adapter__targets=["q_proj"],
    )  # fmt: skip
    process = psutil.Process()
    before = process.memory_info().rss
    batch = longest_batch(1, 1024)
    trace = tiny_models.trace(job, catalog.config(name), where=tiny_models.card(), batch=batch)
    assert process.memory_info().rss - before < 2**30
    assert trace.base.parameters == entry.parameters
    found = job_forecast.make(trace, tiny_models.card(), batch, "sdpa", replay.RunSetting())
    # 32 layers of four 4096 x 4096 and three 4096 x 11008 weights at 4.127 bits, embedding and head in 16.
    linear = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    weights = found.categories["base_weights"] + found.categories["quantization_state"]
    assert weights == pytest.approx(linear * 4.127 / 8 + 2 * 2 * 32000 * 4096, rel=2e-3)


@pytest.mark.slow
def test_a_layer_under_peft_launches_355_kernels_on_a_card() -> None:
    """Forward, recomputation and backward of a Llama layer, counted by hand from the operators' sources."""
    found = trace(3, tiny_models.card(), longest_batch(4, 64), kernels__fused="off")
    calls = {
        phase: sum(stretch.work.calls for stretch in found.stretches if (stretch.phase, stretch.layer) == (phase, 1))
        for phase in ("forward", "backward")
    }
    assert calls == {"forward": 108, "backward": 247}


def test_more_accumulation_adds_the_gradients_of_the_micro_batches_before() -> None:
    once, twice = (trace(**PLAIN, training__batch_size=rows) for rows in (2, 4))
    adapter = sum(block.bytes for block in once.blocks if block.category == "adapter")
    ids_labels_mask = 3 * 8 * 2 * 64  # int64, of 2 rows of 64 tokens
    assert adapter > 0
    # The loop holds a step's micro-batches, on a CPU in the memory that is forecast.
    assert peaks(twice)["forward"] - peaks(once)["forward"] == adapter + ids_labels_mask


@pytest.mark.slow
def test_layer_inputs_on_the_host_are_managed_memory_on_a_card() -> None:
    batch = LargestBatch(rows=2, tokens=512, padded=False, trained_tokens=1022)
    card = tiny_models.card()
    on_host, on_card = (
        job_forecast.make(
            trace(6, card, batch, **PLAIN, kernels__fused="off", memory__offload=offload),
            card, batch, "sdpa", replay.RunSetting(),
        )
        for offload in ("checkpoints", "none")
    )  # fmt: skip
    inputs = 6 * 2 * 512 * 64 * 2  # layers, rows, tokens, width, bytes
    assert on_host.host_bytes - on_card.host_bytes >= inputs
    assert on_card.phases["forward"]["allocated_bytes"] - on_host.phases["forward"]["allocated_bytes"] >= inputs // 2
    assert on_host.seconds == pytest.approx(on_card.seconds, rel=1e-6), "copies run beside the arithmetic"


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["llama", "mixture"], "llama"))
def test_memory_grows_in_proportion_to_a_long_row(name: str) -> None:
    """Nothing grows with the square of its length, and on the fused path nothing is as wide as the MLP."""
    job = tiny_models.config(
        kernels__fused="on", memory__offload="checkpoints", training__micro_batch=1, training__batch_size=1
    )

    def traced(tokens: int) -> tuple[int, int]:
        batch = LargestBatch(rows=1, tokens=tokens, padded=False, trained_tokens=tokens - 1)
        trace = tiny_models.trace(job, tiny_models.architecture(name, 1), where=tiny_models.card(), batch=batch)
        widest = max(block.bytes for block in trace.blocks if block.category == "activations")
        return max(peaks(trace).values()), widest

    (short, _), (middle, _), (long, widest) = map(traced, (8192, 16384, 32768))
    assert long - middle == pytest.approx(2 * (middle - short), rel=0.01)
    if name == "llama":
        assert widest == 32768 * (4 + 2 + 2) * 16 * 2, "queries, keys and values; gate and up are 2 x 176 wide"


@pytest.mark.slow
@pytest.mark.parametrize("where", sampled(["card", "cpu"], "card"))
def test_memory_and_work_grow_in_proportion_to_a_row_longer_than_its_windows(where: str) -> None:
    """With a window, attention on a card takes the pairs of tokens that it leaves, in both directions."""
    base = tiny_models.architecture("mistral", 1)
    job = tiny_models.config(**PLAIN, training__micro_batch=1, training__batch_size=1)
    device = getattr(tiny_models, where)()

    def traced(tokens: int) -> tuple[int, int, float]:
        batch = LargestBatch(rows=1, tokens=tokens, padded=False, trained_tokens=64)
        attention = packing.windowed("sdpa", base, tokens, varlen=device.type == "cuda")
        assert attention.startswith(packing.WINDOWED)
        trace = tiny_models.trace(job, base, where=device, batch=batch, attention=attention)
        live = itertools.accumulate(
            sign * block.bytes for _, block, sign in trace.timeline() if block.category == "activations"
        )
        return max(live), trace.work(["forward"]).flops, trace.work(["backward"]).flops

    # Shorter than what the MLP takes in tiles.
    short, middle, long = (traced(tokens) for tokens in (2048, 3072, 5120))
    for one, two, four in zip(short, middle, long, strict=True):
        assert four - two == pytest.approx(2 * (two - one), rel=0.03)


@pytest.mark.slow
def test_packed_rows_on_a_card_take_the_variable_length_kernel_and_no_more_than_padded_ones() -> None:
    model = tiny_models.architecture(layers=1)
    model.vocab_size = 1024
    padded = LargestBatch(rows=4, tokens=256, padded=True, trained_tokens=1020)
    packed = LargestBatch(rows=1, tokens=1024, padded=False, trained_tokens=1020, packed=(256,) * 4)
    card = tiny_models.card()
    job = tiny_models.config(
        kernels__fused="off", data__packing=True, data__max_length=256, training__micro_batch=4, training__batch_size=4
    )
    ours = tiny_models.trace(job, model, where=card, batch=packed, attention=packing.VARLEN)
    theirs = tiny_models.trace(job.changed({"data.packing": False}), model, where=card, batch=padded)
    for phase in ("forward", "backward"):
        assert 0.9 * peaks(theirs)[phase] < peaks(ours)[phase] < 1.02 * peaks(theirs)[phase]
    assert ours.work(["forward"]).flops == pytest.approx(theirs.work(["forward"]).flops, rel=0.01)
    accumulated = 4 * 4 * (1024 + 4 * 128) * 32  # float32, 4 heads, 128 places more for each row, 16 rounded up to 32
    assert accumulated in [block.bytes for block in ours.blocks if block.category == "workspace"]


def test_a_run_stopped_within_a_step_does_not_hide_the_update_of_the_next_forecast() -> None:
    """accelerate keeps whether gradients are still accumulated for the whole process, and updates nothing meanwhile."""
    state = GradientState()
    state._set_sync_gradients(False)
    try:
        assert any(block.category == "optimizer_states" for block in trace().blocks)
        assert not GradientState().sync_gradients, "left as it was"
    finally:
        GradientState._reset_state()


@pytest.mark.parametrize("kind", ["paged_adamw_8bit", "adamw_8bit"])
def test_paged_states_of_large_weights_are_managed_on_a_card(kind: str) -> None:
    blocks = trace(where=tiny_models.card(), optimizer__kind=kind, adapter__rank=2048).blocks
    managed = [block for block in blocks if block.managed]
    assert bool(managed) is kind.startswith("paged")
    assert all(block.category == "optimizer_states" and block.bytes >= 100_000 for block in managed)


def test_an_evaluation_takes_4_bit_weights_as_they_were_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with AVX512-BF16 bitsandbytes repacks them for inference, if they have 32 rows or a multiple."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    model = tiny_models.architecture(layers=1)
    assert model.intermediate_size % 32
    assert "evaluation" in peaks(tiny_models.trace(tiny_models.config(), model, evaluation=tiny_models.BATCH))


def test_an_optimizer_that_divides_by_one_minus_what_it_reads_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    nadam = optimizers.Optimizer("NAdam", lambda section: (torch.optim.NAdam, {}))
    monkeypatch.setitem(optimizers.OPTIMIZERS, "nadam", nadam)
    blocks = trace(optimizer__kind="nadam").blocks
    weights, states = (
        sum(block.bytes for block in blocks if block.category == each) for each in ("adapter", "optimizer_states")
    )
    assert states >= 2 * weights > 0, "two moments a weight"


@pytest.mark.slow
def test_sgd_with_weight_decay_copies_all_gradients_at_once_on_a_card_and_one_by_one_on_a_cpu() -> None:
    def traced(where: Device, decay: float) -> Trace:
        return trace(1, where, **TWO, optimizer__kind="sgd", optimizer__weight_decay=decay, quantization__kind="none")

    for where in (tiny_models.card(), tiny_models.cpu()):
        decayed, plain = (traced(where, decay) for decay in (0.1, 0))
        copied = peaks(decayed)["optimizer"] - peaks(plain)["optimizer"]
        adapter = [block.bytes for block in plain.blocks if block.category == "adapter"]
        if where.type == "cuda":
            assert copied == pytest.approx(sum(adapter), rel=0.01), "but for the gradients' norms, which are numbers"
        else:
            assert copied <= max(adapter)


@pytest.mark.slow
def test_the_copies_of_sgd_are_extrapolated() -> None:
    job, model = tiny_models.config(**PLAIN, optimizer__kind="sgd"), tiny_models.architecture(layers=6)
    job = job.changed({"optimizer.weight_decay": 0.1})
    found, expected = (
        tiny_models.trace(job, model, where=tiny_models.card(), **shortening)
        for shortening in ({}, {"shortening": extrapolate.whole})
    )
    assert peaks(found)["optimizer"] == peaks(expected)["optimizer"]


@pytest.mark.slow
def test_what_a_layer_keeps_takes_memory_and_is_not_computed_again() -> None:
    batch = LargestBatch(rows=2, tokens=512, padded=False, trained_tokens=1022)
    traces = {
        level: trace(2, tiny_models.card(), batch, **PLAIN, kernels__fused="off", memory__checkpointing=level)
        for level in LEVELS
    }
    flops, calls = ({level: getattr(trace.work(["backward"]), of) for level, trace in traces.items()}
                    for of in ("flops", "calls"))  # fmt: skip
    assert flops["none"] <= flops["keep-both"] < flops["keep-products"] < flops["keep-attention"] < flops["all"]
    saved = {level: flops["all"] - flops[level] for level in LEVELS}
    assert saved["keep-both"] == saved["keep-attention"] + saved["keep-products"]
    assert calls["none"] < calls["keep-both"] < calls["keep-products"] < calls["all"]
    needed = {level: peaks(trace)["backward"] for level, trace in traces.items()}
    assert needed["none"] > needed["keep-both"] > needed["keep-products"] > needed["keep-attention"] > needed["all"]


_OTHERS: list[dict[str, Any]] = [
    {"memory__checkpointing": "none"},
    {"memory__checkpointing": "keep-both"},
    {"memory__checkpointing": "all", "memory__loss_tokens": 32},
    {"memory__checkpointing": "all", "training__micro_batch": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "layers", "card", "changes", "settings"),
    [
        pytest.param("llama", 2, None, {}, _OTHERS[1:3], id="on a CPU", marks=pytest.mark.long),
        pytest.param("llama", 1, "RTX 4090", {**TWO, "kernels__fused": "on"}, _OTHERS[1:], id="fused"),
        pytest.param("llama", 2, None, {"quantization__kind": "int8"}, _OTHERS[:2], id="int8", marks=pytest.mark.long),
        pytest.param("windows", 3, "RTX 3090", {}, _OTHERS[:2], id="windows", marks=pytest.mark.long),
        pytest.param(
            "mixture", 2, "RTX 4090", {"training__precision": "fp16"}, _OTHERS[::3], id="mixture",
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_a_model_traced_before_gives_the_forecast_that_a_new_one_gives(
    architecture: str, layers: int, card: str | None, changes: dict[str, Any], settings: list[dict[str, Any]]
) -> None:
    models, where = Models(), tiny_models.card(card) if card else tiny_models.cpu()
    model = tiny_models.architecture(architecture, layers)
    for setting in settings:
        job = tiny_models.config(**{**changes, **setting})
        batch = LargestBatch(rows=job.training.rows, tokens=64, padded=True, trained_tokens=96)
        found, expected = (
            tiny_models.trace(job, model, where=where, batch=batch, evaluation=tiny_models.BATCH, models=each)
            for each in (models, None)
        )
        assert _comparable(found) == _comparable(expected), setting
    assert len(models.ready) < len(models.traces) == len(settings)


@pytest.mark.slow
def test_how_many_layers_stand_for_like_ones_takes_no_trace_of_its_own() -> None:
    """The steps of a ladder of levels differ in nothing else."""
    models, model = Models(), tiny_models.architecture(layers=12)

    def traced(recomputed: int, models: Models | None = None) -> Trace:
        job = tiny_models.config(
            **PLAIN, optimizer__kind="sgd", memory__checkpointing={"all": recomputed, "none": 12 - recomputed}
        )
        return tiny_models.trace(job, model, where=tiny_models.card(), models=models)

    traced(6, models)
    found = traced(7, models)
    assert len(models.traces) == 1
    assert _comparable(found) == _comparable(traced(7))


def _comparable(trace: Trace) -> tuple[Any, ...]:
    """All of a trace; blocks that are freed one after the other come in any order, which no two traces share."""
    runs = []
    for stretch in trace.stretches:
        events = [(made, sorted(each)) for made, each in itertools.groupby(stretch.events, lambda event: event > 0)]
        runs.append((stretch.phase, stretch.layer, stretch.work, events))
    blocks = [(block.bytes, block.category, block.layer, block.managed) for block in trace.blocks]
    return runs, blocks, dataclasses.replace(trace, blocks=[], stretches=[])
