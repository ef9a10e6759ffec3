"""Write `tests/durations.json`, the seconds that each test file takes, from a JUnit report of the whole suite.

`make durations` runs the suite and then this. Seconds are wall time with two workers on an otherwise idle machine, and
include fixtures: a file that comes first pays for those of the session.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent
DURATIONS = TESTS / "durations.json"


def by_file(report: Path) -> dict[str, float]:
    """Seconds of each test file that a JUnit report names, by its path below `tests/`, the longest first."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.attrib["classname"].split(".")
        while parts and not (TESTS.parent / ("/".join(parts) + ".py")).is_file():
            parts.pop()  # a class
        if parts:
            seconds["/".join(parts[1:]) + ".py"] += float(case.attrib["time"])
    return {name: round(value, 1) for name, value in seconds.most_common()}


def by_folder(seconds: dict[str, float]) -> dict[str, float]:
    """The same by folder; files beside the folders count as "."."""
    sums: Counter[str] = Counter()
    for name, value in seconds.items():
        sums[Path(name).parts[0] if "/" in name else "."] += value
    return {name: round(value, 1) for name, value in sums.most_common()}


def main() -> None:
    seconds = by_file(Path(sys.argv[1]))
    DURATIONS.write_text(json.dumps(seconds, indent=1) + "\n", encoding="utf-8")
    for title, figures in (("folders", by_folder(seconds)), ("files", dict(list(seconds.items())[:20]))):
        print(f"longest {title}, in seconds of one worker")
        for name, value in figures.items():
            print(f"{value:8.1f}  {name}")


if __name__ == "__main__":
    main()
