"""A certificate of a device: each trial and what it showed, on a terminal, as JSON and as a page to send around."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from finetune.report import printing
from finetune.report.view import PageView
from finetune.storage.records import CertificateRecord

_SIZES = {"rows": "rows of a micro-batch", "tokens": "tokens of a row"}


@dataclass(frozen=True, repr=False)
class CertificateView(PageView):
    """The record of a certificate, and what each of its trials tries."""

    record: CertificateRecord
    tries: dict[str, str]

    template = "certificate.html.j2"

    def title(self) -> str:
        return f"Certificate of {self.record['made_for']['device']['name']}"

    def as_dict(self) -> dict[str, Any]:
        """The record: `made_for`, and `results` by trial."""
        return {**self.record, "results": [asdict(result) for result in self.record["results"]]}

    def values(self) -> dict[str, Any]:
        return {"facts": self._facts(), "rows": self._rows()}

    def show(self, console: Console) -> None:
        for name, value in self._facts():
            printing.put(console, printing.plain(console, f"{name:22} {value}"), whole=True)
        for about, status, reason, figures in self._rows():
            line = f"{status:7} {about}" + "".join(f": {text}" for text in (reason, figures) if text)
            printing.put(console, printing.plain(console, line), whole=True)

    def _facts(self) -> list[tuple[str, str]]:
        made_for = self.record["made_for"]
        versions = [f"{name} {version}" for name, version in made_for["versions"].items() if version]
        job = made_for["job"]
        return [
            *((name, str(value)) for name, value in made_for["device"].items() if value),
            ("versions", ", ".join(versions)),
            ("model", str(job["architecture"].get("model_type"))),
            *((title, str(job[name])) for name, title in _SIZES.items()),
        ]

    def _rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (
                self.tries[result.trial],
                result.status,
                result.reason,
                ", ".join(f"{name} {value:.4g}" for name, value in result.figures.items()),
            )
            for result in self.record["results"]
        ]
