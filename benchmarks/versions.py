"""What other versions of the libraries move: patched attributes, golden trajectories and forecasts.

    python benchmarks/versions.py .venv-newest/bin/python ...

Each interpreter, and first the one that runs this, trains and plans the golden jobs of `tests/golden` with one thread
on this machine, and reads the source of every attribute that `finetune/runtime/patches.py` replaces. What differs from
the first one is printed in Markdown and written to the result: for a patch its signature, its source or that it is
gone; for a trajectory the first step whose loss or gradient norm differs, and by how much at most, relative; for a
forecast each figure that differs.
"""

from __future__ import annotations

import difflib
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import harness

from finetune.runtime import patches
from finetune.runtime.patches import Patch

PACKAGES = (
    "torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate", "datasets", "huggingface-hub", "tokenizers",
    "safetensors", "gguf", "compressed-tensors", "numpy", "pyarrow",
)  # fmt: skip

Facts = dict[str, Any]


def main() -> None:
    parser = harness.parser(__doc__, "versions.json")
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="the interpreter of another environment")
    parser.add_argument("--facts", type=Path, help="write what this interpreter finds to a file, and compare nothing")
    parser.add_argument("--diff", action="store_true", help="print what changed in the source of patched attributes")
    asked = parser.parse_args()
    if asked.facts:
        asked.facts.write_text(json.dumps(facts()), encoding="utf-8")
        return
    first, *others = (_asked(python) for python in (sys.executable, *asked.pythons))
    found = [compared(first, other) for other in others]
    for other, differences in zip(others, found, strict=True):
        print(page(differences))
        if asked.diff:
            print("\n".join(_sources(first, other)))
    versions = {"python": first["python"], "packages": first["packages"]}
    harness.save(asked.output, {"first": versions, "others": found}, threads=1)


def _asked(python: str) -> Facts:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "facts.json")
        harness.succeeded(harness.run([python, Path(__file__), "--facts", file], threads=1))
        found: Facts = json.loads(file.read_text(encoding="utf-8"))
        return found


# -- in one environment ------------------------------------------------------------------------------------------------


def facts() -> Facts:
    """Versions, patched attributes, trajectories and forecasts in this environment."""
    sys.path[:0] = [str(harness.ROOT / "tests" / "golden")]
    import golden_jobs

    def trained(train: Callable[[str, Path], Facts], name: str) -> Facts:
        with tempfile.TemporaryDirectory() as folder:
            return _tried(train, name, Path(folder))

    trajectories = {name: trained(golden_jobs.trajectory, name) for name in (*golden_jobs.JOBS, golden_jobs.RESUMED)}
    fused = {f"{name}, fused": trained(golden_jobs.fused_trajectory, name) for name in golden_jobs.FUSED}
    return {
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "patches": {name: _patched(entry) for name, entry in patches.entries().items()},
        "trajectories": trajectories | fused,
        "forecasts": {name: _tried(golden_jobs.plan, name) for name in golden_jobs.PLANS},
    }


def _tried(work: Callable[..., Facts], *arguments: Any) -> Facts:
    try:
        return work(*arguments)
    except Exception as error:  # another version of a library may raise anything
        return {"fails": harness.last_line(f"{type(error).__name__}: {error}")}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _patched(entry: Patch) -> dict[str, str]:
    try:
        return {"signature": installed_signature(entry), "source": installed_source(entry)}
    except (ImportError, AttributeError) as error:
        return {"signature": "gone", "source": f"{type(error).__name__}: {error}"}


