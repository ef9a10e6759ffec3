"""What the pages of the documentation point to exists: files, headings, tests."""

import builtins
import dis
import re
import runpy
from pathlib import Path

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
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(f"{page.name}: {link}")
    assert dead == []


def test_the_page_of_faults_names_tests_that_exist_and_every_file_of_fault_tests() -> None:
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", text)
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (TESTS / file).is_file() or (test and f"def {test}(" not in (TESTS / file).read_text(encoding="utf-8"))
    ]
    assert missing == []
    files = {f"faults/{file.name}" for file in (TESTS / "faults").glob("test_*.py")}
    assert files
    assert files - {file for file, _ in named} == set()


def patched(diff: str, source: str) -> str:
    """`source` with the added lines of `diff` put in; its other lines must stand in `source`, `...` leaves some out."""
    lines, at = source.splitlines(), 0
    added: list[str] = []
    for line in diff.splitlines():
        if line.startswith("+"):
            added.append(line[1:])
        elif line != "...":
            at = lines.index(line[1:], at)
            lines[at:at] = added
            at += len(added) + 1
            added = []
    lines[at:at] = added
    return "\n".join(lines)


def test_every_example_of_the_page_on_extending_fits_the_file_that_it_changes(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    examples = re.findall(r"^## .*?\n\n`(finetune/[\w/.]+)`.*?```diff\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    assert len(examples) == text.count("```diff") == 6
    for name, diff in examples:
        file = ROOT / name
        file = file / "__init__.py" if file.is_dir() else file
        (tmp_path / "changed.py").write_text(patched(diff, file.read_text(encoding="utf-8")), encoding="utf-8")
        module = runpy.run_path(str(tmp_path / "changed.py"))
        known = module.keys() | vars(builtins).keys()
        for function in re.findall(r"^\+def (\w+)", diff, re.MULTILINE):
            loaded = dis.get_instructions(module[function])
            used = {each.argval for each in loaded if each.opname == "LOAD_GLOBAL"}
            assert used - known == set(), f"{name}: {function}"
