"""What an examination found: each finding with its status, and the exit code of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rich.console import Console

from finetune.report import printing
from finetune.report.view import View

Status = Literal["ok", "warning", "refused", "skipped", "error"]

_STYLES = {"ok": "green", "warning": "yellow", "refused": "yellow", "skipped": "dim", "error": "bold red"}


class Finding(NamedTuple):
    """One thing that was checked: its status, details, and what to do if something is wrong."""

    about: str
    status: Status
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class Examination(View):
    """All findings. The exit code is 0, or `fails_with`, which a job would end with, if any finding is an error, or the
    whole is `refused`.
    """

    findings: list[Finding]
    fails_with: int
    refused: bool = False

    @property
    def exit_code(self) -> int:
        wrong = self.refused or any(finding.status == "error" for finding in self.findings)
        return self.fails_with if wrong else 0

    def as_dict(self) -> dict[str, Any]:
        """The findings as JSON values."""
        return {"sound": self.exit_code == 0, "findings": [finding._asdict() for finding in self.findings]}

    def show(self, console: Console) -> None:
        """Print one finding a line."""
        width = max(len(about) for about, *_ in self.findings)
        for about, status, what, remedy in self.findings:
            text = "; ".join(what.splitlines()) + (f" → {remedy}" if remedy else "")
            line = printing.plain(console, f"{status:7}  {about:{width}}  {text}")
            line.stylize(_STYLES[status], 0, 7)
            printing.put(console, line, whole=True)
