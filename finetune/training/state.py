"""Saves and restores the training state as tensors and JSON values, bit for bit.

A checkpoint contains the trained weights; `optimizer.safetensors`; `state.json` with the optimizer's other values, the
schedule, the loss scaler and the random state of each rank; and `trainer_state.json` with the progress (step, epoch,
best evaluation). Nothing is pickled. Tensors that ranks hold in parts are stored whole, so that any number of ranks
can resume.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

import torch

from finetune.errors import ArtifactError
from finetune.model.adapters import adapter_files, peft_format, plain_peft
from finetune.model.distributed import optimizer_states
from finetune.model.distributed.engine import Engine, WeightAccess, on_host
from finetune.model.structure import linear_layers
from finetune.runtime import libraries, ranks
from finetune.runtime.randomness import RandomState
from finetune.storage import checkpoint, records
from finetune.storage.checkpoint import Contents
from finetune.training.progress import FILE as PROGRESS_FILE
from finetune.training.progress import Progress, read_progress
from finetune.training.step import Step

Name = TypeVar("Name")

ADAPTER_FILE, MODEL_FILE = adapter_files.WEIGHTS, "model.safetensors"
OPTIMIZER_FILE, STATE_FILE = "optimizer.safetensors", "state.json"


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    """The trained weights by name (not copies; maybe a rank's part), an adapter's by the names in PEFT's files."""
    if not hasattr(model, "peft_config"):
        return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return adapter_files.weights(model)


def _weights_file(model: Any) -> str:
    return ADAPTER_FILE if hasattr(model, "peft_config") else MODEL_FILE


def save_weights(model: Any, folder: Path, whole: dict[str, torch.Tensor] | None = None) -> None:
    """Write the adapter, or the whole model without one, as safetensors; `whole`: see `whole_weights`."""
    if hasattr(model, "peft_config"):
        peft_format.write(adapter_files.weights(model, whole), plain_peft.settings(model), folder)
    else:
        libraries.save_model(model, folder, **({"state_dict": whole} if whole else {}))


def whole_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """The weights of a divided model, for `save_weights`: in host memory of rank 0; all ranks must call it."""
    state = engine.model.state_dict(keep_vars=True)
    if hasattr(engine.model, "peft_config"):
        state = {name: tensor for name, tensor in state.items() if tensor.requires_grad}
    whole = _copied_by_main(engine, {id(tensor): tensor for tensor in state.values()})  # tied weights once
    return {name: whole[id(tensor)] for name, tensor in state.items() if whole}


def _copied_by_main(engine: Engine, tensors: dict[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
    """Whole copies of tensors in host memory, on rank 0 only, gathered one at a time."""
    whole = ((name, engine.whole(tensor)) for name, tensor in tensors.items())
    return {name: on_host(tensor) for name, tensor in whole if ranks.is_main()}


def restore_weights(weights: WeightAccess, folder: Path) -> None:
    """Load the weights of the checkpoint `folder` into the model, whose dtypes must match. Raises ArtifactError."""
    model = weights.model
    file = _weights_file(model)
    stored, live = checkpoint.read_tensors(folder, file), trained_weights(model)
    if hasattr(model, "peft_config"):  # earlier versions put adapters without effect on these layers too
        untrained = linear_layers.untrained(model.get_base_model())
        stored = {name: tensor for name, tensor in stored.items() if adapter_files.layer_of(name) not in untrained}
    if other := sorted(stored.keys() ^ live.keys()):
        raise ArtifactError(
            f"{folder / file} belongs to another job: it differs in {len(other)} names such as `{other[0]}`"
        )
    with torch.no_grad():
        for name, tensor in stored.items():
            into = live[name]
            shape = weights.shape_of(into)
            if (tensor.shape, tensor.dtype) != (shape, into.dtype):
                raise ArtifactError(
                    f"{folder / file}: `{name}` is {tensor.dtype} of {tuple(tensor.shape)}, but this job's is "
                    f"{into.dtype} of {tuple(shape)}"
                )
            weights.write(tensor, into)


def _refuse_other_kind(what: str, stored: Any, live: Any) -> None:
    """Raise ValueError if a value of a checkpoint does not have the type or structure of the job's own."""
    if isinstance(live, dict) and isinstance(stored, dict):
        if unknown := sorted(stored.keys() - live.keys()):
            raise ValueError(f"{what} has no `{unknown[0]}`")
        for key, value in stored.items():
            _refuse_other_kind(f"{what}.{key}", value, live[key])
    elif isinstance(live, (list, tuple)) and isinstance(stored, list):
        if len(live) != len(stored):
            raise ValueError(f"{what} has {len(stored)} values instead of {len(live)}")
        for number, (value, expected) in enumerate(zip(stored, live, strict=True)):
            _refuse_other_kind(f"{what}.{number}", value, expected)
    elif isinstance(live, float) and type(stored) in (int, float):
        if not math.isfinite(stored):
            raise ValueError(f"{what} is not a finite number")
    elif type(stored) is not type(live):
        raise ValueError(f"{what} is {type(stored).__name__} instead of {type(live).__name__}")


def restore_optimizer(engine: Engine, described: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Restore what `Engine.optimizer_state` returned. Raises ValueError if it does not fit."""
    own, groups = engine.optimizer.param_groups, described["groups"]
    if (len(groups), len(described["weights"])) != (len(own), len(engine.weights)):
        raise ValueError("different parameter groups")
    engine.restore_optimizer(
        [
            {key: tensors[value["tensor"]] if isinstance(value, dict) else value for key, value in values.items()}
            for values in described["weights"]
        ]
    )
    for group, settings, stored in zip(own, optimizer_states.groups(engine.optimizer), groups, strict=True):
        _refuse_other_kind("groups", stored, settings)
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()})


def snapshot(
    step: Step, schedule: Any, progress: Progress, provenance: dict[str, Any], random_states: list[dict[str, Any]]
) -> Contents:
    """A copy of the training state in rank 0's memory; ranks that hold parts of the model must all call it."""
    engine, model = step.engine, step.model
    if step.device.type == "cuda":
        # Paged states are read as host memory, bypassing the stream of their update.
        torch.cuda.synchronize(step.device)
    optimizer, optimizer_tensors = engine.optimizer_state()
    weights = _copied_by_main(engine, trained_weights(model))
    values = {
        STATE_FILE: {
            "optimizer": optimizer,
            "schedule": schedule.state_dict(),
            "scaler": engine.scaler.state_dict() if engine.scaler else None,
            "random": random_states,
        },
        PROGRESS_FILE: progress.as_json(),
    }
    if hasattr(model, "peft_config"):
        # PEFT's own (peft 0.21, `PeftModel.save_pretrained`), so that it can load a checkpoint.
        values[adapter_files.CONFIG] = {**adapter_files.as_json(plain_peft.settings(model)), "inference_mode": True}
    return Contents(
        step=progress.step,
        tensors={_weights_file(model): weights, OPTIMIZER_FILE: optimizer_tensors},
        values=json.loads(json.dumps(values)),  # also copies the values
        provenance=provenance,
    )


def restore(step: Step, schedule: Any, folder: Path) -> None:
    """Restore optimizer, schedule and scaler from a checkpoint. Raises ArtifactError if it does not fit the job."""
    state = records.read(folder / STATE_FILE, records.CHECKPOINT_STATE)
    tensors = checkpoint.read_tensors(folder, OPTIMIZER_FILE)
    try:
        restore_optimizer(step.engine, {**state["optimizer"]}, tensors)
        # The state of the schedule's functions is not restored: earlier versions had other functions.
        stored = {key: value for key, value in state["schedule"].items() if key != "lr_lambdas"}
        _refuse_other_kind("schedule", stored, schedule.state_dict())
        # Learning rates follow the current config, which may have more steps.
        done = stored["last_epoch"]
        rates = [peak * factor(done) for peak, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
        schedule.load_state_dict({**stored, "_last_lr": rates, "lr_lambdas": [None] * len(rates)})
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if state["scaler"] and (scaler := step.engine.scaler):
            _refuse_other_kind("scaler", state["scaler"], scaler.state_dict())
            scaler.load_state_dict(state["scaler"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise ArtifactError(f"{folder}: its state does not fit this job ({error}); use --fresh to start over") from None


def updates_in(folder: Path) -> int:
    """The updates made by the time of a checkpoint: its steps without the skipped ones. Raises ArtifactError."""
    made = records.read(folder / STATE_FILE, records.CHECKPOINT_STATE)["schedule"].get("last_epoch")
    if type(made) is not int:
        raise ArtifactError(f"{folder / STATE_FILE}: `schedule` has no count of updates; use --fresh to start over")
    return made


def restore_random(folder: Path, rank: int) -> None:
    """Restore this rank's random state from a checkpoint, unless the checkpoint was made with fewer ranks."""
    if rank < len(states := _random_states(folder)):
        states[rank].restore()


def _random_states(folder: Path) -> list[RandomState]:
    states = records.read(folder / STATE_FILE, records.CHECKPOINT_STATE)["random"]
    try:
        return [RandomState.from_json(state) for state in states]
    except (ValueError, LookupError, TypeError, OverflowError, RuntimeError) as error:
        raise ArtifactError(f"{folder / STATE_FILE}: `random` is not a random state: {error}") from None


def problems_of(folder: Path) -> list[str]:
    """Problems that prevent resuming from a checkpoint, each naming its file; empty if there are none."""
    if damaged := checkpoint.problems_of(folder):
        return damaged
    try:
        read_progress(folder)
        _random_states(folder)
    except ArtifactError as error:
        return [str(error)]
    return []
