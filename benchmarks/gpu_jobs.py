"""What slices of a GPU check run: jobs of `finetune train`, read back from their run directories, and saved weights."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

Findings = Iterator[tuple[str, dict[str, Any]]]
"""What a slice yields: the name of a finding, and its values; `passed` is among them where it can fail."""

OUT_OF_MEMORY = 6
"""Exit code of finetune (see finetune.errors)."""

CONFIG = harness.ROOT / "configs" / "llama7b_qlora.yaml"
BUILTIN = "builtin:tiny-llama"


@dataclass(frozen=True)
class Sizes:
    """What is run on a device: `large` and `small` are models, `tokens` and `small_tokens` the lengths of their rows.

    `steps` optimizer steps, of which the first `warm_up_steps` are left out of the speed and the steady peaks.
    """

    large: str
    small: str
    tokens: int
    small_tokens: int
    steps: int
    warm_up_steps: int
    limit: str | None


SIZES = {
    "cuda": Sizes(
        large="meta-llama/Llama-2-7b-hf", small="meta-llama/Llama-3.2-1B", tokens=2048, small_tokens=1024, steps=12,
        warm_up_steps=3, limit="24GiB",
    ),
    "cpu": Sizes(
        large=BUILTIN, small=BUILTIN, tokens=64, small_tokens=64, steps=3, warm_up_steps=1, limit=None,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Where a slice runs (`on` is cuda or cpu), and its folders.

    `scratch` is the slice's own and goes at its end; small text files are taken from it. `shared` is a cache of all
    slices and of later commands. `kept` is where the slice's results are.
    """

    on: str
    scratch: Path
    shared: Path
    kept: Path

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.on]

    @property
    def device(self) -> Any:
        import torch

        from finetune.runtime.device import this_device

        return this_device() if self.on == "cuda" else torch.device("cpu")


# -- jobs --------------------------------------------------------------------------------------------------------------


def overrides(sizes: Sizes, batch: int, rows: Path) -> dict[str, Any]:
    """What the 7B job changes in its config."""
    return {
        "model.name": sizes.large,
        "model.weights": "random",
        "data.train": rows,
        "data.format": "text",
        "data.eval": "none",
        "data.max_length": sizes.tokens,
        "training.batch_size": batch,
        "training.micro_batch": batch,
        "training.max_steps": sizes.steps,
        **({"memory.limit": sizes.limit} if sizes.limit else {}),
    }


def job(work: Work, name: str, changes: Mapping[str, Any], *, steps: int | None = None) -> dict[str, Any]:
    """Train the 7B's config with `changes`, in a process of its own, and read its run directory."""
    run = work.scratch / name
    arguments = [f"{key}={value}" for key, value in {**changes, "output.dir": run}.items()]
    done = harness.python("-m", "finetune", "train", CONFIG, *arguments, log=work.kept / name)
    wanted, sizes = steps or work.sizes.steps, work.sizes
    found = figures(run, done.exit_code, done.errors.replace(str(run), "RUN"), wanted, sizes.warm_up_steps)
    return {"exit_code": done.exit_code, "process_seconds": round(done.wall_seconds, 1), **found}


def figures(run: Path, exit_code: int, errors: str, wanted: int, warm_up_steps: int) -> dict[str, Any]:
    """What became of a job of `wanted` steps: tokens per second, seconds a step, losses, and peaks in bytes by phase.

    `steady_bytes` are the peaks of the steps after warm-up, `peak_bytes` those of the whole run with loading;
    `differences` are the forecast's from what was measured.
    """
    steps = harness.steps(run)
    losses = [line["loss"] for line in steps]
    finite = bool(losses) and all(loss is not None and math.isfinite(loss) for loss in losses)
    found: dict[str, Any] = {
        "passed": exit_code == 0 and len(steps) == wanted and finite,
        "out_of_memory": exit_code == OUT_OF_MEMORY,
        "steps": len(steps),
        "losses": losses,
        "losses_are_finite": finite,
    }
    if exit_code:
        found["message"] = last_error(errors)
    found["peak_bytes"] = harness.peaks(run)
    if steady := steps[warm_up_steps:]:
        seconds = [harness.seconds(line) for line in steady]
        found |= {
            "tokens_per_second": round(sum(line["tokens"] for line in steady) / sum(seconds), 1),
            "step_seconds_median": round(statistics.median(seconds), 4),
            "step_seconds": [round(second, 4) for second in seconds],
            "padding_share": max(line["padding_share"] for line in steady),
            "steady_bytes": harness.largest([line["memory"] for line in steady]),
        }
    if (forecast := run / "forecast.json").is_file():
        found["differences"] = json.loads(forecast.read_text(encoding="utf-8")).get("differences", [])
    return found


# -- weights in files --------------------------------------------------------------------------------------------------

_SAVE = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM
from finetune.config import ModelSection
from finetune.model.base import load_architecture
from finetune.model.source.tokenizer import load_tokenizer

name, on, folder = sys.argv[1:]
section = ModelSection(name=name, weights="random", tokenizer="builtin:tiny-llama")
torch.manual_seed(0)
started = time.perf_counter()
with torch.device(on):
    model = AutoModelForCausalLM.from_config(load_architecture(section), dtype=torch.bfloat16)
model.save_pretrained(folder)
load_tokenizer(section).save_pretrained(folder)
print(json.dumps({"parameters": model.num_parameters(), "seconds": round(time.perf_counter() - started, 1)}))
"""


def saved_weights(shared: Path, model: str, on: str) -> tuple[Path, dict[str, Any]]:
    """A folder below `shared` with random weights of `model` in 16 bit and a tokenizer, made on `on` if need be.

    Beside it is a file of facts, written last: a folder without it was not finished.
    """
    shared.mkdir(parents=True, exist_ok=True)
    folder, facts = (shared / f"{Path(model).name}{suffix}" for suffix in ("", ".json"))
    if not facts.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        found = answer(harness.python("-c", _SAVE, model, on, folder))
        if "message" in found:
            raise RuntimeError(found["message"])
        found["file_bytes"] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        facts.write_text(json.dumps(found))
    return folder, json.loads(facts.read_text())


# -- processes ---------------------------------------------------------------------------------------------------------


def answer(done: harness.Finished) -> dict[str, Any]:
    """The JSON in a process's last line of output, or what it failed with."""
    if done.exit_code:
        return {"passed": False, "exit_code": done.exit_code, "message": last_error(done.errors)}
    return {"passed": True, "process_seconds": round(done.wall_seconds, 1), **json.loads(done.output.splitlines()[-1])}


def last_error(errors: str) -> str:
    """The paragraph after `error:`, or the last line of a traceback, without the machine's paths."""
    _, marker, paragraph = f"\n{errors}".rpartition("\nerror: ")
    if not marker:
        return harness.last_line(errors)
    return harness.without_paths(paragraph.strip())[:2000]
