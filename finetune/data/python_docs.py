"""The built-in data set `builtin:python_docs`: questions about Python's own standard library.

Every text comes at run time from the docstrings of the interpreter that runs this module, so the data set
needs no download, no file and no licence of its own. The rows depend on that interpreter's version and
platform and on nothing else.

Two views of the same objects are offered: `conversations` (a question and a short answer per object, to
fine-tune on) and `documents` (whole docstrings, to pre-train a base model on). Both obey one held-out rule,
decided by the hash of an object's qualified name. See `_without_leaks` for what it guarantees.

The standard library is imported in a child interpreter (this file, run as a script). Importing some four
hundred modules has lasting effects on a process, and what is found in them depends on what was imported or
patched before; neither should reach a training run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, Literal, NamedTuple

Split = Literal["train", "eval"]

EVAL_FRACTION = 0.08
"""Share of the qualified names that are held out."""

MIN_ANSWER_CHARS = 24
"""Shorter first paragraphs ("See above.") answer nothing."""

MAX_ANSWER_CHARS = 300
"""Longer first paragraphs are cut after the last sentence that fits, or left out if none does."""

MAX_SIGNATURE_CHARS = 200
"""Longer signatures are annotation noise and are left out of the documents."""

COLLECTION_TIMEOUT_SECONDS = 120

SKIPPED_MODULES: dict[str, str] = {
    "__main__": "is the running script, not a library",
    "antigravity": "opens a web browser when imported",
    "this": "prints when imported",
    "idlelib": "an application, and needs tkinter",
    "tkinter": "needs a Tk library that many machines lack",
    "_tkinter": "needs a Tk library that many machines lack",
    "turtle": "needs tkinter",
    "turtledemo": "needs tkinter",
    "test": "Python's own tests",
    "_testbuffer": "Python's own tests",
    "_testcapi": "Python's own tests",
    "_testimportmultiple": "Python's own tests",
    "_testinternalcapi": "Python's own tests",
    "_testmultiphase": "Python's own tests",
    "_ctypes_test": "Python's own tests",
    "xxlimited": "an example for authors of C extensions",
    "xxlimited_35": "an example for authors of C extensions",
    "xxsubtype": "an example for authors of C extensions",
    "lib2to3": "deprecated, and writes grammar caches",
    "readline": "changes the terminal when imported",
    "rlcompleter": "imports readline and registers an exit handler",
    "encodings": "hundreds of codec tables with the same few docstrings",
    "posixpath": "documented as os.path",
    "ntpath": "nearly the same docstrings as os.path, so it would leak held-out answers",
    "_pydecimal": "nearly the same docstrings as decimal, so it would leak held-out answers",
    "_pydatetime": "nearly the same docstrings as datetime, so it would leak held-out answers",
    "_pyio": "nearly the same docstrings as io, so it would leak held-out answers",
}
"""Top-level modules that are not read, with the reason. A module that fails to import is skipped as well."""

SKIPPED_SUBMODULES = frozenset({"__main__", "test", "tests"})
"""Submodules with these names are programs or tests in every package."""

QUESTIONS: dict[str, tuple[str, ...]] = {
    "module": (
        "What is the `{name}` module for?",
        "What does the module `{name}` provide?",
        "Describe the `{name}` module.",
    ),
    "class": (
        "What is `{name}`?",
        "What does the class `{name}` represent?",
        "Describe the class `{name}`.",
    ),
    "exception": (
        "When is `{name}` raised?",
        "What does the exception `{name}` mean?",
        "Explain the exception `{name}`.",
    ),
    "function": (
        "What does `{name}` do?",
        "Explain what `{name}` does.",
        "What is the function `{name}` for?",
        "How would you describe `{name}` in a sentence or two?",
    ),
    "method": (
        "What does `{name}` do?",
        "What does the method `{name}` do?",
        "Explain the method `{name}`.",
    ),
    "attribute": (
        "What is the attribute `{name}`?",
        "What does `{name}` hold?",
    ),
}
"""Question wordings for each kind of object. Kinds without wordings appear in `documents` only."""


class DocumentedObject(NamedTuple):
    """One object of the standard library that has a docstring."""

    name: str
    """Qualified name, such as `textwrap.fill`. Builtins go without their module: `str.split`."""
    kind: str
    """A key of `QUESTIONS`, or "topic" for a chapter of the language reference shown by `help()`."""
    signature: str
    """Such as `(text, width=70)`; empty where Python knows none."""
    docstring: str
    is_public: bool


def conversations(split: Split) -> list[dict[str, Any]]:
    """Question-and-answer rows `{"messages": [user, assistant]}` of one side of the split, sorted by name."""
    return [
        {
            "messages": [
                {"role": "user", "content": _question(documented)},
                {"role": "assistant", "content": _answer(documented)},
            ]
        }
        for documented in _split(split)
        if _is_askable(documented)
    ]


def documents(split: Split) -> Iterator[str]:
    """Plain documentation texts of one side of the split, sorted by name: name, signature and docstring.

    They cover private objects and the language reference too, and hold no questions.
    """
    for documented in _split(split):
        yield f"{documented.name}{documented.signature}\n\n{documented.docstring}"


# Splitting --------------------------------------------------------------------------------------------------


def _split(split: Split) -> tuple[DocumentedObject, ...]:
    train, held_out = _both_splits()
    if split == "train":
        return train
    if split == "eval":
        return held_out
    raise ValueError(f"split must be 'train' or 'eval', not {split!r}")


@functools.cache
def _both_splits() -> tuple[tuple[DocumentedObject, ...], tuple[DocumentedObject, ...]]:
    train: list[DocumentedObject] = []
    held_out: list[DocumentedObject] = []
    for documented in _without_repeats(_collect_in_child()):
        (held_out if _is_held_out(documented.name) else train).append(documented)
    return _without_leaks(train, held_out)


def _is_held_out(name: str) -> bool:
    return _hash_fraction(name) < EVAL_FRACTION


def _hash_fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, unlike `hash`, which differs between processes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _without_repeats(objects: Iterable[DocumentedObject]) -> list[DocumentedObject]:
    """Keep one object per docstring and per answer, under its best name; sorted by name.

    Most repeats are one object under several names (`asyncio.run`, `asyncio.runners.run`); the public and
    then the shortest name wins. The rest are copied docstrings, which would leak answers across the split.
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
) -> tuple[tuple[DocumentedObject, ...], tuple[DocumentedObject, ...]]:
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
    return tuple(train), tuple(held_out)


