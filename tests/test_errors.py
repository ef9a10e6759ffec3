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


def test_every_error_has_the_documented_exit_code_and_is_caught_as_no_other() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FinetuneError)}
    assert kinds == {*EXIT_CODES, FinetuneError, ForecastError, InUseError}
    assert {kind: kind("what is wrong").exit_code for kind in EXIT_CODES} == EXIT_CODES
    assert InUseError.exit_code in EXIT_CODES.values()
    assert FinetuneError.exit_code not in {0, *EXIT_CODES.values()}
    for kind in EXIT_CODES:
        assert [other for other in EXIT_CODES if issubclass(kind, other)] == [kind]


def test_a_model_that_cannot_be_forecast_needs_another_config() -> None:
    with refusal(ConfigError, "no forecast") as raised:
        raise ForecastError("no forecast")
    assert raised.value.exit_code == 2
