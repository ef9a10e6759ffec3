"""Facts about errors: each kind a person can meet has an exit code of its own, as documented."""

from __future__ import annotations

from messages import refusal

from finetune import errors
from finetune.errors import (
    ArtifactError,
    ConfigError,
    DataError,
    FinetuneError,
    ForecastError,
    InUseError,
    MachineError,
    NumbersError,
    OutOfMemoryError,
)

EXIT_CODES = {ConfigError: 2, DataError: 3, MachineError: 4, NumbersError: 5, OutOfMemoryError: 6, ArtifactError: 7}


def test_each_kind_of_error_has_its_documented_exit_code() -> None:
    assert {kind: kind("what is wrong").exit_code for kind in EXIT_CODES} == EXIT_CODES


def test_every_error_is_a_finetune_error_with_a_code_of_the_documented_ones() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FinetuneError)}
    kinds -= {FinetuneError}
    assert kinds - set(EXIT_CODES) == {ForecastError, InUseError}
    assert {kind.exit_code for kind in kinds} == set(EXIT_CODES.values())
    assert FinetuneError.exit_code not in {0, *EXIT_CODES.values()}


def test_a_model_that_cannot_be_forecast_needs_another_config() -> None:
    with refusal(ConfigError, "no forecast") as raised:
        raise ForecastError("no forecast")
    assert raised.value.exit_code == 2


def test_no_kind_but_that_one_is_caught_as_another() -> None:
    for kind in EXIT_CODES:
        assert [other for other in EXIT_CODES if issubclass(kind, other)] == [kind]
