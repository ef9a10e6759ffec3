"""What is agreed about the source holds; `make house` shows each violation with its place."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from house import DEEPSPEED, House

LIMITS = {
    "names of types that exist twice": 0,
    "module names that exist twice": 0,
    "functions that nothing calls": 0,
    "unlisted patches": 0,
    "patches that nothing uses": 0,
    "attributes hung on foreign objects": 0,
    "entries of the lists here that nothing needs": 0,
    "folders without a contract of imports": 0,
    "whole configs where a section would do": 0,
    "internal imports of training/run.py": 16,
    "files that know sharding": 6,
    "files that know DeepSpeed": 4,
}


@pytest.fixture(scope="module")
def house() -> House:
    return House()


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_no_count_is_above_its_limit(house: House, name: str) -> None:
    assert house.counts[name] <= LIMITS[name], house.violations.get(name)


def test_every_count_has_a_limit(house: House) -> None:
    assert house.counts.keys() == LIMITS.keys()


def test_no_file_has_tests_that_pytest_does_not_collect() -> None:
    files = {path for path in Path(__file__).parent.rglob("*.py") if re.search(r"(?m)^def test_", path.read_text())}
    assert {path.name for path in files if not path.name.startswith("test_")} == {"interpreted.py"}  # a process runs it


FILES = {
    "runtime/patches.py": """
        class Patch: pass
        USED = Patch("torch:compile")
        UNUSED = Patch("torch:load")
        """,
    "rows.py": """
        class Row:
            def __init__(self):
                self.place = 1
        class _Job: pass
        """,
    "jobs.py": """
        import torch
        from torch.nn import functional
        from finetune.rows import Row
        from finetune.runtime import patches
        class Job: pass
        def work(model, rows: list[Row], zero, x):
            functional.linear = work
            torch.nn.Module.forward = work
            x.__class__ = Job
            setattr(functional, "relu", work)
            torch.library.Library("aten", "IMPL", "CPU")
            torch.library.Library("own", "DEF")
            patches.USED.put(work)
            rows[0].place = 2
            rows[0].shape = 2
            model.place = 2
            x.data = 2
            setattr(x, "room", 1)
            x.marked = 2  # type: ignore[attr-defined]
        """,
    "builders.py": """
        def one_section(config: Config, other: int = 1): return config.model.name, config.model.revision
        def one_property(*, job: Config | None): return job.fused
        def nothing(config: Config): return 1
        def two_sections(config: Config): return config.model, config.data
        def passed_on(config: Config): return two_sections(config), config.model
        def changed(config: Config): return config.changed({"model.name": config.model.name})
        def section(config: ModelSection): return config.name
        ALL = one_section, one_property, nothing, passed_on, changed, section
        """,
    "data/rows.py": "Job = dict[str, int]\nJOB = Job",
}


def test_violations_are_seen(tmp_path: Path) -> None:
    for name, text in FILES.items():
        file = tmp_path / "finetune" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    made = House(tmp_path)
    assert made.types_twice() == ["Job: finetune/data/rows.py:1, finetune/jobs.py:6, finetune/rows.py:5"]
    assert made.modules_twice() == ["rows: finetune.data.rows, finetune.rows"]
    assert [line.split(":")[1] for line in made.unlisted_patches()] == ["8", "9", "10", "11", "12"]
    assert [line.rpartition(": ")[2] for line in made.unused_functions()] == ["_Job"]
    assert made.unused_patches() == ["UNUSED"]
    hung = {line.split(": ")[1] for line in made.hung_attributes()}
    assert hung == {"rows[0].shape", "model.place", "x.room", "x.marked", "x.__class__"}
    whole = [line.partition(": ")[2] for line in made.sections_as_whole()]
    assert whole == ["one_section reads config.model", "one_property reads job.fused", "nothing reads config.-"]
    contract = '[[tool.importlinter.contracts]]\ncontainers = ["finetune.runtime"]\n'
    (tmp_path / "pyproject.toml").write_text(contract)
    assert made.folders_without_contract() == ["finetune"]
    assert made.imported_by("finetune.jobs") == ["finetune.rows", "finetune.runtime.patches"]
    assert made.files_that_know(DEEPSPEED) == ["finetune.jobs"]
