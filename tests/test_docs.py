"""What the documentation points to exists: files, headings, tests, messages; its examples fit the code."""

import ast
import builtins
import contextlib
import dis
import importlib
import inspect
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jobs
import pytest
from jobs import write_rows
from transformers import AutoModelForCausalLM
from typer.main import get_command

import finetune
from finetune import choices, cli, objectives
from finetune.data import formats, readers, sources
from finetune.data.examples import Chat, Completion
from finetune.errors import DataError
from finetune.objectives import preference
from finetune.storage.rundir import RunDirectory

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them: lower case, blanks to hyphens, other signs dropped."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    dead = []
    for page in PAGES:
        for link in re.findall(r"\](?:\(|: )([^)\s]+)", page.read_text(encoding="utf-8")):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(f"{page.name}: {link}")
    assert dead == []


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_another_host(tmp_path: Path) -> None:
    """mkdocs warns of links and anchors that lead nowhere, and of pages that no reader finds in the navigation."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.glob("*.html")}
    assert pages.keys() >= {"index.html", *(f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md"))}
    loaded = r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//"
    assert [name for name, text in pages.items() if re.search(loaded, text)] == []


def test_a_chat_export_becomes_conversations_by_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = re.findall(r"```python\n(import csv.*?)```", (ROOT / "docs" / "your-data.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    lines = ["1,Ann,Hi", "1,Ann,Is it open?", "1,Support,Yes.", "2,Support,Hello!", "3,Bob,Hi", "3,Support,Hello!"]
    (tmp_path / "export.csv").write_text("\n".join(["conversation,sender,text", *lines]) + "\n")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    rows = [formats.read(row.fields, "auto", {})[0] for row in sources.rows("rows.jsonl")]
    said = [[(turn["role"], turn["content"]) for turn in row.messages] for row in rows if isinstance(row, Chat)]
    assert said == [
        [("user", "Hi\nIs it open?"), ("assistant", "Yes.")], [("user", "Hi"), ("assistant", "Hello!")]
    ]  # fmt: skip


# -- commands ----------------------------------------------------------------------------------------------------------

COMMANDS: Any = get_command(cli.app)


def test_make_targets_of_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        target for page in PAGES for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    assert len(named) > 8
    assert named - targets == set()


def test_commands_and_options_of_the_pages_exist() -> None:
    """Wherever a line or code in a line begins with the program's name."""
    unknown, seen = [], set()
    for page in PAGES:
        for name, rest in re.findall(
            r"(?:^|`|\$ |finetune )finetune ([a-z]+)\b([^`\n]*)", page.read_text(), re.MULTILINE
        ):
            if name not in COMMANDS.commands:
                unknown.append(f"{page.name}: finetune {name}")
                continue
            seen.add(name)
            known = {option for parameter in COMMANDS.commands[name].params for option in parameter.opts}
            given = re.findall(r"(?<= )--[a-z-]+", rest.partition("#")[0])
            unknown += [f"{page.name}: finetune {name} {option}" for option in given if option not in known]
    assert unknown == []
    assert seen == COMMANDS.commands.keys()


# -- messages, faults, files -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """Of the package's code, each text, with an ellipsis for what an f-string fills in; and the events and fields."""

    texts: list[str]
    events: set[str]
    fields: set[str]


@pytest.fixture(scope="module")
def code() -> Code:
    found = Code([], set(), set())
    for file in (ROOT / "finetune").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.texts.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.texts.append(node.value)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "event":
                if isinstance(node.args[0], ast.Constant):
                    found.events.add(node.args[0].value)
                found.fields.update(keyword.arg for keyword in node.keywords if keyword.arg)
    return found


