"""Build `python_docs.jsonl.gz`: questions about Python's standard library, with answers from its docstrings.

    python data/build_python_docs.py --output data/python_docs.jsonl.gz
    python data/build_python_docs.py --documents > documents.json

A row has a question, the answer and, for preferences, the same answer with words out of order; the hash of an object's
qualified name decides what is held out. The documents, for pre-training `tiny-llama`, are whole docstrings and the
language reference, of the same split: {"train": [text, ...], "eval": [...]}. Both depend on the version and platform of
the Python that runs this, and on nothing else: it starts itself again without the current directory, environment
variables, installed packages and start-up hooks, because docstrings depend on what was imported or patched before.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import hashlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

EVAL_FRACTION = 0.08
"""Share of the qualified names that are held out."""

MIN_ANSWER_CHARS = 24
"""Shorter first paragraphs ("See above.") answer nothing."""

MAX_ANSWER_CHARS = 300
"""Longer first paragraphs are cut after the last sentence that fits, or left out if none does."""

EXCHANGED_EVERY = 8
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

OPENS_WITH_A_CALL = re.compile(r"\s*[^\s(]+\s*\(")

INSTALLATION = (os.path.dirname(os.__file__), sys.executable)

MAX_SIGNATURE_CHARS = 200
"""Longer signatures are annotation noise and are left out of the documents."""

SKIPPED_MODULES: dict[str, tuple[str, ...]] = {
    "the running script, not a library": ("__main__",),
    "changes something when imported: a browser, the output, the terminal": (
        "antigravity", "this", "readline", "rlcompleter",
    ),
    "needs a Tk library that many machines lack": ("tkinter", "_tkinter", "idlelib", "turtle", "turtledemo"),
    "Python's own tests": (
        "test", "_testbuffer", "_testcapi", "_testimportmultiple", "_testinternalcapi", "_testmultiphase",
        "_ctypes_test",
    ),
    "an example for authors of C extensions": ("xxlimited", "xxlimited_35", "xxsubtype"),
    "deprecated, and writes grammar caches": ("lib2to3",),
    "hundreds of codec tables with the same few docstrings": ("encodings",),
    "nearly the docstrings of another module, so it would leak held-out answers": (
        "posixpath", "ntpath", "_pydecimal", "_pydatetime", "_pyio",
    ),
}  # fmt: skip
"""Top-level modules that are skipped, by reason. A module that fails to import is skipped as well."""

SKIPPED_SUBMODULES = frozenset({"__main__", "test", "tests"})
"""Submodules with these names are programs or tests in every package."""


class DocumentedObject(NamedTuple):
    """One object of the standard library that has a docstring."""

    name: str
    """Qualified name, such as `textwrap.fill`. Builtins go without their module: `str.split`."""
    kind: str
    """Module, class, exception, function, method or attribute; or topic, a chapter of what `help()` shows."""
    signature: str
    """Such as `(text, width=70)`; empty if Python knows none."""
    docstring: str
    is_public: bool


def collect() -> Iterator[DocumentedObject]:
    """Every documented object of the standard library."""
    # os.path is an attribute rather than a submodule, so no package lists it.
    for module_name in sorted((sys.stdlib_module_names | {"os.path"}) - set().union(*SKIPPED_MODULES.values())):
        for name, module in import_tree(module_name):
            yield from documented_in_module(name, module)
    yield from language_reference()


def import_tree(name: str) -> Iterator[tuple[str, ModuleType]]:
    """The module and, for a package, everything below it; modules that fail to import are skipped silently."""
    try:
        module = importlib.import_module(name)
    except Exception:  # a module of another platform may fail in any way, not only with ImportError
        return
    yield name, module
    for submodule in sorted(pkgutil.iter_modules(getattr(module, "__path__", ())), key=lambda s: s.name):
        if submodule.name not in SKIPPED_SUBMODULES:
            yield from import_tree(f"{name}.{submodule.name}")


def documented_in_module(module_name: str, module: ModuleType) -> Iterator[DocumentedObject]:
    yield from described(module_name, "module", module, is_public=is_public_name(module_name))
    prefix = "" if module_name == "builtins" else f"{module_name}."
    exported = getattr(module, "__all__", None)
    for attribute, member in sorted(vars(module).items()):
        if attribute not in (exported or ()) and not is_defined_in(member, module_name):
            continue
        name = prefix + attribute
        is_public = is_public_name(name) and (exported is None or attribute in exported)
        if inspect.isclass(member):
            yield from documented_in_class(name, member, is_public)
        elif inspect.isroutine(member):
            yield from described(name, "function", member, is_public)


def documented_in_class(name: str, class_: type, is_public: bool) -> Iterator[DocumentedObject]:
    kind = "exception" if issubclass(class_, BaseException) else "class"
    yield from described(name, kind, class_, is_public)
    for attribute, member in sorted(vars(class_).items()):
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        member_name = f"{name}.{attribute}"
        member_is_public = is_public and is_public_name(attribute)
        if inspect.isdatadescriptor(member):
            yield from described(member_name, "attribute", member, member_is_public)
        elif inspect.isroutine(member):
            yield from described(member_name, "method", member, member_is_public)


def described(name: str, kind: str, member: Any, is_public: bool) -> Iterator[DocumentedObject]:
    docstring = getattr(member, "__doc__", None)
    if isinstance(docstring, str) and docstring.strip():
        signature = signature_of(member) if inspect.isroutine(member) else ""
        docstring = without_addresses(inspect.cleandoc(docstring))
        yield DocumentedObject(name, kind, signature, docstring, is_public)


def signature_of(routine: Any) -> str:
    try:
        signature = without_addresses(str(inspect.signature(routine)))
    except Exception:  # many functions written in C have none, or one whose defaults do not evaluate
        return ""
    names_this_installation = any(path in signature for path in INSTALLATION)  # in a default argument
    return "" if names_this_installation or len(signature) > MAX_SIGNATURE_CHARS else signature


def without_addresses(text: str) -> str:
    """Drop the memory addresses that `repr` puts into signatures and docstrings: they differ per run."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def is_defined_in(member: Any, module_name: str) -> bool:
    """Whether the member comes from the module's own package rather than from an import of another one."""
    defining_module = getattr(member, "__module__", None) or ""
    return defining_module.partition(".")[0] == module_name.partition(".")[0]


