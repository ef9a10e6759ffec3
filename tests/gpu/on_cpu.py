"""How far the body of each GPU test runs without a card, so that no wrong name or argument waits for one.

    python tests/gpu/on_cpu.py            writes the list, tests/gpu/on_cpu.json

With FINETUNE_GPU_TESTS_ON=cpu a test that asks for a card (fixture `cuda`) runs its body on the CPU, with stand-ins for
what CUDA alone gives. They make nothing true: the test is never passed but skipped, and the reason says how many of
its assertions (fixture `on_card`) were reached, whatever they found, and where the body ended. A wrong name or argument
fails it.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import subprocess
import sys
import tempfile
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".json")

_WRONG = (NameError, AttributeError, ImportError, TypeError)


# -- the body ----------------------------------------------------------------------------------------------------------


class Assertions:
    """A context for one assertion about what a card does: on a CPU it is evaluated and noted, whatever it finds.

    A wrong name or argument in it fails the test.
    """

    def __init__(self) -> None:
        self.reached: dict[int, str] = {}
        """By line, the error that the assertion ended with; empty if it could be evaluated."""
        self._line = 0

    def __enter__(self) -> None:
        self._line = sys._getframe(1).f_lineno
        self.reached.setdefault(self._line, "")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, Exception) or is_wrong(error):
            return False
        if not isinstance(error, AssertionError):
            said = type(error).__name__
            self.reached[self._line] = f"{said} {error}" if isinstance(error, KeyError) else said
        return True


@contextlib.contextmanager
def as_far_as_possible(function: Callable[..., Any], assertions: Assertions) -> Iterator[None]:
    """In the block, the body of `function` runs to its end or to what only a card can do; the test is then skipped."""
    place = "to its end"
    try:
        yield
    except Exception as error:
        if is_wrong(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.line for frame in frames if frame.name == function.__name__]
        place = f"up to `{lines[-1] if lines else ''}`: {type(error).__name__}"
    reason = f"ran on a CPU {place}; {len(assertions.reached)} assertions reached"
    if lacking := sorted({error for error in assertions.reached.values() if error}):
        reason += f", which lack what a card gives ({', '.join(lacking)})"
    pytest.skip(reason)


def is_wrong(error: BaseException) -> bool:
    """Whether `error` would be one on a card too; where None stands for what a CPU has not, it says nothing."""
    return isinstance(error, _WRONG) and "NoneType" not in str(error)


# -- stand-ins ---------------------------------------------------------------------------------------------------------


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Let calls that only CUDA answers be made on a CPU: with the right arguments, and the process's size as answer."""

    def resident() -> int:
        return psutil.Process().memory_info().rss

    answers: dict[str, Callable[[], Any]] = dict.fromkeys(
        ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), resident
    )
    answers |= dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"), lambda: None)
    answers["get_device_properties"] = lambda: SimpleNamespace(multi_processor_count=1)
    answers["mem_get_info"] = lambda: (psutil.virtual_memory().available, psutil.virtual_memory().total)
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, _called_alike(getattr(torch.cuda, name), answer))
    patch.setattr("finetune.recipe.start.meter_for", lambda device_type: _Meter())


def _called_alike(function: Callable[..., Any], answer: Callable[[], Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def called(*arguments: Any, **named: Any) -> Any:
        signature.bind(*arguments, **named)
        return answer()

    return called


class _Meter:
    """A CUDA meter's measures, each the process's size."""

    def reset(self) -> None: ...

    def read(self) -> dict[str, int]:
        return dict.fromkeys(("allocated_bytes", "reserved_bytes", "device_bytes"), psutil.Process().memory_info().rss)


def smaller(settings: Mapping[str, Any], *, a_card_decides: bool) -> dict[str, Any]:
    """A job's settings with what only a CUDA device can do left out, and small enough for a CPU.

    Few steps will do where the test's assertions are a card's; those that put NaN into fp16 do so in the sixth too.
    """
    found = {"memory.check": "off", **settings}
    in_fp16 = found.get("training.precision") == "fp16"
    if in_fp16:
        found["training.precision"] = "bf16"
    if a_card_decides:
        found["training.max_steps"] = min(found["training.max_steps"], 6 if in_fp16 else 2)
    found["data.max_length"] = min(found["data.max_length"], 32)
    for rows in ("training.batch_size", "training.micro_batch"):
        found[rows] = min(found[rows], 8)
    return found


def train_here(file: Path) -> subprocess.CompletedProcess[str]:
    """`finetune train` in this process, as if in one of its own."""
    from finetune import cli

    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            cli.app(["train", str(file)], standalone_mode=False)
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(["finetune", "train", str(file)], code, output.getvalue(), errors.getvalue())


# -- the list ----------------------------------------------------------------------------------------------------------


def run_all() -> dict[str, str]:
    """Run all GPU tests on the CPU: each test, and `passed`, how far it came, or what it failed with.

    In this process, which has not imported them before (and assertions stay as they are: what pytest would rewrite
    may have been imported).
    """
    os.environ["FINETUNE_GPU_TESTS_ON"] = "cpu"
    with tempfile.TemporaryDirectory(prefix="gpu-tests-") as scratch:
        report = Path(scratch) / "report.xml"
        pytest.main(
            [str(ROOT / "tests" / "gpu"), "-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
             "--assert=plain", f"--rootdir={ROOT}", f"--junitxml={report}", f"--basetemp={scratch}/tmp"]
        )  # fmt: skip
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            said = found.get("message", "")
            return said if kind == "skipped" else f"FAILED: {said}"
    return "passed"


if __name__ == "__main__":
    outcomes = run_all()
    LIST.write_text(json.dumps(outcomes, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write("".join(f"{name}: {outcome}\n" for name, outcome in outcomes.items()))
    sys.exit(any(outcome.startswith("FAILED") for outcome in outcomes.values()))
