"""The home folder of a user who has no entry in the system's user database."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

import pytest

import finetune
from finetune.storage import private


@pytest.fixture
def unknown_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a user without a passwd entry and HOME is given."""

    def nobody(user: int) -> pwd.struct_passwd:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("HOME", "HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "USER"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    return tmp_path / f"finetune-home-{os.geteuid()}"


def test_a_user_without_a_home_gets_one_of_their_own(unknown_user: Path) -> None:
    assert str(unknown_user) in (private.settle_home() or "")
    assert unknown_user.stat().st_mode & 0o777 == 0o700
    assert private.cache_folder().is_relative_to(unknown_user)
    assert private.settle_home() is None


def test_the_python_api_provides_a_home_like_the_command_line(
    unknown_user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(finetune.load_config)
    assert Path.home() == unknown_user
    assert callable(finetune.train)
    assert capsys.readouterr().err.count(str(unknown_user)) == 1


def test_a_home_writable_by_others_is_not_used(unknown_user: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    unknown_user.symlink_to("elsewhere")
    private.settle_home()
    assert Path.home() != unknown_user
    assert not Path.home().is_symlink()
    assert private.not_private(Path.home()) is None


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    assert private.cache_folder().is_relative_to(Path.home() / ".cache")
    private.settle_home()
    assert "HF_HOME" not in os.environ
