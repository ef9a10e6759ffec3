"""Saves and restores the training state as tensors and JSON values, bit for bit.

A checkpoint contains the trained weights; `optimizer.safetensors`; `state.json` with the optimizer's other values, the
schedule, the loss scaler and the random state of each rank; and `trainer_state.json` with the progress (step, epoch,
best evaluation). Nothing is pickled. Of a sharded model, tensors are stored whole, so that any number of ranks can
resume.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit

from finetune.errors import ArtifactError
from finetune.model.adapters import adapter_files, plain_peft, published
from finetune.model.distributed import sharding, zero
from finetune.model.distributed.sharding import Slices
from finetune.model.structure import linear_layers
from finetune.runtime import ranks
from finetune.runtime.randomness import RandomState
from finetune.storage import checkpoint, records
from finetune.storage.checkpoint import Contents
from finetune.training.optimizers import BLOCK
from finetune.training.progress import FILE as PROGRESS_FILE
from finetune.training.progress import Progress, read_progress
from finetune.training.step import Step

Name = TypeVar("Name")

ADAPTER_FILE, MODEL_FILE = "adapter_model.safetensors", "model.safetensors"
OPTIMIZER_FILE, STATE_FILE = "optimizer.safetensors", "state.json"


# -- weights ---------------------------------------------------------------------------------------------------------


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    """The trained weights by name (not copies; maybe sharded), an adapter's by the names in PEFT's files."""
    if not hasattr(model, "peft_config"):
        return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return adapter_files.weights(model)


def _weights_file(model: Any) -> str:
    return ADAPTER_FILE if hasattr(model, "peft_config") else MODEL_FILE


def save_weights(model: Any, folder: Path, whole: dict[str, torch.Tensor] | None = None) -> None:
    """Write the adapter, or the whole model without one, as safetensors; `whole` are the weights of a sharded model."""
    if hasattr(model, "peft_config"):
        published.write(adapter_files.weights(model, whole), plain_peft.settings(model), folder)
    else:
        model.save_pretrained(str(folder), **({"state_dict": whole} if whole else {}))


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    """What `save_weights` needs of a sharded model, in host memory of rank 0; every rank must call it.

    Without an adapter that is the whole model, otherwise what is trained.
    """
    state = model.state_dict(keep_vars=True)
    if hasattr(model, "peft_config"):
        state = {name: tensor for name, tensor in state.items() if tensor.requires_grad}
    whole = _held_by_main({id(tensor): tensor for tensor in state.values()})  # tied weights once
    return {name: whole[id(tensor)] for name, tensor in state.items() if whole}


def _held_by_main(tensors: dict[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
    """Whole copies of tensors in host memory, on rank 0 alone; one at a time is gathered."""
    whole = ((name, sharding.whole(tensor)) for name, tensor in tensors.items())
    return {name: _on_host(tensor) for name, tensor in whole if ranks.is_main()}


def restore_weights(model: Any, folder: Path) -> None:
    """Load the weights of the checkpoint `folder` into the model, whose dtypes must match. Raises ArtifactError."""
    file = _weights_file(model)
    stored, live = checkpoint.read_tensors(folder, file), trained_weights(model)
    if hasattr(model, "peft_config"):  # earlier versions also put one, without effect, on these layers
        untrained = linear_layers.untrained(model.get_base_model())
        stored = {name: tensor for name, tensor in stored.items() if adapter_files.layer_of(name) not in untrained}
    _refuse_other_names(folder / file, stored, live)
    with torch.no_grad():
        for name, tensor in stored.items():
            _copy(tensor, live[name], f"{folder / file}: `{name}`")


def _copy(tensor: torch.Tensor, into: torch.Tensor, what: str) -> None:
    shape = zero.shape_of(into)
    if (tensor.shape, tensor.dtype) != (shape, into.dtype):
        raise ArtifactError(
            f"{what} is {tensor.dtype} of {tuple(tensor.shape)}, but this job's is {into.dtype} of {tuple(shape)}"
        )
    sharding.write(tensor, into)


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


def _refuse_other_names(what: object, found: Iterable[str], expected: Iterable[str]) -> None:
    if other := sorted(set(found) ^ set(expected)):
        raise ArtifactError(f"{what} belongs to another job: it differs in {len(other)} names such as `{other[0]}`")


# -- optimizer -------------------------------------------------------------------------------------------------------


def optimizer_state(optimizer: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The optimizer's state as JSON values, and its tensors (not copies) by name.

    A tensor shared by several weights, such as bitsandbytes' quantization map, is stored once.
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


def whole_optimizer_state(optimizer: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`optimizer_state` with copies of whole tensors in host memory, on rank 0 alone; all ranks of a sharded model must
    call it.
    """
    described, tensors = optimizer_state(optimizer)
    parameters = _parameters(optimizer)
    if not any(hasattr(parameter, "sharded") for parameter in parameters):
        return described, {name: _on_host(tensor) for name, tensor in tensors.items()}
    # Of weights with few rows the last ranks hold none, and no state.
    described, made = ranks.main_does(
        lambda: (described, {name: (held.dtype, held.shape[1:]) for name, held in tensors.items()})
    )
    found = {}
    for name, (dtype, row) in made.items():
        number, _, key = name.partition(".")
        parameter = parameters[int(number)]
        held = tensors.get(name, torch.empty(0, *row, dtype=dtype, device=parameter.device))
        slices = _slices(parameter, key)
        whole = slices.whole(held) if slices else held
        if ranks.is_main():
            found[name] = _on_host(whole)
    return described, found


