"""Metrics that score an answer against its reference: the built-in table, and rules in a user's own files.

A rule in Python is code that runs with the user's permissions, so it comes from the command line or a caller alone,
never from a run directory. Importing this module loads no library: `finetune --help` reads the table.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from finetune import tables
from finetune.config.field_types import unknown
from finetune.data.strict_json import Decoder, JsonError
from finetune.errors import ConfigError, DataError, MachineError, first_line

if TYPE_CHECKING:
    from finetune.evaluation.intervals import Measured

ScoringRule = Callable[[str, str, dict[str, Any]], float]
"""A score, usually from 0 to 1, of (answer, reference, row): text without special tokens, and the fields of the row."""


@dataclass(frozen=True)
class Metric:
    """A rule under the name that the user gave."""

    name: str
    rule: ScoringRule

    def score(self, answer: str, reference: str, location: str, row: dict[str, Any]) -> float:
        """The score of an answer to the row at `location`. Raises DataError if the rule fails or returns no number."""
        try:
            value = self.rule(answer, reference, row)
            number = math.nan if isinstance(value, str) else float(value)
        except Exception as error:  # whatever a user's rule raises
            at = error.__traceback__
            while at and at.tb_next:
                at = at.tb_next
            where = f" ({Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno})" if at else ""
            raise DataError(
                f"{location}: the metric `{self.name}` cannot score this row: {type(error).__name__}: "
                f"{first_line(error)}{where}"
            ) from error
        if not math.isfinite(number):
            raise DataError(f"{location}: the metric `{self.name}` returned {value!r}; it must return a finite number")
        return number


@dataclass(frozen=True)
class Scored:
    """What a source of metrics computes: a name for people, and whether more is better (None: not known)."""

    name: str
    higher_is_better: bool | None
    measured: Measured


class Source(Protocol):
    """Scores a model by metrics of its own."""

    def run(self, model: Any, tokenizer: Any) -> Iterator[Scored]: ...


SOURCES: dict[str, Callable[..., Source]] = {}
"""Sources of more metrics, which extras add, by the argument of `evaluate` that asks for them."""


@dataclass(frozen=True)
class Entry:
    """A built-in metric. `make` returns its rule, given the text after `NAME:` if the metric `takes` one."""

    help: str
    make: Callable[[str], ScoringRule]
    takes: str = ""


def find(text: str) -> Metric:
    """The metric of a name in METRICS, `NAME:KEY`, `FILE.py:FUNCTION` or `FILE.json`, a JSON schema."""
    name, _, rest = text.partition(":")
    file, _, function = text.rpartition(":")
    if file.endswith(".py"):
        return Metric(text, _python_rule(Path(os.path.expanduser(file)), function))
    if text.endswith(".json"):
        return Metric(text, _schema_rule(Path(os.path.expanduser(text))))
    if name not in METRICS or bool(rest) != bool(METRICS[name].takes):
        known = [f"{name}:{entry.takes}" if entry.takes else name for name, entry in METRICS.items()]
        raise ConfigError(f"metric {unknown(text, [*known, 'FILE.py:FUNCTION', 'SCHEMA.json'])}")
    return Metric(text, METRICS[name].make(rest))


def _exact_match(answer: str, reference: str, _: dict[str, Any]) -> float:
    return float(answer.strip() == reference.strip())


def _f1(answer: str, reference: str, _: dict[str, Any]) -> float:
    """Harmonic mean of precision and recall of the words, as SQuAD 2.0 counts them."""
    given, wanted = _words(answer), _words(reference)
    if not given or not wanted:
        return float(given == wanted)
    return 2 * (Counter(given) & Counter(wanted)).total() / (len(given) + len(wanted))


def _words(text: str) -> list[str]:
    """The words as in SQuAD's evaluate-v2.0.py: in lower case, without ASCII punctuation and English articles."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


class _Words:
    """rouge_score's own tokenizer knows ASCII only, and scores every answer in another script 0."""

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r"[^\W_]+", text.lower())


