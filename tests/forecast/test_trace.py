"""What the recorder writes down: each storage once, from its birth to its death, and what was computed with it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
from jobs import sampled
from torch._subclasses.fake_tensor import FakeTensorMode
from traces import events, profiled

from finetune.forecast import operator_costs
from finetune.forecast.fake_values import Answers, Routing
from finetune.forecast.operator_costs import DeviceOperators
from finetune.forecast.trace import Work
from finetune.forecast.trace_recorder import TraceRecorder

aten = torch.ops.aten


def kernels(python: Any = None, scratch: Any = lambda func, args, named: []) -> DeviceOperators:
    return DeviceOperators(python=python or {}, scratch=scratch, flops={})


NOTHING = Answers(uneven=False, trained_tokens=0)


@contextlib.contextmanager
def recording(given: DeviceOperators | None = None, answers: Answers = NOTHING) -> Iterator[TraceRecorder]:
    recorder = TraceRecorder(given or kernels(), answers)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        yield recorder


@contextlib.contextmanager
def updating(*weights: tuple[int, int]) -> Iterator[tuple[TraceRecorder, list[torch.Tensor]]]:
    """Records an optimizer of the weights, of which each has (numbers, its layer)."""
    recorder, mode = TraceRecorder(kernels(), NOTHING), FakeTensorMode()
    with mode:
        made = [torch.empty(size) for size, _ in weights]
    for weight, (_, layer) in zip(made, weights, strict=True):
        recorder.keep(weight, "adapter", layer)
    recorder.phase, recorder.layer = "optimizer", None
    with mode, recorder, recorder.follow_layers():
        yield recorder, made


def bytes_of(recorder: TraceRecorder) -> list[int]:
    """Each event's bytes, above 0 where they were allocated."""
    return [sign * size for _, _, sign, size, _ in events(recorder.trace())]


# -- allocations -------------------------------------------------------------------------------------------------------


def test_a_new_storage_is_an_allocation_and_its_death_a_free() -> None:
    with recording() as recorder:
        first = torch.empty(10)
        second = first + 1
        assert bytes_of(recorder) == [40, 40]
        del first
        assert bytes_of(recorder) == [40, 40, -40]
        third = second.double()
        del second, third
    assert bytes_of(recorder) == [40, 40, -40, 80, -40, -80]


def test_views_and_operators_in_place_allocate_nothing() -> None:
    with recording() as recorder:
        values, other = torch.empty(4, 4), torch.ones(4, 4)
        before = bytes_of(recorder)
        views = [values.view(16), values[1:], values.t(), values.expand(2, 4, 4), *values.split(2), values.detach()]
        values.add_(1).mul_(other)
        values.zero_()
        torch.mm(other, other, out=values)
        assert bytes_of(recorder) == before == [64, 64]
        del values
        assert bytes_of(recorder) == before, "a view keeps the storage alive"
        del views
    assert bytes_of(recorder) == [64, 64, -64]


def test_every_output_of_an_operator_is_an_allocation() -> None:
    with recording() as recorder:
        kept = torch.var_mean(torch.empty(5, 8), dim=1)
    assert bytes_of(recorder) == [160, 20, 20, -160]
    assert len(kept) == 2


def test_a_stretch_has_one_phase_and_one_layer() -> None:
    with recording() as recorder:
        recorder.phase = "forward"
        first = torch.empty(1)
        recorder.layer = 2
        second = first + first
        recorder.phase = "backward"
        del second
        third = first + first
    assert events(recorder.trace())[:3] == [
        ("forward", None, 1, 4, "activations"),
        ("forward", 2, 1, 4, "activations"),
        ("backward", 2, -1, 4, "activations"),
    ]
    assert [(stretch.phase, stretch.layer) for stretch in recorder.trace().stretches] == [
        ("forward", None), ("forward", 2), ("backward", 2),
    ]  # fmt: skip
    assert third.numel() == 1


