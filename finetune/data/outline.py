"""Where the texts of a conversation are in its rendering, and which of them the chat template leaves out.

A copy of the conversation is rendered in which each text, name, key and number is a unique word instead: a placeholder.
Placeholders that are missing belong to what is lost in each row of this shape: with these roles, fields, calls and
tools. The text between the placeholders is that of the template, so a row's own rendering must be the same with the
row's texts in it. A row whose rendering is not, because the template reads the texts themselves, is searched for each
of them. A mark, here as in `masks`, is the template's `{% generation %}` around an assistant turn.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from finetune.data.examples import Chat, Message, RowError, in_common
from finetune.errors import FinetuneError
from finetune.model.source import chat_template as template

# Fields of a message that templates take a thought from, besides its content; transformers gives templates a thought in
# each of them under its other names.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")

# How many shapes of conversations are kept for a tokenizer.
_KEPT = 1024
_MOST_LEAVES = 99_999
_BEFORE_ARGUMENTS = 6  # keys of the path of a call's arguments: messages[n].tool_calls[n].function.arguments

_TAG = re.compile(r"(</?think>)")
_SPACE = re.compile(r"\s*")
_PLACEHOLDER = re.compile(r"0qz(\d{5})zq|8370(\d{5})(?:\.5)?")

# Keys of a tool's schema whose texts templates compare or translate, such as the names of types.
_SCHEMA_WORDS = frozenset({"type", "format", "pattern", "required", "$ref", "$schema", "$id"})

_NOTHING = object()

Keys = tuple[str | int, ...]
LeafKind = Literal["text", "key", "thought", "free"]


class Leaf(NamedTuple):
    """A text or number of a row, and the index of its message.

    `kind`: a template may leave out what is `free` (ids, names that repeat a call's, the small print of a tool) and a
    `thought` that led to an earlier answer.
    """

    path: Keys
    value: str | int | float
    kind: LeafKind
    message: int


class Place(NamedTuple):
    """The characters of a leaf in a rendering; `again` if it repeats an id, or what the template has written before."""

    start: int
    end: int
    message: int
    again: bool


@dataclass(frozen=True)
class Outline:
    """The rendering of conversations of one shape.

    `pieces` are the template's text before each leaf, by number, and `tail` that after the last; `lost` the numbers of
    leaves that it leaves out, `lost_tools` what of the tools, and `lost_constant` a boolean or null. `headers` is what
    of each assistant turn that the template marks is written by its prompt, and `beyond` the rest of that prompt, which
    the conversation does not have; of a template without marks, that of the last answer alone.
    """

    pieces: list[tuple[str, int]]
    tail: str
    lost: frozenset[int] = frozenset()
    lost_tools: str = ""
    lost_constant: str = ""
    headers: Mapping[int, str] = field(default_factory=dict)
    beyond: Mapping[int, str] = field(default_factory=dict)


class Found(NamedTuple):
    """What `check` has found in a row's rendering.

    `places` are those of its leaves in order, None if they are not known. The thoughts of `without_thought`, indices of
    messages before the last one, are left out.
    """

    outline: Outline | None
    places: list[Place] | None
    without_thought: frozenset[int]


def check(example: Chat, text: str, tokenizer: Any, *, marks: bool = False) -> Found:
    """Find what the row holds in its rendering `text`; with `marks`, also the headers of the template's marks.

    Raises RowError for a text, a name of a function or parameter, or an argument that is not in it, and for the thought
    of the last message.
    """
    placeholders = _Placeholders()
    messages = [placeholders.message(message, number) for number, message in enumerate(example.messages)]
    if len(placeholders.leaves) > _MOST_LEAVES:
        return Found(None, None, frozenset())
    key = json.dumps([messages, example.tools, marks], default=str)
    known = _outlines(tokenizer)
    if key not in known:
        if len(known) >= _KEPT:
            known.clear()
        known[key] = _outline(messages, placeholders.leaves, example, tokenizer, marks)
    outline = known[key]
    if outline is None:
        _search(placeholders.leaves, text)
        return Found(None, None, frozenset())
    _refuse_lost(outline, placeholders.leaves, example, tokenizer)
    places = _places(outline, placeholders.leaves, text)
    if places is None:
        _search(placeholders.leaves, text)
    thoughts = {
        leaf.message for n, leaf in enumerate(placeholders.leaves) if n in outline.lost and leaf.kind == "thought"
    }
    return Found(outline, places, frozenset(thoughts))


@template.kept_by_tokenizer
def _outlines(tokenizer: Any) -> dict[str, Outline | None]:
    return {}


class _Placeholders:
    """Makes copies with a placeholder for each text or number, and collects these in `leaves`.

    `constants` are the booleans and nulls with their paths, which stay as they are but for the one of number `changed`:
    it is the other boolean, or for a null an empty text, or no item of a list.
    """

    def __init__(self, changed: int = -1) -> None:
        self.leaves: list[Leaf] = []
        self.constants: list[tuple[Keys, bool | None]] = []
        self._changed = changed
        self._ids: dict[Any, str] = {}

    def message(self, message: Message, number: int) -> Message:
        where: Keys = ("messages", number)
        replaced = dict(message)
        content = message.get("content")
        if isinstance(content, str):
            # An answer's thoughts within tags have placeholders of their own; texts and tags alternate.
            thinks = message["role"] == "assistant" and "</think>" in content
            pieces = [*_TAG.split(content), ""] if thinks else [content, ""]
            replaced["content"] = "".join(
                self._text(piece, (*where, "content"), number, "thought" if tag == "</think>" else "text") + tag
                for piece, tag in zip(pieces[::2], pieces[1::2], strict=True)
            )
        elif isinstance(content, list):
            replaced["content"] = [
                {**part, "text": self._text(part["text"], (*where, "content", at), number)} if "text" in part else part
                for at, part in enumerate(content)
            ]
        thoughts: dict[str, str] = {}
        for name in THOUGHTS:
            if isinstance(thought := message.get(name), str):
                if thought not in thoughts:
                    thoughts[thought] = self._text(thought, (*where, name), number, "thought")
                replaced[name] = thoughts[thought]
        if calls := message.get("tool_calls"):
            replaced["tool_calls"] = []
            for at, call in enumerate(calls):
                inner, function, copy = (*where, "tool_calls", at), call["function"], dict(call)
                if isinstance(name := call.get("id"), str):
                    copy["id"] = self._id(False, name, (*inner, "id"), number)
                inner, name = (*inner, "function"), function["name"]
                self._ids[True, name] = placeholder = self._text(name, (*inner, "name"), number)
                arguments = self.value(function["arguments"], (*inner, "arguments"), number)
                replaced["tool_calls"].append(
                    {**copy, "function": {**function, "name": placeholder, "arguments": arguments}}
                )
        for name in ("name", "tool_call_id"):
            if isinstance(repeated := message.get(name), str):
                replaced[name] = self._id(name == "name", repeated, (*where, name), number)
        return replaced

    def value(self, value: Any, where: Keys, number: int) -> Any:
        """An argument with placeholders for the texts and numbers in it, and behind its keys."""
        if isinstance(value, str):
            return self._text(value, where, number)
        if value is None or isinstance(value, bool):
            self.constants.append((where, value))
            if len(self.constants) - 1 != self._changed:
                return value
            return not value if value is not None else _NOTHING if isinstance(where[-1], int) else ""
        if isinstance(value, int | float):
            placeholder = f"8370{self._add(Leaf(where, value, 'text', number)):05d}"
            return float(placeholder + ".5") if isinstance(value, float) else int(placeholder)
        if isinstance(value, Mapping):
            return {
                self._key(key, (*where, key), number): self.value(item, (*where, key), number)
                for key, item in value.items()
            }
        if isinstance(value, list):
            items = [self.value(item, (*where, at), number) for at, item in enumerate(value)]
            return [item for item in items if item is not _NOTHING]
        return value

    def schema(self, value: Any, where: Keys, key: str = "") -> Any:
        """A tool with placeholders behind the texts in it and the names of its parameters."""
        if isinstance(value, str):
            if key in _SCHEMA_WORDS or not value.strip():
                return value
            # Some templates leave out the descriptions of nested parameters, titles and defaults by design.
            outer = len(where) <= 4 or where[-4:-2] == ("parameters", "properties")
            needed = key == "name" or (key == "description" and outer)
            return value + self._text(value, where, -1, "text" if needed else "free")
        if isinstance(value, list):
            return [self.schema(item, (*where, at), key) for at, item in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        if key == "properties":
            return {
                self._key(name, (*where, name), -1): self.schema(item, (*where, name)) for name, item in value.items()
            }
        replaced = {name: self.schema(item, (*where, name), name) for name, item in value.items()}
        if isinstance(required := value.get("required"), list) and isinstance(value.get("properties"), Mapping):
            renamed = dict(zip(value["properties"], replaced["properties"], strict=True))
            replaced["required"] = [renamed.get(name, name) if isinstance(name, str) else name for name in required]
        return replaced

    def _add(self, leaf: Leaf) -> int:
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def _text(self, text: str, where: Keys, number: int, kind: LeafKind = "text") -> str:
        return f"0qz{self._add(Leaf(where, text, kind, number)):05d}zq" if text.strip() else text

    def _key(self, key: str, where: Keys, number: int) -> str:
        return f"{key}0qz{self._add(Leaf(where, key, 'key', number)):05d}zq"

    def _id(self, is_name: bool, text: str, where: Keys, number: int) -> str:
        """The placeholder of an id or a name that other messages repeat: nine characters, as some templates require."""
        if (is_name, text) not in self._ids:
            self._ids[is_name, text] = f"8370{self._add(Leaf(where, text, 'free', number)):05d}"
        return self._ids[is_name, text]


def _outline(
    messages: list[Message], leaves: Sequence[Leaf], example: Chat, tokenizer: Any, marks: bool
) -> Outline | None:
    """The outline of `messages` of placeholders; None if the template refuses them.

    With `marks`, also the headers of the turns that the template marks.
    """
    text, marked_spans = _rendered(tokenizer, messages, example.tools, marks=marks)
    if text is None:
        return None
    pieces, at = [], 0
    for found in _PLACEHOLDER.finditer(text):
        if (number := int(found[1] or found[2])) < len(leaves):
            pieces.append((text[at : found.start()], number))
            at = found.end()
    lost = frozenset(range(len(leaves))) - {number for _, number in pieces}
    lost |= _lost_names(messages, leaves, example, tokenizer)
    lost_tools = _lost_of_tools(example.messages, example.tools, tokenizer)
    lost_constant = _lost_constant(text, example, tokenizer)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    spans = [span for span in marked_spans if span[0] < span[1]]
    starts = dict(zip(answers, spans, strict=True)) if len(spans) == len(answers) else {}
    headers, beyond = {}, {}
    for turn in starts or answers[-1:]:
        prompt = _rendered(tokenizer, messages[:turn], example.tools, prompt=True)[0] or ""
        until = text
        if turn == answers[-1] and messages[-1]["role"] != "assistant":
            until = _rendered(tokenizer, messages[: turn + 1], example.tools)[0] or text
        shared = in_common(text, prompt)
        beyond[turn] = prompt[in_common(until, prompt) :]
        if turn in starts:
            start, end = starts[turn]
            headers[turn] = text[start : min(end, shared)]
    return Outline(pieces, text[at:], lost, lost_tools, lost_constant, headers, beyond)


def _lost_names(messages: list[Message], leaves: Sequence[Leaf], example: Chat, tokenizer: Any) -> set[int]:
    """Numbers of the names of calls without arguments that only the calls' results repeat."""
    calls = Counter(leaf.path[:4] for leaf in leaves if leaf.path[2] == "tool_calls" and leaf.kind != "free")
    lost = set()
    for number, leaf in enumerate(leaves):
        if calls[leaf.path[:4]] == 1 and leaf.kind == "text":
            text, _ = _rendered(tokenizer, messages[: leaf.message + 1], example.tools)
            if text is not None and f"0qz{number:05d}zq" not in text:
                lost.add(number)
    return lost


def _lost_constant(text: str, example: Chat, tokenizer: Any) -> str:
    """The path of the first boolean or null in an argument without which the rendering of placeholders is `text`.

    Of equal ones in the same place of a list's items the first and the last are tried: a template treats others alike.
    """
    as_written = _Placeholders()
    for at, message in enumerate(example.messages):
        as_written.message(message, at)
    alike: dict[Any, list[int]] = {}
    for number, (path, value) in enumerate(as_written.constants):
        place = path[:_BEFORE_ARGUMENTS], *("[]" if isinstance(key, int) else key for key in path)
        alike.setdefault((place, value), []).append(number)
    for number in sorted({number for numbers in alike.values() for number in (numbers[0], numbers[-1])}):
        changed = _Placeholders(changed=number)
        messages = [changed.message(message, at) for at, message in enumerate(example.messages)]
        if _rendered(tokenizer, messages, example.tools)[0] == text:
            return _shown(as_written.constants[number][0])
    return ""


def _rendered(
    tokenizer: Any, messages: list[Message], tools: Any, *, prompt: bool = False, marks: bool = False
) -> tuple[str | None, list[tuple[int, int]]]:
    try:
        return template.text(tokenizer, messages, tools=tools, prompt=prompt, marks=marks)
    except FinetuneError:
        raise
    except Exception:  # a template may raise anything, for example because it compares a text
        return None, []


def _lost_of_tools(messages: list[Message], tools: list[dict[str, Any]] | None, tokenizer: Any) -> str:
    """What of the tools is not in the rendering of `messages`, as a path; empty if nothing is."""
    if not tools:
        return ""
    placeholders = _Placeholders()
    text, _ = _rendered(tokenizer, messages, [placeholders.schema(tool, ("tools", n)) for n, tool in enumerate(tools)])
    if text is None:
        return ""
    needed = [(n, leaf) for n, leaf in enumerate(placeholders.leaves) if leaf.kind != "free"]
    return _named([leaf for n, leaf in needed if f"0qz{n:05d}zq" not in text], [leaf for _, leaf in needed])


def _named(lost: Sequence[Leaf], leaves: Iterable[Leaf]) -> str:
    """The path of the first lost leaf, shortened to the largest part of the row of which nothing is left."""
    if not lost:
        return ""
    paths, missing = [leaf.path for leaf in leaves], {leaf.path for leaf in lost}
    path = lost[0].path
    for depth in range(1 if path[0] == "tools" else 3, len(path)):
        if all(other in missing for other in paths if other[:depth] == path[:depth]):
            return _shown(path[:depth])
    return _shown(path)


def _shown(path: Keys) -> str:
    first, *others = path
    return str(first) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in others)


