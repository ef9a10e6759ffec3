"""Control tokens in the text of rows, such as `<|im_end|>` in a question, are trained as ordinary text.

Only the chat template and the tokenizer itself write control tokens, so no row can forge a turn. Before the template is
rendered, the first character of each control token in a row is replaced by a placeholder (stand-in). A copy of the
tokenizer restores it right after matching control tokens and before normalization. Rows without control tokens are
tokenized as usual, and nothing else changes in the others: merges still cross the boundary of row and template.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from finetune.data.examples import Chat, Completion, Example, RowError, Text, Tokens, in_common
from finetune.model.source import chat_template

# Anatolian hieroglyphs, out of use for 2,700 years: printable, without upper and lower case and not white space, so
# no template changes them.
_FIRST_STAND_IN = 0x14400

_PROBE = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]


# A regular expression without a match.
_NOTHING = r"(?!)"

Escapable = TypeVar("Escapable", bound=Example)


def escaped(example: Escapable, tokenizer: Any) -> Escapable:
    """The example with stand-ins in the control tokens of its text; unchanged if it has none.

    An EOS token at the end of a text or completion is dropped, since every row gets one. Raises RowError if the
    tokenizer cannot treat control tokens as text.
    """
    match example:
        case Tokens():
            return example
        case Text(text):
            example = replace(example, text=text.removesuffix(tokenizer.eos_token))
        case Completion(_, completion):
            example = replace(example, completion=completion.removesuffix(tokenizer.eos_token))
    control = _control(tokenizer)
    token = next(filter(None, map(control.first, texts(example))), None)
    if token is None:
        return example
    if not tokenizer.is_fast:
        raise RowError(
            f"its text contains the control token `{token}`, which this tokenizer cannot treat as text, because it is "
            "written in Python; remove it from the row"
        )
    if any(letter in text for text in texts(example) for letter in control.stand_ins.values()):
        raise RowError(f"its text contains the control token `{token}` and Anatolian hieroglyphs; remove either")
    if isinstance(example, Chat):
        # Roles are validated by now, and templates compare them.
        messages = [{**control.escape(message), "role": message["role"]} for message in example.messages]
        return replace(example, messages=messages, tools=control.escape(example.tools), escaped=True)
    return replace(example, **{name: control.escape(text) for name, text in vars(example).items()} | {"escaped": True})


def plain(text: str, tokenizer: Any) -> str:
    """An escaped text, unescaped."""
    return text.translate({ord(stand_in): letter for letter, stand_in in _control(tokenizer).stand_ins.items()})


def tokenize(texts: list[str], tokenizer: Any, special: bool) -> list[Any]:
    """The `tokenizers.Encoding` of escaped texts; `special` adds the tokenizer's special tokens (BOS, EOS)."""
    return _reading_text(tokenizer).encode_batch(texts, add_special_tokens=special)


def check(text: str, ids: list[int], tokenizer: Any, special: bool) -> None:
    """Raise RowError if an escaped text has more control tokens than its template wrote, as in some unigram models."""
    control = _control(tokenizer)
    written = len(control.pattern.findall(text)) + (tokenizer.num_special_tokens_to_add() if special else 0)
    made = [token for token in ids if token in control.ids]
    if len(made) > written:
        raise RowError(
            "its text contains a control token that the tokenizer cannot split into other pieces; remove it from the "
            f"row. It is one of {', '.join(sorted(set(tokenizer.convert_ids_to_tokens(made))))}"
        )


class Around(NamedTuple):
    """What a tokenizer writes `before` and `after` a text, such as BOS, and the control tokens that its chat template
    writes around `turns`; `opens`: whether the template begins with what the tokenizer writes before a text.
    """

    before: list[int]
    after: list[int]
    turns: frozenset[int]
    opens: bool


@chat_template.kept_by_tokenizer
def around(tokenizer: Any) -> Around:
    """See `Around`."""
    try:
        word, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    except Exception:  # tokenizers raises plain Exception for a word that is unknown
        word = whole = []
    at = next((at for at in range(len(whole)) if word and whole[at : at + len(word)] == word), None)
    before, after = ([], []) if at is None else (whole[:at], whole[at + len(word) :])
    try:
        written = chat_template.ids(tokenizer, _PROBE, prompt=True)
    except Exception:  # a template may raise anything; one that cannot be rendered writes no tokens
        written = []
    turns = {*_tokens(tokenizer).values()} & {*written}
    turns -= {*before, *after, tokenizer.bos_token_id, tokenizer.eos_token_id}
    return Around(before, after, frozenset(turns), written[: len(before)] == before)


