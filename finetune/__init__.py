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

from finetune import libraries

if TYPE_CHECKING:
    from finetune.inspecting import inspect_data
    from finetune.planning import fit, plan
    from finetune.recipe import evaluate, generate, merge, train
    from finetune.rundir import RunDirectory
    from finetune.settings import load_config

libraries.before_import()

# Importing torch takes seconds; `finetune --help` and `import finetune` should not.
_HOMES = {
    "load_config": "finetune.settings",
    "inspect_data": "finetune.inspecting",
    "plan": "finetune.planning",
    "fit": "finetune.planning",
    "train": "finetune.recipe",
    "merge": "finetune.recipe",
    "generate": "finetune.recipe",
    "evaluate": "finetune.recipe",
    "RunDirectory": "finetune.rundir",
}

__all__ = ["RunDirectory", "evaluate", "fit", "generate", "inspect_data", "load_config", "merge", "plan", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
