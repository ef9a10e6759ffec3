"""Facts about what people watch of training on preferences: in the terminal, the page, comparisons and warnings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jobs import write_rows
from messages import reported

import finetune
from finetune.report import curves, words
from finetune.report.figures import Figures
from finetune.storage.rundir import RunDirectory
from finetune.training.guards import Falls


@pytest.fixture
def job(tmp_path: Path, quick: Any) -> Any:
    """A function from overrides to a job of DPO on short pairs."""
    rows = [{"prompt": f"To {n}. ", "chosen": "yes " * (1 + n % 5), "rejected": "no " * (2 + n % 3)} for n in range(24)]
    file = write_rows(tmp_path / "pairs.jsonl", rows)

    def make(*overrides: str, run: str = "run") -> Any:
        settings = ["training.objective=dpo", "data.eval_share=0.2", "quantization.kind=none"]
        return quick(f"data.train={file}", *settings, *overrides, run=run)

    return make


def test_a_fall_of_the_chosen_answers_is_reported_once_and_only_beside_a_margin() -> None:
    falls = Falls()
    assert [falls.see(-0.5 + 0.01 * (step % 3), 1.0 + 0.1 * (step % 2)) for step in range(19)] == [None] * 19
    chosen, margin = falls.see(-0.5, 1.0) or (0, 0)
    assert (round(chosen, 2), round(margin, 2)) == (-0.49, 1.05)
    assert falls.see(-0.5, 1.0) is None, "told already"
    for rewards in ((0.5, 1.0), (-0.5, -1.0), (-0.5, 0.0)):
        assert not any(map(Falls().see, *zip(*[rewards] * 40, strict=True)))
    noisy = Falls()
    assert not any(noisy.see((-1) ** step * 2.0 - 0.1, 1.0) for step in range(40)), "within the noise of steps"
    assert Falls().see(None, 1.0) is None


def _lowered(see: Any) -> Any:
    """The watch with rewards as of answers that fall."""
    return lambda self, chosen, margin: see(self, chosen - 1, margin + 1 + abs(chosen))


@pytest.mark.slow
def test_statistics_are_shown_and_kept_and_a_fall_of_the_chosen_answers_warns_with_the_key_that_helps(
    job: Any, call: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trained: RunDirectory
) -> None:
    monkeypatch.setattr(Falls, "WINDOW", 3)
    monkeypatch.setattr(Falls, "see", _lowered(Falls.see))
    first = finetune.train(job("training.max_steps=5", "training.learning_rate=1e-6")).run
    shown = capsys.readouterr().out
    assert shown.count("less likely") == 1
    reported(shown, "less likely", "`preference.nll_weight`")
    assert re.search(r"step 5/5 +loss \S+ +margin -?\d\.\d{3} +accuracy \d+%", shown)
    figures = Figures.read(first)
    assert figures.statistics == [*finetune.objectives.preference.STATISTICS]
    recent = finetune.Result(first).summary()["statistics"]
    assert recent["rewards_margins"] == pytest.approx(
        sum(line["rewards_margins"] for line in figures.training) / len(figures.training)
    )
    titles = [chart["title"] for chart in curves.of_run(figures)]
    assert titles[:4] == ["Loss", "Rewards", "Rewards accuracies", "Logps"]
    assert curves.loss(figures)["unit"] == "mean over rows"
    page = first.report_file.read_text()
    assert f'rewards margins</h2><p class="value">{words.number(recent["rewards_margins"])}</p>' in page
    assert Figures.read(trained).statistics == []
    code, out, _ = call("compare", first.path, trained.path)
    assert code == 0
    assert "rewards margins" in out
    # A loss without a reference has no rewards that could fall.
    finetune.train(job("training.max_steps=5", "training.objective=simpo", run="simpo"))
    assert "less likely" not in capsys.readouterr().out


def test_a_run_directory_without_statistics_is_read_as_before(trained: RunDirectory) -> None:
    assert "statistics" not in finetune.Result(trained).summary()
    assert curves.loss(Figures.read(trained))["unit"] == "nats per trained token"
