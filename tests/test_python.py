"""Jobs from Python: sections as arguments, rows, formats and objectives of one's own, and callbacks."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import example as always
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import adapter_weights, metric, write_rows
from messages import refusal, reported
from pandas import DataFrame
from safetensors.torch import load_file
from steps import ready
from typer.testing import CliRunner

import finetune
from finetune import objectives
from finetune.choices import CHOICES
from finetune.cli import app
from finetune.config import load
from finetune.config.field_types import GIVEN
from finetune.data import formats, in_memory, sources
from finetune.data.examples import RowError
from finetune.errors import ArtifactError, ConfigError, DataError, MachineError
from finetune.evaluation import run_models
from finetune.export.finished_run import FinishedRun
from finetune.objectives import contract
from finetune.report.terminal import Terminal
from finetune.runtime import libraries

EXAMPLES = Path(__file__).parent.parent / "examples"
ROWS = [{"prompt": f"Say {number}.", "completion": f" {number}"} for number in range(24)]


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    """What these tests give from Python is gone after them."""
    yield
    tables: tuple[dict[str, Any], ...] = (formats.FORMATS, objectives.OBJECTIVES, in_memory._KEPT)
    for table in tables:
        for name in [name for name in table if name.startswith(GIVEN)]:
            del table[name]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> finetune.Result:
    """The script of the README, run as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("example"))
        result: finetune.Result = runpy.run_path(str(EXAMPLES / "own_loss.py"))["result"]
    return finetune.Result(finetune.RunDirectory(folder / result.run.path))