def _without_mentions(documented: DocumentedObject, names: set[str]) -> DocumentedObject | None:
    """The object without those paragraphs of its docstring that spell out one of `names`.

    None if the first paragraph does, since the rest makes little sense without it. Dropping the text for any
    mention would waste most of the language reference, whose chapters mention hundreds of names.
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
    choice = int(_hash_fraction(documented.name + "?") * len(wordings))
    return wordings[choice].format(name=documented.name)


@functools.cache
def _answer(documented: DocumentedObject) -> str:
    """The first paragraph of prose in the docstring, on one line; empty if it makes no usable answer."""
    prose = _without_leading_signatures(documented.docstring, documented.name.rpartition(".")[2])
    paragraph = re.split(r"\n\s*\n", prose, maxsplit=1)[0]
    answer = _cut_at_sentence_end(_clean(paragraph), MAX_ANSWER_CHARS)
    return answer if len(answer) >= MIN_ANSWER_CHARS and _reads_as_prose(answer) else ""


def _reads_as_prose(answer: str) -> bool:
    """Whether it is made of whole sentences; fragments of signatures, grammars and examples are not."""
    starts_a_sentence = answer[0].isupper() or answer[0] in "`'\""
    ends_a_sentence = answer[-1] in ".!?)"
    return starts_a_sentence and ends_a_sentence and " -> " not in answer and ">>>" not in answer


def _without_leading_signatures(docstring: str, short_name: str) -> str:
    """Drop the call signatures that functions written in C open their docstrings with."""
    signature_lines = rf"(?:\s*(?:\w+\.)*{re.escape(short_name)}\s*\([^\n]*\n)+"
    return re.sub(rf"\A{signature_lines}", "", docstring.strip() + "\n").strip()


def _clean(text: str) -> str:
    """Collapse white space and turn reStructuredText's inline markup into plain backticks."""
    text = re.sub(r":(?:\w+:)?\w+:`~?([^`<]*)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").split())


def _cut_at_sentence_end(text: str, max_chars: int) -> str:
    """The longest run of whole sentences within `max_chars` characters; empty if the first is longer."""
    if len(text) <= max_chars:
        return text
    ends = [match.end() for match in re.finditer(r"[.!?](?= [A-Z`])", text[: max_chars + 2])]
    return text[: ends[-1]] if ends else ""


# Collecting the objects -------------------------------------------------------------------------------------


