"""The built-in data sets `builtin:python_docs` and `builtin:python_pairs`: questions about Python's standard library.

All text is taken at run time from the docstrings of the running interpreter, so the data set needs no download and no
licence of its own; the rows depend on that interpreter's version and platform alone. `conversations` are for
fine-tuning, `pairs` for training on preferences, and `documents` for pre-training a base; the hash of an object's
qualified name decides what all of them hold out.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from finetune.data import stdlib_docs
from finetune.data.stdlib_docs import DocumentedObject

Split = Literal["train", "eval"]

EVAL_FRACTION = 0.08
"""Share of the qualified names that are held out."""

MIN_ANSWER_CHARS = 24
"""Shorter first paragraphs ("See above.") answer nothing."""

MAX_ANSWER_CHARS = 300
"""Longer first paragraphs are cut after the last sentence that fits, or left out if none does."""

_EXCHANGED_EVERY = 8
"""Words from one exchange of neighbours to the next in the rejected answer of a pair."""

QUESTIONS: dict[str, tuple[str, ...]] = {
    "module": ("What is the `{name}` module for?", "What does the module `{name}` provide?",
               "Describe the `{name}` module."),
    "class": ("What is `{name}`?", "What does the class `{name}` represent?", "Describe the class `{name}`."),
    "exception": ("When is `{name}` raised?", "What does the exception `{name}` mean?",
                  "Explain the exception `{name}`."),
    "function": ("What does `{name}` do?", "Explain what `{name}` does.", "What is the function `{name}` for?",
                 "How would you describe `{name}` in a sentence or two?"),
    "method": ("What does `{name}` do?", "What does the method `{name}` do?", "Explain the method `{name}`."),
    "attribute": ("What is the attribute `{name}`?", "What does `{name}` hold?"),
}  # fmt: skip
"""Question wordings for each kind of object. Kinds without wordings appear in `documents` only."""

_OPENS_WITH_A_CALL = re.compile(r"\s*[^\s(]+\s*\(")


def conversations(split: Split) -> list[dict[str, Any]]:
    """Question-and-answer rows `{"messages": [user, assistant]}` of one side of the split, sorted by name."""
    return [
        {
            "messages": [
                {"role": "user", "content": _question(documented)},
                {"role": "assistant", "content": _answer(documented)},
            ]
        }
        for documented in _splits()[split]
        if _is_askable(documented)
    ]


def pairs(split: Split) -> list[dict[str, Any]]:
    """Rows `{"prompt", "chosen", "rejected"}` of one side of the split: each question with its answer, and with the
    same answer in which words are out of order.
    """
    rows = []
    for row in conversations(split):
        asked, answered = row["messages"]
        garbled = {**answered, "content": _out_of_order(answered["content"])}
        rows.append({"prompt": [asked], "chosen": [answered], "rejected": [garbled]})
    return rows


def documents(split: Split) -> Iterator[str]:
    """Texts of one side of the split, sorted by name: name, signature and docstring, of private objects too."""
    for documented in _splits()[split]:
        yield f"{documented.name}{documented.signature}\n\n{documented.docstring}"


# Splitting --------------------------------------------------------------------------------------------------


@functools.cache
def _splits() -> dict[Split, list[DocumentedObject]]:
    train: list[DocumentedObject] = []
    held_out: list[DocumentedObject] = []
    for documented in _without_repeats(stdlib_docs.objects()):
        (held_out if _hash_fraction(documented.name) < EVAL_FRACTION else train).append(documented)
    return _without_leaks(train, held_out)


def _hash_fraction(text: str) -> float:
    """A number in [0, 1) that depends only on the text; `hash` differs between processes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _without_repeats(objects: Iterable[DocumentedObject]) -> list[DocumentedObject]:
    """Keep one object per docstring and per answer, under its best name; sorted by name.

    Most repeats are one object under several names, of which the public and then the shortest wins. The rest are copied
    docstrings, which would leak answers across the split.
    """
    seen_texts: set[str] = set()
    kept = []
    for documented in sorted(objects, key=lambda o: (not o.is_public, o.name.count("."), o.name)):
        texts = {_clean(documented.docstring)}
        if _is_askable(documented):
            texts.add(_answer(documented))
        if seen_texts.isdisjoint(texts):
            kept.append(documented)
        seen_texts |= texts
    return sorted(kept)


