"""Strict YAML with line numbers: values mean what they look like, and every value knows its line.

The YAML 1.2 core schema, not 1.1: `no` is the string "no", `2e-4` is a number, `0o17` is octal and `017` is
seventeen (https://yaml.org/spec/1.2.2/#103-core-schema). Duplicate keys and tags such as `!!python/object` are
refused. PyYAML composes the nodes; its own constructors support only 1.1 and keep the last of two equal keys.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

Path = tuple[str, ...]

_CORE_SCHEMA: tuple[tuple[str, Callable[[str], Any]], ...] = (
    (r"~|null|Null|NULL|", lambda _: None),
    (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    (r"[-+]?[0-9]+", int),
    (r"0o[0-7]+", lambda text: int(text, 8)),
    (r"0x[0-9a-fA-F]+", lambda text: int(text, 16)),
    (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", float),
    (r"[-+]?(\.inf|\.Inf|\.INF)", lambda text: float(text.replace(".", ""))),
    (r"\.nan|\.NaN|\.NAN", lambda _: math.nan),
)


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a file: the 1-based line (0 when the file as a whole) and what to do about it."""

    line: int
    message: str


@dataclass(frozen=True)
class Document:
    """A parsed mapping with, for each key path, the line it stands on."""

    values: dict[str, Any]
    lines: dict[Path, int]
    problems: list[Problem]


def scalar(text: str) -> Any:
    """Resolve one plain scalar by the YAML 1.2 core schema: `"2e-4"` gives 0.0002, `"no"` gives "no"."""
    return next((read(text) for pattern, read in _CORE_SCHEMA if re.fullmatch(pattern, text)), text)


def parse(text: str) -> Document:
    """Parse a YAML mapping; every problem found is in `Document.problems`, none is raised."""
    return copy.deepcopy(_parsed(text))


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Document:
    """`parse`, cached by the text: a run reads its config many times, and each parse takes hundredths of a second."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return _refused(line, f"the character #x{error.character:04x} is not allowed in YAML")
    try:
        root = loader.get_single_node()
    except _Refused as error:
        return _refused(*error.args)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        remedy = next((remedy for part, remedy in _REMEDIES.items() if part in str(error.problem)), "")
        return _refused(mark.line + 1 if mark else 0, f"not valid YAML: {error.problem}{remedy}")
    if root is None:
        return Document({}, {}, [])
    if not isinstance(root, yaml.MappingNode):
        return _refused(root.start_mark.line + 1, "expected `section:` lines at the top level")
    builder = _Builder(loader.tags)
    return Document(builder.value(root, ()) or {}, builder.lines, builder.problems)


_REMEDIES = {
    "found character '\\t'": "; indent with spaces",
    "found unknown escape character": "; write a path with / or in single quotes, where a backslash is one",
    "mapping values are not allowed here": "; the line before may lack its colon, or a text with `: ` its quotes",
    "expected '<document start>'": "; a config is a YAML file of sections, such as `model:`, with indented keys",
    "expected alphabetic or numeric character": "; quote what begins with * or &, or write a pattern as ./*.jsonl",
    "expected <block end>": "; the lines of a section begin at the same column",
}
"""Remedies by a part of PyYAML's message."""


def _refused(line: int, message: str) -> Document:
    return Document({}, {}, [Problem(line, message)])


class _Refused(Exception):
    """A line, and what is wrong there."""


class _Loader(yaml.SafeLoader):
    """Composes the nodes of a text, and notes those with an explicit tag. Raises _Refused for aliases."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tags: dict[yaml.Node, str] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise _Refused(line, "aliases (`*name`) are not used here; write the value out")
        node = super().compose_node(parent, index)
        if node is not None and event.tag is not None:
            self.tags[node] = event.tag
        return node


class _Builder:
    """Turns composed nodes into plain values, noting lines and problems as it goes."""

    def __init__(self, tags: dict[yaml.Node, str]) -> None:
        self.tags = tags
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []

    def value(self, node: yaml.Node, path: Path) -> Any:
        if path:
            self.lines.setdefault(path, node.start_mark.line + 1)
        if node in self.tags:
            return self._refuse(node, f"the tag `{self.tags[node]}` is not allowed; write a plain value")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        # A quoted or block scalar is text, whatever it looks like.
        return scalar(node.value) if node.style is None else node.value

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(key_node, "a key must be a plain word")
            elif key_node in self.tags:
                self._refuse(key_node, f"the tag `{self.tags[key_node]}` is not allowed; write a plain value")
            elif key_node.style is None and ":" in key and value_node.value == "" and value_node.style is None:
                self._refuse(key_node, f"`{key}` lacks a space after the colon: `{': '.join(key.rsplit(':', 1))}`")
            elif key in values:
                first, dotted = self.lines[(*path, key)], ".".join((*path, key))
                self._refuse(key_node, f"`{dotted}` is given twice, first on line {first}; keep one")
            else:
                self.lines[(*path, key)] = key_node.start_mark.line + 1
                values[key] = self.value(value_node, (*path, key))
        return values

    def _refuse(self, node: yaml.Node, message: str) -> None:
        self.problems.append(Problem(node.start_mark.line + 1, message))
