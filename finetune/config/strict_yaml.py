"""Strict YAML with positions: what a line says is what the config gets, and every value knows its line.

The YAML 1.2 core schema, not 1.1: `no` is the string "no", `2e-4` is a number, `0o17` is octal and `017` is
seventeen (https://yaml.org/spec/1.2.2/#103-core-schema). Duplicate keys and tags such as `!!python/object` are
refused. Nothing is constructed but dicts, lists, strings, numbers, booleans and null.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import yaml

Path = tuple[str, ...]

_NULL = re.compile(r"^(~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9]+$")
_OCTAL = re.compile(r"^0o[0-7]+$")
_HEX = re.compile(r"^0x[0-9a-fA-F]+$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_INF = re.compile(r"^([-+]?)(\.inf|\.Inf|\.INF)$")
_NAN = re.compile(r"^(\.nan|\.NaN|\.NAN)$")

# A config is a page of text. The bounds keep a hostile file from costing memory or the stack.
MAX_BYTES = 1 << 20
MAX_DEPTH = 32


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
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        return int(text)
    if _OCTAL.match(text):
        return int(text[2:], 8)
    if _HEX.match(text):
        return int(text[2:], 16)
    if _FLOAT.match(text):
        return float(text)
    if infinite := _INF.match(text):
        return -math.inf if infinite.group(1) == "-" else math.inf
    if _NAN.match(text):
        return math.nan
    return text


def parse(text: str) -> Document:
    """Parse a YAML mapping; every problem found is in `Document.problems`, none is raised."""
    if len(text) > MAX_BYTES:
        return Document({}, {}, [Problem(0, f"the file is larger than {MAX_BYTES} characters; a config is a page")])
    try:
        if (line := _alias_line(text)) is not None:
            return Document({}, {}, [Problem(line, "aliases (`*name`) are not used here; write the value out")])
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        return Document({}, {}, [Problem(mark.line + 1 if mark else 0, f"not valid YAML: {error.problem}")])
    except (yaml.YAMLError, RecursionError) as error:
        return Document({}, {}, [Problem(0, f"not valid YAML: {error}")])
    if root is None:
        return Document({}, {}, [])
    if not isinstance(root, yaml.MappingNode):
        return Document({}, {}, [Problem(root.start_mark.line + 1, "expected `section:` lines at the top level")])
    builder = _Builder()
    values = builder.mapping(root, ())
    return Document(values, builder.lines, builder.problems)


def _alias_line(text: str) -> int | None:
    """The line of the first alias: a few of them expand without bound, and no config needs any."""
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            return event.start_mark.line + 1 if event.start_mark else 0
    return None


class _Builder:
    """Turns composed nodes into plain values, noting lines and problems as it goes."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem(line, "a key must be a plain word"))
                continue
            key = key_node.value
            if key in values:
                first = self.lines[(*path, key)]
                dotted = ".".join((*path, key))
                message = f"`{dotted}` is given twice, first on line {first}; keep one"
                self.problems.append(Problem(line, message))
                continue
            self.lines[(*path, key)] = line
            values[key] = self.value(value_node, (*path, key))
        return values

    def value(self, node: yaml.Node, path: Path) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        if not _is_core_tag(node):
            self.problems.append(Problem(line, f"the tag `{node.tag}` is not allowed; write a plain value"))
            return None
        if len(path) > MAX_DEPTH:
            self.problems.append(Problem(line, "nested too deeply"))
            return None
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        # A quoted or block scalar is text, whatever it looks like.
        return scalar(node.value) if node.style is None else node.value


def _is_core_tag(node: yaml.Node) -> bool:
    """PyYAML resolves plain scalars by YAML 1.1 before we look; those tags are harmless, explicit others are not."""
    prefix = "tag:yaml.org,2002:"
    known = {"str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value"}
    return node.tag.startswith(prefix) and node.tag.removeprefix(prefix) in known
