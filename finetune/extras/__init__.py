"""What a run does not need. The core never imports it: extras add their entries to the core's tables."""

from __future__ import annotations

from finetune.extras import excel, lm_eval, python_docs, sweeps, zero


def register() -> None:
    """Have the extras add to each table when it is imported; what they need is imported when a job asks for it."""
    excel.register()
    lm_eval.register()
    python_docs.register()
    sweeps.register()
    zero.register()
