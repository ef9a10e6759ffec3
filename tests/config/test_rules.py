"""The table of rules between keys: it names keys and values that a config can have."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import TypeAdapter

from finetune import choices
from finetune.config import Config
from finetune.config.rules import RULES


def test_a_rule_is_about_values_that_its_keys_may_have_and_defaults_keep_it(subtests: pytest.Subtests) -> None:
    for rule in RULES:
        with subtests.test(rule=rule):
            assert not rule.broken(Config())
            for key, values in ((rule.key, rule.values), (rule.other, rule.others)):
                section, _, name = key.partition(".")
                field = Config.model_fields[section].annotation.model_fields[name]
                adapter = TypeAdapter(Annotated[field.annotation, field])
                for value in values.named:
                    adapter.validate_python(value, context={"choices": choices.CHOICES})