def installed_signature(entry: Patch) -> str:
    """What the target is in the installed version; raises ImportError or AttributeError if there is none.

    The parameters of a function (of a Triton kernel, of an autograd function's forward pass), with `=...` for
    defaults; the schema of an operator; "of instances" for an attribute that a class gives its instances;
    otherwise the type's name.
    """
    owner = entry.owner()
    if inspect.isclass(owner) and not hasattr(owner, entry.attribute):
        if f"self.{entry.attribute}" not in inspect.getsource(owner):
            raise AttributeError(f"{entry.target} is not there")
        return "of instances"
    value = getattr(owner, entry.attribute)
    if hasattr(value, "_schema"):
        return str(value._schema)
    if hasattr(value, "save_for_backward"):
        value = value.forward
    value = getattr(value, "fn", value)
    if not callable(value):
        return type(value).__name__
    try:
        signature = inspect.signature(value)
    except ValueError:
        return "built in"
    parameters = [
        one.replace(annotation=one.empty, default=one.default if one.default is one.empty else ...)
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters)).replace("Ellipsis", "...")


def installed_source(entry: Patch) -> str:
    """The source of the target, of its class for an attribute that instances have; empty for one in C++."""
    owner = entry.owner()
    value = getattr(owner, entry.attribute, owner)
    try:
        return inspect.getsource(getattr(value, "fn", value))
    except (TypeError, OSError):
        return ""


# -- beside another ----------------------------------------------------------------------------------------------------


def compared(first: Facts, other: Facts) -> Facts:
    """What `other` has otherwise than `first`; all that is equal is counted, not listed."""
    kinds = {
        "patches": _patch_moved, "trajectories": _trajectory_moved, "forecasts": _forecast_moved,
    }  # fmt: skip
    moved = {
        kind: {name: what for name, one in first[kind].items() if (what := compare(one, other[kind].get(name)))}
        for kind, compare in kinds.items()
    }
    return {
        "python": other["python"],
        "packages": other["packages"],
        "equal": {kind: len(first[kind]) - len(names) for kind, names in moved.items()},
        **moved,
    }


def _patch_moved(one: Mapping[str, str], other: Mapping[str, str] | None) -> str:
    if other is None or other["signature"] == "gone":
        return "gone"
    if one["signature"] != other["signature"]:
        return f"the signature is {other['signature']}"
    return "" if one["source"] == other["source"] else "the source changed"


def _trajectory_moved(one: Facts, other: Facts | None) -> str:
    assert other is not None, "both train the same jobs"
    if failed := one.get("fails") or other.get("fails"):
        return f"fails: {failed}"
    if len(one["steps"]) != len(other["steps"]):
        return f"{len(other['steps'])} steps, not {len(one['steps'])}"
    steps = list(zip(one["steps"], other["steps"], strict=True))
    off = [max(_off(a, b) for a, b in zip(*step, strict=True)) for step in steps]
    if number := next((number for number, each in enumerate(off, 1) if each), None):
        return f"from step {number}, by {max(off):.1e} at most"
    return "" if one == other else "the weights or evaluations alone"


def _forecast_moved(one: Any, other: Any) -> dict[str, list[Any]]:
    return dict(_leaves(one, other))


def _leaves(one: Any, other: Any, where: str = "") -> Iterator[tuple[str, list[Any]]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from _leaves(one.get(key), other.get(key), f"{where}.{key}".strip("."))
    elif one != other:
        yield where, [one, other]


def _off(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), 1e-12)


# -- shown -------------------------------------------------------------------------------------------------------------


def page(found: Facts) -> str:
    """What moved, in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in found["packages"].items() if version)
    lines = [f"## Python {found['python']}, {versions}", ""]
    for kind, equal in found["equal"].items():
        lines.append(f"- {kind}: {equal} of {equal + len(found[kind])} as before")
        lines += [f"  - `{name}`: {_shown(what)}" for name, what in found[kind].items()]
    return "\n".join(lines)


def _shown(what: Any) -> str:
    if isinstance(what, str):
        return what
    return "; ".join(f"{key} {one} -> {other}" for key, (one, other) in what.items())


def _sources(first: Facts, other: Facts) -> Iterator[str]:
    for name, one in first["patches"].items():
        old, new = (each.splitlines() for each in (one["source"], other["patches"][name]["source"]))
        yield from difflib.unified_diff(old, new, f"{name}, first", f"{name}, other", lineterm="", n=1)


if __name__ == "__main__":
    main()
