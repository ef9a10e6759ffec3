"""What was looked at, how it is, and the exit code that it stands for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at: how it is, and what to do where it is not well."""

    about: str
    status: Status
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class Examination:
    """All findings, and the exit code that they stand for: 0, or that of the error with which a job would end."""

    findings: list[Finding]
    fails_with: int

    @property
    def exit_code(self) -> int:
        return self.fails_with if any(found.status == "error" for found in self.findings) else 0

    def as_dict(self) -> dict[str, Any]:
        """The findings as JSON values."""
        return {"sound": self.exit_code == 0, "findings": [asdict(found) for found in self.findings]}
