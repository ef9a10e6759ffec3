"""The table of mistakes.md: what people write in a first config or in their data, and what they are told.

    .venv/bin/python tests/config/mistakes.py      (after a message changed: writes the column `said` anew)

A mistake is added as a row of the table, with its cure: words that the message must contain. Each is made in an empty
folder with a few files, on the built-in base.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from finetune.choices import load_config
from finetune.config import Config
from finetune.data.prepare import prepare
from finetune.errors import FinetuneError
from finetune.forecast import devices
from finetune.model import build, precision
from finetune.model.base import load_architecture
from finetune.model.source.tokenizer import load_tokenizer

TABLE = Path(__file__).with_name("mistakes.md")
LONGEST = 350
"""Characters that one mistake may take to explain."""

_ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
_CELLS = re.compile(r"(?<!\\) \| ")


@dataclass(frozen=True)
class Mistake:
    """A row of the table. `written` has lines of a config, overrides (`a.b=c`) and `--gpu`, in code spans.

    Of `data` it has the content of rows.jsonl, and what the config says of the data.
    """

    source: str
    written: str
    said: str
    cure: str

    @property
    def row(self) -> str:
        cells = (self.source, self.written, self.said, self.cure)
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |".replace("\n", "<br>")


def read() -> list[Mistake]:
    """The rows of the table."""
    rows = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][2:]
    cells = (_CELLS.split(row.removeprefix("| ").removesuffix(" |")) for row in rows)
    return [Mistake(*(cell.replace("\\|", "|").replace("<br>", "\n") for cell in row)) for row in cells]


def told(mistakes: list[Mistake]) -> list[Mistake]:
    """The mistakes with what is said of them now. Raises AssertionError if one goes unnoticed."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return [replace(mistake, said=_message(mistake)) for mistake in mistakes]
        finally:
            os.chdir(before)


def _message(mistake: Mistake) -> str:
    parts = re.findall(r"`(.*?)`", mistake.written)
    rows, config, overrides, gpu = json.dumps(_ROW), [], [], None
    if mistake.source == "data":
        rows, *of_data = parts
        config = ["data:", "  train: rows.jsonl", *(f"  {line}" for line in of_data)]
    else:
        for part in parts:
            if part.startswith("--gpu "):
                gpu = part.removeprefix("--gpu ")
            elif re.match(r"[a-z_]+\.[a-z_]+=", part):
                overrides.append(part)
            else:
                config.append(part)
    Path("rows.jsonl").write_text(rows + "\n")
    Path("job.yaml").write_text("\n".join(config) + "\n")
    try:
        _check(load_config("job.yaml", overrides), gpu)
    except FinetuneError as error:
        return str(error)
    raise AssertionError(f"nothing is said of {mistake.written}")


def _check(job: Config, gpu: str | None) -> None:
    """What `finetune train` checks before the weights are loaded."""
    if job.training.precision == "auto":
        name, _ = precision.fastest(job, [devices.find(gpu or "cpu", job.memory).arithmetic])
        job = job.changed({"training.precision": name})
    tokenizer = load_tokenizer(job.model, job.data)
    build.blueprint(job, load_architecture(job.model), "eager").check(job.adapter)
    prepare(job.data, tokenizer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    head, _, _ = TABLE.read_text(encoding="utf-8").partition("| --- |")
    rows = [mistake.row for mistake in told(read())]
    TABLE.write_text("\n".join([f"{head}| --- | --- | --- | --- |", *rows, ""]), encoding="utf-8")
