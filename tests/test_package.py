"""What is installed elsewhere is whole: the wheel builds, and it asks for what it needs in versions that are tested."""

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
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


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_pins_serve_a_cpu_as_well_as_a_gpu(file: str) -> None:
    assert {name: version for name, version in pins(file).items() if "+" in version} == {}
    assert [name for name in pins(file) if name.startswith(("nvidia-", "cuda-"))] == []


def test_ci_tries_each_python_that_is_named_to_users_by_targets_that_there_are() -> None:
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["versions"]["strategy"]["matrix"]
    assert matrix["python"] == pythons
    local = re.findall(r"for version in (.+);", (ROOT / ".ci/versions").read_text())
    assert local == [" ".join(pythons[1:])]
    workflows = "".join(file.read_text() for file in (ROOT / ".github/workflows").glob("*.yml"))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"run: (test-\w+)", workflows)) <= {*targets}
    assert {each["versions"] for each in matrix["include"]} == {*matrix["versions"]}


def test_without_ceilings_each_floor_stays() -> None:
    printed = subprocess.run([sys.executable, ROOT / ".ci/uncapped"], check=True, capture_output=True, text=True).stdout
    floors = {canonicalize_name(one.name): one.specifier for one in map(Requirement, printed.splitlines())}
    assert {name: str(floors[name]) for name in NEEDED} == {
        name: ",".join(str(each) for each in wanted if each.operator == ">=") for name, wanted in NEEDED.items()
    }


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
def test_the_wheel_made_of_the_sdist_works_outside_the_checkout(tmp_path: Path) -> None:
    def built(kind: str, at: Path, suffix: str) -> Path:
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(tmp_path)]
        subprocess.run(command, cwd=at, check=True, capture_output=True)
        [file] = tmp_path.glob(f"*{suffix}")
        return file

    with tarfile.open(built("sdist", ROOT, ".tar.gz")) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    [unpacked] = (tmp_path / "sdist").iterdir()
    with zipfile.ZipFile(built("wheel", unpacked, ".whl")) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert any(name.endswith("licenses/data/LICENSE.python_docs") for name in names)
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "finetune").rglob("*.*") if path.suffix != ".pyc"}
    assert ours <= names
    assert "finetune/extras/pages/templates/run.html.j2" in ours
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)
    configs = {f"finetune/_builtin/configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    assert configs <= names

    (tmp_path / "work").mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path / "work", env={"PYTHONPATH": str(tmp_path / "site")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    home = run("-c", "import finetune; print(finetune.__file__)").stdout
    assert home.startswith(str(tmp_path / "site"))
    begin = run("-m", "finetune", "train")
    assert begin.returncode == 2
    # The command that it offers; of the built-in base and rows, two steps.
    [command] = re.findall(r"`finetune (train builtin:\S+)`", begin.stderr)
    trained = run("-m", "finetune", *command.split(), "training.max_steps=2", "training.eval_every=2")
    assert trained.returncode == 0, trained.stderr
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["runs"]
    assert (tmp_path / "work/runs/tiny_cpu/merged/model.safetensors").is_file()


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
