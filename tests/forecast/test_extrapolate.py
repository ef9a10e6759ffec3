"""A deep model's trace is a shallow one's with its layers repeated, exactly; where it is not, that is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from jobs import sampled
from traces import Story, events, peaks

from finetune.forecast import traced_step as tracing
from finetune.forecast.depth import Scattered
from finetune.forecast.extrapolate import NotAlike, extrapolate, shorten, whole
from finetune.forecast.trace import Trace

# -- which layers are kept ---------------------------------------------------------------------------------------------


def test_like_layers_are_kept_at_both_ends_and_one_stands_for_those_between() -> None:
    for kinds, layers, unit, repeats in (
        ("a" * 9, (0, 1, 2, 7, 8), (0, 1, 2, 3, 4), (1, 5, 1, 1, 1)),
        # The first layers are checkpointed and the others not.
        ("c" * 7 + "p" * 6, (0, 1, 2, 5, 6, 7, 8, 9, 11, 12), tuple(range(10)), (1, 3, 1, 1, 1, 1, 2, 1, 1, 1)),
        # A stretch too short to save anything is kept whole.
        ("cc" + "p" * 6, (0, 1, 2, 3, 4, 6, 7), tuple(range(7)), (1, 1, 1, 2, 1, 1, 1)),
        # Alternating kinds repeat as one unit; an odd last layer stands by itself.
        ("ab" * 8, (*range(6), *range(12, 16)), (0, 0, 1, 1, 2, 2, 3, 3, 4, 4), (1, 4, 1, 1, 1)),
        ("wwf" * 7, (*range(9), *range(15, 21)), tuple(number // 3 for number in range(15)), (1, 3, 1, 1, 1)),
        ("cp" * 6 + "c", (*range(6), *range(8, 13)), (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5), (1, 2, 1, 1, 1, 1)),
    ):
        found = shorten(kinds)
        assert (found.layers, found.unit, found.repeats) == (layers, unit, repeats), kinds
    for kinds in ("a" * 5, "abcabc", ""):
        assert shorten(kinds) == whole(kinds)


def test_layers_of_mixed_sizes_are_one_run_with_two_of_each_size_between() -> None:
    assert shorten("a" * 9).runs == ((0, 1, 1, 1, 1, 1, 2, 3, 4),)
    found = shorten("a" * 12, "xxxyyxyyxyyx")
    assert found.layers == (0, 1, 2, 3, 4, 10, 11)
    assert found.runs == ((0, 1, 1, 3, 3, 1, 3, 3, 2, 4, 5, 6),)
    assert shorten("a" * 4 + "b" * 4, "xyxyxyxy").layers == tuple(range(8)), "too short to save anything"


@given(st.lists(st.tuples(st.text("abc", min_size=1, max_size=4), st.integers(1, 12)), max_size=4))
def test_the_layers_kept_repeated_are_the_layers_there_were(stretches: list[tuple[str, int]]) -> None:
    kinds = "".join(text * times for text, times in stretches)
    found = shorten(kinds)
    units: dict[int, str] = {}
    for layer, unit in zip(found.layers, found.unit, strict=True):
        units[unit] = units.get(unit, "") + kinds[layer]
    assert "".join(units[number] * times for number, times in enumerate(found.repeats)) == kinds


# -- traces written by hand --------------------------------------------------------------------------------------------


def step(layers: int, *, weight: Callable[[int], int] = lambda layer: 100, reach: int = 1, odd: int = -1) -> Story:
    """Load, forward and backward: a layer frees its neighbour's output, its own activations and a shared gradient.

    `weight` gives the bytes of a layer's weight, `reach` how far away the output is that a layer frees; the layer
    number `odd` makes something more.
    """
    story = Story().at("load")
    for layer in range(layers):
        story.at("load", layer).make(f"weight{layer}", weight(layer), "base_weights")
    story.at("forward").make("embedded", 50)
    for layer in range(layers):
        story.at("forward", layer).make(f"saved{layer}", 40 + 400 * (layer == 0)).make(f"out{layer}", 30)
        if layer == odd:
            story.make("odd", 7).drop("odd")
        if layer >= reach:
            story.drop(f"out{layer - reach}")
        story.work(flops=10, moved_bytes=20, calls=3)
    story.at("forward").make("logits", 500, "loss")
    story.at("backward")
    for layer in range(layers):
        story.make(f"router{layer}", 3)
    for layer in reversed(range(layers)):
        story.at("backward", layer).make(f"grad{layer}", 60, "gradients").drop(f"saved{layer}", f"router{layer}")
    story.at("backward").drop(*(f"out{layer}" for layer in range(max(0, layers - reach), layers)), "logits", "embedded")
    story.at("optimizer").drop(*(f"grad{layer}" for layer in range(layers)))
    return story


def evaluated(layers: int) -> Story:
    """A backward pass that makes less in the layer where it ends; then each layer frees its neighbour's output."""
    story = Story()
    for layer in reversed(range(layers)):
        story.at("backward", layer)
        if layer:
            story.make(f"input gradient{layer}", 30).drop(f"input gradient{layer}")
    for layer in range(layers):
        story.at("evaluation", layer).make(f"out{layer}", 30)
        if layer:
            story.drop(f"out{layer - 1}")
    return story.drop(f"out{layers - 1}")