@pytest.mark.slow
def test_the_page_of_troubleshooting_quotes_messages_of_the_program(code: Code) -> None:
    """A quoted message is part of a text in the code; where it says `…`, the program may fill in something."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [line for block in re.findall(r"^```text\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    assert len(quoted) > 15
    pattern = {line: re.compile(".*".join(map(re.escape, line.split("…"))), re.S) for line in quoted}
    longest = {line: max(line.split("…"), key=len) for line in quoted}  # by which to look first
    assert [
        line for line in quoted if not any(longest[line] in one and pattern[line].search(one) for one in code.texts)
    ] == []


def test_the_page_of_the_run_directory_names_every_event_that_the_code_writes(code: Code) -> None:
    text = (ROOT / "docs" / "run-directory.md").read_text(encoding="utf-8")
    section = text.split("## events.jsonl")[1].split("\n## ")[0]
    told = {name for cell in re.findall(r"^\| (`[^|]+`) \|", section, re.M) for name in re.findall(r"`(\w+)`", cell)}
    assert len(code.events) > 20
    # The names of those that end a run by a signal are chosen where they are written.
    assert told - {"event"} == code.events | {"interrupted", "terminated"}
    assert {field for field in code.fields if f"`{field}`" not in section} == set()


def test_a_run_has_no_file_and_no_key_that_its_page_does_not_name(run: RunDirectory) -> None:
    text = (ROOT / "docs" / "run-directory.md").read_text(encoding="utf-8")
    inside = {path.name for path in run.path.iterdir()}
    assert {name for name in inside if f"`{name}" not in text} == set()
    lines = [*run.metrics(), *run.events()]
    merged = {key for line in run.events() if line["event"] == "merged" for key in line}
    assert {key for line in lines for key in line if f"`{key}`" not in text} - merged == set()
    for name in ("environment.json", "answers.json", "data.json"):
        value = json.loads((run.path / name).read_text())
        first = value[0] if isinstance(value, list) else value
        assert {key for key in first if f"`{key}`" not in text} == set()


def test_modules_that_the_pages_name_exist() -> None:
    """By their path from the repository, the package or the tests, or by their name alone."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    known = {
        file.name for root in ("finetune", "tests", "benchmarks", "examples") for file in (ROOT / root).rglob("*.py")
    }
    added = {
        "forms/int5.py",
        "data/sums.py",
        "training/counting.py",
        "export/int8_export.py",
        "model/distributed/averaged.py",
    }  # by examples
    named = {name.removeprefix("finetune/") for name in re.findall(r"`((?:\w+/)*\w+\.py)(?:`|::)", text)} - added
    assert len(named) > 50
    roots = (ROOT, ROOT / "finetune", TESTS)
    assert {name for name in named if name not in known and not any((root / name).is_file() for root in roots)} == set()