def _collect_in_child() -> list[DocumentedObject]:
    """Run this file as a script and read back what it found.

    `-I -S` keeps the current directory, environment variables, installed packages and start-up hooks away
    from the child; `-B` keeps it from writing byte code.
    """
    child = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-X", "utf8", __file__],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=COLLECTION_TIMEOUT_SECONDS,
        encoding="utf-8",
    )
    if child.returncode != 0:
        raise RuntimeError(f"could not read the standard library's docstrings:\n{child.stderr[-2000:]}")
    return [DocumentedObject(*fields) for fields in json.loads(child.stdout)]


def _collect() -> Iterator[DocumentedObject]:
    for module_name in _top_level_module_names():
        for name, module in _import_tree(module_name):
            yield from _documented_in_module(name, module)
    yield from _language_reference()


def _top_level_module_names() -> list[str]:
    # os.path is an attribute rather than a submodule, so no package lists it.
    return sorted((sys.stdlib_module_names | {"os.path"}) - SKIPPED_MODULES.keys())


def _import_tree(name: str) -> Iterator[tuple[str, ModuleType]]:
    """The module and, for a package, everything below it; what does not import here is left out quietly."""
    try:
        module = importlib.import_module(name)
    except Exception:  # a module of another platform may fail in any way, not only with ImportError
        return
    yield name, module
    for submodule in sorted(pkgutil.iter_modules(getattr(module, "__path__", ())), key=lambda s: s.name):
        if submodule.name not in SKIPPED_SUBMODULES:
            yield from _import_tree(f"{name}.{submodule.name}")


def _documented_in_module(module_name: str, module: ModuleType) -> Iterator[DocumentedObject]:
    yield from _documented(module_name, "module", module, is_public=_is_public_name(module_name))
    prefix = "" if module_name == "builtins" else f"{module_name}."
    exported = getattr(module, "__all__", None)
    for attribute, member in sorted(vars(module).items()):
        if attribute not in (exported or ()) and not _is_defined_in(member, module_name):
            continue
        name = prefix + attribute
        is_public = _is_public_name(name) and (exported is None or attribute in exported)
        if inspect.isclass(member):
            yield from _documented_in_class(name, member, is_public)
        elif inspect.isroutine(member):
            yield from _documented(name, "function", member, is_public)


def _documented_in_class(name: str, class_: type, is_public: bool) -> Iterator[DocumentedObject]:
    kind = "exception" if issubclass(class_, BaseException) else "class"
    yield from _documented(name, kind, class_, is_public)
    for attribute, member in sorted(vars(class_).items()):
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        member_name = f"{name}.{attribute}"
        member_is_public = is_public and _is_public_name(attribute)
        if inspect.isdatadescriptor(member):
            yield from _documented(member_name, "attribute", member, member_is_public)
        elif inspect.isroutine(member):
            yield from _documented(member_name, "method", member, member_is_public)


def _documented(name: str, kind: str, documented: Any, is_public: bool) -> Iterator[DocumentedObject]:
    docstring = getattr(documented, "__doc__", None)
    if isinstance(docstring, str) and docstring.strip():
        signature = _signature(documented) if inspect.isroutine(documented) else ""
        docstring = _without_addresses(inspect.cleandoc(docstring))
        yield DocumentedObject(name, kind, signature, docstring, is_public)


def _signature(routine: Any) -> str:
    try:
        signature = _without_addresses(str(inspect.signature(routine)))
    except Exception:  # many functions written in C have none, or one whose defaults do not evaluate
        return ""
    names_this_installation = os.path.dirname(os.__file__) in signature  # as a default argument
    return "" if names_this_installation or len(signature) > MAX_SIGNATURE_CHARS else signature


def _without_addresses(text: str) -> str:
    """Drop the memory addresses that `repr` puts into signatures and docstrings: they differ per run."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _is_defined_in(member: Any, module_name: str) -> bool:
    """Whether the member comes from the module's own package rather than from an import of another one."""
    defining_module = getattr(member, "__module__", None) or ""
    return defining_module.partition(".")[0] == module_name.partition(".")[0]


def _is_public_name(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def _language_reference() -> Iterator[DocumentedObject]:
    """The chapters that `help("for")` and the like show."""
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics

        for title, text in sorted(topics.items()):
            yield DocumentedObject(f"help {title}", "topic", "", inspect.cleandoc(text), is_public=False)


def _print_collection() -> None:
    """The child's part: write every documented object to standard output as JSON."""
    warnings.simplefilter("ignore")  # half of the deprecated modules say so when imported
    with contextlib.redirect_stdout(io.StringIO()):  # and nothing else may mix into the JSON
        collected = list(_collect())
    json.dump(collected, sys.stdout)


if __name__ == "__main__":
    _print_collection()
