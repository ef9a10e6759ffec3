"""Parameter-efficient fine-tuning of language models that measures its memory and proves its exports.

import finetune

config = finetune.load_config("configs/tiny_cpu.yaml", ["training.max_steps=20"])
result = finetune.train(config)
print(finetune.generate(result.run, "What does `textwrap.fill` do?"))
finetune.merge(result.run)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from finetune.runtime import libraries

if TYPE_CHECKING:
    from finetune.forecast.planning import fit
    from finetune.inference.evaluation import evaluate
    from finetune.inference.jobs import generate
    from finetune.lifecycle.publish import merge
    from finetune.recipe import train
    from finetune.report.data_look import inspect_data
    from finetune.report.plan_look import plan
    from finetune.settings import load_config
    from finetune.storage.rundir import RunDirectory

libraries.before_import()

# Importing torch takes seconds; `finetune --help` and `import finetune` should not.
_HOMES = {
    "load_config": "finetune.settings",
    "inspect_data": "finetune.report.data_look",
    "plan": "finetune.report.plan_look",
    "fit": "finetune.forecast.planning",
    "train": "finetune.recipe",
    "merge": "finetune.lifecycle.publish",
    "generate": "finetune.inference.jobs",
    "evaluate": "finetune.inference.evaluation",
    "RunDirectory": "finetune.storage.rundir",
}

__all__ = ["RunDirectory", "evaluate", "fit", "generate", "inspect_data", "load_config", "merge", "plan", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
