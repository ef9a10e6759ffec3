"""What `training.precision: auto` is: by the device, by the other keys, and on a machine that a run is moved to."""

import shutil
from collections.abc import Callable, Iterable

import pytest
import torch
from messages import refusal

import finetune
from finetune.choices import load_config
from finetune.config import Config
from finetune.errors import MachineError
from finetune.extras.sweeps import grid, running
from finetune.model import precision
from finetune.report.terminal import Terminal
from finetune.resolve import planning
from finetune.storage.rundir import RunDirectory

A100, T4 = precision.of_card("A100", (8, 0)), precision.of_card("T4", (7, 5))
MIB = 2**20
Has = Callable[..., None]


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Has:
    """Give this machine's CPU these instructions for bfloat16, and no others."""
    real = torch.cpu.get_capabilities()

    def give(*instructions: str) -> None:
        capabilities = {**real, **dict.fromkeys(("avx512_bf16", "amx_bf16", "bf16"), False)}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities | dict.fromkeys(instructions, True))

    return give


@pytest.mark.parametrize(
    ("capability", "fastest"),
    [
        ((12, 0), "bf16"), ((9, 0), "bf16"), ((8, 9), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp16"), ((7, 0), "fp16"),
        ((6, 1), "fp32"), ((6, 0), "fp16"), ((5, 2), "fp32"),
    ],
)  # fmt: skip
def test_a_card_takes_the_fastest_that_it_computes_natively(capability: tuple[int, int], fastest: str) -> None:
    assert precision.of_card("a card", capability).native[0] == fastest


@pytest.mark.parametrize("instructions", ["avx512_bf16", "amx_bf16", "bf16", ""])
def test_a_cpu_takes_bfloat16_where_it_has_instructions_for_it(has: Has, instructions: str) -> None:
    has(*filter(None, [instructions]))
    assert precision.of_cpu().native[0] == ("bf16" if instructions else "fp32")


def test_a_cpu_without_onednn_computes_in_float32(has: Has, monkeypatch: pytest.MonkeyPatch) -> None:
    has("bf16")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert precision.of_cpu().native == ("fp32",)


@pytest.mark.parametrize(
    ("settings", "of_ranks", "value", "why"),
    [
        ([], [A100], "bf16", "A100 has bfloat16"),
        ([], [T4], "fp16", "T4 has no bfloat16"),
        (["adapter.dtype=bfloat16"], [T4], "fp32", "loss scaling"),
        (["distributed.kind=fsdp"], [T4, T4], "fp32", "loss scale"),
        (["distributed.kind=fsdp"], [A100, A100], "bf16", "A100"),
        ([], [A100, T4], "fp16", "T4"),
        ([], [T4, precision.of_card("GTX 1080", (6, 1))], "fp32", "GTX 1080"),
        (["training.precision=bf16"], [T4], "bf16", None),
    ],
)
def test_auto_is_what_all_ranks_have_and_no_other_key_rules_out(
    settings: list[str], of_ranks: list[precision.Arithmetic], value: str, why: str | None
) -> None:
    config = load_config({}, settings)
    if why is None:
        assert config.training.precision == value, "what the user wrote stays"
    else:
        name, reason = precision.fastest(config, of_ranks)
        assert name == value
        assert why in reason


@pytest.mark.parametrize(
    ("kind", "name", "arithmetic"), [("cpu", "fp16", precision.of_cpu()), ("cuda", "bf16", T4)]
)  # fmt: skip
def test_a_precision_that_a_device_cannot_train_in_is_refused(
    kind: str, name: str, arithmetic: precision.Arithmetic
) -> None:
    with refusal(MachineError, "training.precision", name):
        precision.check(name, kind, arithmetic)
    precision.check("fp32", kind, arithmetic)


@pytest.mark.parametrize(
    ("gpu", "settings", "value", "flops"),
    [
        ("T4", [], "fp16", 65e12),
        pytest.param("T4", ["adapter.dtype=bfloat16"], "fp32", 8.1e12, marks=pytest.mark.long),
        pytest.param("RTX 4090", ["training.precision=fp32"], "fp32", 82.6e12, marks=pytest.mark.long),
        pytest.param("16GiB", [], "bf16", None, marks=pytest.mark.long),
    ],
)
def test_a_plan_is_in_the_precision_and_at_the_rate_that_the_card_trains_with(
    quick: Callable[..., Config], gpu: str, settings: list[str], value: str, flops: float | None
) -> None:
    plan = planning.plan(quick("training.precision=auto", "data.max_length=64", *settings), gpu)
    assert (plan.config.training.precision, plan.as_dict()["precision"]) == (value, value)
    assert plan.forecast.device.rates.flops == (flops or plan.forecast.device.rates.flops)
    assert (plan.why_precision is None) is ("training.precision=fp32" in settings)


def test_a_fit_writes_the_precision_with_its_reason(quick: Callable[..., Config]) -> None:
    fitted = planning.fit(quick("training.precision=auto", "data.max_length=64"), "T4")
    assert fitted.value("training.precision") == "fp16" == fitted.as_dict()["chosen"]["training.precision"]
    assert "T4" in fitted.reasons["training.precision"]


@pytest.mark.parametrize(
    ("then", "now", "value"),
    [(["avx512_bf16"], [], "bf16"), pytest.param([], ["amx_bf16"], "fp32", marks=pytest.mark.long)],
)
def test_a_run_goes_on_in_the_precision_it_was_started_in(
    quick: Callable[..., Config], has: Has, capsys: pytest.CaptureFixture, then: Iterable[str], now: Iterable[str],
    value: str,
) -> None:  # fmt: skip
    job = ["training.precision=auto", "quantization.kind=none", "training.schedule=constant", "data.eval=none"]
    has(*then)
    run = finetune.train(quick(*job, "training.max_steps=1")).run
    assert f"training.precision: {value} (this CPU has " in capsys.readouterr().out
    assert run.config().training.precision == value
    has(*now)
    finetune.train(quick(*job, "training.max_steps=2"))
    assert (run.steps_done, run.config().training.precision) == (2, value)
    assert "training.precision:" not in capsys.readouterr().out


@pytest.mark.long
def test_members_of_a_sweep_go_on_in_the_precision_of_those_that_were_started(run: RunDirectory, has: Has) -> None:
    has()
    folder = run.path.parent / "sweep"
    keys = {"training.seed": ["1", "2"], "adapter.rank": ["4", "8"]}
    made = grid.members({"output": {"dir": str(folder)}, "data": {"train": "builtin:conversations"}}, [], keys)
    assert {one.config.training.precision for one in running._in_one_precision(made, Terminal(), fresh=False)} == {
        "fp32"
    }
    started = RunDirectory(shutil.copytree(run.path, str(made[1].config.output.dir)))
    started.create(started.config().changed({"training.precision": "bf16"}))
    for fresh, value in ((False, "bf16"), (True, "fp32")):
        members = running._in_one_precision(made, Terminal(), fresh=fresh)
        assert {one.config.training.precision for one in members} == {value}