def without_layers(trace: Trace) -> list[tuple[str, int, int, str]]:
    return [(phase, *event) for phase, _, *event in events(trace)]


def test_a_short_traces_layers_repeated_are_the_long_trace() -> None:
    """Also where the first layer makes less in one phase and is alike in the next (`evaluated`)."""
    for story, layers in ((step, 6), (step, 7), (step, 20), (evaluated, 9)):
        found, expected = extrapolate(story(5).trace, shorten("a" * layers)), story(layers).trace
        assert without_layers(found) == without_layers(expected), (story, layers)
        assert found.work(["forward"]) == expected.work(["forward"])
    trace = step(4).trace
    assert extrapolate(trace, whole("a" * 4)) is trace


def test_every_free_belongs_to_an_earlier_allocation() -> None:
    living = set[int]()
    for stretch in extrapolate(step(5).trace, shorten("a" * 9)).stretches:
        for event in stretch.events:
            living.add(event) if event > 0 else living.remove(-event)
    assert len(living) == 9, "the weights stay"


@pytest.mark.parametrize(
    ("story", "words"),
    [
        pytest.param(step(5, odd=1), "units 1 and 2 of the layers differ", id="the template does more"),
        pytest.param(step(5, odd=2), "units 1 and 2 of the layers differ", id="the next does more"),
        pytest.param(step(5, reach=2), "reach|differ", id="it frees what is two layers away"),
        pytest.param(step(5, weight=lambda layer: 100 + (layer == 4)), "keep differs", id="the last keeps more"),
        pytest.param(step(5, weight=lambda layer: 100 + (layer == 0)), "keep differs", id="the first keeps more"),
    ],
)
def test_layers_that_are_not_alike_are_noticed(story: Story, words: str) -> None:
    with pytest.raises(NotAlike, match=words):
        extrapolate(story.trace, shorten("a" * 9))


def test_only_the_first_and_last_layer_may_free_blocks_elsewhere() -> None:
    found = events(extrapolate(step(5, odd=4).trace, shorten("a" * 9)))
    assert [event for event in found if event[3] == 7] == [("forward", 8, sign, 7, "activations") for sign in (1, -1)]


# -- real models -------------------------------------------------------------------------------------------------------


PLAIN = {"quantization__kind": "none"}
TWO = {**PLAIN, "adapter__targets": ["q_proj", "up_proj"], "memory__checkpointing": "none"}
# The layers that are kept have other numbers than in the whole model.
PATTERN = "layers[.]([0-5]|7)[.]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "layers", "changes"),
    sampled(
        [
            # More layers of the first level than are traced of both.
            ("llama", 10, {**PLAIN, "memory__checkpointing": {"all": 8, "keep-both": 2}}),
            ("llama", 6, {"memory__checkpointing": "keep-both", "kernels__fused": "on"}),
            ("llama", 6, {**PLAIN, "adapter__kind": "none", "optimizer__kind": "sgd"}),
            ("mixture", 6, {}),
            (MIXTURE := ("mixture", 6, {**TWO, "adapter__targets": ["q_proj"]})),
            ("llama", 12, {"quantization__kind": "q4_k_m", "adapter__targets": ["q_proj"]}),
            ("llama", 8, {**PLAIN, "adapter__targets": ["q_proj", f".*{PATTERN}mlp.*"]}),
            ("llama", 8, {**TWO, "adapter__ranks": {f"{PATTERN}.*": 64, "q_proj": 2}}),
        ],
        MIXTURE,
    ),
    ids=str,
)  # fmt: skip
def test_the_extrapolated_trace_has_the_peaks_of_the_whole_one(
    architecture: str, layers: int, changes: dict[str, Any]
) -> None:
    job, model = tiny_models.config(**changes), tiny_models.architecture(architecture, layers)
    repeated = tiny_models.trace(job, model, evaluation=tiny_models.BATCH)
    full = tiny_models.trace(job, model, evaluation=tiny_models.BATCH, shortening=whole)
    found, expected = peaks(repeated), peaks(full)
    # Clipping stacks a list of norms, one for each trained weight of the short model: 4 bytes and a copy for each
    # that was left out.
    assert found.pop("optimizer") == pytest.approx(expected.pop("optimizer"), abs=512)
    assert found == expected
    assert repeated.work(["forward", "backward"]).flops == full.work(["forward", "backward"]).flops
    assert repeated.base == full.base
    assert events(repeated)[-1][0] == events(full)[-1][0]


@pytest.mark.parametrize("problem", [NotAlike, Scattered])
def test_a_model_that_cannot_be_shortened_is_traced_whole(
    problem: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def trace_step(setting: Any, shortening: Any, models: Any) -> Trace:
        tried.append(shortening("a" * 9, ()))
        if len(tried) < 3:
            raise problem("for the test")
        return Trace([], [])

    monkeypatch.setattr(tracing, "_trace_step", trace_step)
    tracing.trace_step(
        tracing.StepSetting(tiny_models.config(), None, tiny_models.BATCH, None, tiny_models.cpu(), "sdpa")
    )
    assert tried == [shorten("a" * 9), shorten("a" * 9), whole("a" * 9)]
