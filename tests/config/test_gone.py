"""Each entry of config/gone.json: refused by name, read from a finished run, and named by a run that is to go on."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from messages import refusal
from pydantic import ValidationError

from finetune.choices import CHOICES, config_of, load_config
from finetune.config import Config, gone, written
from finetune.errors import ArtifactError, ConfigError
from finetune.recipe import resume
from finetune.report.runs_view import compare
from finetune.resolve import Job
from finetune.storage.rundir import RunDirectory

KEYS, VALUES = gone.TABLE["keys"], gone.TABLE["values"]
IN_USE = [
    *((key, "not the default", None, entry["instead"]) for key, entry in KEYS.items()),
    *((key, value, entry["read_as"], entry["instead"]) for key, of in VALUES.items() for value, entry in of.items()),
]
"""Key, value that is gone (for a key any but its default), how it is read, and what to use instead."""


def _run(folder: Path, given: dict[str, object], *events: str) -> RunDirectory:
    sections = Config().changed({"output.dir": str(folder)}).values()
    for key, value in given.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    run = RunDirectory(folder)
    run.create(Config())
    run.config_file.write_text(written(sections))
    for event in events:
        run.event(event, step=1)
    return run


@pytest.mark.parametrize(("key", "value", "read_as", "instead"), IN_USE)
def test_what_is_gone_is_refused_where_it_is_written_with_what_to_use_instead(
    key: str, value: object, read_as: object, instead: str, tmp_path: Path
) -> None:
    section, _, name = key.partition(".")
    file = tmp_path / "job.yaml"
    file.write_text(f"training:\n  max_steps: 1\n{written({section: {name: value}})}")
    for source, overrides, place in (
        (file, [], f"{file}:{len(file.read_text().splitlines())}"),
        ({}, [f"{key}={value}"], f"override `{key}={value}`"),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(source, overrides)
        assert str(error.value).startswith(f"{place}: `{key}`: ")
        assert str(error.value).endswith(instead)


@pytest.mark.parametrize(("key", "value", "read_as", "instead"), IN_USE)
def test_a_run_with_what_is_gone_is_read_and_says_so_if_it_is_to_go_on(
    key: str, value: object, read_as: object, instead: str, tmp_path: Path
) -> None:
    finished = _run(tmp_path / "finished", {key: value}, "started", "saved", "trained", "finished")
    lost = (KEYS.get(key) or VALUES[key][str(value)]).get("lost")
    with pytest.raises(ArtifactError, match=re.escape(lost)) if lost else contextlib.nullcontext():
        config_of(finished)  # as commands do that use its weights
    config = finished.config()
    assert read_as is None or config.value(key) == read_as
    assert resume.is_finished(Job(config, config, earlier=finished))
    shown = compare([finished, _run(tmp_path / "other", {"output.keep": 3})]).as_dict()
    assert shown["differences"][key]["finished"] == value
    assert key in shown["unread"]["finished"]
    killed = _run(tmp_path / "killed", {key: value}, "started", "saved")
    for run, now in ((killed, config), (finished, config.changed({"training.max_steps": 10**6}))):
        with pytest.raises(ConfigError) as error:
            resume.is_finished(Job(now, now, earlier=run))
        assert str(error.value).startswith(f"{run.config_file}: `{key}`: ")
        assert instead in str(error.value)
    assert not resume.is_finished(Job(config, config))


def test_a_run_trained_with_the_exact_way_to_serve_says_why_its_weights_cannot_be_used(tmp_path: Path) -> None:
    """Its whole config: the base was held as it would have been served."""
    exact = {"quantization.snap": True, "output.way": "exact", "quantization.kind": "q4_0", "output.serve": "q4_0"}
    finished, killed = (
        _run(tmp_path / name, exact, "started", "saved", *events)
        for name, events in (("finished", ["trained", "finished"]), ("killed", []))
    )
    assert finished.config().quantization.kind == "q4_0"
    with refusal(ArtifactError, finished.config_file, "quantization.snap"):
        config_of(finished)
    with refusal(ConfigError, killed.config_file, "output.way"):
        resume.is_finished(Job(killed.config(), killed.config(), earlier=killed))


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_is_gone_says_nothing_at_its_default_as_each_earlier_run_has_it(key: str, tmp_path: Path) -> None:
    killed = _run(tmp_path / "killed", {key: KEYS[key]["default"]}, "started", "saved")
    config = config_of(killed)
    assert not resume.is_finished(Job(config, config, earlier=killed))
    assert load_config(killed.config_file) == config_of(killed)


def test_what_is_in_the_table_no_longer_exists() -> None:
    defaults = Config().values()
    for key in KEYS:
        section, _, name = key.partition(".")
        assert name not in defaults.get(section, {})
    for key, values in VALUES.items():
        section, _, name = key.partition(".")
        for value, entry in values.items():
            context = {"choices": CHOICES}
            Config.model_validate({section: {name: entry["read_as"]}}, context=context)
            with pytest.raises(ValidationError):
                Config.model_validate({section: {name: value}}, context=context)