def _slices(parameter: Any, key: str) -> Slices | None:
    """How a state of an optimizer is cut; None for one that all ranks have in common."""
    weight = getattr(parameter, "sharded", None)
    if weight is None or key.startswith(("step", "qmap")):
        return None
    slices = sharding.slices_of(weight)
    return slices.by_block(weight.numel(), BLOCK) if slices and key.startswith("absmax") else slices


def _cut(parameter: Any, key: str, whole: torch.Tensor) -> torch.Tensor:
    slices = _slices(parameter, key)
    return slices.mine(whole) if slices else whole


def restore_optimizer(
    optimizer: Any, described: dict[str, Any], tensors: dict[str, torch.Tensor], shared: zero.Zero | None = None
) -> None:
    """Restore what `whole_optimizer_state` returned, with each tensor's dtype, device and paging.

    `shared` is the engine that steps it.
    """
    parameters, groups = shared.weights if shared else _parameters(optimizer), described["groups"]
    if (len(groups), len(described["weights"])) != (len(optimizer.param_groups), len(parameters)):
        raise ValueError("different parameter groups")
    states = [
        {
            key: _cut(parameter, key, tensors[value["tensor"]]) if isinstance(value, dict) else value
            for key, value in values.items()
        }
        if parameter.numel() or shared
        else {}
        for parameter, values in zip(parameters, described["weights"], strict=True)
    ]
    if shared:
        shared.restore_optimizer(states)
    elif isinstance(optimizer, Optimizer8bit):
        _restore_bitsandbytes(optimizer, states)
    else:
        _restore_torch(optimizer, states)
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        _refuse_other_kind("groups", stored, {key: value for key, value in group.items() if key != "params"})
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()})


def _restore_bitsandbytes(optimizer: Optimizer8bit, states: list[dict[str, Any]]) -> None:
    """Create bitsandbytes' own buffers and fill them: its `load_state_dict` would move paged states to GPU memory."""
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
    """torch restores devices, but casts states to their weight's dtype, so the original dtype is restored after it."""
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
    step: Step, schedule: Any, progress: Progress, provenance: dict[str, Any], random_states: list[dict[str, Any]]
) -> Contents:
    """A copy of the training state in host memory; training can continue at once.

    All ranks of a sharded model must call it; only rank 0's has the tensors.
    """
    model = step.model
    if step.device.type == "cuda":
        torch.cuda.synchronize(
            step.device
        )  # paged states are read as host memory, bypassing the stream of their update
    optimizer, optimizer_tensors = step.zero.optimizer_state() if step.zero else whole_optimizer_state(step.optimizer)
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
        values["adapter_config.json"] = _adapter_config(plain_peft.settings(model))
    return Contents(
        step=progress.step,
        tensors={_weights_file(model): _held_by_main(trained_weights(model)), OPTIMIZER_FILE: optimizer_tensors},
        values=json.loads(json.dumps(values)),  # also a copy
        provenance=provenance,
    )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _adapter_config(config: Any) -> dict[str, Any]:
    """PEFT's adapter_config.json (peft 0.21, `PeftModel.save_pretrained`), so that PEFT can load a checkpoint."""
    values = {**config.to_dict(), "inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}


def restore(step: Step, schedule: Any, folder: Path) -> None:
    """Restore optimizer, schedule and scaler from a checkpoint. Raises ArtifactError if it does not fit the job."""
    state = records.read(folder / STATE_FILE, records.CHECKPOINT_STATE)
    tensors = checkpoint.read_tensors(folder, OPTIMIZER_FILE)
    try:
        restore_optimizer(step.optimizer, {**state["optimizer"]}, tensors, step.zero)
        # The state of the schedule's functions is not restored: earlier versions had other functions.
        stored = {key: value for key, value in state["schedule"].items() if key != "lr_lambdas"}
        _refuse_other_kind("schedule", stored, schedule.state_dict())
        _restore_schedule(schedule, stored)
        if state["scaler"] and step.scaler:
            _refuse_other_kind("scaler", state["scaler"], step.scaler.state_dict())
            step.scaler.load_state_dict(state["scaler"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise ArtifactError(f"{folder}: its state does not fit this job ({error}); use --fresh to start over") from None


def _restore_schedule(schedule: Any, state: dict[str, Any]) -> None:
    """Restore the schedule's update count; learning rates follow the current config, which may have more steps."""
    done = state["last_epoch"]
    rates = [peak * factor(done) for peak, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    schedule.load_state_dict({**state, "_last_lr": rates, "lr_lambdas": [None] * len(rates)})
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


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
    """The random state of each rank. Raises ArtifactError."""
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
