"""Each target of the registry exists in the installed versions, with the signature its patch expects."""

from __future__ import annotations

import importlib.util
import re
import types
from pathlib import Path
from typing import Any

import pytest
import write_docs
from versions import installed_signature

from finetune.runtime import libraries, patches
from finetune.runtime.patches import Patch

ENTRIES = patches.entries()


@pytest.mark.parametrize("name", ENTRIES)
def test_target_exists_with_the_signature_it_was_read_with(name: str) -> None:
    entry = ENTRIES[name]
    for package in (entry.target.partition(":")[0].partition(".")[0], *re.findall(r"[a-z_]+(?= )", entry.read_at)):
        if package in {"deepspeed", "lm_eval", "triton"} and importlib.util.find_spec(package) is None:
            pytest.skip(f"the optional package {package} is not installed")
    known = (entry.signature,) if isinstance(entry.signature, str) else entry.signature
    assert installed_signature(entry) in known, (
        f"read {entry.target} in the installed version, adapt what replaces it, then write this signature in the entry"
    )


def test_entries_say_why_and_until_when() -> None:
    for name, entry in ENTRIES.items():
        assert entry.why.endswith("."), name
        assert entry.until.endswith("."), name
        assert entry.signature, name
    assert len({entry.target for entry in ENTRIES.values()}) == len(ENTRIES)


def of(owner: Any, name: str) -> Patch:
    return Patch("made:up." + name, "made 1", "()", "Why.", "Until.", objects="any")


def test_by_restores_own_attributes_and_removes_inherited_ones() -> None:
    class Layer:
        _on = True

        def forward(self) -> int:
            return 1

        @property
        def on(self) -> bool:
            return self._on

        @on.setter
        def on(self, value: bool) -> None:
            self._on = value

    module, layer = types.SimpleNamespace(own=1), Layer()
    with of(module, "own").by(2, module), of(layer, "forward").by(lambda: 2, layer):
        assert (module.own, layer.forward()) == (2, 2)
    assert (vars(module), vars(layer)) == ({"own": 1}, {})
    with of(layer, "on").by(False, layer):
        assert not layer.on, "through the setter"
    assert layer.on


def test_a_class_becomes_the_class_of_an_object() -> None:
    class Plain:
        pass

    class Watched(Plain):
        pass

    module = Plain()
    with of(module, "forward").by(Watched, module):
        assert type(module) is Watched
    assert type(module) is Plain


def test_only_an_entry_for_objects_takes_an_object() -> None:
    with pytest.raises(AssertionError, match="forward"):
        patches.MODULE_FORWARD.put(lambda: None)
    with pytest.raises(AssertionError, match="sync_gpu"):
        patches.SYNC_GPU.put(lambda tensor: None, libraries)


def test_the_page_is_made_from_the_registry() -> None:
    page = Path(__file__).parents[2] / "docs" / "patches.md"
    assert page.read_text(encoding="utf-8") == write_docs.patches_page(), "run `make docs`"
