"""The report of `make test-newest` names what other versions of the libraries change."""

import subprocess
import sys
from pathlib import Path

import pytest
import what_moved

ROOT = Path(__file__).parent.parent

MOVED = """<testsuites><testsuite>
<testcase classname="tests.runtime.test_patches" name="test_target[COMPILE]"><properties>
 <property name="patch" value="torch:compile"/><property name="read" value="(a)"/>
 <property name="signature" value="(a|b)"/>
</properties><failure message="AssertionError: read torch:compile&#10;assert"/></testcase>
<testcase classname="tests.runtime.test_patches" name="test_target[FAKE_LIST]"><properties>
 <property name="patch" value="torch:tolist"/></properties><failure message="AttributeError: no `tolist`"/></testcase>
<testcase classname="tests.golden.test_golden" name="test_a_trajectory_is_what_it_was[nf4, packed]"><properties>
 <property name="moved" value=".steps[2][0]: 4.0 is now 4.002"/></properties></testcase>
<testcase classname="tests.golden.test_golden" name="test_a_forecast_is_what_it_was[7B]"><properties>
 <property name="moved" value=".peak_allocated_bytes: 5 is now 6"/></properties>
 <failure message="assert not"/></testcase>
<testcase classname="tests.golden.test_golden" name="test_a_trajectory_is_what_it_was[dora]">
 <failure message="ImportError: no peft&#10;more"/></testcase>
<testcase classname="tests.data.test_rows" name="test_left_out"><skipped message="no"/></testcase>
<testcase classname="tests.data.test_rows" name="test_rows"><error message=""/></testcase>
<testcase classname="tests.data.test_rows" name="test_others"/>
</testsuite></testsuites>"""


def test_what_moved_is_named_by_patch_and_by_pinned_number(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(MOVED)
    text = what_moved.markdown(what_moved.cases(tmp_path / "report.xml"), [("torch", "2.13.0", "2.15.0")])
    assert [line for line in text.splitlines() if line.startswith(("## ", "| ")) and "---" not in line] == [
        "## Versions that are not those of constraints.txt",
        "| library | pinned | installed |",
        "| torch | 2.13.0 | 2.15.0 |",
        "## Patches: 0 of 2 ok",
        "| patch | found |",
        "| `torch:compile` | signature moved: `(a)` → `(a\\|b)` |",
        "| `torch:tolist` | gone: AttributeError: no 'tolist' |",
        "## Pinned numbers: 0 of 3 equal to the bit",
        "| job | numbers |",
        "| nf4, packed | moved at step 3 by 0.0005 |",
        "| 7B | moved: `.peak_allocated_bytes: 5 is now 6` |",
        "| dora | failed: ImportError: no peft |",
        "## Other failures: 1 of 2",
        "| test | says |",
        "| `tests/data/test_rows.py::test_rows` | it failed |",
    ]


@pytest.mark.slow
def test_the_tests_of_patches_and_pinned_numbers_say_what_it_reports(tmp_path: Path) -> None:
    report, chosen = tmp_path / "report.xml", "COMPILE or (a_forecast and tiny and packed)"
    command = ["-m", "pytest", "tests/runtime/test_patches.py", "tests/golden", "-k", chosen, "--junitxml", str(report)]
    subprocess.run([sys.executable, *command, "-p", "no:cacheprovider"], cwd=ROOT, check=True, capture_output=True)
    text = what_moved.markdown(what_moved.cases(report), what_moved.versions())
    assert "| `torch:compile` | ok |" in text
    assert "| tiny, packed | " in text
    assert "## Other failures: 0 of" in text
