"""A folder of wheels for a machine without network: what finetune needs there and the machine does not have.

    python3 -m pip freeze > installed.txt                # on that machine
    python benchmarks/offline_wheels.py --python 3.12 --have installed.txt --output .wheels

Run it in this project's environment: what each package requires is read from the packages installed here, which are
those of constraints.txt. A package of the target that fits every requirement on it is left alone; any other that is
needed comes in the version of constraints.txt. torch is never carried: it belongs to the target's driver.

A line of the list may be a bare name; the package then counts as fitting, whatever its version.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]

NEVER_CARRIED = frozenset({"torch"})

CUDA = ("128", "130")
"""CUDA versions that torch is built for today, of which the target has one."""

# bitsandbytes loads the library of torch's CUDA version; the CPU one is small and is loaded where that fails.
_NATIVE_LIBRARY = re.compile(r"bitsandbytes/libbitsandbytes_(?!cpu\.)(\w+)\.so")

Versions = Mapping[str, Version | None]
"""Version by canonical package name; None where the version is not known."""

Requires = Callable[[str], Iterable[Requirement]]
"""What a package, by canonical name, requires."""


def main() -> None:
    options = _options()
    constraints = read_versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    present = read_versions(options.have.read_text(encoding="utf-8"))
    needed = carried(_requirements(), present, constraints, _installed_requires(options.python))
    print(f"{len(needed)} packages to carry: " + ", ".join(f"{name} {version}" for name, version in needed.items()))
    wheels = [_download(name, version, options) for name, version in needed.items()]
    for wheel in wheels:
        strip_cuda(wheel, options.cuda)
    print(_report(wheels, options.output))


# -- which packages ----------------------------------------------------------------------------------------------------


def read_versions(freeze: str) -> dict[str, Version | None]:
    """Packages of a `pip freeze` text, a constraints file, or bare names; comments and options are left out."""
    found: dict[str, Version | None] = {}
    for line in freeze.splitlines():
        match = re.match(r"\s*([A-Za-z0-9][\w.-]*)\s*(?:===?\s*([^\s;]+)|@.*)?\s*(?:[;#].*)?$", line)
        if match:
            found[canonicalize_name(match[1])] = _version(match[2])
    return found


def _version(text: str | None) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


def carried(
    wanted: Iterable[Requirement], present: Versions, constraints: Versions, requires: Requires
) -> dict[str, Version]:
    """Packages to carry, by name, so that `wanted` and what it requires in turn are met on the target.

    A package of `present` that fits is not looked into: what it requires is there with it. Raises SystemExit for a
    package that `constraints` does not pin.
    """
    taken: dict[str, Version] = {}
    open_requirements = list(wanted)
    while open_requirements:
        requirement = open_requirements.pop()
        name = canonicalize_name(requirement.name)
        if name in taken or name in NEVER_CARRIED or _fits(requirement.specifier, name, present):
            continue
        pinned = constraints.get(name)
        if pinned is None:
            sys.exit(f"error: {requirement} is needed, and constraints.txt has no version of it")
        taken[name] = pinned
        open_requirements += requires(name)
    return dict(sorted(taken.items()))


def _fits(specifier: SpecifierSet, name: str, present: Versions) -> bool:
    if name not in present:
        return False
    version = present[name]
    return version is None or specifier.contains(version, prereleases=True)


def _requirements() -> list[Requirement]:
    """What finetune needs, and TRL, with which the GPU check compares it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    reference = [one for one in project["dependency-groups"]["test"] if one.startswith("trl")]
    return [Requirement(text) for text in [*project["project"]["dependencies"], *reference]]


def _installed_requires(python: str) -> Requires:
    """What packages require on Linux under `python`, a version such as 3.12, without their extras."""
    target = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }

    def requires(name: str) -> Iterable[Requirement]:
        try:
            texts = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            sys.exit(f"error: {name} is not installed here; run this in the project's environment (make setup)")
        parsed = [Requirement(text) for text in texts]
        return [found for found in parsed if found.marker is None or found.marker.evaluate(target)]

    return requires