def is_public_name(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def language_reference() -> Iterator[DocumentedObject]:
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics

        for title, text in sorted(topics.items()):
            yield DocumentedObject(f"help {title}", "topic", "", inspect.cleandoc(text), is_public=False)


# Splitting --------------------------------------------------------------------------------------------------


@functools.cache
def splits() -> dict[str, list[DocumentedObject]]:
    train: list[DocumentedObject] = []
    held_out: list[DocumentedObject] = []
    warnings.simplefilter("ignore")  # deprecated modules warn when imported
    with contextlib.redirect_stdout(io.StringIO()):  # and others print
        objects = list(collect())
    for documented in without_repeats(objects):
        (held_out if hash_fraction(documented.name) < EVAL_FRACTION else train).append(documented)
    return without_leaks(train, held_out)


def hash_fraction(text: str) -> float:
    """A number in [0, 1) that depends only on the text; `hash` differs between processes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def without_repeats(objects: Iterable[DocumentedObject]) -> list[DocumentedObject]:
    """Keep one object per docstring and per answer, under its best name; sorted by name.

    Most repeats are one object under several names, of which the public and then the shortest wins. The rest are copied
    docstrings, which would leak answers across the split.
    """
    seen_texts: set[str] = set()
    kept = []
    for documented in sorted(objects, key=lambda o: (not o.is_public, o.name.count("."), o.name)):
        texts = {clean(documented.docstring)}
        if is_askable(documented):
            texts.add(answer_of(documented))
        if seen_texts.isdisjoint(texts):
            kept.append(documented)
        seen_texts |= texts
    return sorted(kept)


def without_leaks(train: list[DocumentedObject], held_out: list[DocumentedObject]) -> dict[str, list[DocumentedObject]]:
    """Make the two sides disjoint in what they say, not only in which objects they are about.

    Afterwards no training text spells out a dotted held-out name, and no held-out answer occurs in a training
    text. Names without a dot (`re`, `print`) are everyday words, so only their docstrings are kept apart.
    """
    held_out_names = {documented.name for documented in held_out if "." in documented.name}
    train = [kept for documented in train if (kept := without_mentions(documented, held_out_names))]
    train_text = "\n".join(clean(documented.docstring) for documented in train)
    held_out = [
        documented
        for documented in held_out
        if (answer_of(documented) or clean(documented.docstring)) not in train_text
    ]
    return {"train": train, "eval": held_out}


def without_mentions(documented: DocumentedObject, names: set[str]) -> DocumentedObject | None:
    """The object without those paragraphs of its docstring that spell out one of `names`; None if the first one does.

    Dropping the text for any mention would waste most of the language reference, whose chapters mention hundreds of
    names.
    """
    opening, *rest = re.split(r"\n\s*\n", documented.docstring)
    if mentions(opening, names):
        return None
    kept = [opening, *(paragraph for paragraph in rest if not mentions(paragraph, names))]
    signature = "" if mentions(documented.signature, names) else documented.signature
    return documented._replace(signature=signature, docstring="\n\n".join(kept))


def mentions(text: str, names: set[str]) -> bool:
    return not names.isdisjoint(re.findall(r"\w+(?:\.\w+)+", text))


# From docstrings to questions and answers -------------------------------------------------------------------


def is_askable(documented: DocumentedObject) -> bool:
    return documented.is_public and documented.kind in QUESTIONS and bool(answer_of(documented))


def question_of(documented: DocumentedObject) -> str:
    wordings = QUESTIONS[documented.kind]
    # The suffix makes the choice of wording independent of the side of the split.
    return wordings[int(hash_fraction(documented.name + "?") * len(wordings))].format(name=documented.name)


@functools.cache
def answer_of(documented: DocumentedObject) -> str:
    """The first paragraph of prose in the docstring, on one line; empty if it makes no usable answer."""
    prose = without_leading_signatures(documented.docstring, documented.name.rpartition(".")[2])
    paragraph = re.split(r"\n\s*\n", prose, maxsplit=1)[0]
    answer = cut_at_sentence_end(clean(paragraph), MAX_ANSWER_CHARS)
    return answer if len(answer) >= MIN_ANSWER_CHARS and reads_as_prose(answer) else ""


def out_of_order(answer: str) -> str:
    """The answer with two neighbouring words exchanged now and then, from one of its first words on."""
    words = answer.split(" ")
    first = int(hash_fraction(answer) * min(EXCHANGED_EVERY, len(words) - 1))
    for at in range(first, len(words) - 1, EXCHANGED_EVERY):
        words[at], words[at + 1] = words[at + 1], words[at]
    return " ".join(words)


def reads_as_prose(answer: str) -> bool:
    """Whether it consists of whole sentences, rather than fragments of signatures, grammars or examples."""
    starts_a_sentence = answer[0].isupper() or answer[0] in "`'\""
    ends_a_sentence = answer[-1] in ".!?)"
    return starts_a_sentence and ends_a_sentence and " -> " not in answer and ">>>" not in answer


def without_leading_signatures(docstring: str, short_name: str) -> str:
    """Drop the call signatures that functions written in C open their docstrings with."""
    if not OPENS_WITH_A_CALL.match(docstring):  # most do, so that no pattern needs to be compiled for them
        return docstring.strip()
    signature_lines = rf"(?:\s*(?:\w+\.)*{re.escape(short_name)}\s*\([^\n]*\n)+"
    return re.sub(rf"\A{signature_lines}", "", docstring.strip() + "\n").strip()


def clean(text: str) -> str:
    """Collapse white space and turn reStructuredText's inline markup into plain backticks."""
    return " ".join(re.sub(r":(?:\w+:)?\w+:`~?([^`<]*)`", r"`\1`", text).replace("``", "`").split())


def cut_at_sentence_end(text: str, max_chars: int) -> str:
    """The longest run of whole sentences within `max_chars` characters; empty if the first is longer."""
    if len(text) <= max_chars:
        return text
    ends = [match.end() for match in re.finditer(r"[.!?](?= [A-Z`])", text[: max_chars + 2])]
    return text[: ends[-1]] if ends else ""


# The two files ----------------------------------------------------------------------------------------------


def rows(split: str) -> Iterator[dict[str, str]]:
    """The questions of one side of the split, sorted by name."""
    for documented in splits()[split]:
        if is_askable(documented):
            answer = answer_of(documented)
            yield {
                "split": split,
                "prompt": question_of(documented),
                "chosen": answer,
                "rejected": out_of_order(answer),
            }


def documents(split: str) -> Iterator[str]:
    """Texts of one side of the split, sorted by name: name, signature and docstring, of private objects too."""
    for documented in splits()[split]:
        yield f"{documented.name}{documented.signature}\n\n{documented.docstring}"


def main() -> None:
    if not sys.flags.isolated:
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", "-X", "utf8", *sys.argv])
    parser = argparse.ArgumentParser(description="Build the rows of builtin:python_docs, or print the documents.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="file of rows to write")
    what.add_argument("--documents", action="store_true", help="print the documents as JSON")
    arguments = parser.parse_args()
    if arguments.documents:
        json.dump({split: list(documents(split)) for split in splits()}, sys.stdout)
    else:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for split in splits() for row in rows(split))
        arguments.output.write_bytes(gzip.compress(lines.encode(), mtime=0))


if __name__ == "__main__":
    main()
