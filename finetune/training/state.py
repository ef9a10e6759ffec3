"""Save and restore the training state as tensors and JSON values, bit for bit.

A checkpoint holds the trained weights; `optimizer.safetensors`; `state.json` with the optimizer's numbers, the
schedule, the loss scaler and the random state of each rank; `trainer_state.json` with the progress (step, epoch, best
evaluation). Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit

from finetune.errors import ArtifactError
from finetune.model import adapter
from finetune.runtime.randomness import RandomState
from finetune.storage import checkpoint, records
from finetune.storage.checkpoint import Contents
from finetune.training.progress import FILE as PROGRESS_FILE
from finetune.training.progress import Progress, read_progress
from finetune.training.step import Step

ADAPTER_FILE, MODEL_FILE = "adapter_model.safetensors", "model.safetensors"
OPTIMIZER_FILE, STATE_FILE = "optimizer.safetensors", "state.json"


# -- weights ---------------------------------------------------------------------------------------------------------


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    """The trained weights themselves (no copies), under the names that PEFT gives an adapter's, by which it reads them.

    Without an adapter: every trained weight by its own name.
    """
    if not hasattr(model, "peft_config"):
        return {name: weight.data for name, weight in model.named_parameters() if weight.requires_grad}
    return adapter.weights(model)


def _weights_file(model: Any) -> str:
    return ADAPTER_FILE if hasattr(model, "peft_config") else MODEL_FILE


def save_weights(model: Any, folder: Path, **arguments: Any) -> None:
    """Write the adapter (or the whole model without one) as safetensors."""
    if hasattr(model, "peft_config"):
        # "auto" would ask the hub whether the vocabulary grew; extra_modules says what else is trained.
        model.save_pretrained(str(folder), save_embedding_layers=False, **arguments)
    else:
        model.save_pretrained(str(folder))


def restore_weights(model: Any, folder: Path) -> None:
    """Put the weights of the checkpoint `folder` into the model, in their own type. Raises ArtifactError."""
    file = _weights_file(model)
    stored, live = checkpoint.read_tensors(folder, file), trained_weights(model)
    _refuse_other_names(folder / file, stored, live)
    with torch.no_grad():
        for name, tensor in stored.items():
            _copy(tensor, live[name], f"{folder / file}: `{name}`")


def _copy(tensor: torch.Tensor, into: torch.Tensor, what: str) -> None:
    if (tensor.shape, tensor.dtype) != (into.shape, into.dtype):
        raise ArtifactError(
            f"{what} is {tensor.dtype} of {tuple(tensor.shape)}, but this job's is {into.dtype} of {tuple(into.shape)}"
        )
    into.copy_(tensor)


def _refuse_other_kind(what: str, stored: Any, live: Any) -> None:
    """Raise ValueError where a value of a checkpoint is not of the kind that the job's own is of."""
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


def _refuse_other_names(what: object, found: Iterable[str], expected: Iterable[str]) -> None:
    if other := sorted(set(found) ^ set(expected)):
        raise ArtifactError(f"{what} belongs to another job: it differs in {len(other)} names such as `{other[0]}`")


# -- optimizer -------------------------------------------------------------------------------------------------------


def optimizer_state(optimizer: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The optimizer's numbers as JSON values, and its tensors (no copies) by name.

    A tensor that several weights share, such as bitsandbytes' quantization map, is there once.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    weights = []
    for number, weight in enumerate(_parameters(optimizer)):
        values: dict[str, Any] = {}
        for key, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, torch.Tensor):
                name = names.setdefault(id(value), f"{number}.{key}")
                tensors[name] = value
                value = {"tensor": name}
            values[key] = value
        weights.append(values)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"weights": weights, "groups": groups}, tensors


