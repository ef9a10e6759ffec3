"""Every documented object of the standard library, found in a child interpreter (this file, run as a script).

Importing some four hundred modules has lasting side effects on a process, and their docstrings depend on what was
imported or patched before. Neither should affect a training run, so this file imports only the standard library.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

_TIMEOUT_SECONDS = 120
_INSTALLATION = (os.path.dirname(os.__file__), sys.executable)

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


def objects() -> list[DocumentedObject]:
    """The documented objects, collected by running this file as a script with the current interpreter.

    `-I -S` keeps the current directory, environment variables, installed packages and start-up hooks away
    from the child; `-B` keeps it from writing byte code.
    """
    child = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-X", "utf8", __file__],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_TIMEOUT_SECONDS,
        encoding="utf-8",
    )
    if child.returncode != 0:
        raise RuntimeError(f"could not read the standard library's docstrings:\n{child.stderr[-2000:]}")
    return [DocumentedObject(*fields) for fields in json.loads(child.stdout)]


def _collect() -> Iterator[DocumentedObject]:
    # os.path is an attribute rather than a submodule, so no package lists it.
    for module_name in sorted((sys.stdlib_module_names | {"os.path"}) - set().union(*SKIPPED_MODULES.values())):
        for name, module in _import_tree(module_name):
            yield from _documented_in_module(name, module)
    yield from _language_reference()


def _import_tree(name: str) -> Iterator[tuple[str, ModuleType]]:
    """The module and, for a package, everything below it; modules that fail to import are skipped silently."""
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
    names_this_installation = any(path in signature for path in _INSTALLATION)  # in a default argument
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
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics

        for title, text in sorted(topics.items()):
            yield DocumentedObject(f"help {title}", "topic", "", inspect.cleandoc(text), is_public=False)


def _print_collection() -> None:
    """Runs in the child: write every documented object to standard output as JSON."""
    warnings.simplefilter("ignore")  # deprecated modules warn when imported
    with contextlib.redirect_stdout(io.StringIO()):  # modules that print must not corrupt the JSON
        collected = list(_collect())
    json.dump(collected, sys.stdout)


if __name__ == "__main__":
    _print_collection()
