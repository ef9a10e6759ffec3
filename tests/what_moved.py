"""What other versions of the libraries change, as Markdown: by library, by patch of the registry and by pinned number.

`make test-newest` runs the tests with a JUnit report each, and then this, in the environment that ran them. In a job of
GitHub it also goes to the job's summary.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
_MOST = 20
"""Rows of other failures that are shown."""


@dataclass(frozen=True)
class Case:
    """A test that ran: what it said in its properties, and the first line of its failure, None if it passed."""

    test: str
    parameter: str
    said: dict[str, str]
    failure: str | None


def cases(report: Path) -> Iterator[Case]:
    """Those of a JUnit report, without skipped ones."""
    for each in ElementTree.parse(report).iter("testcase"):
        if each.find("skipped") is not None:
            continue
        test, _, parameter = each.attrib["name"].partition("[")
        failed = [found for found in map(each.find, ("failure", "error")) if found is not None]
        first = (failed[0].attrib.get("message", "").strip().splitlines() or ["it failed"])[0] if failed else None
        said = {one.attrib["name"]: one.attrib["value"] for one in each.iter("property")}
        place = f"{each.attrib['classname'].replace('.', '/')}.py::{test}"
        yield Case(place, parameter.removesuffix("]"), said, first)


def markdown(found: Iterable[Case], versions: Iterable[tuple[str, str, str]]) -> str:
    """The whole report; `versions` are names with the pinned and the installed version."""
    found = list(found)
    patches = [case for case in found if "patch" in case.said]
    golden = [case for case in found if "moved" in case.said or (case.failure and "/golden/" in case.test)]
    others = [case for case in found if case.failure and case not in patches and case not in golden]
    still = sum(case.failure is None for case in patches)
    equal = sum(case.said.get("moved") == "" for case in golden)
    return "\n".join(
        [
            "## Versions that are not those of constraints.txt",
            *_table("library | pinned | installed", map(" | ".join, versions)),
            f"## Patches: {still} of {len(patches)} ok",
            *_table("patch | found", (f"`{case.said['patch']}` | {_of_patch(case)}" for case in patches)),
            f"## Pinned numbers: {equal} of {len(golden)} equal to the bit",
            "On another processor than that of the record the last bits differ with any version.",
            *_table("job | numbers", (f"{case.parameter or case.test} | {_of_golden(case)}" for case in golden)),
            f"## Other failures: {len(others)} of {len(found) - len(patches) - len(golden)}",
            *_table("test | says", (f"`{_named(case)}` | {_cell(case.failure)}" for case in others[:_MOST])),
            *([f"and {len(others) - _MOST} more"] if len(others) > _MOST else []),
        ]
    )


def _named(case: Case) -> str:
    return f"{case.test}[{case.parameter}]" if case.parameter else case.test


def _of_patch(case: Case) -> str:
    if case.failure is None:
        return "ok"
    if "signature" not in case.said:
        return f"gone: {_cell(case.failure)}"
    return f"signature moved: `{_cell(case.said['read'])}` → `{_cell(case.said['signature'])}`"


def _of_golden(case: Case) -> str:
    if "moved" not in case.said:
        return f"failed: {_cell(case.failure)}"
    moved = case.said["moved"]
    if step := re.match(r"\.steps\[(\d+)\]\[[01]\]: (\S+) is now (\S+)", moved):
        before, after = float(step[2]), float(step[3])
        return f"moved at step {int(step[1]) + 1} by {abs(after - before) / (abs(before) or 1):.1g}"
    return f"moved: `{_cell(moved)}`" if moved else "equal"


def _cell(text: str | None) -> str:
    """Text as a table can hold it."""
    return " ".join((text or "").split()).replace("|", "\\|").replace("`", "'")[:300]


def _table(heads: str, rows: Iterable[str]) -> list[str]:
    rows = [f"| {row} |" for row in rows]
    return ["", f"| {heads} |", "|" + " --- |" * (heads.count("|") + 1), *rows, ""] if rows else [""]


def versions() -> Iterator[tuple[str, str, str]]:
    """Pinned libraries that are installed here in another version, without the name of a build (+cpu)."""
    pins = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    for name, pinned in pins:
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # of a group that is not installed here
        if installed.partition("+")[0] != pinned:
            yield name, pinned, installed


def main() -> None:
    reports = [Path(name) for name in sys.argv[1:]]
    found = [case for report in reports if report.is_file() for case in cases(report)]
    text = f"# Python {sys.version.split()[0]}\n\n{markdown(found, versions())}\n"
    text += "".join(f"\nNo report: pytest did not write {report.name}.\n" for report in reports if not report.is_file())
    sys.stdout.write(text)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