# -- the wheels --------------------------------------------------------------------------------------------------------


def _download(name: str, version: Version, options: argparse.Namespace) -> Path:
    """The wheel of one package in the output folder; an older one of the same package is removed."""
    options.output.mkdir(parents=True, exist_ok=True)
    for old in _wheels_of(name, options.output):
        old.unlink()
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(options.glibc, 4, -1)]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--implementation=cp", f"--python-version={options.python}",
        *platforms, "--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64",
        f"--dest={options.output}", f"{name}=={version}",
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"error: {name} {version} has no wheel for Python {options.python}, or could not be fetched")
    (wheel,) = _wheels_of(name, options.output)
    return wheel


def _wheels_of(name: str, folder: Path) -> list[Path]:
    return [wheel for wheel in folder.glob("*.whl") if canonicalize_name(wheel.name.split("-")[0]) == name]


def strip_cuda(wheel: Path, cuda: Sequence[str]) -> None:
    """Leave these CUDA libraries, such as `130` for CUDA 13.0, in a wheel of bitsandbytes, and no other ones.

    Other wheels stay as they are. RECORD is written anew from what is left, so that the wheel stays valid. Raises
    SystemExit, and leaves the wheel alone, when it has no library for one of them.
    """
    with zipfile.ZipFile(wheel) as archive:
        libraries = {name: match[1] for name in archive.namelist() if (match := _NATIVE_LIBRARY.fullmatch(name))}
        if not libraries:
            return
        wanted = {f"cuda{version}" for version in cuda}
        if lacking := wanted - set(libraries.values()):
            has = ", ".join(libraries.values())
            sys.exit(f"error: {wheel.name} has no library for {', '.join(sorted(lacking))}; it has {has}")
        unneeded = {name for name, platform in libraries.items() if platform not in wanted}
        kept = {item: archive.read(item) for item in archive.infolist() if item.filename not in unneeded}
    stripped = wheel.with_suffix(".stripped")
    with zipfile.ZipFile(stripped, "w", zipfile.ZIP_DEFLATED) as archive:
        for item, content in kept.items():
            is_record = item.filename.endswith(".dist-info/RECORD")
            archive.writestr(item, _record(kept, item.filename) if is_record else content)
    stripped.replace(wheel)


def _record(files: Mapping[zipfile.ZipInfo, bytes], own_name: str) -> bytes:
    """RECORD of a wheel: path, sha256 and size in bytes of each file, its own line without both (PEP 376)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for item, content in files.items():
        if item.filename == own_name:
            writer.writerow((own_name, "", ""))
        elif not item.is_dir():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            writer.writerow((item.filename, f"sha256={digest}", len(content)))
    return text.getvalue().encode()


def _report(wheels: list[Path], folder: Path) -> str:
    by_size = sorted(((wheel.stat().st_size, wheel.name) for wheel in wheels), reverse=True)
    total = sum(size for size, _ in by_size)
    lines = [f"{size / 2**20:7.1f} MiB  {name}" for size, name in by_size]
    return "\n".join(
        [
            *lines,
            f"{total / 2**20:7.1f} MiB  in {len(wheels)} wheels",
            "",
            "On the machine without network:",
            f"  python3 -m pip install --no-index --no-deps --upgrade --target ~/finetune-site {folder.name}/*.whl",
            "  export PYTHONPATH=~/finetune-site",
        ]
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the target's Python, such as 3.12")
    parser.add_argument("--have", required=True, type=Path, help="`pip freeze` of the target")
    parser.add_argument("--output", type=Path, default=Path(".wheels"), help="folder for the wheels (default .wheels)")
    parser.add_argument(
        "--cuda", nargs="+", metavar="VERSION", default=CUDA,
        help=f"keep only bitsandbytes' libraries for these (default {' '.join(CUDA)})",
    )  # fmt: skip
    parser.add_argument(
        "--glibc", type=int, default=35, metavar="MINOR", help="the target's glibc is 2.MINOR (default 35)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
