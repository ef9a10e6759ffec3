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
MAX_DIGITS = 100  # Python refuses to read integers over 4,300 digits with an error of its own


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
    if _INT.match(text) and len(text) <= MAX_DIGITS:
        return int(text)
    if _OCTAL.match(text) and len(text) <= MAX_DIGITS:
        return int(text[2:], 8)
    if _HEX.match(text) and len(text) <= MAX_DIGITS:
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
        problem, tagged = _scan(text)
        if problem is not None:
            return Document({}, {}, [problem])
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        return Document({}, {}, [Problem(mark.line + 1 if mark else 0, f"not valid YAML: {error.problem}")])
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return Document({}, {}, [Problem(line, f"the character #x{error.character:04x} is not allowed in YAML")])
    if root is None:
        return Document({}, {}, [])
    if root.start_mark.index in tagged:
        line = root.start_mark.line + 1
        return Document({}, {}, [Problem(line, f"the tag `{tagged[root.start_mark.index]}` is not allowed")])
    if not isinstance(root, yaml.MappingNode):
        return Document({}, {}, [Problem(root.start_mark.line + 1, "expected `section:` lines at the top level")])
    builder = _Builder(tagged)
    values = builder.mapping(root, ())
    return Document(values, builder.lines, builder.problems)


def _scan(text: str) -> tuple[Problem | None, dict[int, str]]:
    """The first alias or excess of depth, and the explicit tags by the index where their node starts.

    Events are made as they are asked for, so what lies deeper is never parsed.
    """
    depth = 0
    tagged: dict[int, str] = {}
    loader = yaml.SafeLoader(text)
    while True:
        try:
            event = loader.get_event()
        except (ValueError, OverflowError):  # of chr()
            return Problem(loader.line + 1, "not valid YAML: an escape such as `\\U00110000` that is no character"), {}
        if event is None:
            return None, tagged
        assert event.start_mark is not None
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            return Problem(line, "aliases (`*name`) are not used here; write the value out"), {}
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            return Problem(line, "nested too deeply"), {}
        if getattr(event, "tag", None) is not None:
            tagged[event.start_mark.index] = event.tag


class _Builder:
    """Turns composed nodes into plain values, noting lines and problems as it goes."""

    def __init__(self, tagged: dict[int, str]) -> None:
        self.tagged = tagged
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem(line, "a key must be a plain word"))
                continue
            if self._has_tag(key_node):
                continue
            key = key_node.value
            if not key.isprintable():
                self.problems.append(Problem(line, f"the key {key!a} has characters that no key has"))
                continue
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
        if self._has_tag(node):
            return None
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        # A quoted or block scalar is text, whatever it looks like.
        return scalar(node.value) if node.style is None else self._text(node.value, line)

    def _text(self, text: str, line: int) -> str | None:
        """`text` with its surrogate pairs joined, which is how JSON escapes a character above U+FFFF."""
        try:
            joined = text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self.problems.append(Problem(line, "half of a surrogate pair (`\\ud800` to `\\udfff`) is no character"))
            return None
        if "\0" in joined:
            self.problems.append(Problem(line, "a null character (`\\0`) is not allowed in text"))
            return None
        return joined

    def _has_tag(self, node: yaml.Node) -> bool:
        tag = self.tagged.get(node.start_mark.index)
        if tag is None:
            return False
        self.problems.append(Problem(node.start_mark.line + 1, f"the tag `{tag}` is not allowed; write a plain value"))
        return True
