"""Facts about strict YAML: what a line says is what the config gets, every problem has its line, nothing runs."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.config import strict_yaml
from finetune.config.strict_yaml import Document, parse, scalar


def values(text: str) -> dict[str, Any]:
    document = parse(textwrap.dedent(text))
    assert document.problems == []
    return document.values


def problems(text: str) -> list[tuple[int, str]]:
    return [(problem.line, problem.message) for problem in parse(textwrap.dedent(text)).problems]


# -- scalars of the YAML 1.2 core schema -----------------------------------------------------------------------------


def test_a_plain_scalar_means_what_yaml_1_2_says(subtests: pytest.Subtests) -> None:
    for written, meant in [
        ("2e-4", 0.0002), ("2e-5", 0.00002), ("2E5", 200000.0), ("1e6", 1e6), ("-3e+2", -300.0), ("1.", 1.0),
        (".5", 0.5), ("1.5e-3", 0.0015), ("12", 12), ("+7", 7), ("-7", -7), ("017", 17), ("08", 8), ("0o17", 15),
        ("0x1F", 31), (".inf", math.inf), ("-.INF", -math.inf), ("+.Inf", math.inf), ("true", True), ("False", False),
        ("null", None), ("~", None), ("", None), ("no", "no"), ("off", "off"), ("yes", "yes"), ("y", "y"),
        ("tRue", "tRue"), ("1_000", "1_000"), ("1:30", "1:30"), ("2024-01-31", "2024-01-31"), ("0b11", "0b11"),
        ("1e", "1e"), ("e5", "e5"), (".", "."), ("inf", "inf"), ("24GiB", "24GiB"),
    ]:  # fmt: skip
        with subtests.test(written=written):
            found = values(f"key: {written}\n")["key"]
            assert found == meant
            assert type(found) is type(meant)
            assert scalar(written) == meant
    assert math.isnan(values("key: .nan\n")["key"])


def test_a_quoted_or_block_scalar_is_text_whatever_it_looks_like(subtests: pytest.Subtests) -> None:
    for style in ["'{}'", '"{}"', "|-\n  {}", ">-\n  {}"]:
        for text in ["12", "2e-4", "true", "null", "~", "0o17", "2024-01-31"]:
            with subtests.test(style=style, text=text):
                assert values(f"key: {style.format(text)}\n") == {"key": text}


# -- structure and lines ---------------------------------------------------------------------------------------------


def test_every_key_path_knows_its_line() -> None:
    document = parse("# a comment\nmodel:\n  name: x\n\nadapter:\n  targets:\n    - q\n    - v\n")
    assert document.lines[("model",)] == 2
    assert document.lines[("model", "name")] == 3
    assert document.lines[("adapter", "targets")] == 6
    assert document.lines[("adapter", "targets", "1")] == 8


def test_an_empty_file_and_a_file_of_comments_are_empty_mappings() -> None:
    assert parse("") == Document({}, {}, [])
    assert parse("# nothing yet\n") == Document({}, {}, [])


# A text, and for each problem its line and words of its message.
PROBLEMS: list[tuple[str, list[tuple[int, str]]]] = [
    ("training:\n  seed: 1\n  seed: 2\nmodel:\n  name: a\ntraining:\n  max_steps: 3\n",
     [(3, "`training.seed` is given twice, first on line 2"), (6, "`training` is given twice, first on line 1")]),
    ("model: {name: x, name: y}\n", [(1, "`model.name` is given twice")]),
    ("- a\n- b\n", [(1, "section")]),
    ("only words\n", [(1, "section")]),
    ("5\n", [(1, "section")]),
    ("a:\n  b: {k:proj:64, v: 1}\n", [(2, "`k:proj:64` lacks a space after the colon: `k:proj: 64`")]),
    ("a: 1\n? [b, c]\n: 2\n", [(2, "key")]),
    *((text, [(line, "not valid YAML")]) for text, line in (
        ("a: 1\nb: 'unclosed\n", 3), ("a: 1\nb: [1, 2\n", 3), ("a: 1\n  b: 2\n", 2), ("a: 1\n\tb: 2\n", 2),
        ("a: 1\nb: @x\n", 2), ("a: 1\n---\nb: 2\n", 2), ("a: b: c\n", 1),
    )),
    ("a: 1\nb: x\0y\n", [(2, "")]),
    ("a: 1\nb: x\x1by\n", [(2, "")]),
    ("model:\n  name: !!python/object/apply:os.system ['true']\n", [(2, "python/object/apply:os.system")]),
    *((f"key: {tagged}\n", [(1, "is not allowed; write a plain value")])
      for tagged in ("!!str 5", "!!int '5'", "!!float 5", "! 5")),
    ("a: &a [*a]\n", [(1, "alias")]),
]  # fmt: skip


def test_each_problem_has_its_line_and_one_line_of_words(subtests: pytest.Subtests) -> None:
    for text, expected in PROBLEMS:
        with subtests.test(text=text):
            found = problems(text)
            assert [line for line, _ in found] == [line for line, _ in expected]
            assert [words for (_, message), (_, words) in zip(found, expected, strict=True)
                    if words not in message or "\n" in message] == []  # fmt: skip


def test_what_is_written_unusually_is_read_or_kept() -> None:
    assert parse("seed: 1\nseed: 2\n").values == {"seed": 1}, "the first value is kept for the rest of the check"
    assert values("a: {'b:c': null, d:e: 1}\n") == {"a": {"b:c": None, "d:e": 1}}
    assert values("a: &name 1\n") == {"a": 1}, "an anchor alone"
    assert values("<<: {a: 1}\n") == {"<<": {"a": 1}}, "a merge key is an ordinary one"


# -- what a hostile file may not do ----------------------------------------------------------------------------------


def test_a_tag_is_refused_and_nothing_runs(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for text in [
        "model: !!python/object/apply:os.system ['touch {}']\n",
        "model:\n  name: !!python/object/apply:os.system ['touch {}']\n",
        "!!python/object/apply:os.system ['touch {}']\n",
        "model: [!!python/object/new:os.system ['touch {}']]\n",
        "model: !!python/name:os.system\n",
        "model: !custom x\n",
        "model:\n  !!python/object/apply:os.system name: x\n",
    ]:
        with subtests.test(text=text):
            trace = tmp_path / "ran"
            document = parse(text.replace("{}", str(trace)))
            assert document.problems
            assert not trace.exists()


def test_aliases_are_refused_before_they_expand() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    [problem] = parse("\n".join(levels)).problems
    assert problem.line == 2
    assert "alias" in problem.message


# -- properties ------------------------------------------------------------------------------------------------------

# Characters that may stand as they are in a JSON string and in a YAML double-quoted scalar.
_TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs", "Cn", "Zl", "Zp"], exclude_characters="\ufeff"))
_KEY = _TEXT.filter(lambda key: len(key) < 40 and key.isprintable())
_SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT
_VALUE = st.recursive(_SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEY, inner, max_size=3))


@settings(max_examples=50)
@given(st.dictionaries(_KEY, _VALUE, max_size=5))
def test_json_is_yaml_and_is_read_as_json_reads_it(mapping: dict[str, Any]) -> None:
    document = parse(json.dumps(mapping, ensure_ascii=False))
    assert document.problems == []
    assert document.values == mapping


@settings(max_examples=50)
@given(
    st.dictionaries(
        _KEY.filter(lambda key: scalar(key) == key), _VALUE.map(lambda value: json.loads(json.dumps(value))), max_size=5
    )
)
def test_block_yaml_is_read_back(mapping: dict[str, Any]) -> None:
    class Dumper(yaml.SafeDumper):
        """Quotes all text, for PyYAML leaves plain what only YAML 1.1 takes for text."""

    Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, '"'))
    document = parse(yaml.dump(mapping, Dumper=Dumper, sort_keys=False))
    assert document.problems == []
    assert document.values == mapping


@settings(max_examples=200)
@given(st.text(max_size=60) | st.text("a:-[]{}!&*'\"#|>%@ \n\t0", max_size=40))
def test_parse_raises_nothing_whatever_it_is_given(text: str) -> None:
    document = parse(text)
    assert isinstance(document.values, dict)
    assert all(problem.message for problem in document.problems)


def test_the_module_builds_no_objects_of_its_own() -> None:
    """Only dicts, lists, strings, numbers, booleans and null come out, of YAML's richest own types too."""
    text = "a: 2001-12-14t21:59:43.10-05:00\nb: [1, 2.5, x, true, ~]\nc: {d: !!set {x, y}}\n"
    document = strict_yaml.parse(text)
    assert document.values["a"] == "2001-12-14t21:59:43.10-05:00"
    assert document.values["b"] == [1, 2.5, "x", True, None]
    assert [problem.line for problem in document.problems] == [3]
