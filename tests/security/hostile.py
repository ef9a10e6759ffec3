"""What the tests of hostile files share: a trap that shows whether it ran, and what a refusal looks like."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

from watched import Ended

CANARY = "hf_canaryCANARYcanary0123456789"
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny_cpu.yaml"


class Trap:
    """Code that leaves a trace where it runs: as a pickle, as Python, and as a shell command."""

    def __init__(self, folder: Path) -> None:
        self.trace = folder / "it_ran"
        self.python = f"open({str(self.trace)!r}, 'w').close()\n"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trace}",)

    def pickled(self, file: Path) -> None:
        file.write_bytes(pickle.dumps({"weight": self}))

    @property
    def went_off(self) -> bool:
        return self.trace.exists()


def refused(ended: Ended, *words: object, code: int = 7) -> None:
    """Assert that a command ended with one clear paragraph that says `words`."""
    assert ended.code == code, ended.out + ended.err
    assert ended.err.startswith("error: ")
    assert "Traceback" not in ended.err
    for word in words:
        assert str(word) in ended.err


def change(file: Path, **values: Any) -> None:
    """Set keys of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