@dataclass(frozen=True)
class _Control:
    """The control tokens of a tokenizer with its chat template.

    `stand_ins` maps characters to their stand-ins. `bracketed` are texts that become a control token inside the
    brackets that some templates write around names. `normalize` is the normalizer, if control tokens are matched after
    it: those of `look_alikes`, which is what it makes of them.
    """

    ids: frozenset[int]
    pattern: re.Pattern[str]
    starts: re.Pattern[str]
    bracketed: frozenset[str]
    stand_ins: dict[str, str]
    normalize: Any
    look_alikes: re.Pattern[str]

    def first(self, text: str) -> str | None:
        if match := self.pattern.search(text) or (self.normalize and self.look_alikes.search(self.normalize(text))):
            return match[0]
        return text if text in self.bracketed else None

    def escape(self, value: Any) -> Any:
        """The value with stand-ins in all nested strings, dictionary keys included."""
        if isinstance(value, str):
            if value in self.bracketed:
                value = self.stand_ins[value[0]] + value[1:]
            return self.starts.sub(lambda start: self.stand_ins[start[0]], value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        return [self.escape(item) for item in value] if isinstance(value, list) else value


def texts(value: Any) -> Iterator[str]:
    """All strings of an example or nested in a value, dictionary keys included."""
    match value:
        case str():
            yield value
        case Chat(messages, _, tools):
            yield from texts(messages)
            yield from texts(tools)
        case Completion(prompt, completion):
            yield from (prompt, completion)
        case Text(text):
            yield text
        case Mapping():
            for key, item in value.items():
                yield from texts(key)
                yield from texts(item)
        case list():
            for item in value:
                yield from texts(item)


@chat_template.kept_by_tokenizer
def _control(tokenizer: Any) -> _Control:
    tokens = _tokens(tokenizer)
    pattern = _any_of(sorted(tokens)) if tokens else _NOTHING
    bracketed = frozenset(inner for inner in (token[1:-1] for token in tokens) if re.search(r"\W", inner))
    first = sorted({text[0] for text in (*tokens, *bracketed)})
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    normalized = [text for text, token in tokens.items() if tokenizer.added_tokens_decoder[token].normalized]
    normalize = normalizer.normalize_str if normalizer and normalized else None
    look_alikes = sorted({normalize(text) for text in normalized} - {""}) if normalize else []
    return _Control(
        # Any text may contain unknown tokens.
        ids=frozenset(tokens.values()) - {tokenizer.unk_token_id},
        pattern=re.compile(pattern),
        starts=re.compile(f"(?={pattern}).", re.DOTALL),
        bracketed=bracketed,
        stand_ins={letter: chr(_FIRST_STAND_IN + number) for number, letter in enumerate(first)},
        normalize=normalize,
        look_alikes=re.compile(_any_of(look_alikes) if look_alikes else _NOTHING),
    )


def _tokens(tokenizer: Any) -> dict[str, int]:
    """Control tokens by content: special tokens, and added tokens that the template writes around turns.

    Some tokenizers (DeepSeek's) do not mark the tokens that open a turn as special. Pairs of tags inside an answer,
    `<think>` and `</think>`, are part of its text.
    """
    added = {token.content: (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()}

    def is_of_pair(text: str) -> bool:  # <name> and </name>
        return f"{text[:1]}/{text[1:]}" in added or (text[1:2] == "/" and text[:1] + text[2:] in added)

    tokens = {text: number for text, (number, special) in added.items() if special}
    turns = {text: number for text, (number, special) in added.items() if not special and not is_of_pair(text)}
    if turns:
        try:
            written = chat_template.ids(tokenizer, _PROBE, prompt=True)
        except Exception:  # a template may raise anything; one that cannot be rendered writes no tokens
            return tokens
        # Tokens of system, tool and tool-call turns are found in the template's source.
        spelled = str(tokenizer.chat_template)
        tokens |= {text: number for text, number in turns.items() if number in written or text in spelled}
    return tokens


def _any_of(words: list[str]) -> str:
    """A regular expression for the sorted `words`, as a trie, so that matching does not slow down with their number."""
    shared = words[0][: in_common(words[0], words[-1])]
    rests = [word[len(shared) :] for word in words]
    branches = [_any_of(list(these)) for _, these in itertools.groupby(filter(None, rests), key=lambda rest: rest[0])]
    if not branches:
        return re.escape(shared)
    return f"{re.escape(shared)}(?:{'|'.join(branches)}){'?' if '' in rests else ''}"


@chat_template.kept_by_tokenizer
def _reading_text(tokenizer: Any) -> Any:
    """A copy of the tokenizer's backend that restores the original characters after matching control tokens."""
    from tokenizers import Tokenizer

    tokens = _tokens(tokenizer)
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in rules["added_tokens"]:
        if token["content"] in tokens:
            token["normalized"] = False  # else it is matched after normalization, which restores the characters
    back = [
        {"type": "Replace", "pattern": {"String": stand_in}, "content": letter}
        for letter, stand_in in _control(tokenizer).stand_ins.items()
    ]
    own = [rules["normalizer"]] if rules["normalizer"] else []
    copy = Tokenizer.from_str(json.dumps({**rules, "normalizer": {"type": "Sequence", "normalizers": [*back, *own]}}))
    copy.no_padding()
    copy.no_truncation()
    copy.encode_special_tokens = tokenizer.backend_tokenizer.encode_special_tokens
    return copy
