"""A config that is more than a page of plain values exits with 2, and nothing of it runs.

What each line means is in tests/config/test_strict_yaml.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile import Trap, refused

_LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))

CONFIGS = {
    "a call": ("model:\n  name: !!python/object/apply:os.system ['touch TRACE']\n", ":2: the tag"),
    "a module": ("data: !!python/module:antigravity\n", ":1: the tag"),
    "a bomb of aliases": (_LAUGHS, ":2: aliases"),
    "a key given twice": ("model:\n  name: x\n  name: y\n", ":3: `model.name` is given twice"),
    "an unknown key": ("training:\n  rate: 2e-5\n", ":2: unknown key `training.rate`"),
    "a word for a number": ("training:\n  batch_size: no\n", ":2: `training.batch_size`: expected a whole number"),
    "two documents": ("model: {}\n---\nmodel: {}\n", ":2: not valid YAML"),
}


def test_such_a_config_is_refused_with_its_line(
    foreign: Path, trap: Trap, call_each, subtests: pytest.Subtests
) -> None:
    files = [foreign / f"{name}.yaml" for name in CONFIGS]
    for file, (text, _) in zip(files, CONFIGS.values(), strict=True):
        file.write_text(text.replace("TRACE", str(trap.trace)))
    every = call_each(*(("train", file) for file in files))
    for file, (_, words), ended in zip(files, CONFIGS.values(), every, strict=True):
        with subtests.test(name=file.stem):
            refused(ended, f"{file}{words}", code=2)


def test_the_config_of_a_foreign_run_is_read_as_strictly(run, trap: Trap, call_each) -> None:
    with open(run.config_file, "a") as file:
        file.write(f"\nx: !!python/object/apply:os.system ['touch {trap.trace}']\n")
    commands = ("generate", run.path, "--prompt", "x"), ("merge", run.path), ("eval", run.path)
    for ended in call_each(*commands):
        refused(ended, "the tag", code=2)
