"""What is printed, where, and that nothing is where nothing should be."""

from __future__ import annotations

import dataclasses
import io
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forecasts import forecast
from report_lines import evaluation_line, training_line
from rich.console import Console

from finetune.config import Config
from finetune.data.counts import CONTROL_TOKENS, DUPLICATE, EMPTY, TOO_LONG, Affected, Counts, Traits
from finetune.data.prepare import Prepared
from finetune.report import live, printing
from finetune.report.live import STOPPING, LiveView
from finetune.report.scores import Scores
from finetune.report.terminal import Terminal
from finetune.storage.files import write_json
from finetune.storage.rundir import RunDirectory

_PROOF = {"rows": 8, "tokens": 1234, "rows_of": "the rows", "error": 0.0025, "bound": 0.011, "effect": 0.31,
          "agreement": 0.9951, "compared_with": "base plus adapter"}  # fmt: skip
_EVALUATION: Any = {
    "steps": 1000, "interval": "How.", "notes": ["One note."], "settings": {},
    "measures": [{"name": "perplexity", "better": "lower", "rows": 8, "models": {
        "base": {"value": None, "low": None, "high": None},
        "adapter": {"value": 1234.6, "low": 90.0, "high": 2000.0,
                    "difference": {"value": -1.0, "low": -2.0, "high": 0.0}},
    }}],
}  # fmt: skip
_AFFECTED = [
    *(Affected(f"rows.jsonl:{line}", "truncated", TOO_LONG, 2000) for line in range(10, 16)),
    Affected("rows.jsonl:20", "answer truncated", TOO_LONG, 3000),
    Affected("rows.jsonl:3", "dropped", EMPTY),
    Affected("rows.jsonl:5", "kept", DUPLICATE, 12),
]
_COUNTS = Counts(rows=1000, tokens=200_000, trained_tokens=50_000, longest=256, affected=_AFFECTED)


class Log:
    """A Terminal that writes into memory, as into a file or, with `tty`, as onto a screen."""

    def __init__(self, tty: bool = False, width: int = 100) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=tty, width=width, color_system=None, legacy_windows=False)
        self.terminal = Terminal(console=self.console)

    @property
    def text(self) -> str:
        return self.file.getvalue()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@pytest.fixture
def log() -> Log:
    return Log()


def whole_run(terminal: Terminal, run: RunDirectory) -> None:
    data = Prepared(train=None, eval=None, train_counts=_COUNTS, eval_counts=None)
    terminal.opened(run.path, Config(), "cpu", data, "sdpa (no flash-attn here)", forecast())
    terminal.built(SimpleNamespace(parameters=list), {})
    terminal.started(0, 3)
    terminal.evaluated(evaluation_line(0, 4.0))
    terminal.stepped(training_line(1, 3.5, forward=800))
    terminal.note("a note")
    terminal.answers(run)
    terminal.merged(run.merged, _PROOF)
    terminal.finished(run)
    terminal.evaluating("base")
    terminal.show(Scores(_EVALUATION))


