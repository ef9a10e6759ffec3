"""`finetune data`: a job's data as the model will see it, before a GPU is rented.

Reads the data and the tokenizer, but no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config import Config
from finetune.data import inspection
from finetune.data.inspection import Inspection
from finetune.model import bounds
from finetune.model.tokenizer import load_tokenizer
from finetune.report import data_view
from finetune.runtime import libraries
from finetune.storage.files import write_text


@dataclass(frozen=True, repr=False)
class DataLook:
    """An inspection of a job's data: as a dict, as a page, or in a notebook as tables and rows."""

    inspection: Inspection

    def as_dict(self) -> dict[str, Any]:
        """The inspection as JSON values."""
        return self.inspection.as_dict()

    def write(self, path: Path) -> None:
        """Write a self-contained HTML page. Raises MachineError if it cannot be written."""
        write_text(path, data_view.page(self.inspection))

    def __repr__(self) -> str:
        return f"<data: {data_view.headline(self.inspection)}>"

    def _repr_html_(self) -> str:
        return data_view.html(self.inspection)


def inspect_data(config: Config) -> DataLook:
    """Inspect the data that the job would train on: counts, lengths, padding, and the first rows token by token.

    Raises a FinetuneError for anything the user can fix; DataError also if there is nothing to learn.
    """
    libraries.quiet()
    config, _ = bounds.settled(config)
    return DataLook(
        inspection.inspect(config.data, config.training, load_tokenizer(config.model, config.data.chat_template))
    )
