"""DeepSpeed's ZeRO: ranks share optimizer states, gradients and weights as shards of one flat buffer.

A shard begins and ends within weights, so only an optimizer that updates each element by itself can train it. DeepSpeed
is optional, and imported here alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import itertools
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from finetune.config import DistributedSection
from finetune.errors import MachineError
from finetune.model.distributed import optimizer_states
from finetune.model.distributed.optimizer_states import States
from finetune.runtime import patches, ranks
from finetune.storage.files import amount

STAGES = {"optimizer": 1, "gradients": 2, "weights": 3}
"""DeepSpeed's number of each `distributed.stage`."""

_STEP = "step"  # the one state that all weights share

BUCKET = 2**27
"""Elements that are reduced at once, of 4 bytes each."""
PERSISTENT = 100_000
"""Weights of no more elements are kept whole between the updates, and gathered after each (DeepSpeed's own default)."""


class Rates(torch.optim.Optimizer):
    """The groups of an optimizer that DeepSpeed steps: a schedule sets their learning rates, and no step is taken here.

    DeepSpeed drops groups without weights, which a checkpoint has.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing: `Zero.clip` has updated the weights."""


class Zero:
    """DeepSpeed's engine, which clips and updates in one call; one process alone is a group of one rank."""

    scaler: torch.amp.GradScaler | None = None
    repeatable = False
    holds_parts = True

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, section: DistributedSection, max_grad_norm: float,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._deepspeed = _imported(device)
        self.model = model
        self.world_size = ranks.world_size()
        self._device = device
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._updates = optimizer
        groups = list(optimizer.param_groups)
        # Replaced by itself, because DeepSpeed leaves a function of its own there.
        self._restore_linear = patches.FUNCTIONAL_LINEAR.put(nn.functional.linear)
        self._disk = None
        if section.nvme_path:
            with ranks.agreeing():
                _async_io().load()
                self._disk = Disk(section.nvme_path, sum(map(torch.numel, self.weights)))
        self._without_launcher = "LOCAL_RANK" not in os.environ
        # DeepSpeed starts as under a launcher, also in a single process without one.
        os.environ.setdefault("LOCAL_RANK", "0")
        if not dist.is_initialized():
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        with patches.SHARED_MEMORY.by(lambda: None):
            self._engine, *_ = self._deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config=_config(section, max_grad_norm, sum(map(torch.numel, self.weights)), device, self._disk),
                dist_init_required=False,
            )
        self.optimizer: torch.optim.Optimizer = Rates(groups)
        self._make_states()

    @property
    def weights(self) -> list[nn.Parameter]:
        """The trained weights, group by group."""
        return [weight for group in self._groups for weight in group]

    @property
    def module(self) -> Any:
        """The model, by DDP's name for it: an objective may read its config."""
        return self.model

    @property
    def forward(self) -> Any:
        return self

    def __call__(self, **batch: Any) -> Any:
        with patches.ENGINE_AUTOCAST.by(lambda _: contextlib.nullcontext()):
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
        """Add the gradients of `loss`, averaged over ranks: NaN if it is not finite, for which `clip` drops them."""
        spoilt = torch.where(loss.detach().isfinite(), 1.0, math.nan)
        self._engine.backward(loss * spoilt, scale_wrt_gas=False)

    def catch_up(self, idle_pass: Callable[[], object]) -> None:
        raise AssertionError("a step cannot be repeated")

    def clip(self, max_norm: float) -> Tensor:
        """Clip to the norm of DeepSpeed's config, and update. Where it is not finite, DeepSpeed drops the gradients."""
        self._engine.step()
        # A number, not a tensor on the device, where the update was dropped.
        return torch.as_tensor(self._engine.get_global_grad_norm(), device=self._device)

    def update(self) -> None:
        """Let the schedule see an update: `clip` has made it, and torch warns of rates that change before one."""
        self.optimizer.step()

    def warm_up_count(self, count: int) -> int:
        """0: DeepSpeed drops gradients only if they are not finite, and a loss divided by zero makes them so."""
        return 0

    def make_states(self, max_norm: float) -> None:
        """Do nothing: DeepSpeed has made the states at its start."""

    def empty_update(self, max_norm: float) -> None:
        self.clip(max_norm)

    def shape_of(self, weight: Tensor) -> torch.Size:
        return shape_of(weight)

    def whole(self, weight: Tensor) -> Tensor:
        if not is_partitioned(weight):
            return weight
        with self._deepspeed.zero.GatheredParameters([weight], modifier_rank=None):
            return weight.detach().clone()

    def write(self, whole: Tensor, into: Tensor) -> None:
        if not is_partitioned(into):
            into.copy_(whole)
            return
        # What rank 0 has at the end of the block is partitioned again.
        with self._deepspeed.zero.GatheredParameters([into], modifier_rank=0):
            into.detach().copy_(whole)

    def optimizer_state(self) -> States:
        tensors: dict[str, Tensor] = {}
        numbers = {weight: number for number, weight in enumerate(self.weights)}
        for number, (flat, weights) in enumerate(self._partitions()):
            with self._in_memory(number, written=False):
                for weight, (key, value) in itertools.product(weights, self._updates.state[flat].items()):
                    whole = value if key == _STEP else self._deepspeed.utils.safe_get_full_optimizer_state(weight, key)
                    if ranks.is_main():
                        tensors[f"{numbers[weight]}.{key}"] = whole.detach().to("cpu", copy=True)
        keys: Mapping[str, Any] = next(iter(self._updates.state.values()), {})
        described = [{key: {"tensor": f"{number}.{key}"} for key in keys} for number in numbers.values()]
        return {"weights": described, "groups": optimizer_states.groups(self.optimizer)}, tensors

    def restore_optimizer(self, states: Sequence[Mapping[str, Any]]) -> None:
        shared = self._engine.optimizer
        if not self._disk:
            shared.refresh_fp32_params()
        stored = dict(zip(self.weights, states, strict=True))
        for number, (flat, weights) in enumerate(self._partitions()):
            own = self._updates.state[flat]
            with self._in_memory(number):
                if self._disk:
                    flat.data.copy_(shared.fp16_partitioned_groups_flat[number])
                for weight in weights:
                    if not stored[weight]:  # never updated, as before the first update that was not skipped
                        continue
                    if stored[weight].keys() != own.keys():
                        raise ValueError(f"states {sorted(stored[weight])} instead of {sorted(own)}")
                    for key, value in stored[weight].items():
                        if key == _STEP:
                            own[key].copy_(value)
                            continue
                        if value.shape != shape_of(weight):
                            raise ValueError(f"`{key}` is of {tuple(value.shape)} instead of {tuple(shape_of(weight))}")
                        whole, utils = value.to(weight.device), self._deepspeed.utils
                        # The function for whole states fails for padded shards (DeepSpeed 0.19).
                        if is_partitioned(weight):
                            part = partition_of(whole, weight.ds_tensor.numel())
                            utils.safe_set_local_optimizer_state(weight, part, key)
                        else:
                            utils.safe_set_full_optimizer_state(weight, whole, key)

    def _partitions(self) -> list[tuple[Tensor, list[nn.Parameter]]]:
        """The tensors that the optimizer updates on this rank, each with the weights it is a shard of."""
        shared = self._engine.optimizer
        if hasattr(shared, "fp16_groups"):
            return list(zip(shared.fp32_partitioned_groups_flat, shared.fp16_groups, strict=True))
        return list(zip(shared.single_partition_of_fp32_groups, shared.bit16_groups, strict=True))

    def _make_states(self) -> None:
        """Create the states as the first update does, but empty, so that they can be restored.

        DeepSpeed 0.19 finds those of a weight only if they are there before the first group is updated.
        """
        groups = self._updates.param_groups
        for number, (flat, weights) in enumerate(self._partitions()):
            one = nn.Parameter(torch.zeros(1, dtype=flat.dtype, device=flat.device))
            one.grad = torch.zeros_like(one)
            self._updates.param_groups = [{**groups[0], "params": [one]}]
            self._updates.step()
            with self._in_memory(number):
                self._updates.state[flat] = {
                    key: torch.zeros_like(flat if value.shape == one.shape else value, requires_grad=False)
                    for key, value in self._updates.state.pop(one).items()
                }
            if not is_partitioned(weights[0]):
                self._deepspeed.utils.lazy_init_hp_params_optimizer_state(weights, flat, self._updates.state)
        self._updates.param_groups = groups

    @contextlib.contextmanager
    def _in_memory(self, number: int, *, written: bool = True) -> Iterator[None]:
        """In the block shard `number` and its states are in memory; then on the disk, as before unless `written`."""
        shared = self._engine.optimizer
        if not self._disk or not shared.optimizer_swapper.is_swappable_tensor(
            numel=shared.fp16_partitioned_groups_flat_numel[number]
        ):
            yield
            return
        swapper, flat = shared.optimizer_swapper, shared.fp32_partitioned_groups_flat[number]
        swapper.swap_in_optimizer_state(flat)
        with patches.SWAPPABLE.by(lambda number: False, shared):
            yield
        if written:
            swapper.swap_out_optimizer_state(flat)
        else:
            swapper.release_swap_buffers(flat)

    def close(self) -> None:
        """End the engine, and the process group of one process."""
        self._engine.destroy()
        self._restore_linear()
        if self._disk:
            self._disk.close()
        if ranks.world_size() == 1:
            self._deepspeed.comm.destroy_process_group()
        if self._without_launcher:
            del os.environ["LOCAL_RANK"]  # by which accelerate would take a later trainer of the process for a rank


