"""Facts about errors: each kind a person can meet has an exit code of its own, as documented."""

from __future__ import annotations

import pytest

from finetune import errors
from finetune.errors import (
    ArtifactError,
    ConfigError,
    DataError,
    FinetuneError,
    ForecastError,
    MachineError,
    NumbersError,
    OutOfMemoryError,
)

EXIT_CODES = {
    ConfigError: 2,
    DataError: 3,
    MachineError: 4,
    NumbersError: 5,
    OutOfMemoryError: 6,
    ArtifactError: 7,
}


@pytest.mark.parametrize(("kind", "code"), EXIT_CODES.items())
def test_a_kind_of_error_has_its_documented_exit_code(kind: type[FinetuneError], code: int) -> None:
    assert kind("what is wrong").exit_code == code
    assert str(kind("what is wrong")) == "what is wrong"


def test_every_kind_is_documented_and_no_two_share_a_code() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and FinetuneError in kind.__bases__}
    assert kinds == set(EXIT_CODES)
    assert len({kind.exit_code for kind in kinds} | {FinetuneError.exit_code, 0}) == len(kinds) + 2


def test_a_model_that_cannot_be_forecast_needs_another_config() -> None:
    assert issubclass(ForecastError, ConfigError)
    assert ForecastError.exit_code == ConfigError.exit_code


@pytest.mark.parametrize("kind", EXIT_CODES)
def test_a_kind_is_told_apart_from_pythons_own_and_from_the_others(kind: type[FinetuneError]) -> None:
    assert kind.__bases__ == (FinetuneError,)
    assert FinetuneError.__bases__ == (Exception,)
    assert kind.__doc__ != FinetuneError.__doc__
