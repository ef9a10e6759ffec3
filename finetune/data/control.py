"""Control tokens in the text of rows, such as `<|im_end|>` in a question: they are trained as ordinary text.

Only the chat template and the tokenizer itself write control tokens, so no row can forge a turn. In each control token
that a row contains, the first character is replaced by a placeholder before the template is rendered. A copy of the
tokenizer restores it after it has looked for control tokens, and before anything else. So rows without control tokens
are tokenized as usual, and in the others nothing else changes: merges still cross the border of row and template.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from finetune.data.examples import Chat, Completion, Example, RowError, Text, Tokens, in_common
from finetune.model import chat_template

# Letters of a script that is dead for 2,700 years (Anatolian hieroglyphs): printable, and neither blanks nor of two
# cases, so that no template changes them.
_FIRST_STAND_IN = 0x14400

_PROBE = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]


Found = TypeVar("Found", bound=Example)


def escaped(example: Found, tokenizer: Any) -> Found:
    """The example with stand-ins in the control tokens that its text spells; itself, where there are none.

    An end of text at the end of a text or completion is the one that each gets in any case, and is left out. Raises
    RowError where the tokenizer cannot be made to read them as text.
    """
    match example:
        case Tokens():
            return example
        case Text(text):
            example = replace(example, text=text.removesuffix(tokenizer.eos_token))
        case Completion(_, completion):
            example = replace(example, completion=completion.removesuffix(tokenizer.eos_token))
    control = _control(tokenizer)
    found = next(filter(None, map(control.first, texts(example))), None)
    if found is None:
        return example
    if not tokenizer.is_fast:
        raise RowError(
            f"its text spells the control token `{found}`, which this tokenizer cannot write as text, because it is "
            "written in Python; remove it from the row"
        )
    if any(letter in text for text in texts(example) for letter in control.stand_ins.values()):
        raise RowError(f"its text spells the control token `{found}` beside Anatolian hieroglyphs; remove either")
    if isinstance(example, Chat):
        # Roles are known names by now, and templates compare them.
        messages = [{**control.escape(message), "role": message["role"]} for message in example.messages]
        return replace(example, messages=messages, tools=control.escape(example.tools), escaped=True)
    return replace(example, **{name: control.escape(text) for name, text in vars(example).items()} | {"escaped": True})


def plain(text: str, tokenizer: Any) -> str:
    """What an escaped text was before."""
    return text.translate({ord(stand_in): letter for letter, stand_in in _control(tokenizer).stand_ins.items()})


def tokenize(texts: list[str], tokenizer: Any, special: bool) -> list[Any]:
    """The `tokenizers.Encoding` of escaped texts; with `special`, between the tokens around any text."""
    copy = _reading_text(tokenizer, str(tokenizer.chat_template), len(tokenizer))
    return copy.encode_batch(texts, add_special_tokens=special)


def check(text: str, ids: list[int], tokenizer: Any, special: bool) -> None:
    """Raise RowError where an escaped text has become more control tokens than its template wrote.

    A unigram model knows `</s>` as a piece like any other.
    """
    control = _control(tokenizer)
    written = len(control.pattern.findall(text)) + (tokenizer.num_special_tokens_to_add() if special else 0)
    made = [token for token in ids if token in control.ids]
    if len(made) > written:
        raise RowError(
            "its text spells a control token, and the tokenizer has no other pieces for it; remove it from the row. It "
            f"is one of {', '.join(sorted(set(tokenizer.convert_ids_to_tokens(made))))}"
        )


@dataclass(frozen=True)
class _Control:
    """The control tokens of a tokenizer with its chat template.

    `stand_ins` are by the characters that they stand for. `bracketed` are texts that become a control token in the
    brackets that some templates write around names. `normalize` is what happens to a text before some control tokens
    are looked for.
    """

    ids: frozenset[int]
    pattern: re.Pattern[str]
    starts: re.Pattern[str]
    bracketed: frozenset[str]
    stand_ins: dict[str, str]
    normalize: Any

    def first(self, text: str) -> str | None:
        """A control token that the text spells."""
        if found := self.pattern.search(text) or (self.normalize and self.pattern.search(self.normalize(text))):
            return found[0]
        return text if text in self.bracketed else None

    def escape(self, value: Any) -> Any:
        """The value with stand-ins in all texts within it, names of fields included."""
        if isinstance(value, str):
            if value in self.bracketed:
                value = self.stand_ins[value[0]] + value[1:]
            return self.starts.sub(lambda found: self.stand_ins[found[0]], value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        return [self.escape(item) for item in value] if isinstance(value, list) else value


def texts(value: Any) -> Iterator[str]:
    """All texts of an example or within a value, names of fields included."""
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


def _control(tokenizer: Any) -> _Control:
    return _control_of(tokenizer, str(tokenizer.chat_template), len(tokenizer))


@functools.lru_cache(maxsize=8)
def _control_of(tokenizer: Any, _: str, __: int) -> _Control:
    tokens = _tokens(tokenizer)
    # No text spells a pattern that matches nothing.
    pattern = _any_of(sorted(tokens)) if tokens else r"(?!)"
    bracketed = frozenset(inner for inner in (token[1:-1] for token in tokens) if re.search(r"\W", inner))
    first = sorted({text[0] for text in (*tokens, *bracketed)})
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    normalized = any(tokenizer.added_tokens_decoder[token].normalized for token in tokens.values())
    return _Control(
        # Any text may be unknown.
        ids=frozenset(tokens.values()) - {tokenizer.unk_token_id},
        pattern=re.compile(pattern),
        starts=re.compile(f"(?={pattern}).", re.DOTALL),
        bracketed=bracketed,
        stand_ins={letter: chr(_FIRST_STAND_IN + number) for number, letter in enumerate(first)},
        normalize=normalizer.normalize_str if normalizer and normalized else None,
    )


def _tokens(tokenizer: Any) -> dict[str, int]:
    """The control tokens by their spelling: those called special, and those that the template writes around turns.

    Some tokenizers (DeepSeek's) do not call the tokens special that open a turn. Tokens that open and close a part of
    an answer, `<think>` and `</think>`, belong to its text.
    """
    added = {token.content: (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
    found = {text: number for text, (number, special) in added.items() if special}
    turns = {text: number for text, (number, special) in added.items() if not special and not _is_tag(text, added)}
    if turns:
        try:
            written = chat_template.ids(tokenizer, _PROBE, prompt=True)
        except Exception:  # of whatever kind a template raises; one that cannot be rendered writes none
            return found
        # Those of system, tool and call turns stand in the template's text.
        spelled = str(tokenizer.chat_template)
        found |= {text: number for text, number in turns.items() if number in written or text in spelled}
    return found


def _is_tag(text: str, known: Collection[str]) -> bool:
    """Whether there is an opening and a closing token of this name."""
    return f"{text[:1]}/{text[1:]}" in known or (text[1:2] == "/" and text[:1] + text[2:] in known)


def _any_of(words: list[str]) -> str:
    """A pattern of the sorted `words` that looks at each letter once, however many words there are."""
    shared = words[0][: in_common(words[0], words[-1])]
    rests = [word[len(shared) :] for word in words]
    branches = [_any_of(list(these)) for _, these in itertools.groupby(filter(None, rests), key=lambda rest: rest[0])]
    if not branches:
        return re.escape(shared)
    return f"{re.escape(shared)}(?:{'|'.join(branches)}){'?' if '' in rests else ''}"


@functools.lru_cache(maxsize=2)
def _reading_text(tokenizer: Any, _: str, __: int) -> Any:
    """A copy of the tokenizer's backend that turns stand-ins back after it has looked for control tokens."""
    from tokenizers import Tokenizer

    tokens = _tokens(tokenizer)
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in rules["added_tokens"]:
        if token["content"] in tokens:
            token["normalized"] = False  # it would be looked for after normalization, among letters turned back
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