def _config(
    section: DistributedSection, max_grad_norm: float, trained: int, device: torch.device, disk: Disk | None
) -> dict[str, Any]:
    sharing: dict[str, Any] = {
        "stage": STAGES[section.stage],
        "reduce_bucket_size": min(trained, BUCKET),
        # A weight is whole only while its module computes, however small the model is; the next is gathered meanwhile
        # because the host is ahead of the card.
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": PERSISTENT,
    }
    if section.offload != "none":
        host = {"device": "cpu", "pin_memory": device.type != "cpu"}
        sharing["offload_optimizer"] = {**host, "device": "nvme", "nvme_path": str(disk.path)} if disk else host
        if section.stage == "weights":
            sharing["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": 1,  # used for its statistics only; the step makes micro-batches
        "gradient_clipping": max_grad_norm,
        "zero_optimization": sharing,
        "zero_allow_untested_optimizer": True,  # SGD
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own CPU optimizer needs a compiler
    }


def _imported(device: torch.device) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


# -- a disk ------------------------------------------------------------------------------------------------------------


def check(section: DistributedSection, device: torch.device) -> None:
    """Raise MachineError if DeepSpeed is missing, or something that `offload: nvme` needs."""
    if importlib.util.find_spec("deepspeed") is None:
        raise MachineError("`distributed.kind: deepspeed` needs the package deepspeed: pip install deepspeed")
    if not section.nvme_path:
        return
    try:
        with tempfile.TemporaryFile(dir=section.nvme_path):
            pass
    except OSError as error:
        raise _unusable(section.nvme_path, error) from None
    _imported(device)
    if not _async_io().is_compatible():
        raise MachineError(
            "`distributed.offload: nvme` needs DeepSpeed's async_io, which is compiled at the first start: install a "
            "C++ compiler, ninja and libaio with its headers (apt-get install libaio-dev), or set `offload: cpu`"
        )


