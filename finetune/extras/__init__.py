"""What a run does not need. The core never imports it: extras add their entries to the core's tables."""

from __future__ import annotations

from finetune.extras import doctor, excel, init, launch, lm_eval, pages, python_docs, sweeps, zero


def register() -> None:
    """Have the extras add to each table when it is imported; what they need is imported when a job asks for it."""
    for extra in (doctor, excel, init, launch, lm_eval, pages, python_docs, sweeps, zero):
        extra.register()
