"""What is said of a forecast on a terminal, in a log and in a notebook."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from forecasts import GIB, MIB, forecast
from rich.console import Console

from finetune.config import Config, DistributedSection
from finetune.data.batching import LargestBatch
from finetune.forecast.job_forecast import WORDS, Experts, Forecast
from finetune.forecast.levers import Lever
from finetune.forecast.plan import Plan
from finetune.forecast.replay import Ranks
from finetune.forecast.trace import Work
from finetune.model.structure.mixture import Mixture
from finetune.report import forecast_view, words
from finetune.report.forecast_view import PlanView
from finetune.storage.records import Difference, UpTo


def printed(show: Callable[[Console], None], *, encoding: str = "utf-8", tty: bool = False) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(Console(file=file, width=80, force_terminal=tty, color_system="standard" if tty else None))
    file.seek(0)
    return file.read()


def shown(planned: Forecast, **settings: object) -> str:
    return printed(lambda console: forecast_view.show(planned, console), **settings)  # type: ignore[arg-type]


def html(planned: Forecast) -> str:
    return PlanView(Plan(Config(), planned, ()))._repr_html_() or ""


def row(text: str, name: str) -> list[str]:
    """The cells of the only line that begins with `name`, without bars and rules."""
    (line,) = [line for line in text.splitlines() if re.match(rf"[│|\s]*{re.escape(name)}\b", line)]
    return [cell for cell in re.split(r"\s{2,}|\s*│\s*", line.strip("│ ")) if cell]


HELD = Mixture(128, 8, "nf4", 1.0, 1_500_000_000, 30_500_000_000)
ONE_ROW = LargestBatch(rows=1, tokens=300, padded=False, trained_tokens=299, source="the data's rows")


def shared(**values: Any) -> dict[str, Any]:
    return {"ranks": Ranks(sharing=DistributedSection(**values).model_dump())}


LINES: list[tuple[dict[str, Any], str]] = [
    ({}, "fits: 7.00 of 12.00 GiB on RTX 3090"),
    ({"budget": 6 * GIB}, "does NOT fit: 7.00 of 6.00 GiB on RTX 3090, 1.00 GiB too much"),
    ({}, "batch 4 rows x 2,048 tokens, padded, 2 such micro-batches a step; lengths from data.max_length"),
    ({"batch": ONE_ROW, "tokens": 300}, "batch 1 row x 300 tokens; lengths from the data's rows"),
    (shared(kind="ddp"), "sharing a copy of the model on each GPU (ddp)"),
    (shared(kind="fsdp", context=2), "on each GPU (fsdp, stage weights); each row split over 2 GPUs"),
    (shared(kind="deepspeed", stage="optimizer", offload="cpu"), "shards of optimizer states in the host memory of "
     "each GPU (deepspeed, stage optimizer)"),
    ({"by_length": (UpTo(512, "none"), UpTo(1024, "keep-attention"))},
     "rows of up to 512 tokens recompute nothing, of up to 1,024 tokens recompute all but attention"),
    ({}, "step 5,000 GFLOP, at least 8 s, at most 2,048 tokens/s"),
    ({"work": Work(250_000_000), "seconds": 0.001234}, "step 0.25 GFLOP, at least 0.00123 s, at most"),
    ({"seconds": 12345.6}, "at least 12,346 s, at most 1 tokens/s"),
    ({"host_bytes": 3 * GIB, "disk_bytes": 200 * MIB}, "host memory 3.00 GiB disk 200 MiB"),
    ({"experts": Experts(HELD)},
     "experts 128 a layer in nf4; 1,500,000,000 of all 30,500,000,000 parameters stay unquantized"),
    ({"experts": Experts(Mixture(8, 2, "fp4", 0.5, 10, 20))},
     "experts 8 a layer, 50.0% of their parameters in fp4; 10 of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "line"), LINES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_forecast_says(changes: dict[str, Any], line: str) -> None:
    assert line in " ".join(shown(forecast(**changes)).split())


def test_the_answer_comes_first_and_what_there_is_none_of_is_not_named() -> None:
    text = shown(forecast())
    assert text.startswith("fits: ")
    name = "a card whose name is longer than a terminal is wide " * 3
    assert name in shown(forecast(name=name)).splitlines()[0], "lines of a log stay whole"
    for word in ("recompute", "disk", "host memory", "experts", "routing", "over the budget"):
        assert word not in text
    assert "host memory" not in shown(forecast(type="cpu", host_bytes=3 * GIB))


def test_categories_at_the_peak_have_size_share_and_a_bar_in_proportion() -> None:
    text = shown(forecast())
    assert row(text, "base weights") == ["base weights", "█" * 32, "3.00 GiB", "42.9%"]
    assert row(text, "activations") == ["activations", "█" * 21 + "▍", "2.00 GiB", "28.6%"]
    assert row(text, "context and libraries")[2:] == ["1.00 GiB", "14.3%"]
    assert row(text, "allocator slack")[2:] == ["512 MiB", "7.1%"]
    assert row(text, "at the peak") == ["at the peak", "7.00 GiB", "100.0%"]


def test_categories_are_in_the_order_of_the_plot_without_empty_ones() -> None:
    text = shown(forecast())
    there = ["base weights", "optimizer states", "gradients", "activations", "context and libraries", "allocator slack"]
    assert [name for name in WORDS.values() if name in text] == there
    assert sorted(there, key=text.index) == there
    seen = forecast()
    assert "quantization state" not in shown(forecast(categories={**seen.categories, "quantization_state": 1000}))
    assert "quantization state" in shown(forecast(categories={**seen.categories, "quantization_state": MIB}))


def test_phases_show_allocated_and_reserved_and_on_a_cpu_one_column() -> None:
    text = shown(forecast())
    assert row(text, "backward") == ["backward", "5.50 GiB", "6.00 GiB"]
    assert row(text, "load") == ["load", "3.00 GiB", "3.00 GiB"]
    cpu = shown(forecast(type="cpu"))
    assert row(cpu, "backward") == ["backward", "5.50 GiB"]
    assert "reserved" not in cpu


def test_only_phases_that_exceed_the_budget_themselves_are_marked() -> None:
    seen = forecast()
    merge = {"allocated_bytes": 13 * GIB, "reserved_bytes": 13 * GIB}
    text = shown(forecast(phases={**seen.phases, "merge": merge}))
    assert row(text, "merge")[-1] == "over the budget"
    assert text.count("over the budget") == 1
    tight = shown(forecast(budget=6 * GIB))
    assert row(tight, "backward")[-1] == "over the budget"
    assert tight.count("over the budget") == 1  # the optimizer's 6 GiB were reserved by the backward pass


def test_bars_are_of_ascii_on_a_console_that_knows_no_other_characters() -> None:
    text = shown(forecast(name="карта"), encoding="ascii")
    assert row(text, "base weights")[1] == "#" * 32
    assert "on ?????" in text


def levers(*found: tuple[dict[str, int], int, bool, str]) -> str:
    """(changes, needed bytes, whether it fits then, cost) of each lever, as printed."""
    afters = [
        (Lever(changes, cost), forecast(budget=needed if fits else needed - 1, peak_reserved_bytes=needed - GIB))
        for changes, needed, fits, cost in found
    ]
    text = printed(PlanView(Plan(Config(), forecast(), tuple(afters))).show)
    return text[text.index("what would") :] if "what would" in text else ""


def test_levers_show_change_need_verdict_and_cost() -> None:
    text = levers(
        ({"training.micro_batch": 1}, 3 * GIB, True, "more passes"),
        ({"adapter.rank": 8}, 9 * GIB, False, "a smaller one"),
    )
    assert text.startswith("what would make it fit\n")
    assert row(text, "training.micro_batch=1") == ["training.micro_batch=1", "3.00 GiB", "yes", "more passes"]
    assert row(text, "adapter.rank=8") == ["adapter.rank=8", "9.00 GiB", "no", "a smaller one"]


def test_levers_that_do_not_suffice_are_titled_so() -> None:
    assert levers(({"adapter.rank": 8}, 9 * GIB, False, "")).startswith("what would make it smaller; none of these is")
    assert levers() == ""


def compared(*rows: tuple[str, int, int]) -> str:
    differences = [Difference(phase, "allocated_bytes", predicted, measured) for phase, predicted, measured in rows]
    return printed(lambda console: forecast_view.compare(differences, console))


def test_a_comparison_marks_what_is_more_than_three_percent_off() -> None:
    text = compared(
        ("forward", 1029 * MIB, 1000 * MIB), ("backward", 1031 * MIB, 1000 * MIB), ("optimizer", 900 * MIB, 1000 * MIB)
    )
    assert row(text, "forward") == ["forward", "1.00 GiB", "1000 MiB", "+2.9%"]
    assert row(text, "backward")[-1] == "+3.1% *"
    assert row(text, "optimizer")[-1] == "-10.0% *"
    assert text.endswith("* more than 3% from what was measured\n")
    small = compared(("forward", 1010 * MIB, 1000 * MIB), ("save", 0, 0))
    assert "*" not in small
    assert row(small, "save") == ["save", "0 MiB", "0 MiB"]
    assert compared() == ""


def test_a_comparison_of_several_measures_names_them() -> None:
    differences = [Difference("backward", measure, MIB, MIB) for measure in ("allocated_bytes", "reserved_bytes")]
    text = printed(lambda console: forecast_view.compare(differences, console))
    assert "backward, allocated" in text
    assert "backward, reserved" in text


def test_a_comparison_on_a_cpu_adds_the_memory_of_the_process() -> None:
    peaks = {"forward": {"resident_bytes": 900 * MIB, "allocated_bytes": MIB}, "load": {"resident_bytes": 950 * MIB}}
    assert forecast_view.process(873 * MIB, peaks) == (
        "tensors, in a step on the largest batch; with libraries the process was to take 873 MiB and took up to 950 MiB"
    )
    assert forecast_view.process(GIB, {"forward": {"allocated_bytes": GIB, "reserved_bytes": GIB}}) == ""


def test_a_notebook_and_a_program_get_the_storage_of_experts_and_no_picture_without_a_curve() -> None:
    assert "<img" not in html(forecast(curve=()))
    held = forecast(experts=Experts(HELD))
    assert "128 a layer in nf4" in html(held)
    assert held.as_dict()["mixture"]["quantized_experts"] == 1.0
    evenly = held.needed_bytes - 64 * MIB
    routed = replace(held, experts=Experts(HELD, evenly_routed_bytes=evenly))
    least, most = words.size(evenly), words.size(held.needed_bytes)
    assert f"routing    {least} if experts get equally many tokens, {most} if one gets all" in shown(routed)
    assert routed.as_dict()["evenly_routed_bytes"] == evenly
