"""What is installed elsewhere is whole: the wheel builds, and it asks for what it needs in versions that are tested."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = {canonicalize_name(one.name): one.specifier for one in map(Requirement, PROJECT["dependencies"])}


def pins(file: str) -> dict[str, str]:
    """Version by canonical name."""
    found = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def test_each_floor_is_what_the_oldest_environment_installs() -> None:
    pinned = pins("constraints-oldest.txt")
    floors = {name: Version(one.version) for name, wanted in NEEDED.items() for one in wanted if one.operator == ">="}
    del floors["torch"]  # the Makefile names it
    assert floors == {name: Version(pinned[name]) for name in NEEDED if name != "torch"}


def test_the_tested_versions_lie_in_the_ranges() -> None:
    pinned = pins("constraints.txt")
    assert not {name: pinned[name] for name, wanted in NEEDED.items() if not wanted.contains(pinned[name])}


@pytest.mark.slow
def test_what_is_imported_is_asked_for() -> None:
    imported = set()
    for file in (ROOT / "finetune").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            imported |= {name.partition(".")[0] for name in names}
    packages = metadata.packages_distributions()
    asked = {name for name, made_by in packages.items() if {canonicalize_name(one) for one in made_by} & NEEDED.keys()}
    came_along = {"fsspec", "pydantic_core", "regex", "triton"}  # of datasets, pydantic, transformers; torch on a GPU
    optional = {"pynvml", "python_calamine"}  # of nvidia-ml-py, and the extra `excel`
    assert not imported - sys.stdlib_module_names - asked - {"finetune"} - came_along - optional


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert any(name.endswith("licenses/data/LICENSE.python_docs") for name in names)
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "finetune").rglob("*.*") if path.suffix != ".pyc"}
    assert ours <= names
    assert "finetune/extras/pages/templates/run.html.j2" in ours
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)
    script = (
        "import finetune, sys; from finetune.model.source.locate import locate; "
        "from finetune.extras.python_docs import rows; "
        "assert finetune.__file__.startswith(sys.argv[1]); assert rows.pairs('eval'); "
        "print(locate('builtin:tiny-llama'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "site")],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(tmp_path / "site" / "finetune" / "_builtin" / "tiny-llama")


def test_subjects_of_commits_after_the_base_are_checked(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        names = ("-c", "user.name=t", "-c", "user.email=t@t.example", "-c", "commit.gpgsign=false")
        command = ["git", *names, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    def refused(base: str) -> list[str]:
        done = subprocess.run(
            [ROOT / ".ci" / "subjects", base], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == bool(done.stdout)
        return done.stdout.splitlines()

    git("init", "--quiet")
    commits = []
    for subject in (
        "Before the base",
        "data: " + "x" * 66,
        "data: " + "x" * 67,
        "Add a kind of row",
        "data: Add a row",
    ):
        git("commit", "--quiet", "--allow-empty", "--message", subject)
        commits.append(git("rev-parse", "HEAD"))
    assert refused(commits[-1]) == refused("0" * 40) == []  # nothing after the base, and a clone without it
    assert [line.rpartition("characters: ")[2][:15] for line in refused(commits[0])] == [
        "data: Add a row", "Add a kind of r", "data: xxxxxxxxx",
    ]  # fmt: skip
    git("reset", "--quiet", "--hard", commits[1])
    assert refused(commits[0]) == []
