"""Facts about the config's own documentation: each key explains itself, the schema and docs/config.md follow."""

from __future__ import annotations

import re
from typing import Any

import pytest

from finetune import choices
from finetune.choices import CHOICES
from finetune.config import Config

FIELDS = [
    (name, key, field)
    for name, section in Config.model_fields.items()
    for key, field in section.annotation.model_fields.items()
]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return choices.schema()


@pytest.fixture(scope="module")
def reference() -> str:
    return choices.reference()


def test_a_key_is_in_schema_and_reference_with_its_docstring_and_default(
    schema: dict[str, Any], reference: str, subtests: pytest.Subtests
) -> None:
    for section, key, field in FIELDS:
        with subtests.test(section=section, key=key):
            assert field.description, "it has no docstring"
            assert len(field.description.split()) >= 2
            assert field.description.rstrip().endswith(".")
            entry = schema["$defs"][Config.model_fields[section].annotation.__name__]["properties"][key]
            assert entry["description"] == field.description
            assert entry["default"] == field.default
            part = reference.split(f"## `{section}`\n")[1].split("\n## ")[0]
            [row] = [line for line in part.splitlines() if line.startswith(f"- `{key}: ")]
            assert " ".join(field.description.split()) in row
    assert all("__doc__" in vars(section.annotation) for section in Config.model_fields.values())


@pytest.mark.parametrize(
    ("key", "end"),
    [
        ("learning_rate", "One of `auto`, or a number."),
        ("micro_batch", "One of `auto`, or a number."),
        ("targets", "One of `all-linear`, or a list."),
        ("encoding", "`cp1257`."),
        ("precision", "One of `auto`, `bf16`, `fp16`, `fp32`."),
    ],
)
def test_the_reference_names_what_may_stand_in_place_of_a_name(reference: str, key: str, end: str) -> None:
    [line] = re.findall(rf"^- `{key}: .*$", reference, re.M)
    assert line.endswith(end)


def test_every_choice_field_has_its_table(schema: dict[str, Any]) -> None:
    """A field whose names come from a table that nobody collected would take any name."""
    from finetune.config.reference import _choice

    assert {choice.table for _, _, field in FIELDS if (choice := _choice(field))} == set(CHOICES)


def test_the_schema_forbids_unknown_keys(schema: dict[str, Any]) -> None:
    assert schema["additionalProperties"] is False
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values())


def test_schema_and_reference_have_each_name_of_each_table(
    schema: dict[str, Any], reference: str, subtests: pytest.Subtests
) -> None:
    for table, names in CHOICES.items():
        with subtests.test(table=table):
            section, key = table.split(".")
            entry = schema["$defs"][Config.model_fields[section].annotation.__name__]["properties"][key]
            entry = entry.get("items", entry)
            assert entry.get("anyOf", [entry])[0]["enum"] == list(names)
            [part] = re.findall(rf"^`{table}` is one of[^\n]*:\n\n(.*?)(?:\n\n|\Z)", reference, re.S | re.M)
            for name, choice in names.items():
                [line] = [line for line in part.splitlines() if line.startswith(f"- `{name}`: ")]
                assert len(line.split()) >= 3
                assert choice.help in line