EXTENDING = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
PAIRS, ENGINES = ((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("pairs.md", "engines.md"))


def examples(page: str) -> list[tuple[str, str]]:
    """The files that a page adds to, each with the addition as a diff."""
    return re.findall(r"^`(finetune/[\w/]+\.py)`:.*?^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


EXAMPLES = [example for page in (EXTENDING, PAIRS, ENGINES) for example in examples(page)]


def test_every_addition_has_an_example() -> None:
    assert len(examples(EXTENDING)) == EXTENDING.count("```diff") == 9
    sections = EXTENDING.split("\n## ")[1:]
    assert len(sections) == 10
    assert all("```diff" in section or "```python" in section for section in sections)
    assert [len(examples(page)) for page in (PAIRS, ENGINES)] == [3, 2]


def applied(file: str, diff: str) -> tuple[ModuleType, dict[str, Any], str, dict[str, Any]]:
    """The module of `file`, its names with those that `diff` adds, the name of its table, and its new entries."""
    module = importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    definitions, table, entries = re.split(r"^ (\w+): dict\[.*$", diff, flags=re.MULTILINE)
    names = dict(vars(module))
    added = [
        "\n".join(line[1:] for line in part.splitlines() if line.startswith("+")) for part in (definitions, entries)
    ]
    code = compile("from __future__ import annotations\n" + added[0], file, "exec")
    exec(code, names)  # noqa: S102 -- our own page
    return module, names, table, eval(f"{{{added[1]}}}", names)  # noqa: S307 -- our own page


@pytest.mark.parametrize(("file", "diff"), EXAMPLES, ids=[Path(file).stem for file, _ in EXAMPLES])
def test_an_example_of_an_addition_fits_the_table_of_its_file(file: str, diff: str) -> None:
    """Its definitions and its entry, in the names of that file: nothing in them is unknown there."""
    module, names, table, entries = applied(file, diff)
    before = names[table]
    for name, entry in entries.items():
        assert name not in before
        assert type(entry) is type(next(iter(before.values())))
    functions = [value for key, value in names.items() if key not in vars(module) and inspect.isfunction(value)]
    read = {
        step.argval for function in functions for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"
    }
    assert read - names.keys() - vars(builtins).keys() == set()


def written(page: str, file: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of which `page` has the text, as if it stood in `file`."""
    [code] = re.findall(rf"`{file}`:\n\n```python\n(.*?)^```", page, re.M | re.S)
    module = ModuleType(file.removesuffix(".py").replace("/", "."))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, module.__name__, "exec"), vars(module))  # noqa: S102 -- our own page
    return module


@pytest.fixture
def add() -> Iterator[Callable[[str], None]]:
    """Put the entries of a page into their tables, above those that are there; afterwards the tables are as before."""
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def of_page(page: str) -> None:
        for file, diff in examples(page):
            module, _, table, entries = applied(file, diff)
            now = getattr(module, table)
            tables.append((now, dict(now)))
            _become(now, entries | now)

    yield of_page
    for table, before in reversed(tables):
        _become(table, before)


def _become(table: dict[str, Any], entries: dict[str, Any]) -> None:
    table.clear()
    table.update(entries)


def test_the_examples_of_a_source_of_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = "finetune/data/readers.py"
    _, _, _, entries = applied(file, dict(examples(EXTENDING))[file])
    monkeypatch.setitem(readers.READERS, ".sqlite", entries[".sqlite"])
    sums = written(EXTENDING, "finetune/data/sums.py", monkeypatch)
    *before, files, hub = sources.KINDS
    monkeypatch.setattr(sources, "KINDS", (*before, sums.Sums(), files, hub))

    with contextlib.closing(sqlite3.connect(tmp_path / "rows.sqlite")) as database, database:
        database.execute("CREATE TABLE examples (prompt TEXT, completion TEXT)")
        database.execute("INSERT INTO examples VALUES ('Hi', 'Hello')")
    [row] = sources.rows(str(tmp_path / "rows.sqlite"))
    assert (row.location, row.fields) == (f"{tmp_path}/rows.sqlite[1]", {"prompt": "Hi", "completion": "Hello"})
    (tmp_path / "other.sqlite").write_text("no database")
    with pytest.raises(DataError, match="not a database"):
        list(sources.rows(str(tmp_path / "other.sqlite")))

    rows = list(sources.rows("sums:20"))
    assert (len(rows), rows[0].location) == (20, "sums:20:1")
    assert rows == list(sources.rows("sums:20"))
    assert isinstance(formats.read(rows[0].fields, "auto", {})[0], Completion)


def closeness(run: RunDirectory) -> list[float]:
    """The relative differences of a run's peaks from their forecast."""
    differences = json.loads((run.path / "forecast.json").read_text())["differences"]
    return [abs(phase["relative"]) for phase in differences]


@pytest.mark.slow
def test_the_example_of_pairs_is_trained_as_it_was_forecast(
    quick, add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(PAIRS)
    monkeypatch.setitem(choices.CHOICES, "data.format", {**choices.CHOICES["data.format"], **formats.FORMATS})
    rows = [
        {"prompt": f"To {n}. ", "chosen": "yes " * (1 + n % 5), "rejected": "no", "margin": n % 4} for n in range(40)
    ]
    write_rows(tmp_path / "pairs.jsonl", rows)
    job = quick(
        f"data.train={tmp_path / 'pairs.jsonl'}", "training.objective=hinge", "data.format=pair", "memory.check=warn"
    )
    run = finetune.train(job).run
    losses = [line["eval_loss"] for line in run.metrics() if "eval_loss" in line]
    assert losses[-1] < losses[0]
    assert max(closeness(run)) < 0.01


@pytest.mark.slow
def test_one_more_member_of_the_family_is_trained_and_measured_by_its_entry_alone(
    quick, add, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add(PAIRS)
    monkeypatch.setitem(objectives.OBJECTIVES, "slic", preference.FAMILY["slic"])
    rows = [{"prompt": f"To {n}. ", "chosen": "yes " * (1 + n % 5), "rejected": "no"} for n in range(30)]
    write_rows(tmp_path / "pairs.jsonl", rows)
    run = finetune.train(quick(f"data.train={tmp_path / 'pairs.jsonl'}", "training.objective=slic")).run
    lines = run.metrics()
    assert lines[0]["eval_loss"] == 1, "a margin of 0"
    assert {*preference.STATISTICS} <= lines[1].keys()
    assert "accuracy" in {measure["name"] for measure in finetune.evaluate(run).record["measures"]}


@pytest.mark.long
def test_the_example_of_an_engine_is_trained_as_it_was_forecast(quick, add, monkeypatch: pytest.MonkeyPatch) -> None:
    add(ENGINES)
    written(ENGINES, "finetune/model/distributed/averaged.py", monkeypatch)
    keys = ["memory.check=warn", "adapter.rank=64", "training.max_steps=2", "data.eval=none"]
    plain, averaged = (
        finetune.train(quick(*keys, f"distributed.kind={kind}", run=kind)).run for kind in ("auto", "averaged")
    )
    assert jobs.same_adapter(plain, averaged)
    assert max(closeness(averaged)) < 0.01

    def states(run: RunDirectory) -> float:
        [phase] = [one for one in json.loads((run.path / "forecast.json").read_text())["differences"]
                   if one["phase"] == "optimizer"]  # fmt: skip
        return phase["forecast_bytes"]

    assert states(averaged) > states(plain)


@pytest.mark.slow
def test_the_example_of_an_export_format_is_written_proven_and_loaded(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = "finetune/export/export_formats.py"
    module, _, table, entries = applied(file, dict(examples(EXTENDING))[file])
    monkeypatch.setitem(getattr(module, table), "int8", entries["int8"])
    written(EXTENDING, "finetune/export/int8_export.py", monkeypatch)
    merged, exported = finetune.merge(run), finetune.export_model(run, "int8")
    assert merged["bound"] < exported["bound"] == 2 * merged["bound"]
    assert merged["error"] < exported["error"] < exported["bound"] < exported["effect"]
    assert json.loads((run.path / "int8" / "export.json").read_text())["format"] == "int8"
    assert not any(path.is_dir() for path in (run.path / "int8").iterdir())
    model = AutoModelForCausalLM.from_pretrained(run.path / "int8")
    assert model.is_loaded_in_8bit
    assert model.get_memory_footprint() < 0.75 * sum(file.stat().st_size for file in run.merged.glob("*.safetensors"))