def _refuse_lost(outline: Outline, leaves: Sequence[Leaf], example: Chat, tokenizer: Any) -> None:
    needed = [leaf for leaf in leaves if leaf.kind in ("text", "key")]
    lost = [leaf for number, leaf in enumerate(leaves) if number in outline.lost]
    name = outline.lost_tools or _named([leaf for leaf in lost if leaf.kind in ("text", "key")], needed)
    if name := name or outline.lost_constant:
        raise RowError(refusal(name))
    last = len(example.messages) - 1
    for leaf in lost:
        if leaf.kind == "thought" and leaf.message == last:
            name = _shown(leaf.path)
            thought = "the thought in " * (leaf.path[-1] == "content")
            raise RowError(
                f"the chat template does not render {thought}`{name}`, so it would be lost; {thought_remedy(tokenizer)}"
            )


def refusal(name: str) -> str:
    remedy = "use a model whose template does, or set `data.chat_template` to a file with one"
    if re.search(r"tool_calls\[[1-9]", name):
        remedy = "write each call in a message of its own, followed by its result, or " + remedy
    return f"the chat template does not render `{name}`, so it would be lost; {remedy}"


def thought_remedy(tokenizer: Any, *, is_missing: bool = False) -> str:
    """How to write an answer's thought, or an empty one, so that the template renders it."""
    word, asked = "0qz00000zq", [{"role": "user", "content": "a"}]
    other = "set `data.chat_template` to a template that renders thoughts"
    ways = {
        "write {} in the content, as <think>…</think> before the answer": {
            "content": f"<think>\n{word}\n</think>\n\nb"
        },
        "write {} in `reasoning_content`": {"content": "b", "reasoning_content": word},
    }
    for way, answer in ways.items():
        text, _ = _rendered(tokenizer, [*asked, {"role": "assistant", **answer}], None)
        if text and word in text:
            other = f"{way.format('one, even if it is empty,' if is_missing else 'it')}, or {other}"
            break
    return f"{other}, or to a copy of this one whose prompt opens none" if is_missing else f"{other}, or remove it"


