"""Parameter-efficient fine-tuning of language models that measures its memory and proves its exports.

import finetune

result = finetune.train(model="builtin:tiny-llama", data="rows.jsonl", training={"max_steps": 20})
print(finetune.generate(result.run, "What does `textwrap.fill` do?"))
finetune.merge(result.run)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from finetune.runtime import libraries

if TYPE_CHECKING:
    from finetune.api import train
    from finetune.config import Config
    from finetune.errors import FinetuneError
    from finetune.export.publish import export_model, merge
    from finetune.forecast.planning import fit
    from finetune.inference.evaluation import evaluate
    from finetune.inference.jobs import generate
    from finetune.objectives import Objective
    from finetune.report.compare import compare
    from finetune.report.data_view import inspect_data
    from finetune.report.plan_look import plan
    from finetune.report.result import Result
    from finetune.settings import load_config
    from finetune.storage.rundir import RunDirectory
    from finetune.training.callbacks import Callback

libraries.before_import()

# Importing torch takes seconds; `finetune --help` and `import finetune` should not.
_HOMES = {
    "Callback": "finetune.training.callbacks",
    "Config": "finetune.config",
    "FinetuneError": "finetune.errors",
    "Objective": "finetune.objectives",
    "Result": "finetune.report.result",
    "RunDirectory": "finetune.storage.rundir",
    "compare": "finetune.report.compare",
    "evaluate": "finetune.inference.evaluation",
    "export_model": "finetune.export.publish",
    "fit": "finetune.forecast.planning",
    "generate": "finetune.inference.jobs",
    "inspect_data": "finetune.report.data_view",
    "load_config": "finetune.settings",
    "merge": "finetune.export.publish",
    "plan": "finetune.report.plan_look",
    "train": "finetune.api",
}

__all__ = [
    "Callback",
    "Config",
    "FinetuneError",
    "Objective",
    "Result",
    "RunDirectory",
    "compare",
    "evaluate",
    "export_model",
    "fit",
    "generate",
    "inspect_data",
    "load_config",
    "merge",
    "plan",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