def test_quiet_prints_nothing(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal(quiet=True) as terminal:
        whole_run(terminal, run)
    assert capsys.readouterr() == ("", "")


def test_a_closed_output_does_not_end_the_run(run: RunDirectory) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        whole_run(Terminal(console=Console(file=pipe)), run)
    assert [event["reason"] for event in run.events() if event["event"] == "output_lost"] == ["Broken pipe"]


def test_a_log_has_the_header_and_the_proofs_and_no_control_characters(log: Log, run: RunDirectory) -> None:
    whole_run(log.terminal, run)
    for text in (
        "16 rows = 4 micro-batches of 4", "sdpa (no flash-attn here)", "cpu, 2 cores, 2 threads",
        "1,000 rows, 200,000 tokens, 25.0% trained, longest 256, 7 cut to 1,024, ",
        "1 of them in the answer, 1 duplicate, 1 dropped: 1 empty answer (rows.jsonl:3), listed in",
        "fits: 7.00 of 12.00 GiB on RTX 3090", "0.250%", "1.100%", "31.000%", "99.51%", str(run.merged),
    ):  # fmt: skip
        assert text in log.text
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", log.text)


def test_the_header_shows_unused_columns_control_tokens_and_a_missing_evaluation_set_and_forecast(
    log: Log, run: RunDirectory
) -> None:
    kept = [Affected("a:1", "kept", CONTROL_TOKENS, 5)]
    counts = Counts(rows=2, tokens=9, affected=kept, traits=Traits(unused=["id", "lang"]))
    data = Prepared(train=None, eval=None, train_counts=counts, eval_counts=None, warning="none: all rows are equal")
    log.terminal.opened(run.path, Config(), "cpu", data, "sdpa", None)
    assert "1 with control tokens as text, listed in data.jsonl" in log.text
    assert re.search(r"^not used +columns id, lang$", log.text, re.M)
    assert re.search(r"^evaluation set +none: all rows are equal$", log.text, re.M)
    assert "memory" not in log.text


def test_the_header_warns_of_an_evaluation_set_too_small_to_choose_weights_by(log: Log, run: RunDirectory) -> None:
    data = Prepared(train=None, eval=[{"input_ids": [1]}] * 10, train_counts=_COUNTS, eval_counts=Counts(rows=10))
    config = Config.model_validate({"training": {"eval_every": 1, "early_stopping": 2}})
    log.terminal.opened(run.path, config, "cpu", data, "sdpa", None)
    assert "so the last one is published, although training stops early by their loss" in log.text
    different = dataclasses.replace(data, eval=[{"input_ids": [number]} for number in range(10)])
    before = len(log.text)
    log.terminal.opened(run.path, config, "cpu", different, "sdpa", None)
    assert "too few" not in log.text[before:]


def test_a_log_gets_about_ten_lines_and_each_evaluation(log: Log) -> None:
    log.terminal.started(0, 1000)
    for step in range(1, 1001):
        log.terminal.stepped(training_line(step, 2.0, forward=800, backward=1536))
        if step % 250 == 0:
            log.terminal.evaluated(evaluation_line(step, 2.5))
    steps = [line for line in log.lines if re.match(r"step \d+/1000 ", line)]
    assert 10 <= len(steps) <= 12
    assert len([line for line in log.lines if "eval loss 2.5000" in line]) == 4
    assert len(log.lines) == len(steps) + 4
    assert "loss 2.0000  lr 2.00e-04  1,000 tokens/s  1.50 GiB" in steps[0]


def test_a_log_gets_a_line_at_the_configured_interval(log: Log, run: RunDirectory) -> None:
    data = Prepared(train=None, eval=None, train_counts=_COUNTS, eval_counts=None)
    log.terminal.opened(run.path, Config.model_validate({"tracking": {"log_every": 4}}), "cpu", data, "sdpa", None)
    log.terminal.started(0, 10)
    for step in range(1, 11):
        log.terminal.stepped(training_line(step, 2.0))
    assert re.findall(r"^step (\d+)/10", log.text, re.M) == ["1", "4", "8", "10"]
    resumed = Log()
    resumed.terminal.started(97, 100)
    for step in (98, 99, 100):
        resumed.terminal.stepped(training_line(step, 2.0))
    assert len(resumed.lines) == 3, "of a few steps each"


def test_a_terminal_shows_loss_and_trend_gradient_speed_and_memory_beside_budget_and_forecast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, clock = Log(tty=True, width=120), [0]
    monkeypatch.setattr(live, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    view = LiveView(log.console, 0, 100, forecast())
    view.evaluated(evaluation_line(0, 4.0))
    for step in range(1, 21):
        view.stepped(training_line(step, 4 - step / 10, forward=800, backward=1536))
    clock[0] = 5
    view.stop()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", log.text)
    assert re.search(r"step 20/100 ━+ +0:20 left", shown)
    assert re.search(r"memory +━+ +1.50 GiB of 12.00 GiB, forecast 7.00 GiB", shown)
    assert "loss 2.0000 ↓  eval loss 4.0000  grad norm 1  lr 2.00e-04  20,000 tokens/s" in shown
    assert STOPPING not in shown


def test_a_signal_is_answered_in_the_live_view_and_in_a_log_while_training(
    log: Log, capfd: pytest.CaptureFixture[str]
) -> None:
    live = Log(tty=True)
    for terminal in (live.terminal, log.terminal):
        terminal.stopping()
        terminal.started(0, 3)
        terminal.stopping()
        terminal.close()
        terminal.stopping()
    assert STOPPING in live.text
    assert capfd.readouterr().err == f"{STOPPING}\n"


def test_a_loss_that_is_not_finite_is_nan(log: Log, empty_run: RunDirectory) -> None:
    log.terminal.started(0, 1)
    log.terminal.stepped(training_line(1, None))
    log.terminal.evaluated(evaluation_line(1, None))
    assert "loss nan" in log.lines[0]
    assert "eval loss nan" in log.lines[1]


def test_scores_are_a_line_for_each_measure_and_model(log: Log) -> None:
    log.terminal.show(Scores(_EVALUATION))
    assert re.search(r"value\W+interval\W+vs\. base\W+interval", log.text)
    assert re.search(r"perplexity\W+- base\W+not finite\W+- adapter\W", log.text), "and no interval"
    assert re.search(r"- adapter\W+1,234\.60\W+90\.00 to 2,000\.00\W+-1\.0000\W+-2\.0000 to \+0\.0000", log.text)
    assert "Measured after step 1,000. How. One note." in log.text.replace("\n", " ")


def test_the_end_of_a_run_shows_the_published_loss_and_the_paths(log: Log, run: RunDirectory) -> None:
    log.terminal.finished(run)
    assert "eval loss of the base 4.0000 → 3.0000 (-25.0%), best 3.0000 at step 2" in log.text
    assert "2,000 tokens/s, 14.3% padding" in log.text
    assert str(run.adapter) in log.text
    assert str(run.merged) not in log.text
    assert "next     finetune chat " in log.text


def test_answers_are_printed_as_they_are_but_for_control_characters(log: Log, run: RunDirectory) -> None:
    write_json(
        run.answers_file,
        [{"question": "Q [bold]?", "reference": "R :smile:", "before": "\x1b[2Jgone", "after": "[/red]\n  two"}],
    )
    log.terminal.answers(run)
    assert "Q [bold]?" in log.text
    assert ":smile:" in log.text
    assert "\x1b" not in log.text
    assert "    [/red]\n      two\n" in log.text.replace(" \n", "\n")


def test_a_live_line_ends_when_the_run_fails() -> None:
    log = Log(tty=True)

    def fail() -> None:
        with log.terminal as terminal:
            terminal.started(0, 3)
            terminal.stepped(training_line(1, 3.25, forward=800))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert "step 1/3" in log.text
    assert "loss 3.2500" in log.text
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert log.text.count(hide) == log.text.count(show) == 1
    ended = log.text
    log.terminal.close()
    assert log.text == ended


def test_four_bit_weights_are_counted_by_their_true_shape_and_layers_without_an_adapter_named(log: Log) -> None:
    packed: Any = SimpleNamespace(shape=(512, 1), requires_grad=False, quant_state=SimpleNamespace(shape=(32, 32)))
    adapter: Any = SimpleNamespace(shape=(1024,), requires_grad=True)
    log.terminal.built(SimpleNamespace(parameters=lambda: [packed, adapter]), {})
    assert "2,048, trained 1,024 (50.000%)" in log.text
    assert "no adapter" not in log.text
    log.terminal.built(SimpleNamespace(parameters=list), {"that nothing reads": 96, "that nothing trains": 1024})
    assert re.search(r"no adapter\s+on 96 layers that nothing reads, and on 1,024 layers that nothing trains", log.text)


def test_a_broken_output_is_the_null_device_from_then_on_and_nothing_else_stays_open(tmp_path: Path) -> None:
    with open(tmp_path / "output", "w") as stream:
        before = sorted(os.listdir("/proc/self/fd"))
        printing.discard(stream)
        assert os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))
        assert sorted(os.listdir("/proc/self/fd")) == before