def _places(outline: Outline, leaves: Sequence[Leaf], text: str) -> list[Place] | None:
    """Where the leaves are in a rendering; None unless all else is as in the outline, but for white space."""
    places, seen = [], set()
    statics = [static for static, _ in outline.pieces] + [outline.tail]
    at: int | None = _after(statics[0], text, 0)
    for (_, number), static in zip(outline.pieces, statics[1:], strict=True):
        if at is None:
            return None
        leaf = leaves[number]
        if leaf.kind == "key":  # its placeholder is behind it
            start = end = at
            at = _after(static, text, end)
        else:
            start, at = _SPACE.match(text, at).end(), None  # type: ignore[union-attr]
            for form in _forms(leaf.value):
                end = start + len(form)
                if text.startswith(form, start) and (at := _after(static, text, end)) is not None:
                    break
        places.append(Place(start, end, leaf.message, number in seen or leaf.kind == "free"))
        seen.add(number)
    return places if at is not None and not text[at:].strip() else None


def _after(static: str, text: str, at: int) -> int | None:
    """The end of the template's text that comes at `at`, or after white space there."""
    blank: int = _SPACE.match(text, at).end()  # type: ignore[union-attr]
    found = text.find(static, at, blank + len(static))
    if found >= 0:
        return found + len(static)
    return blank if not static.strip() else None


def _forms(value: str | int | float) -> Iterator[str]:
    """How templates write a text (trimmed, within JSON or as Python does) or a number."""
    if not isinstance(value, str):
        yield json.dumps(value)
        return
    yield (trimmed := value.strip())
    for text in (value, trimmed):
        yield json.dumps(text, ensure_ascii=False)[1:-1]
        yield json.dumps(text)[1:-1]
        yield repr(text)[1:-1]


def _search(leaves: Sequence[Leaf], text: str) -> None:
    """Raise RowError for a needed leaf that is not in the text as often as in the row, white space aside."""
    letters = "".join(text.split())
    needed = [leaf for leaf in leaves if leaf.kind in ("text", "key")]
    counts = Counter(str(leaf.value) for leaf in needed)
    for leaf in needed:
        forms = {"".join(form.split()) for form in _forms(leaf.value)} - {""}
        if forms and sum(map(letters.count, forms)) < counts[str(leaf.value)]:
            raise RowError(refusal(_shown(leaf.path)))
