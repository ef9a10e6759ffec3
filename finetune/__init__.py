"""Parameter-efficient fine-tuning of language models that measures its memory and proves its exports.

import finetune

result = finetune.train(model="builtin:tiny-llama", data="rows.jsonl", training={"max_steps": 20})
print(finetune.generate(result.run, "What does `textwrap.fill` do?"))
finetune.merge(result.run)
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from finetune import extras
from finetune.runtime import libraries
from finetune.storage import private

if TYPE_CHECKING:
    from finetune.api import compare as compare
    from finetune.api import fit as fit
    from finetune.api import inspect_data as inspect_data
    from finetune.api import plan as plan
    from finetune.api import train as train
    from finetune.choices import load_config as load_config
    from finetune.config import Config as Config
    from finetune.errors import FinetuneError as FinetuneError
    from finetune.evaluation.evaluate import evaluate as evaluate
    from finetune.evaluation.run_models import generate as generate
    from finetune.export.publish import export_model as export_model
    from finetune.export.publish import merge as merge
    from finetune.extras.sweeps.api import sweep as sweep
    from finetune.objectives import Objective as Objective
    from finetune.report.result import Result as Result
    from finetune.storage.rundir import RunDirectory as RunDirectory
    from finetune.training.callbacks import Callback as Callback

libraries.before_import()
extras.register()

# Importing torch takes seconds; `finetune --help` and `import finetune` should not.
_HOMES = {
    "Callback": "finetune.training.callbacks",
    "Config": "finetune.config",
    "FinetuneError": "finetune.errors",
    "Objective": "finetune.objectives",
    "Result": "finetune.report.result",
    "RunDirectory": "finetune.storage.rundir",
    "compare": "finetune.api",
    "evaluate": "finetune.evaluation.evaluate",
    "export_model": "finetune.export.publish",
    "fit": "finetune.api",
    "generate": "finetune.evaluation.run_models",
    "inspect_data": "finetune.api",
    "load_config": "finetune.choices",
    "merge": "finetune.export.publish",
    "plan": "finetune.api",
    "sweep": "finetune.extras.sweeps.api",
    "train": "finetune.api",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    if note := private.settle_home():  # before the libraries that these modules import, as the command line does
        sys.stderr.write(f"{note}\n")
    return getattr(importlib.import_module(_HOMES[name]), name)
