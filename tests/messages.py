"""Messages to users: tests assert type, key and place; the wording is in messages.txt, which `make docs` rewrites.

A test calls `refusal` or `reported`. `pytest --record-messages` runs the tests that call one of the two, and writes
their messages, over all parameters of a test, into the file: its difference is the review of what is said.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from finetune.errors import FinetuneError

TESTS = Path(__file__).resolve().parent
FILE = TESTS / "messages.txt"
VERSIONS = ", ".join(
    [f"Python {sys.version_info[0]}.{sys.version_info[1]}"]
    + [f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "pydantic", "datasets", "pyarrow")]
)
"""The first line of the file: messages of these libraries are quoted in ours."""

_MASKS = {
    r"\b0x[0-9a-f]{6,}": "ADDRESS",
    rf"{re.escape(tempfile.gettempdir())}/pytest-of-[^/]+/pytest-\d+(/popen-gw\d+)?/[^/\s`'\",:;)]+": "TMP",
    re.escape(str(TESTS.parent)): "REPOSITORY",
    re.escape(tempfile.gettempdir()) + r"/[^/\s`'\",:;)]+": "TMP",
    r"\bprocess \d+|\bPID \d+": "process N",
    r"\d[\d,]*\.\d+(\.\d+)*(e[-+]?\d+)?|\d{1,3}(,\d{3})+|\d{4,}": "N",  # sizes, seconds, versions
    r"\b\d+ (?=[KMG]iB\b)": "N ",
    r"\b\d+(?=%)": "N",
    r"(\w/|\w)\1{39,}": r"\1...",  # a name longer than a system takes
}
_said: list[str] = []
"""The messages of the test that is running."""


@contextlib.contextmanager
def refusal(error: type[FinetuneError], *parts: object) -> Iterator[pytest.ExceptionInfo[FinetuneError]]:
    """Assert that `error` (its class has the exit code) is raised with each of `parts` (key, place); record it."""
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    assert [part for part in parts if str(part) not in message] == [], message
    _said.append(f"{caught.type.__name__}: {message}")


def reported(text: str, *parts: str) -> None:
    """Assert that one line of a command's output has each of `parts`; record the line."""
    lines = [line for line in text.splitlines() if all(part in line for part in parts)]
    assert lines, text
    _said.append(lines[0].strip())


def masked(text: str) -> str:
    """The text without what differs between machines and runs: temporary paths, processes, sizes, versions."""
    for pattern, name in _MASKS.items():
        text = re.sub(pattern, name, text)
    return text


def read() -> dict[str, set[str]]:
    """The messages in the file by test; none if it was written with other versions."""
    versions, *paragraphs = FILE.read_text(encoding="utf-8").rstrip().split("\n\n") if FILE.is_file() else [""]
    tests = (paragraph.split("\n    ") for paragraph in paragraphs)
    return {test: set(messages) for test, *messages in tests} if versions == VERSIONS else {}


# -- hooks of pytest ---------------------------------------------------------------------------------------------------

_recorded = read()
_new: dict[str, set[str]] = defaultdict(set)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-messages", action="store_true", help="run the tests of messages, write messages.txt")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("record_messages"):
        items[:] = [item for item in items if _calls(item.obj)]  # type: ignore[attr-defined]


def _calls(test: Callable[..., object]) -> bool:
    """Whether a test calls one of the two functions above, by itself or by a function of its file."""
    calling = "|".join(["refusal", "reported", *_calling(inspect.getmodule(test))])
    return re.search(rf"\b({calling})\(", inspect.getsource(test)) is not None


@functools.cache
def _calling(module: object) -> list[str]:
    """The names of a module's functions that call one of the two."""
    direct = re.compile(r"\b(refusal|reported)\(")
    functions = [each for each in vars(module).values() if inspect.isfunction(each)]
    return [each.__name__ for each in functions if direct.search(inspect.getsource(each))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _said.clear()
    yield
    messages = {re.sub(r"\s*\n\s*", "\n  ", masked(message)) for message in _said}
    test = f"{item.path.relative_to(TESTS)}::{item.originalname}"  # type: ignore[attr-defined]
    if item.config.getoption("record_messages"):
        item.user_properties += [("message", (test, message)) for message in messages]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for _, (test, message) in (each for each in report.user_properties if each[0] == "message"):
        _new[test].add(message)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file; paragraphs of files of which no test ran stay."""
    if not session.config.getoption("record_messages") or hasattr(session.config, "workerinput"):
        return
    ran = {test.partition("::")[0] for test in _new}
    files = ((test, test.partition("::")[0]) for test in _recorded)
    _new.update((test, _recorded[test]) for test, file in files if file not in ran and (TESTS / file).is_file())
    paragraphs = ["\n    ".join([test, *sorted(_new[test])]) for test in sorted(_new)]
    FILE.write_text("\n\n".join([VERSIONS, *paragraphs]) + "\n", encoding="utf-8")
