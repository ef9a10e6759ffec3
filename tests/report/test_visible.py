"""Nothing that a file, a row, a key or a library says can steer the terminal: errors, views, warnings, tracebacks."""

from __future__ import annotations

import io
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from children import Children
from hypothesis import given
from hypothesis import strategies as st

from finetune.report.visible import LINES, VisibleStream, visible

TINY = Path(__file__).parents[2] / "configs" / "tiny_cpu.yaml"
# A cleared screen, a title, eight-bit escapes, an override of direction, a bell, a line that covers another.
EVIL = "\x1b[2J\x1b]0;t\x07\x9b31m\u202egpj\u2066\x08\r"


def steers(text: str) -> bool:
    return any(unicodedata.category(letter) in ("Cc", "Cf", "Cs") and letter not in LINES for letter in text)


@given(st.text(st.characters()))
def test_no_text_steers_and_what_has_a_glyph_stays(text: str) -> None:
    cleaned = visible(text, LINES)
    assert not steers(cleaned)
    for letter, shown in zip(text, cleaned, strict=True):
        assert shown == letter or not letter.isprintable()


def test_spaces_and_joiners_of_other_languages_stay() -> None:
    text = "réponse\u00a0: 答え\u3000می\u200cخواهم 👩\u200d👩\u200d👧"
    assert visible(text, LINES) == text


def test_a_stream_is_otherwise_as_it_was() -> None:
    stream = io.StringIO()
    shown = VisibleStream(stream)
    print("a\n" + EVIL, file=shown)
    assert stream.getvalue().startswith("a\n")
    assert not steers(stream.getvalue())
    assert shown.isatty() is False


def finetune(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "finetune", *map(str, arguments)], capture_output=True, text=True, timeout=600
    )


def test_an_error_names_a_hostile_key_value_and_file_without_obeying_them(tmp_path: Path) -> None:
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in EVIL)
    config = tmp_path / f"job{EVIL}.yaml"
    config.write_text(f'model: {{name: 5, "a{escaped}": 1}}\ndata: {{format: "{escaped}", train: "{escaped}"}}\n')
    ended = finetune("data", config)
    assert ended.returncode == 2
    assert "`model.name`" in ended.stderr
    assert "`data.format`" in ended.stderr
    assert not steers(ended.stdout + ended.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--debug"]])
def test_so_it_is_with_what_a_library_says_of_a_model_and_in_a_traceback(
    tmp_path: Path, children: Children, flags: list[str]
) -> None:
    base = tmp_path / f"base{EVIL}"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "x\\u001b[2J\\u202e"}')
    (tmp_path / "job.yaml").write_text(f'model:\n  name: "{str(base).encode("unicode_escape").decode()}"\n')
    ended = children.run(["data", tmp_path / "job.yaml", *flags])
    assert ended.code != 0
    assert ended.output
    assert not steers(ended.output)