def _unusable(path: str, error: OSError) -> MachineError:
    return MachineError(
        f"`distributed.nvme_path`: nothing can be written to {path}: {error.strerror}; set a directory that exists, "
        "with room, on a local disk"
    )


def _async_io() -> Any:
    return importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()


class Disk:
    """A directory of this rank below `distributed.nvme_path`, locked while its process lives.

    Those of killed processes are removed. Raises MachineError if there is no room for what this machine's
    ranks keep of `trained` elements: a copy, two states and the gradient of each, in float32.
    """

    def __init__(self, path: str, trained: int) -> None:
        root = Path(path)
        needed = 16 * trained * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // ranks.world_size()
        try:
            for left in root.glob("finetune-*"):
                # Directories in use are kept, and those of other users.
                with contextlib.suppress(OSError), open(left / "lock") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left)
            self.path = Path(tempfile.mkdtemp(prefix="finetune-", dir=root))
            self._lock = open(self.path / "starting", "w")  # noqa: SIM115 -- closed below
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            (self.path / "starting").rename(self.path / "lock")
            free = shutil.disk_usage(root).free
        except OSError as error:
            raise _unusable(path, error) from None
        if free < needed:
            self.close()
            raise MachineError(
                f"`distributed.nvme_path`: {root} has {amount(free)} left, and the optimizer's states take up to "
                f"{amount(needed)}; free some, or choose another disk"
            )

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


# -- weights -----------------------------------------------------------------------------------------------------------


def is_partitioned(weight: Tensor) -> bool:
    """Whether ZeRO-3 has partitioned this weight (`stage: weights`)."""
    return hasattr(weight, "ds_id")


def shape_of(weight: Tensor) -> torch.Size:
    """The shape of the whole weight."""
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape


def partition_of(whole: Tensor, numel: int) -> Tensor:
    """This rank's shard (numel,) of a partitioned tensor; after the end of `whole` there are zeros."""
    padded = nn.functional.pad(whole.flatten(), (0, numel * ranks.world_size() - whole.numel()))
    return padded.narrow(0, numel * ranks.rank(), numel)
