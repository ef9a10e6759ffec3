"""What is carried to a machine without a network."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import re
import zipfile
from pathlib import Path

import offline_wheels
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = {name: Version("2.0") for name in ("app", "lib", "deep", "other")}


def requires(name: str) -> list[Requirement]:
    return [Requirement(text) for text in {"app": ["lib>=2", "torch>=2"], "lib": ["deep"]}.get(name, [])]


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ({}, "app deep lib"), ({"app": "1.0"}, ""), ({"app": "0.9"}, "app deep lib"), ({"lib": "2.5"}, "app"),
        ({"lib": "1.5"}, "app deep lib"), ({"lib": None}, "app"), ({"deep": "0.1"}, "app lib"),
    ],
    ids=["nothing there: all but torch", "what fits is not looked into", "too old: with what it requires",
         "a requirement that is there", "a requirement that is too old", "an unknown version counts as fitting",
         "any version will do"],
)  # fmt: skip
def test_only_missing_or_unfit_packages_are_carried(present: dict[str, str | None], expected: str) -> None:
    versions = {name: version and Version(version) for name, version in present.items()}
    found = offline_wheels.carried([Requirement("app>=1")], versions, CONSTRAINTS, requires)
    assert found == dict.fromkeys(expected.split(), Version("2.0"))


def test_every_runtime_requirement_is_pinned_and_installed_here() -> None:
    constraints = offline_wheels.read_versions((ROOT / "constraints.txt").read_text())
    if constraints["transformers"] != importlib.metadata.version("transformers"):
        pytest.skip("other versions are installed, which require other packages")
    found = offline_wheels.carried(
        offline_wheels._requirements(), {}, constraints, offline_wheels._installed_requires("3.12")
    )
    assert {"bitsandbytes", "numpy", "peft", "pydantic-core", "transformers", "trl"} <= set(found)
    assert not {"torch", "pytest", "finetune"} & set(found)


def write_wheel(path: Path, files: dict[str, bytes]) -> None:
    """A wheel with a RECORD of all its files."""
    record = "example-1.dist-info/RECORD"
    lines = [f"{name},sha256={digest(content)},{len(content)}\n" for name, content in files.items()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(record, "".join(lines) + f"{record},,\n")


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


FILES = {
    "bitsandbytes/__init__.py": b"",
    "bitsandbytes/libbitsandbytes_cpu.so": b"cpu",
    "bitsandbytes/libbitsandbytes_cuda130.so": b"cuda 13.0",
    "bitsandbytes/libbitsandbytes_cuda128.so": b"cuda 12.8",
    "bitsandbytes/libbitsandbytes_cuda118.so": b"cuda 11.8",
    "bitsandbytes/libbitsandbytes_rocm72.so": b"rocm",
    "example-1.dist-info/METADATA": b"Name: example\n",
}


def test_a_stripped_wheel_is_still_a_valid_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "example-1-py3-none-any.whl"
    write_wheel(wheel, FILES)
    before = wheel.read_bytes()
    with pytest.raises(SystemExit, match=r"no library for cuda126; it has cuda130, cuda128, cuda118, rocm72"):
        offline_wheels.strip_cuda(wheel, ["130", "126"])
    assert wheel.read_bytes() == before
    offline_wheels.strip_cuda(wheel, ["128", "130"])
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    record = {row[0]: row[1:] for row in csv.reader(io.StringIO(contents["example-1.dist-info/RECORD"].decode()))}
    kept = {name: content for name, content in FILES.items() if not re.search("cuda118|rocm", name)}
    assert set(record) == set(contents) == {*kept, "example-1.dist-info/RECORD"}
    for name, content in kept.items():
        assert contents[name] == content
        assert record[name] == [f"sha256={digest(content)}", str(len(content))]
    assert record["example-1.dist-info/RECORD"] == ["", ""]
