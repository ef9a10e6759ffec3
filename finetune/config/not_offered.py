"""Values that other tools offer and this one does not: what to write or use instead.

They are what people know and try first, so the nearest name that is offered (`fp4` for `fp8`) would mislead them.
`not_offered.json` lists, for each of our keys, the advice with the patterns of values (in lower case) that it is for.
"""

from __future__ import annotations

import json
import re
from importlib import resources

_VALUES: dict[str, dict[str, list[str]]] = json.loads(
    resources.files(__package__).joinpath("not_offered.json").read_text(encoding="utf-8")
)


def advice(key: str, value: object) -> str | None:
    """What to write or use instead of a `value` that `section.key` does not have; None where that is not known."""
    if not isinstance(value, str):
        return None
    patterns = [(text, pattern) for text, listed in _VALUES.get(key, {}).items() for pattern in listed]
    return next((text for text, pattern in patterns if re.fullmatch(pattern, value.lower())), None)


def cure(key: str, value: object) -> str | None:
    """The advice as a sentence that says that `section.key` has no such `value`; None where none is known."""
    text = advice(key, value)
    return text and f"`{value}` is not offered: {text}"