def restore_optimizer(optimizer: Any, described: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Give the optimizer the state that `optimizer_state` described, each tensor in its type, place and paging."""
    states = [
        {key: tensors[value["tensor"]] if isinstance(value, dict) else value for key, value in weight.items()}
        for weight in described["weights"]
    ]
    groups = described["groups"]
    if (len(groups), len(states)) != (len(optimizer.param_groups), len(_parameters(optimizer))):
        raise ValueError("other groups of weights")
    if isinstance(optimizer, Optimizer8bit):
        _restore_bitsandbytes(optimizer, states)
    else:
        _restore_torch(optimizer, states)
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        _refuse_other_kind("groups", stored, {key: value for key, value in group.items() if key != "params"})
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()})


def _restore_bitsandbytes(optimizer: Optimizer8bit, states: list[dict[str, Any]]) -> None:
    """Its own loading puts paged states into the card's memory; so its own buffers are made, and filled."""
    stored = iter(states)
    for group_number, group in enumerate(optimizer.param_groups):
        for number, weight in enumerate(group["params"]):
            if not (values := next(stored)):
                continue
            optimizer.init_state(group, weight, group_number, number)
            made = optimizer.state[weight]
            _refuse_other_names(OPTIMIZER_FILE, values, made)
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    _copy(value, made[key], f"{OPTIMIZER_FILE}: `{key}`")
                else:
                    _refuse_other_kind(key, value, made[key])
                    made[key] = value


def _restore_torch(optimizer: torch.optim.Optimizer, states: list[dict[str, Any]]) -> None:
    """torch knows where each tensor lives, but casts it to its weight's type, which Adafactor's are not of."""
    groups = optimizer.state_dict()["param_groups"]
    held = {number: values for number, values in enumerate(states) if values}
    optimizer.load_state_dict({"state": held, "param_groups": groups})
    for weight, values in zip(_parameters(optimizer), states, strict=True):
        made = optimizer.state[weight] if values else {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and made[key].dtype != value.dtype:
                made[key] = value.to(made[key].device)


def _parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


# -- all of it -------------------------------------------------------------------------------------------------------


def snapshot(
    step: Step, schedule: Any, progress: Progress, made_with: dict[str, Any], random_states: list[dict[str, Any]]
) -> Contents:
    """A copy of the training's state in host memory, from which training may go on at once."""
    model = step.model
    optimizer, optimizer_tensors = optimizer_state(step.optimizer)
    values = {
        STATE_FILE: {
            "optimizer": optimizer,
            "schedule": schedule.state_dict(),
            "scaler": step.scaler.state_dict() if step.scaler else None,
            "random": random_states,
        },
        PROGRESS_FILE: progress.as_json(),
    }
    if hasattr(model, "peft_config"):
        values["adapter_config.json"] = _adapter_config(model.peft_config["default"])
    tensors = {_weights_file(model): trained_weights(model), OPTIMIZER_FILE: optimizer_tensors}
    return Contents(
        step=progress.step,
        tensors={file: {name: _on_host(tensor) for name, tensor in held.items()} for file, held in tensors.items()},
        values=json.loads(json.dumps(values)),  # a copy, too
        made_with=made_with,
    )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _adapter_config(config: Any) -> dict[str, Any]:
    """What PEFT writes beside an adapter (peft 0.21, `PeftModel.save_pretrained`), so that it reads a checkpoint."""
    values = {**config.to_dict(), "inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}


def restore(step: Step, schedule: Any, folder: Path) -> None:
    """Give optimizer, schedule and scaler the state of a checkpoint. Raises ArtifactError where it does not fit."""
    state = records.read(folder / STATE_FILE, records.CHECKPOINT_STATE)
    tensors = checkpoint.read_tensors(folder, OPTIMIZER_FILE)
    try:
        restore_optimizer(step.optimizer, {**state["optimizer"]}, tensors)
        # What the schedule's functions keep is not the checkpoint's to say: earlier versions had others.
        stored = {key: value for key, value in state["schedule"].items() if key != "lr_lambdas"}
        _refuse_other_kind("schedule", stored, schedule.state_dict())
        _restore_schedule(schedule, stored)
        if state["scaler"] and step.scaler:
            _refuse_other_kind("scaler", state["scaler"], step.scaler.state_dict())
            step.scaler.load_state_dict(state["scaler"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise ArtifactError(f"{folder}: its state does not fit this job ({error}); use --fresh to start over") from None


def _restore_schedule(schedule: Any, state: dict[str, Any]) -> None:
    """Give the schedule its count of updates; the next step's rate is that of the job as it is now, perhaps longer."""
    done = state["last_epoch"]
    rates = [peak * factor(done) for peak, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    schedule.load_state_dict({**state, "_last_lr": rates, "lr_lambdas": [None] * len(rates)})
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def restore_random(folder: Path, process: int) -> None:
    """Set the generators of this process to those of a checkpoint, where it was among those that made it."""
    if process < len(states := _random_states(folder)):
        states[process].restore()


def _random_states(folder: Path) -> list[RandomState]:
    """The generators of each process. Raises ArtifactError."""
    states = records.read(folder / STATE_FILE, records.CHECKPOINT_STATE)["random"]
    try:
        return [RandomState.from_json(state) for state in states]
    except (ValueError, LookupError, TypeError, OverflowError, RuntimeError) as error:
        raise ArtifactError(f"{folder / STATE_FILE}: `random` is not a random state: {error}") from None


def problems_of(folder: Path) -> list[str]:
    """What keeps training from going on from a checkpoint, each naming its file; nothing for one it can go on from."""
    if damaged := checkpoint.problems_of(folder):
        return damaged
    try:
        read_progress(folder)
        _random_states(folder)
    except ArtifactError as error:
        return [str(error)]
    return []