def test_keep_counts_earlier_tensors_and_mark_changes_the_category() -> None:
    with recording() as recorder:
        weight = torch.empty(3)
        recorder.mark(weight, "optimizer_states", managed=True)
        recorder.mark(None, "gradients")
    [block] = recorder.trace().blocks
    assert (block.bytes, block.category, block.managed) == (12, "optimizer_states", True)

    recorder = TraceRecorder(kernels(), NOTHING)
    with FakeTensorMode():
        outside = torch.empty(6)
    recorder.keep(outside, "base_weights", 4)
    recorder.keep(outside.view(2, 3), "adapter", 5)
    assert events(recorder.trace()) == [("load", 4, 1, 24, "base_weights")], "a tied weight is counted once"


def test_an_optimizer_is_followed_from_weight_to_weight() -> None:
    with updating((4, 0), (6, 1)) as (recorder, (first, second)):
        states = [torch.zeros_like(second), torch.zeros_like(first)]
        lists = torch._foreach_add([first, second], 1.0)
    assert [event[1:4] for event in events(recorder.trace())[2:6]] == [(1, 1, 24), (0, 1, 16), (0, 1, 16), (1, 1, 24)]
    assert len(states) == len(lists) == 2


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_an_operator_that_is_a_python_program_is_seen_inside_and_its_output_keeps_the_category() -> None:
    with recording(kernels({"aten::exp": lambda values: values.double() + 1})) as recorder:
        values = torch.empty(10)
        recorder.category = "loss"
        out = torch.exp(values)
    assert [event[2:] for event in events(recorder.trace())][:4] == [
        (1, 40, "activations"), (1, 80, "workspace"), (1, 80, "loss"), (-1, 80, "workspace"),
    ]  # fmt: skip
    assert recorder.category == "loss"
    assert out.dtype is torch.float64


def test_a_python_program_runs_once_for_arguments_alike_unless_a_batch_answers_it() -> None:
    runs = []

    def program(values: torch.Tensor) -> torch.Tensor:
        runs.append(values.shape)
        return values.double() + 1 if values.dim() == 1 else values[values.bool()]

    recorder = TraceRecorder(kernels({"aten::exp": program}), Answers(uneven=False, trained_tokens=2))
    with FakeTensorMode(), recorder:
        for size in (10, 10, 20, (2, 3), (2, 3)):
            recorder.phase = f"{len(runs)} of {size}"
            values = torch.empty(size)
            found = torch.exp(values)
            if size == 10:
                assert (found.dtype, found.shape) == (torch.float64, (10,))
            del values, found
    assert runs == [(10,), (20,), (2, 3), (2, 3)]
    [first, again] = (
        [event[1:] for event in events(recorder.trace()) if event[0] == f"{done} of 10"] for done in (0, 1)
    )
    assert first == again != []


@pytest.mark.parametrize("kind", sampled(["adamw_8bit", "adafactor"], "adamw_8bit"))
def test_a_step_whose_programs_are_repeated_has_the_trace_of_one_in_which_all_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_models.config(optimizer__kind=kind, quantization__kind="nf4", kernels__fused="on")
    traces = []
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(TraceRecorder, "_keep_program", lambda *arguments: None)
        traces.append(tiny_models.trace(job, tiny_models.architecture(layers=1), evaluation=tiny_models.BATCH))
    repeated, expected = traces
    assert events(repeated) == events(expected)
    assert [stretch.work for stretch in repeated.stretches] == [stretch.work for stretch in expected.stretches]


def test_scratch_is_there_only_while_its_operator_runs() -> None:
    scratch = kernels(scratch=lambda func, args, named: [700, 300] if func is aten.mm.default else [])
    with recording(scratch) as recorder:
        values = torch.empty(2, 2)
        out = values @ values
        recorder.phase = "after"
        out = out + 1
    assert [event[2:] for event in events(recorder.trace())][:6] == [
        (1, 16, "activations"), (1, 700, "workspace"), (1, 300, "workspace"),
        (1, 16, "activations"), (-1, 700, "workspace"), (-1, 300, "workspace"),
    ]  # fmt: skip
    assert out.shape == (2, 2)