def _without_leaks(
    train: list[DocumentedObject], held_out: list[DocumentedObject]
) -> dict[Split, list[DocumentedObject]]:
    """Make the two sides disjoint in what they say, not only in which objects they are about.

    Afterwards no training text spells out a dotted held-out name, and no held-out answer occurs in a training
    text. Names without a dot (`re`, `print`) are everyday words, so only their docstrings are kept apart.
    """
    held_out_names = {documented.name for documented in held_out if "." in documented.name}
    train = [kept for documented in train if (kept := _without_mentions(documented, held_out_names))]
    train_text = "\n".join(_clean(documented.docstring) for documented in train)
    held_out = [
        documented for documented in held_out if (_answer(documented) or _clean(documented.docstring)) not in train_text
    ]
    return {"train": train, "eval": held_out}


def _without_mentions(documented: DocumentedObject, names: set[str]) -> DocumentedObject | None:
    """The object without those paragraphs of its docstring that spell out one of `names`; None if the first one does.

    Dropping the text for any mention would waste most of the language reference, whose chapters mention hundreds of
    names.
    """
    opening, *rest = re.split(r"\n\s*\n", documented.docstring)
    if _mentions(opening, names):
        return None
    kept = [opening, *(paragraph for paragraph in rest if not _mentions(paragraph, names))]
    signature = "" if _mentions(documented.signature, names) else documented.signature
    return documented._replace(signature=signature, docstring="\n\n".join(kept))


def _mentions(text: str, names: set[str]) -> bool:
    return not names.isdisjoint(re.findall(r"\w+(?:\.\w+)+", text))


# From docstrings to questions and answers -------------------------------------------------------------------


def _is_askable(documented: DocumentedObject) -> bool:
    return documented.is_public and documented.kind in QUESTIONS and bool(_answer(documented))


def _question(documented: DocumentedObject) -> str:
    wordings = QUESTIONS[documented.kind]
    # The suffix makes the choice of wording independent of the side of the split.
    return wordings[int(_hash_fraction(documented.name + "?") * len(wordings))].format(name=documented.name)


@functools.cache
def _answer(documented: DocumentedObject) -> str:
    """The first paragraph of prose in the docstring, on one line; empty if it makes no usable answer."""
    prose = _without_leading_signatures(documented.docstring, documented.name.rpartition(".")[2])
    paragraph = re.split(r"\n\s*\n", prose, maxsplit=1)[0]
    answer = _cut_at_sentence_end(_clean(paragraph), MAX_ANSWER_CHARS)
    return answer if len(answer) >= MIN_ANSWER_CHARS and _reads_as_prose(answer) else ""


def _out_of_order(answer: str) -> str:
    """The answer with two neighbouring words exchanged now and then, from one of its first words on."""
    words = answer.split(" ")
    first = int(_hash_fraction(answer) * min(_EXCHANGED_EVERY, len(words) - 1))
    for at in range(first, len(words) - 1, _EXCHANGED_EVERY):
        words[at], words[at + 1] = words[at + 1], words[at]
    return " ".join(words)


def _reads_as_prose(answer: str) -> bool:
    """Whether it consists of whole sentences, rather than fragments of signatures, grammars or examples."""
    starts_a_sentence = answer[0].isupper() or answer[0] in "`'\""
    ends_a_sentence = answer[-1] in ".!?)"
    return starts_a_sentence and ends_a_sentence and " -> " not in answer and ">>>" not in answer


def _without_leading_signatures(docstring: str, short_name: str) -> str:
    """Drop the call signatures that functions written in C open their docstrings with."""
    if not _OPENS_WITH_A_CALL.match(docstring):  # most do, so that no pattern needs to be compiled for them
        return docstring.strip()
    signature_lines = rf"(?:\s*(?:\w+\.)*{re.escape(short_name)}\s*\([^\n]*\n)+"
    return re.sub(rf"\A{signature_lines}", "", docstring.strip() + "\n").strip()


def _clean(text: str) -> str:
    """Collapse white space and turn reStructuredText's inline markup into plain backticks."""
    return " ".join(re.sub(r":(?:\w+:)?\w+:`~?([^`<]*)`", r"`\1`", text).replace("``", "`").split())


def _cut_at_sentence_end(text: str, max_chars: int) -> str:
    """The longest run of whole sentences within `max_chars` characters; empty if the first is longer."""
    if len(text) <= max_chars:
        return text
    ends = [match.end() for match in re.finditer(r"[.!?](?= [A-Z`])", text[: max_chars + 2])]
    return text[: ends[-1]] if ends else ""