def _rouge_l(_: str) -> ScoringRule:
    scorer = needed("rouge_score.rouge_scorer", "the metric `rouge_l`").RougeScorer(["rougeL"], tokenizer=_Words())
    return lambda answer, reference, _: float(scorer.score(reference, answer)["rougeL"].fmeasure)


def _parsed(text: str) -> Any:
    """The value of a JSON text. Raises JsonError for anything else, such as a code fence around it."""
    decoder = Decoder()
    value = decoder.read(text)
    if decoder.wrong:
        raise JsonError(decoder.wrong[0], 0)
    return value


def _is_json(answer: str, *_: Any) -> float:
    try:
        _parsed(answer)
    except JsonError:
        return 0.0
    return 1.0


def _json_rule(path: tuple[str, ...]) -> ScoringRule:
    """Whether answer and reference have the same JSON value at `path`; also true if neither has one."""

    def score(answer: str, reference: str, _: dict[str, Any]) -> float:
        try:
            wanted = functools.reduce(_below, path, _parsed(reference))
        except JsonError as error:
            raise ValueError(f"the reference is {error}") from None
        try:
            return float(_same(functools.reduce(_below, path, _parsed(answer)), wanted))
        except JsonError:
            return 0.0

    return score


_MISSING = object()


def _below(value: Any, key: str) -> Any:
    return value.get(key, _MISSING) if isinstance(value, dict) else _MISSING


def _same(one: Any, other: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, but not true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _schema_rule(file: Path) -> ScoringRule:
    validators = needed("jsonschema.validators", f"the metric `{file}`")
    referencing = needed("referencing", f"the metric `{file}`")
    try:
        schema = _parsed(file.read_text(encoding="utf-8"))
        kind = validators.validator_for(schema, default=validators.Draft202012Validator)
        kind.check_schema(schema)
    except OSError as error:
        raise ConfigError(f"metric `{file}`: cannot be read: {error.strerror}") from None
    except Exception as error:  # JsonError, UnicodeDecodeError, jsonschema's SchemaError
        raise ConfigError(f"metric `{file}`: not a JSON schema: {first_line(error)}") from None
    validator = kind(schema, registry=referencing.Registry())  # the default one downloads what a schema refers to

    def score(answer: str, *_: Any) -> float:
        try:
            value = _parsed(answer)
        except JsonError:
            return 0.0
        return float(validator.is_valid(value))

    return score


def _python_rule(file: Path, function: str) -> ScoringRule:
    if not file.is_file():
        raise ConfigError(f"metric `{file}:{function}`: no such file")
    name = f"finetune_metric_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec, "a .py file has a loader"
    assert spec.loader, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever its code raises
        raise ConfigError(
            f"metric `{file}:{function}`: the file cannot be imported: {type(error).__name__}: {first_line(error)}"
        ) from error
    functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    if not callable(rule := getattr(module, function, None)):
        raise ConfigError(f"{file}: function {unknown(function, functions)}")
    return rule


def needed(module: str, what: str) -> Any:
    """Import a module of an optional package. Raises MachineError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise MachineError(f"{what} needs the package {package}: pip install {package}") from None


METRICS: dict[str, Entry] = {
    "exact_match": Entry("the answer is the reference, but for white space around it", lambda _: _exact_match),
    "f1": Entry("words in common with the reference, as SQuAD counts them", lambda _: _f1),
    "rouge_l": Entry("longest common subsequence of words (rouge_score, F-measure)", _rouge_l),
    "json": Entry("the answer parses as JSON", lambda _: _is_json),
    "json_equal": Entry("the answer is the same JSON value as the reference", lambda _: _json_rule(())),
    "json_key": Entry(
        "the value at this key, or `outer.inner`, is the reference's", lambda key: _json_rule((*key.split("."),)), "KEY"
    ),
}

tables.complete(__name__)
