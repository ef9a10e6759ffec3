"""Our names for what other tools have: Axolotl, LLaMA-Factory, Unsloth, TRL, transformers and PEFT.

A key that only they have is refused with the key to write; nothing is renamed silently, since two tools may mean
different things by one name. `finetune init --from` translates a whole config by the same table, `other_names.json`:
what to write here, with the names that other tools have for it.

`not_offered.json` lists values that other tools offer and this one does not: for each of our keys, the advice with the
patterns of values (in lower case) that it is for. They are what people know and try first, so the nearest name that is
offered (`fp4` for `fp8`) would mislead them.
"""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any


def _read(name: str) -> Any:
    return json.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


_TABLE = _read("other_names.json")
_NOT_OFFERED: dict[str, dict[str, list[str]]] = _read("not_offered.json")

NAMES: dict[str, str] = {
    name: here for topic in _TABLE["keys"].values() for here, names in topic.items() for name in names
}
"""By another tool's key, in lower case: what to write, with our keys between backticks."""

_VALUES: dict[str, str] = {name: here for here, names in _TABLE["values"].items() for name in names}
_WITHOUT_EFFECT = re.compile("|".join(_TABLE["keys without effect"]))


def meant(key: str, value: object = None) -> str | None:
    """Our equivalent of another tool's `key: value`; None for an unknown key."""
    text = NAMES.get(spelt(key))
    ours = re.findall(r"`(\w+\.\w+)", text or "")
    cure = not_offered(ours[0], value) if ours and isinstance(value, str) and name_here(value) == value else None
    return f"`{ours[0]}`; {cure}" if cure else text


def spelt(key: str) -> str:
    """Another tool's key as in NAMES."""
    return key.lower().replace("-", "_")


def name_here(value: str) -> str:
    """Our name for another tool's `value`; `value` itself where no other name is known."""
    return _VALUES.get(value.lower(), value)


def advice(key: str, value: object) -> str | None:
    """Advice for a `value` that `section.key` does not accept; None if there is none."""
    if not isinstance(value, str):
        return None
    patterns = [(text, pattern) for text, listed in _NOT_OFFERED.get(key, {}).items() for pattern in listed]
    return next((text for text, pattern in patterns if re.fullmatch(pattern, value.lower())), None)


def not_offered(key: str, value: object) -> str | None:
    """The advice as a sentence that says that `section.key` has no such `value`; None where none is known."""
    text = advice(key, value)
    return text and f"`{value}` is not offered: {text}"


def without_effect(key: str, value: Any) -> bool:
    """Whether leaving out another tool's `key: value` is known not to change the trained weights."""
    off = value is False or value in ("", [], {})
    return off or _WITHOUT_EFFECT.fullmatch(spelt(key)) is not None
