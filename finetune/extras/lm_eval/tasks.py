"""Tasks of lm-evaluation-harness (arXiv 2405.14782), run through its API on a model in memory.

A YAML file that a user names may have `!function` fields, which are Python code beside it. Tasks that execute what a
model wrote are refused.
"""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from finetune.errors import ConfigError, DataError, MachineError, first_line
from finetune.evaluation.intervals import Measured
from finetune.evaluation.metrics import Scored, needed
from finetune.runtime.libraries import without_cudnn_attention
from finetune.runtime.out_of_memory import as_out_of_memory_error

# For metrics without a closed form, such as perplexity.
_RESAMPLES = 1000
# Of numpy, torch and few-shot examples (lm_eval 0.4.13, evaluator.py `DEFAULT_OTHER_SEED`).
_SEED = 1234


class Tasks:
    """Tasks by name, or by path of a YAML file. `limit` is the number of rows of each task (None: all)."""

    def __init__(self, names: Sequence[str], *, batch_size: int, limit: int | None, apply_chat_template: bool) -> None:
        modules = ("lm_eval.evaluator", "lm_eval.tasks", "lm_eval.models.huggingface")
        self._evaluator, tasks, self._models = (needed(name, "`--task`") for name in modules)
        self._names = list(names)
        self._settings = {"batch_size": batch_size, "limit": limit, "apply_chat_template": apply_chat_template}
        # Reading lm_eval's own 14,000 tasks takes seconds.
        self._manager = tasks.TaskManager(include_defaults=not all(map(_stands_alone, names)))
        for name in names:
            loaded = self._loaded(name)
            if unsafe := [task for task, each in loaded.items() if getattr(each, "UNSAFE_CODE", False)]:
                raise ConfigError(
                    f"task `{unsafe[0]}` executes code that the model wrote; run it with lm_eval's own command, in a "
                    "sandbox, on the merged model"
                )

    def _loaded(self, name: str) -> dict[str, Any]:
        try:
            return self._manager.load([name])["tasks"]
        except FileNotFoundError as error:  # also a data set that the hub does not have
            raise DataError(f"task `{name}`: its data is not there: {first_line(error)}") from error
        except OSError as error:  # ConnectionError among them
            raise MachineError(f"task `{name}`: its data cannot be downloaded: {first_line(error)}") from error
        except KeyError as error:
            if name not in str(error):
                raise ConfigError(f"task `{name}` cannot be loaded: {type(error).__name__}: {error}") from error
            near = difflib.get_close_matches(name, self._manager.all_tasks, n=1)
            hint = f"did you mean `{near[0]}`? " if near else ""
            raise ConfigError(
                f"task `{name}` is not known; {hint}`lm_eval ls tasks` lists all; a file of your own ends in .yaml"
            ) from None
        except Exception as error:  # YAML, a task's own code and `datasets` may raise anything
            raise ConfigError(f"task `{name}` cannot be loaded: {type(error).__name__}: {first_line(error)}") from error

    def run(self, model: Any, tokenizer: Any) -> Iterator[Scored]:
        """Each metric of each task and group, as lm_eval computes it."""
        size = self._settings["batch_size"]
        with (
            without_cudnn_attention(),
            as_out_of_memory_error("running the tasks", f"Use a smaller `--batch-size` than {size}"),
        ):
            lm = self._language_model(model.eval(), tokenizer, size)
            try:
                results = self._evaluator.evaluate(
                    lm, self._seeded(), bootstrap_iters=_RESAMPLES, fewshot_as_multiturn=True,
                    **{name: value for name, value in self._settings.items() if name != "batch_size"},
                )  # fmt: skip
            except (MemoryError, RuntimeError):
                raise
            except Exception as error:  # a task's templates, filters and code may raise anything
                raise ConfigError(f"a task failed: {type(error).__name__}: {first_line(error)}") from error
        assert results is not None, "rank 0 gets results"
        return _scored(results)

    def _language_model(self, model: Any, tokenizer: Any, batch_size: int | None) -> Any:
        """The model as lm_eval wants it, whose constructor would tie weights, also those that an adapter untied."""

        class AsItIs(self._models.HFLM):  # type: ignore[name-defined]
            made = False

            @property
            def model(self) -> Any:
                return super().model if self.made else None

        lm = AsItIs(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        lm.made = True
        return lm

    def _seeded(self) -> Any:
        """The tasks, and random numbers, as lm_eval's own command begins with them.

        `simple_evaluate` would do so too, and then run pip, compilers and git for seconds to record what is in
        `environment.json`.
        """
        random.seed(0)
        numpy.random.seed(_SEED)
        torch.manual_seed(_SEED)
        loaded = self._manager.load(self._names)
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=_SEED)
        return loaded


def _stands_alone(name: str) -> bool:
    """Whether `name` is the file of a task, not of a group, whose members may be tasks of lm_eval."""
    if not name.endswith((".yaml", ".yml")):
        return False
    try:
        return "group:" not in Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"task `{name}`: the file cannot be read: {error}") from None


def _scored(results: dict[str, Any]) -> Iterator[Scored]:
    for task, values in results["results"].items():
        better = results["higher_is_better"].get(task, {})
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            rows = [row[metric] for row in results["samples"].get(task, ()) if row["filter"] == kind and metric in row]
            name = f"{task}: {metric}" + ("" if kind == "none" else f" ({kind})")
            error = values.get(f"{metric}_stderr,{kind}")
            measured = Measured(value, error=error if isinstance(error, (int, float)) else None)
            if rows and all(isinstance(one, (int, float)) for one in rows):
                mean = Measured.mean(rows)
                if math.isclose(mean.value, value, rel_tol=1e-9, abs_tol=1e-12):
                    measured = Measured(value, mean.rows)
            yield Scored(name, better.get(metric), measured)