def test_a_weight_in_another_type_is_workspace_and_an_activation_is_not() -> None:
    with recording() as recorder:
        weight, activation = torch.empty(8), torch.empty(4)
        recorder.mark(weight, "base_weights")
        made = [weight.bfloat16(), activation.bfloat16()]
    assert [event[2:] for event in events(recorder.trace())][2:4] == [(1, 16, "workspace"), (1, 8, "activations")]
    assert len(made) == 2


# -- work --------------------------------------------------------------------------------------------------------------


def test_a_product_with_a_low_rank_matrix_is_bandwidth_bound_and_a_large_one_is_not() -> None:
    recorder = TraceRecorder(kernels(), NOTHING, flops_per_byte=20.0)
    with FakeTensorMode(), recorder:
        values, low_rank, square = torch.empty(512, 512), torch.empty(512, 4), torch.empty(512, 512)
        recorder.phase = "forward"
        small = values @ low_rank
        moved = 4 * (512 * 512 + 2 * 512 * 4)
        assert recorder.trace().work(["forward"]) == Work(2 * 512 * 512 * 4, moved, 1, hidden_flops=2 * 512 * 512 * 4)
        recorder.phase = "backward"
        large = values @ square
        assert recorder.trace().work(["backward"]) == Work(2 * 512**3, 0, 1)
    assert small.shape == (512, 4)
    assert large.shape == (512, 512)


def test_a_gradient_that_autograd_adds_in_place_reads_two_and_writes_one() -> None:
    with recording() as recorder:
        weight = torch.empty(10, requires_grad=True)
        loss = (weight * 2).sum() + (weight * 3).sum()
        recorder.phase = "backward"
        loss.backward()
        made = recorder.trace().work(["backward"])
    # The sums' gradients are views of one number, the first of them; each product reads that and writes ten.
    assert made.moved_bytes == 4 + 2 * (4 + 40) + 3 * 40


def test_other_operators_read_inputs_and_write_outputs_and_views_move_nothing() -> None:
    with recording() as recorder:
        first, second = torch.empty(10), torch.empty(10)
        recorder.phase = "forward"
        out = (first + second).view(2, 5).t()
        assert recorder.trace().work(["forward"]) == Work(0, 3 * 40, 1)
        first.add_(second)
        assert recorder.trace().work(["forward"]) == Work(0, 6 * 40, 2)
        assert recorder.trace().work(["backward"]) == Work()
    assert out.shape == (5, 2)


def test_a_list_operator_over_layers_counts_each_layers_share_of_its_traffic() -> None:
    with updating((10, 0), (30, 0), (10, 1)) as (recorder, weights):
        torch._foreach_mul_(weights, 2.0)
    found = {stretch.layer: stretch.work for stretch in recorder.trace().stretches if stretch.phase == "optimizer"}
    assert found == {None: Work(calls=1), 0: Work(moved_bytes=2 * 4 * 40), 1: Work(moved_bytes=2 * 4 * 10)}


# -- answers -----------------------------------------------------------------------------------------------------------


def test_whether_a_mask_is_needed_is_answered_by_the_batch() -> None:
    for padded in (True, False):
        with recording(answers=Answers(uneven=padded, trained_tokens=1)):
            mask = torch.ones(2, 4, dtype=torch.bool)
            assert bool(mask.all()) is bool(mask.sum() == mask.numel()) is not padded


def test_one_expert_of_a_mixture_is_forecast_to_get_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its product is the largest that routing can make; each token goes to two of four experts."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False})  # sums are then in float32
    monkeypatch.setattr(operator_costs, "_is_of_onednn", lambda: True)
    for tokens, busiest in [(64, 64), (0, 32)]:
        with recording(operator_costs.cpu(), Answers(uneven=False, trained_tokens=0, tokens=tokens)) as recorder:
            rows, experts = (torch.empty(size, dtype=torch.bfloat16) for size in ((128, 32), (4, 32, 48)))
            torch.nn.functional.grouped_mm(rows, experts, offs=torch.empty(4, dtype=torch.int32))
        assert max(bytes_of(recorder)[4:]) == 4 * busiest * 48 + 128


