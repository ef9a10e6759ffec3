"""Tasks of lm-evaluation-harness as one more source of metrics; `tasks` is loaded when an evaluation names one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune import tables

if TYPE_CHECKING:
    from finetune.extras.lm_eval.tasks import Tasks


def register() -> None:
    """Add `--task` to the sources of metrics."""
    tables.extend("finetune.evaluation.metrics", _add_source)


def _add_source() -> None:
    from finetune.evaluation.metrics import SOURCES

    SOURCES["tasks"] = _tasks


def _tasks(*given: Any, **settings: Any) -> Tasks:
    from finetune.extras.lm_eval.tasks import Tasks

    return Tasks(*given, **settings)
