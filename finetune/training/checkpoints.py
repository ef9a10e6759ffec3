"""The state of a training as tensors and JSON values, and back, bit for bit; and its writing beside the training.

What a checkpoint holds: the trained weights; `optimizer.safetensors`; `state.json` with the optimizer's numbers, the
schedule, the loss scaler and the random generators of each process; `trainer_state.json`, which is transformers' own
(step, epoch, best evaluation, early stopping). Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from finetune.errors import ArtifactError, MachineError
from finetune.measure.monitor import Peak
from finetune.model import adapter
from finetune.runtime.randomness import RandomState
from finetune.storage import checkpoint, records
from finetune.storage.checkpoint import Contents
from finetune.storage.rundir import RunDirectory, checkpoint_step

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
            f"{what} is {tensor.dtype} of {tuple(tensor.shape)}, and this job's is {into.dtype} of {tuple(into.shape)}"
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


def snapshot(trainer: Any, made_with: dict[str, Any], random_states: list[dict[str, Any]]) -> Contents:
    """A copy of the training's state in host memory, from which training may go on at once."""
    model, scaler = trainer.model, getattr(trainer.accelerator, "scaler", None)
    optimizer, optimizer_tensors = optimizer_state(_inner(trainer.optimizer))
    values = {
        STATE_FILE: {
            "optimizer": optimizer,
            "schedule": trainer.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
            "random": random_states,
        },
        # Its log is metrics.jsonl over again, and would grow with each step.
        TRAINER_STATE_NAME: {**dataclasses.asdict(trainer.state), "log_history": []},
    }
    if hasattr(model, "peft_config"):
        values["adapter_config.json"] = _adapter_config(model.peft_config["default"])
    tensors = {_weights_file(model): trained_weights(model), OPTIMIZER_FILE: optimizer_tensors}
    return Contents(
        step=trainer.state.global_step,
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


def restore(trainer: Any, folder: Path) -> None:
    """Give optimizer, schedule and scaler the state of a checkpoint. Raises ArtifactError where it does not fit."""
    state = records.read(folder / STATE_FILE, records.CHECKPOINT_STATE)
    tensors = checkpoint.read_tensors(folder, OPTIMIZER_FILE)
    try:
        restore_optimizer(_inner(trainer.optimizer), {**state["optimizer"]}, tensors)
        # What the schedule's functions keep is not the checkpoint's to say: earlier versions had others.
        schedule = {key: value for key, value in state["schedule"].items() if key != "lr_lambdas"}
        _refuse_other_kind("schedule", schedule, trainer.lr_scheduler.state_dict())
        _restore_schedule(trainer.lr_scheduler, schedule)
        if state["scaler"] and (scaler := getattr(trainer.accelerator, "scaler", None)):
            _refuse_other_kind("scaler", state["scaler"], scaler.state_dict())
            scaler.load_state_dict(state["scaler"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise ArtifactError(
            f"{folder}: its state does not fit this job ({error}); give --fresh to start anew"
        ) from None


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
        raise ArtifactError(f"{folder / STATE_FILE}: `random` holds no states of generators: {error}") from None


def read_trainer_state(folder: Path) -> TrainerState:
    """transformers' part of a checkpoint. Raises ArtifactError, also for what this version of it does not know."""
    file = folder / TRAINER_STATE_NAME
    found = records.read(file, records.TRAINER_STATE)
    state: dict[str, Any] = {**found}
    if unknown := sorted(state.keys() - {field.name for field in dataclasses.fields(TrainerState)}):
        raise ArtifactError(f"{file}: this version of transformers has no `{unknown[0]}`; use the one that wrote it")
    if state["global_step"] != checkpoint_step(folder):
        raise ArtifactError(f"{file}: `global_step` is {state['global_step']}, and not the checkpoint's")
    return TrainerState(**state)


def problems_of(folder: Path) -> list[str]:
    """What keeps training from going on from a checkpoint, each naming its file; nothing for one it can go on from."""
    if damaged := checkpoint.problems_of(folder):
        return damaged
    try:
        read_trainer_state(folder)
        _random_states(folder)
    except ArtifactError as error:
        return [str(error)]
    return []


def _inner(optimizer: Any) -> Any:
    """The optimizer inside accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


class Saver:
    """Writes one checkpoint at a time while training goes on, and says in the training thread what went wrong.

    `made_with` goes into each manifest; `keep` is how many whole checkpoints stay. `verified` are known to be whole.
    """

    def __init__(self, run: RunDirectory, keep: int, made_with: dict[str, Any], verified: Iterable[Path] = ()) -> None:
        self.made_with = made_with
        self._run = run
        self._keep = keep
        self._verified = set(verified)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, contents: Contents, best_step: int | None, held_seconds: float, peak: Peak) -> None:
        """Begin to write `contents`, after the checkpoint before it is there."""
        self.wait()
        # A daemon, so that a second Ctrl-C ends the process at once: an unfinished save harms nothing.
        self._thread = threading.Thread(
            target=self._save, args=(contents, best_step, held_seconds, peak), name="save", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written. Raises MachineError or NumbersError where that failed."""
        if self._thread:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error:
            raise error

    def _save(self, contents: Contents, best_step: int | None, held_seconds: float, peak: Peak) -> None:
        started = time.perf_counter()
        try:
            self._verified.add(checkpoint.write(self._run, contents))
            seconds = held_seconds + time.perf_counter() - started
            self._run.event(
                "saved", step=contents.step, seconds=round(seconds, 3), held_seconds=round(held_seconds, 3), memory=peak
            )
            checkpoint.prune(self._run, self._keep, best_step, self._verified)
        except OSError as error:
            self._error = MachineError(f"checkpoints in {self._run.checkpoints}: {error}")
        except BaseException as error:
            self._error = error
