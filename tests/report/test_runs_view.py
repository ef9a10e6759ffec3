"""Runs side by side: what differs in their configs, and in their results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from messages import refusal
from rich.console import Console

from finetune.api import compare
from finetune.config import Config, dump
from finetune.errors import ArtifactError, ConfigError
from finetune.storage.files import write_text
from finetune.storage.rundir import RunDirectory


@pytest.fixture
def other(run: RunDirectory) -> RunDirectory:
    """The same run with another rank, whose weights of the last step were published."""
    path = run.path.with_name("<other>")
    shutil.copytree(run.path, path)
    other = RunDirectory(path)
    changed = {"adapter": {"rank": 4}, "data": {"train": ["a.jsonl", "b.jsonl"]}, "output": {"dir": str(path)}}
    write_text(other.config_file, dump(Config.model_validate(changed)))
    other.event("resumed", step=3, world_size=2)
    other.event("trained", step=3, memory={})
    return other


def test_differences_and_results_are_those_of_the_runs(run: RunDirectory, other: RunDirectory) -> None:
    found = compare([run, other.path]).as_dict()
    assert found["differences"] == {
        "adapter.rank": {"small": 16, "<other>": 4},
        "data.train": {"small": "builtin:python_docs", "<other>": ["a.jsonl", "b.jsonl"]},
    }
    assert [one["exported_eval_loss"] for one in found["runs"].values()] == [3.0, 3.5]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_config_of_another_version_is_compared_as_written(
    run: RunDirectory, other: RunDirectory, tmp_path: Path
) -> None:
    text = other.config_file.read_text().replace("  rank: 4\n", "  rank: 4\n  flavour: mild\n")
    write_text(other.config_file, text + "galaxy:\n  arms: 2\nmoon: 1\n")
    found = compare([run, other])
    assert found.as_dict()["unread"] == {"<other>": "it has adapter.flavour, galaxy.arms, moon, unknown here"}
    differences = found.as_dict()["differences"]
    assert differences["adapter.rank"] == {"small": 16, "<other>": 4}
    assert differences["adapter.flavour"] == {"<other>": "mild"}
    assert set(differences) == {"adapter.rank", "adapter.flavour", "data.train", "galaxy.arms", "moon"}
    console = Console(width=200)
    with console.capture() as captured:
        found.show(console)
    assert "<other>: its config is of another version: it has adapter.flavour, galaxy.arms" in captured.get()
    found.write(tmp_path / "page.html")
    assert "adapter.flavour, galaxy.arms, moon, unknown here" in (tmp_path / "page.html").read_text(encoding="utf-8")
    write_text(other.config_file, text.replace("  flavour: mild\n", "").replace("rank: 4", "rank: four"))
    assert "expected a whole number" in compare([run, other]).as_dict()["unread"]["<other>"]


def test_the_tables_have_a_column_and_the_frame_a_row_for_each_run(run: RunDirectory, other: RunDirectory) -> None:
    found = compare([run.path, other.path])
    console = Console(width=100)
    with console.capture() as captured:
        found.show(console)
    lines = [line.replace("│", " ").split() for line in captured.get().splitlines()]
    assert ["eval", "loss,", "published", "3.0000", "3.5000"] in lines
    assert ["change", "-25.0%", "-12.5%"] in lines
    assert ["adapter.rank", "16", "4"] in lines
    assert ["data.train", "builtin:python_docs", '["a.jsonl",', '"b.jsonl"]'] in lines
    assert "eval loss, published" in str(found)
    frame = found.frame().set_index("run")
    assert list(frame.index) == ["small", "<other>"]
    assert list(frame["exported_eval_loss"]) == [3.0, 3.5]
    assert list(frame["adapter.rank"]) == [16, 4]
    assert frame.loc["small", "peaks.backward.resident_bytes"] > 0
    assert not any(isinstance(value, dict) for value in frame.to_numpy().flat)


def test_each_chart_of_the_page_has_a_curve_for_each_run(
    run: RunDirectory, other: RunDirectory, tmp_path: Path
) -> None:
    compare([run.path, other.path]).write(tmp_path / "page.html")
    markup = (tmp_path / "page.html").read_text(encoding="utf-8")
    charts = json.loads(markup.split('id="curves">')[1].split("</script>")[0])
    assert [chart["title"] for chart in charts][:2] == ["Evaluation loss", "Training loss"]
    assert all([table["series"][0]["name"] for table in chart["tables"]] == ["small", "<other>"] for chart in charts)


def test_the_command_says_which_page_it_wrote_beside_json_too(
    call, run: RunDirectory, other: RunDirectory, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    _, out, err = call("compare", run.path, other.path, "--html", page)
    assert (out.splitlines()[-1], err) == (f"wrote {page}", ""), "the table is there if the page cannot be written"
    _, out, err = call("compare", run.path, other.path, "--html", page, "--json")
    assert err.splitlines() == [f"wrote {page}"]
    assert set(json.loads(out)["runs"]) == {"small", "<other>"}


def test_runs_with_equal_names_are_named_by_their_paths_and_fewer_than_two_refused(
    run: RunDirectory, tmp_path: Path
) -> None:
    shutil.copytree(run.path, tmp_path / "elsewhere" / "small")
    paths = [run.path, tmp_path / "elsewhere" / "small"]
    assert list(compare(paths).runs) == [str(path) for path in paths]
    for too_few in ([run.path], [run.path, run]):
        with refusal(ConfigError, "two"):
            compare(too_few)
    with refusal(ArtifactError, "not a run directory"):
        compare([run.path, tmp_path])
