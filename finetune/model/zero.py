"""DeepSpeed's ZeRO: ranks share optimizer states, gradients and weights as slices of one flat buffer.

A slice cuts across weights, so only an optimizer that updates each number by itself can train it. DeepSpeed is
optional, and imported here alone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from finetune.config import DistributedSection
from finetune.runtime import ranks
from finetune.runtime.libraries import replaced

STAGES = {"optimizer": 1, "gradients": 2, "weights": 3}
"""DeepSpeed's number of each `distributed.stage`."""

_BUCKET = 2**27  # numbers that are reduced at once, of 4 bytes each


class Rates(torch.optim.Optimizer):
    """The groups of an optimizer that DeepSpeed steps: a schedule sets their learning rates, and no step is taken here.

    DeepSpeed drops groups without weights, which a checkpoint has.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> None:
        """Nothing: `Zero.step` has updated the weights."""


class Zero:
    """A model in DeepSpeed's engine, which is called like the model; one process alone is a group of one rank."""

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        section: DistributedSection,
        max_grad_norm: float,
        device: torch.device,
    ) -> None:
        self._deepspeed = _imported(device)
        self.module = model
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._optimizer = optimizer
        groups = list(optimizer.param_groups)
        with _started():
            self._engine, *_ = self._deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config=_config(section, max_grad_norm, sum(map(torch.numel, self.weights)), device),
                dist_init_required=False,
            )
        self.rates = Rates(groups)
        self._make_states()

    @property
    def weights(self) -> list[nn.Parameter]:
        """The trained weights, group by group."""
        return [weight for group in self._groups for weight in group]

    def __call__(self, **batch: Any) -> Any:
        engine = importlib.import_module("deepspeed.runtime.engine")
        # DeepSpeed 0.19 ends an autocast that its own config does not ask for; asked for, it sends gradients in 16 bit.
        with replaced(engine, "autocast_if_enabled", lambda _: contextlib.nullcontext()):
            return self._engine(**batch)

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Before the last micro-batch of a step; from `stage: gradients` on, gradients are reduced in each."""
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, averaged over ranks."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> Tensor:
        """Clip the gradients and update the weights; returns the norm before clipping, all ranks the same.

        Where it is not finite, DeepSpeed drops the gradients and updates nothing.
        """
        self._engine.step()
        return torch.as_tensor(self._engine.get_global_grad_norm())

    # -- state ---------------------------------------------------------------------------------------------------------

    def optimizer_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What `training.state.optimizer_state` returns of an unshared optimizer, on rank 0; all ranks must call it."""
        own = self._own_state()
        tensors: dict[str, Tensor] = {}
        for number, weight in enumerate(self.weights):
            for key, value in own.items():
                whole = value if key == "step" else self._deepspeed.utils.safe_get_full_optimizer_state(weight, key)
                if ranks.is_main():
                    tensors[f"{number}.{key}"] = whole.detach().to("cpu", copy=True)
        described = [{key: {"tensor": f"{number}.{key}"} for key in own} for number, _ in enumerate(self.weights)]
        groups = [{key: value for key, value in one.items() if key != "params"} for one in self.rates.param_groups]
        return {"weights": described, "groups": groups}, tensors

    def restore_optimizer(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the whole states of all weights, after the weights. Raises ValueError if they do not fit."""
        self._engine.optimizer.refresh_fp32_params()
        own = self._own_state()
        for weight, values in zip(self.weights, states, strict=True):
            if values.keys() != own.keys():
                raise ValueError(f"states {sorted(values)} instead of {sorted(own)}")
            for key, value in values.items():
                if key != "step":
                    if value.shape != shape_of(weight):
                        raise ValueError(f"`{key}` is of {tuple(value.shape)} instead of {tuple(shape_of(weight))}")
                    self._deepspeed.utils.safe_set_full_optimizer_state(weight, value.to(weight.device), key)
        if "step" in own:
            for state in self._optimizer.state.values():
                state["step"].copy_(states[0]["step"])

    def _own_state(self) -> dict[str, Any]:
        """The states of one of this rank's slices; all have the same keys and the same step."""
        return next(iter(self._optimizer.state.values()), {})

    def _make_states(self) -> None:
        """Create the states as the first update does, but empty, so that they can be restored.

        DeepSpeed 0.19 finds those of a weight only if they are there before the first group is updated.
        """
        shared = self._engine.optimizer
        cut = hasattr(shared, "fp32_partitioned_groups_flat")
        slices = shared.fp32_partitioned_groups_flat if cut else shared.single_partition_of_fp32_groups
        groups = self._optimizer.param_groups
        for number, flat in enumerate(slices):
            one = nn.Parameter(torch.zeros(1, dtype=flat.dtype, device=flat.device))
            one.grad = torch.zeros_like(one)
            self._optimizer.param_groups = [{**groups[0], "params": [one]}]
            self._optimizer.step()
            self._optimizer.state[flat] = {
                key: torch.zeros_like(flat if value.shape == one.shape else value, requires_grad=False)
                for key, value in self._optimizer.state.pop(one).items()
            }
            if not cut:
                self._deepspeed.utils.lazy_init_hp_params_optimizer_state(
                    shared.bit16_groups[number], flat, self._optimizer.state
                )
        self._optimizer.param_groups = groups

    def close(self) -> None:
        """End the engine, before the process group is destroyed, or with that of one process."""
        self._engine.destroy()
        if ranks.world_size() == 1:
            self._deepspeed.comm.destroy_process_group()


def _config(section: DistributedSection, max_grad_norm: float, trained: int, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's config."""
    sharing: dict[str, Any] = {"stage": STAGES[section.stage], "reduce_bucket_size": min(trained, _BUCKET)}
    if section.offload != "none":
        place = {"device": section.offload, "pin_memory": device.type != "cpu"}
        sharing["offload_optimizer"] = place
        if section.stage == "weights":
            sharing["offload_param"] = place
    return {
        "train_micro_batch_size_per_gpu": 1,  # for its statistics; micro-batches are ours
        "gradient_clipping": max_grad_norm,
        "zero_optimization": sharing,
        "zero_allow_untested_optimizer": True,  # SGD
        "zero_force_ds_cpu_optimizer": False,  # its own needs a compiler
    }


def _imported(device: torch.device) -> Any:
    """The package, quiet."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


@contextlib.contextmanager
def _started() -> Iterator[None]:
    """What DeepSpeed wants of a launcher, for a single process without one."""
    backend = importlib.import_module("deepspeed.comm.torch")
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    # On a CPU it would compile collectives of its own for minutes.
    with replaced(backend, "build_shm_op", lambda: None):
        yield


# -- weights -----------------------------------------------------------------------------------------------------------


def is_cut(weight: Tensor) -> bool:
    """Whether this rank may hold but a slice of it (`stage: weights`)."""
    return hasattr(weight, "ds_id")


def shape_of(weight: Tensor) -> torch.Size:
    """The shape of the whole weight."""
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape


@contextlib.contextmanager
def gathered(weight: Tensor, *, write: bool = False) -> Iterator[None]:
    """In the block the weight is whole; with `write`, what rank 0 then has is cut again. All ranks must enter it."""
    deepspeed = importlib.import_module("deepspeed")
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0 if write else None):
        yield