@pytest.mark.slow
def test_the_flat_script_has_the_losses_and_the_adapter_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "So it is. " * times} for times in range(1, 16)])
    job = [f"data.train={rows}", "data.eval_share=0.4", "training.max_steps=3", "training.batch_size=4"]
    job += ["training.micro_batch=2", "training.eval_every=3", f"output.dir={tmp_path / 'flat'}"]
    monkeypatch.setattr(sys, "argv", ["minimal_qlora.py", *job])
    script = runpy.run_path(str(EXAMPLES / "minimal_qlora.py"))
    result = finetune.train(script["config"], output={"dir": str(tmp_path / "run")}, terminal=Terminal(quiet=True))
    assert script["losses"] == [line["loss"] for line in result.metrics]
    assert script["eval_losses"] == [line["eval_loss"] for line in result.evaluations]
    expected = adapter_weights(result.run)
    found = load_file(script["adapter"] / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.slow
def test_the_script_of_the_readme_learns_from_its_rows_by_its_loss_and_is_forecast(example: finetune.Result) -> None:
    assert [line["step"] for line in example.metrics] == list(range(1, 13))
    first, *_, last = (line["eval_loss"] for line in example.evaluations)
    assert last < 0.5 * first
    assert example.plot()._repr_png_().startswith(b"\x89PNG")
    assert "eval loss" in example._repr_html_()
    config = example.run.config()
    assert config.training.objective == "python:focal"
    assert str(config.data.train).startswith("python:")
    assert "rows given from Python" in example.run.report_file.read_text()
    assert (example.run.path / "forecast.json").is_file()
    focal, usual = (objectives.OBJECTIVES[name] for name in ("python:focal", "supervised"))
    assert focal.count is usual.count


@pytest.mark.slow
def test_the_command_line_says_that_rows_and_functions_must_be_given_again(
    example: finetune.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(in_memory, "_KEPT", {})
    monkeypatch.delitem(objectives.OBJECTIVES, "python:focal")
    saved, train = str(example.run.config_file), ["train", str(example.run.config_file)]
    other = CliRunner().invoke(app, train)
    assert other.exit_code == 2
    assert "`python:focal` was given from Python and is not kept on disk" in other.output.replace("\n", " ")
    with refusal(DataError, "are not kept on disk: run the"):
        finetune.train(finetune.load_config(saved, ["training.objective=supervised", f"output.dir={tmp_path}"]))
    # What needs no rows of its own still works.
    proof = finetune.merge(example.run)
    assert proof["error"] < proof["bound"]
    assert "losses" not in proof  # other rows than the run's say nothing about it
    reported(capsys.readouterr().err, "the rows were")
    assert finetune.generate(example.run, "What is 1 plus 1?", max_new_tokens=1) is not None


# -- a config from a dict ----------------------------------------------------------------------------------------------

MISTAKES: dict[str, dict[str, Any]] = {
    "a section": {"trainin": {}},
    "a key": {"training": {"learning_rat": 1e-3}},
    "another tool's key": {"training": {"lr": 1e-3}},
    "a type": {"training": {"max_steps": "10"}},
    "a name": {"optimizer": {"kind": "adam8"}},
    "no section": {"model": "tiny"},
    "two keys": {"quantization": {"kind": "nf4"}, "adapter": {"kind": "none"}},
    "an ignored key": {"optimizer": {"kind": "sgd", "epsilon": 1e-6}},
    "one section's rule": {"training": {"batch_size": 16, "micro_batch": 3}},
}


def test_a_dict_is_refused_in_the_words_for_a_file(tmp_path: Path) -> None:
    import yaml

    file = tmp_path / "job.yaml"
    for what, values in MISTAKES.items():
        file.write_text(yaml.safe_dump(values))
        with pytest.raises(ConfigError) as of_file:
            load(file, choices=CHOICES)
        with pytest.raises(ConfigError) as of_dict:
            finetune.load_config(values)
        place, _, message = str(of_file.value).partition(": ")
        assert place.startswith(str(file)), what
        assert str(of_dict.value) == f"config: {message}", what


def test_a_dict_and_arguments_give_the_config_of_a_file_and_replace_its_keys(
    quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quick("training.learning_rate=1e-3")
    assert finetune.load_config(config.model_dump()) == config
    trained: list[finetune.Config] = []
    monkeypatch.setattr("finetune.recipe.train", lambda config, **_: trained.append(config))
    finetune.train(config, model="other", data=Path("rows.jsonl"), training={"max_steps": 9}, fresh=True)
    finetune.train(model={"name": "other"}, data={"train": "rows.jsonl", "packing": True}, output={"dir": Path("runs")})
    assert trained[0] == config.changed({"model.name": "other", "data.train": "rows.jsonl", "training.max_steps": 9})
    assert trained[1] == finetune.Config().changed(
        {"model.name": "other", "data.train": "rows.jsonl", "data.packing": True, "output.dir": "runs"}
    )


@pytest.mark.long
def test_defaults_of_torch_that_a_notebook_has_set_change_neither_forecast_nor_training(quick) -> None:
    def figures(run: str) -> list[Any]:
        config, quiet = quick("training.max_steps=1", run=run), Terminal(quiet=True)
        trained = finetune.train(config, terminal=quiet).run
        finetune.merge(trained, terminal=quiet)
        answer = finetune.generate(trained, "Say 3", which="merged", max_new_tokens=4)
        peak = finetune.plan(config, "24GiB").forecast.peak_allocated_bytes
        return [peak, answer, *metric(trained, "loss", "eval_loss")]

    expected = figures("run")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            assert figures("other") == expected
            assert torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_second_thread_is_refused_while_one_is_at_work(quick) -> None:
    with libraries.alone(), ThreadPoolExecutor() as pool:
        for work in (finetune.train, finetune.plan):
            with refusal(MachineError, "another thread of this process is using finetune; wait until"):
                pool.submit(work, quick()).result()


# -- rows in memory ----------------------------------------------------------------------------------------------------


def test_what_an_argument_excludes_is_no_default_of_the_config(tmp_path: Path) -> None:
    """`nf4`, which nobody set, is not kept beside a form to serve; the next thing to be wrong is told."""
    config = finetune.load_config({"model": {"weights": "random"}, "output": {"dir": str(tmp_path / "run")}})
    with refusal(ConfigError, "`output.serve`"):
        finetune.train(config, output={"serve": "q8_0"}, terminal=Terminal(quiet=True))


def test_rows_are_a_source_like_others_named_by_their_content() -> None:
    def source(rows: Any) -> Any:
        return finetune.load_config({"data": {"train": rows}}).data.train

    name = source(ROWS)
    assert name == source(Dataset.from_list(ROWS)) == source(iter(ROWS)) != source(ROWS[:-1])
    several = source([{"source": ROWS, "weight": 2}, "rows.jsonl"])
    assert [str(one) for one in several] == [f"rows given from Python (hash {name[7:]}) (weight 2)", "rows.jsonl"]
    assert list(in_memory.records(name, "data.train"))[1] == ("data.train[1]", ROWS[1])
    changed = [dict(row) for row in ROWS]
    name = source(changed)
    changed[0]["prompt"] = "other"
    assert next(in_memory.records(name, "data.train"))[1] == ROWS[0]


def test_a_value_that_is_not_a_row_is_refused_at_once() -> None:
    for rows, message in (
        ([{"prompt": "a", "completion": "b"}, "c"], "data.train[1]: a row must be a dict of its fields"),
        (DataFrame(ROWS), "data.train: of a pandas.DataFrame, give its rows: frame.to_dict"),
        ([{1: "a"}], "data.train[0]: the name of a field must be text, not a number"),
        (["rows.jsonl", {"source": [ROWS[0], 7]}], "data.train[1].source[1]: a row must be a dict"),
    ):
        with refusal(DataError, message):
            finetune.load_config({"data": {"train": rows}})


class Unwritable:
    """Neither its text nor a copy of it can be made."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __deepcopy__(self, memo: object) -> Unwritable:
        raise RuntimeError("no copy")


def containing(make: Callable[[], Any], into: Callable[[Any, Any], object]) -> Any:
    itself = make()
    into(itself, itself)
    return itself


def nested(depth: int) -> Any:
    found: Any = 0
    for _ in range(depth):
        found = [found]
    return found


# What hypothesis must not write itself, by name.
ODD: dict[str, Callable[[], Any]] = {
    "a huge number": lambda: 10**5000,
    "a function": lambda: print,
    "a class": lambda: dict,
    "an object": object,
    "no text or copy": Unwritable,
    "an array": lambda: np.arange(3),
    "a number of numpy": lambda: np.float32(1),
    "a generator": lambda: (number for number in range(3)),
    "a list in itself": lambda: containing(list, list.append),
    "a dict in itself": lambda: containing(dict, lambda one, other: one.update(me=other)),
    "nested": lambda: nested(5000),
}

odd = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.dates(), st.decimals(),
        st.sampled_from(list(ODD)).map(lambda name: ODD[name]()),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.tuples()), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(MappingProxyType),
    ),
    max_leaves=6,
)  # fmt: skip
names = st.one_of(st.sampled_from(["prompt", "completion", "messages", "input_ids", "labels", "text", "id"]), st.text())


def read_or_refused(config: Any) -> finetune.Config | str:
    """The config, or why it is refused; any other error fails a test."""
    try:
        return finetune.load_config(config)
    except (ConfigError, DataError) as error:
        return str(error)


@pytest.mark.slow
@settings(max_examples=60)
@given(row=st.dictionaries(names, odd, max_size=4), value=odd)
def test_whatever_python_gives_for_rows_is_read_or_refused_with_its_location(row: dict[str, Any], value: Any) -> None:
    for rows in ([row], [MappingProxyType(row)], [{"prompt": "a", "completion": "b", "id": value}], [row, value]):
        found = read_or_refused({"data": {"train": rows}})
        if isinstance(found, str):
            assert found.startswith(("data.train[0]", "data.train[1]"))
            continue
        for one in sources.rows(found.data.train):
            assert 0 <= one.share() < 1
            with contextlib.suppress(RowError):
                formats.read(one.fields, "auto", {})


@settings(max_examples=100)
@given(section=odd, value=odd)
@always(section={"r": 10**5000}, value=None)  # a key of other tools
def test_whatever_python_gives_for_a_config_is_read_or_refused(section: Any, value: Any) -> None:
    for config in (section, {"training": section}, {"training": {"max_steps": value}}, {"data": {"columns": value}}):
        assert read_or_refused(config)


def test_rows_of_other_mappings_and_sequences_are_those_of_dicts_and_lists() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    other = [MappingProxyType({"messages": tuple(MappingProxyType(one) for one in turns), "n": {1: 2}})]
    plain = [{"messages": turns, "n": {"1": 2}}]
    first, second = (finetune.load_config({"data": {"train": rows}}).data.train for rows in (other, plain))
    assert first == second


def test_a_name_of_rows_and_what_is_held_out_do_not_depend_on_addresses_in_memory() -> None:
    def kept(rows: list[dict[str, Any]]) -> tuple[Any, float]:
        name = finetune.load_config({"data": {"train": rows}}).data.train
        return name, next(sources.rows(name)).share()

    assert kept([{"text": "a", "id": object()}]) == kept([{"text": "a", "id": object()}])
    long = np.arange(5000)
    assert kept([{"text": "a", "id": long}]) != kept([{"text": "a", "id": long + (long == 2500)}])


# -- a format ----------------------------------------------------------------------------------------------------------


def question(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["q"], "completion": row["a"].lower()}


def test_a_format_from_python_turns_a_row_into_one_that_is_known(quick) -> None:
    rows = [{"q": f"Say {number}.", "a": "YES", "id": number} for number in range(8)]
    job = quick().model_dump(exclude={"data"}) | {"data": {"train": rows, "format": question, "eval": "none"}}
    found = finetune.inspect_data(finetune.load_config(job)).as_dict()
    assert found["train"]["rows"] == 8
    assert "id" in str(found)
    rows[2:] = [{"q": "Say", "a": None}] * 6
    with pytest.raises(DataError) as error:
        finetune.inspect_data(finetune.load_config(job | {"data": {"train": rows, "format": question}}))
    (line,) = str(error.value).splitlines()
    assert line.startswith("data.train[2 to 7]: `python:question` fails: AttributeError: 'NoneType' object has no")


def test_a_row_of_a_list_of_sources_is_named_as_python_would_write_it(rows_file: Path) -> None:
    data = {
        "train": str(rows_file),
        "eval": [{"source": ROWS}, {"source": [*ROWS[:2], {"prompt": 7, "completion": ""}]}],
    }
    with refusal(DataError, "data.eval[1]", "`prompt`"):
        finetune.inspect_data(finetune.load_config({"data": data}))


def test_a_format_that_changes_its_row_in_place_reads_the_same_row_again(quick) -> None:
    def answered(row: dict[str, Any]) -> dict[str, Any]:
        row["messages"].append({"role": "assistant", "content": "yes"})
        return row

    rows = [{"messages": [{"role": "user", "content": f"Say {number}."}]} for number in range(8)]
    job = quick().model_dump(exclude={"data"}) | {"data": {"train": rows, "format": answered, "eval": "none"}}
    config = finetune.load_config(job)
    first, again = (finetune.inspect_data(config).as_dict() for _ in range(2))
    assert first == again
    assert first["train"]["rows"] == 8


def test_a_function_without_a_name_is_refused() -> None:
    for section, name in (("data", "format"), ("training", "objective")):
        with refusal(ConfigError, "`def`"):
            finetune.load_config({section: {name: lambda *_: {}}})


# -- an objective ------------------------------------------------------------------------------------------------------

Loss = Callable[[Any, Any], Any]


def summed(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scores = model(**batch, fused_lm_head=True)
    return -scores.log_probs.sum(), scores.label_mask.sum()


def mean(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total, count = summed(model, batch)
    return total / count, count


def of_rows(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total, count = summed(model, batch)
    return total, torch.ones_like(count) * len(batch["labels"])


def detached(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total, count = summed(model, batch)
    return total.detach(), count


def alone(model: Any, batch: Any) -> torch.Tensor:
    return summed(model, batch)[0]


def test_an_objective_from_python_must_add_up_over_rows(quick) -> None:
    loop = ready(quick("data.eval=none"))
    state = torch.get_rng_state()

    def prove(objective: Any) -> None:
        contract.prove(objectives.given(objective), loop.step.model, "fp32")

    prove(summed)
    prove(objectives.Objective("by rows", of_rows, lambda batch: torch.tensor(len(batch["labels"]))))
    for objective, problem in (
        (mean, "return sums over the rows, not means"),
        (of_rows, "returns a count of 2 for a batch whose loss would be divided by 23; give the count"),
        (detached, "must return one number with a gradient"),
        (alone, "must return two tensors"),
    ):
        with refusal(ConfigError, "`training.objective`", f"`python:{objective.__name__}`", problem):
            prove(objective)
    assert torch.equal(torch.get_rng_state(), state)
    assert loop.step.model.training


def whole_logits(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The supervised loss, from logits that are all kept."""
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


@pytest.mark.slow
def test_the_forecast_is_of_the_objective_that_is_given(quick) -> None:
    rows, tokens, vocabulary = 4, 512, 2048
    settings = [f"data.max_length={tokens}", f"training.micro_batch={rows}", "data.eval=none", "memory.loss_tokens=64"]
    job = quick(*settings).model_dump()
    job["data"]["train"] = "someone/rows"  # not read: every row counts as 512 tokens long

    def peak_bytes(objective: Any) -> int:
        given = {**job, "training": {**job["training"], "objective": objective}}
        return finetune.plan(finetune.load_config(given), "24GiB").forecast.peak_allocated_bytes

    in_tiles, whole = peak_bytes("supervised"), peak_bytes(whole_logits)
    assert whole == peak_bytes(objectives.Objective("", whole_logits))
    # Logits and log-probabilities in float32, and the gradient of either, against one tile of them.
    assert whole - in_tiles > rows * tokens * vocabulary * 4


@pytest.mark.slow
def test_a_plan_has_the_config_what_was_chosen_and_the_levers(quick) -> None:
    plan = finetune.plan(quick("training.micro_batch=auto", "data.eval=none"), "24GiB")
    assert plan.fitted
    assert plan.config.training.micro_batch == plan.fitted.value("training.micro_batch")
    assert plan.levers == ()
    few = ("data.max_length=128", "memory.checkpointing=all", "memory.loss_tokens=512", "adapter.rank=8")
    one_lever = ("training.batch_size=2", "data.eval=none", *few)
    refused = finetune.plan(quick("data.train=someone/rows", *one_lever), "1MiB")
    assert refused.fitted is None
    assert [lever.cost for lever, after in refused.levers]


# -- callbacks ---------------------------------------------------------------------------------------------------------


class Seen(finetune.Callback):
    """Notes its calls; fails at a step."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.calls: list[str] = []

    def on_step(self, metrics: dict[str, Any]) -> None:
        self.calls.append(f"step {metrics['step']}")
        if metrics["step"] == self.fails_at:
            raise KeyError("mine")

    def on_evaluation(self, metrics: dict[str, Any]) -> None:
        assert metrics["eval_loss"] > 0
        self.calls.append(f"evaluation {metrics['step']}")

    def on_save(self, checkpoint: Path) -> None:
        assert (checkpoint / "manifest.json").is_file()
        self.calls.append(checkpoint.name)


class Clears(finetune.Callback):
    def on_step(self, metrics: dict[str, Any]) -> None:
        metrics["memory"].clear()
        metrics.clear()

    on_evaluation = on_step


class OnlySteps:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, metrics: dict[str, Any]) -> None:
        assert metrics["memory"]
        self.steps.append(metrics["step"])


@pytest.mark.slow
def test_a_callback_sees_a_run_and_its_exception_ends_it_saved_and_resumable(quick) -> None:
    fails, other, sees = Seen(fails_at=2), Seen(), Seen()
    job = {"training": {"eval_every": 2}, "data": ROWS}
    with pytest.raises(KeyError, match="mine") as error:
        finetune.train(quick(), callbacks=[fails, other], **job)
    assert fails.calls == ["evaluation 0", "step 1", "step 2"]
    assert other.calls == fails.calls[:-1]  # none is called after the exception
    (note,) = error.value.__notes__
    assert note.startswith("Raised in a callback. Step 2 is saved in ")
    with refusal(ConfigError, "data.train"):
        finetune.train(quick(), training=job["training"], data=ROWS[1:])
    # Functions and objects with some of the methods are callbacks too, and none changes a line for another.
    lines, steps = list[dict[str, Any]](), OnlySteps()
    result = finetune.train(quick(), callbacks=[Clears(), lines.append, steps, sees], **job)
    assert steps.steps == [3, 4]
    assert lines == result.run.metrics()[-len(lines) :]
    assert {"loss", "eval_loss"} <= {name for line in lines for name in line}
    assert sees.calls == ["evaluation 2", "step 3", "step 4", "evaluation 4", "step-00000004"]
    assert [line["step"] for line in result.metrics] == [1, 2, 3, 4]
    assert [event["event"] for event in result.run.events()].count("stopped") == 1


def test_a_value_that_is_not_a_callback_is_refused_first(quick) -> None:
    config = quick()
    for callbacks, message in (
        ("abc", "`callbacks` must be a list of callbacks, not 'abc'"),
        (print, "`callbacks` must be a list of callbacks, not <built-in function print>"),
        (["abc"], "`callbacks[0]` is 'abc'"),
        ([Clears(), Seen], "`callbacks[1]` is the class Seen; give an object of it: Seen()"),
        ([lambda: None], "`callbacks[0]` must be a function that takes one argument"),
        ([SimpleNamespace(on_save=print, on_sept=print)], "`on_sept` would never be called; did you mean `on_step`"),
        ([SimpleNamespace(on_step=lambda: 0)], "`on_step` must be a function that takes one argument"),
    ):
        with refusal(ConfigError, message):
            finetune.train(config, callbacks=callbacks)
    assert not Path(config.output.dir).exists()


def test_none_is_refused_as_callback_model_and_rows(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("finetune.recipe.train", lambda config, callbacks, **_: told.append(callbacks))
    finetune.train(quick(), data=None, callbacks=None)
    assert told == [()]
    for job, missing in (({}, ["`model`", "`data`"]), ({"model": "other", "data": None}, ["`data`"])):
        with pytest.raises(ConfigError) as error:
            finetune.train(**job)
        assert [line.partition(" ")[0] for line in str(error.value).splitlines()] == missing


@pytest.mark.slow
def test_the_header_says_that_the_rows_are_the_built_in_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(_Opened):
        finetune.train(
            finetune.load_config({"output": {"dir": str(tmp_path / "run")}, "memory": {"check": "off"}}),
            terminal=_HeaderOnly(),
        )
    assert "data the built-in rows (builtin:python_docs): " in " ".join(capsys.readouterr().out.split())


class _Opened(Exception):
    """The header was printed."""


class _HeaderOnly(Terminal):
    def opened(self, *args: Any, **named: Any) -> None:
        super().opened(*args, **named)
        raise _Opened


@pytest.mark.parametrize(
    "function",
    [
        finetune.merge, finetune.evaluate, lambda run: finetune.generate(run, "Hello"),
        lambda run: finetune.export_model(run, "adapter"), lambda run: finetune.compare([run, run]),
        lambda run: finetune.Result(run).summary(),
    ],
)  # fmt: skip
def test_a_run_may_be_given_by_its_path_and_nothing_else(function: Callable[[Any], object], tmp_path: Path) -> None:
    for path in (tmp_path / "none", str(tmp_path / "none")):
        with refusal(ArtifactError, "none:"):
            function(path)
    for wrong in (None, 5, {"run": "runs/a"}):
        with refusal(ArtifactError, "expected a run or the path of its folder, not"):
            function(wrong)


def test_arguments_of_other_kinds_are_refused_first(tmp_path: Path) -> None:
    for runs in ("runs/a", Path("runs/a"), finetune.RunDirectory("runs/a"), None):
        with refusal(ConfigError, "expected a list of runs to compare, not"):
            finetune.compare(runs)  # type: ignore[arg-type]
    for prompt in (None, ["Hello", "again"], b"Hello"):
        with refusal(ConfigError, "`prompt`"):
            finetune.generate(tmp_path, prompt)  # type: ignore[call-overload]
    configs: tuple[Any, ...] = ("job.yaml", {"model": {"name": "builtin:tiny-llama"}})
    for function in (finetune.plan, finetune.fit, finetune.inspect_data, finetune.train):
        for config in configs:
            with refusal(ConfigError, "`finetune.load_config`"):
                function(config)
    for name in ("metrics", "tasks", "models"):
        with refusal(ConfigError, f"`{name}`"):
            finetune.evaluate(finetune.RunDirectory(tmp_path), **{name: "f1"})
    with refusal(ConfigError, "`limit`"):
        finetune.evaluate(finetune.RunDirectory(tmp_path), limit=0)
    for wrong in ("training.seed=3", [3], 3, None):
        with refusal(ConfigError, "training.seed"):
            finetune.load_config({}, wrong)  # type: ignore[arg-type]
    with refusal(ConfigError, "`None`"):
        finetune.export_model("runs/none", None)  # type: ignore[arg-type]
    for make in (finetune.plan, finetune.fit):
        with refusal(ConfigError, "`gpus`"):
            make(finetune.Config(), "RTX 4090", 0)
    assert [name for name in finetune.__all__ if not hasattr(finetune, name)] == []
    assert not hasattr(finetune, "nothing_of_the_kind")


def test_an_unknown_model_of_a_run_is_refused_from_python_too() -> None:
    with refusal(ConfigError, "`bas`", "`base`"):
        run_models.model_of(FinishedRun(finetune.RunDirectory("runs/none"), finetune.Config()), "bas")