def test_a_loop_over_experts_gives_one_every_token_or_each_its_share() -> None:
    """Eight tokens go to two of four experts each."""
    for evenly, experts, tokens in [(False, 1, 16), (True, 4, 4)]:
        routing = Routing(evenly)
        with recording(answers=Answers(uneven=False, trained_tokens=0, tokens=8, routing=routing)):
            assert not routing.matters
            assert torch.ones(4).greater(0).nonzero().shape == (experts, 1)
            assert torch.where(torch.ones(2, 8, dtype=torch.bool))[0].shape == (tokens,)
        assert routing.matters


def test_a_read_integer_is_one_a_float_one_half_and_a_truth_value_true() -> None:
    with recording(answers=Answers(uneven=True, trained_tokens=1)):
        assert torch.empty(3).sum().item() == 0.5
        assert torch.empty(3, dtype=torch.long).max().item() == 1
        assert bool(torch.empty(3).isfinite().any())


def test_a_mask_selects_as_many_rows_as_there_are_trained_tokens() -> None:
    for trained, rows in ((5, 5), (8, 8), (100, 8)):
        with recording(answers=Answers(uneven=False, trained_tokens=trained)):
            values = torch.empty(2, 4, 3)
            assert values[torch.ones(2, 4, dtype=torch.bool)].shape == (rows, 3)
            assert values[torch.zeros(6, dtype=torch.long)].shape == (6, 4, 3), "other indices take what they say"


# -- autograd ----------------------------------------------------------------------------------------------------------


class Held(torch.autograd.Function):
    """Hands its gradient on, and holds it."""

    held: list[torch.Tensor]

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        Held.held.append(gradient)
        return gradient


def backward_of_a_weight_used_twice(how: str, mark: Any) -> None:
    Held.held = []
    weight, inputs = torch.empty(64, 64), torch.empty(8, 64)
    weight.requires_grad_()
    inputs.requires_grad_()
    use = Held.apply if how == "held" else (lambda values: values)
    out = (inputs @ use(weight)) @ (use(weight).t() if how == "transposed" else use(weight))
    mark()
    out.backward(torch.ones(8, 64))
    Held.held = []


def test_autograd_adds_in_place_into_a_gradient_that_it_alone_holds() -> None:
    """The engine never does so for a fake tensor; the trace has what the profiler sees of real ones."""
    for how, gradients in (("alone", 2), ("held", 3), ("transposed", 3)):
        with recording() as recorder:
            backward_of_a_weight_used_twice(how, lambda: setattr(recorder, "phase", "backward"))
        traced = [size for _, _, sign, size, _ in events(recorder.trace()) if sign > 0]
        real = profiled(functools.partial(backward_of_a_weight_used_twice, how, lambda: None))
        assert traced == [size for size in real if size > 0], how
        found = [phase for phase, _, *event in events(recorder.trace()) if event[:2] == [1, 64 * 64 * 4]]
        assert found.count("backward") == gradients, how


def test_the_gradient_of_selected_rows_is_written_in_place() -> None:
    """Which autograd does never for a fake tensor."""

    def backward(mark: Any) -> None:
        values = torch.empty(64, 8, requires_grad=True)
        out = values[torch.zeros(16, dtype=torch.long)]
        mark()
        out.backward(torch.ones(16, 8))

    with recording() as recorder:
        backward(lambda: setattr(recorder, "phase", "backward"))
    traced = [size for phase, _, sign, size, _ in events(recorder.trace()) if (phase, sign) == ("backward", 1)]
    assert traced == [16 * 8 * 4, 64 * 8 * 4], "the gradient given and that of the values"
