"""From the config to TRL's SFTConfig: the one place where our keys meet the library's."""

from __future__ import annotations

import os

import torch
from trl import SFTConfig

from finetune.config import Config
from finetune.errors import ConfigError, MachineError
from finetune.runtime import ranks
from finetune.storage.rundir import RunDirectory
from finetune.training import tracking

# transformers counts evaluations and saves in steps; "only at the end" is a step that is never reached.
_NEVER = 10**9


def check(config: Config, device: torch.device) -> None:
    """What this machine cannot do, before anything is loaded.

    Raises MachineError for a precision the device lacks or a tracker that is not installed, ConfigError for a batch
    that the processes cannot share.
    """
    _check_precision(config.training.precision, device)
    tracking.check(config.tracking)
    check_shares(config)


def check_shares(config: Config) -> None:
    """Raise ConfigError for a batch that the processes cannot share."""
    training = config.training
    if training.micro_batch_tokens or training.micro_batch == "auto":
        rows, each = ranks.count(), ""
    else:
        rows, each = training.rows * ranks.count(), f" with `training.micro_batch` {training.rows}"
    if training.batch_size % rows:
        raise ConfigError(
            f"`training.batch_size` {training.batch_size} cannot be shared by {ranks.count()} processes{each}; "
            f"make it a multiple of {rows}"
        )


def arguments(config: Config, run: RunDirectory, *, evaluates: bool, resuming: bool, device: torch.device) -> SFTConfig:
    """The SFTConfig that `config`, which passed `check`, stands for."""
    training, optimizer = config.training, config.optimizer
    if "tensorboard" in config.tracking.to:
        # transformers 5 has no argument for it. Each run of a process has its own.
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.path / "tensorboard")
    found = SFTConfig(
        output_dir=str(run.path),
        run_name=run.path.name,
        use_cpu=device.type == "cpu",
        # A step is one batch, which our collator shares out among processes and micro-batches. So none is filled up.
        per_device_train_batch_size=training.batch_size,
        per_device_eval_batch_size=training.batch_size,
        accelerator_config={"even_batches": False},
        ddp_find_unused_parameters=False,
        gradient_accumulation_steps=1,
        num_train_epochs=training.epochs,
        max_steps=training.max_steps or -1,
        learning_rate=training.learning_rate,
        max_grad_norm=training.max_grad_norm,
        weight_decay=optimizer.weight_decay,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        seed=training.seed,
        # Data and checkpointing are settled before the trainer sees them.
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,
        dataloader_pin_memory=device.type == "cuda",
        # One line per step, and a NaN that shows.
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=config.tracking.to or "none",
        eval_strategy="steps" if evaluates else "no",
        eval_steps=training.eval_every or _NEVER,
        eval_on_start=evaluates and not resuming,
        prediction_loss_only=True,
        metric_for_best_model="eval_loss" if evaluates else None,
        greater_is_better=False if evaluates else None,
        save_strategy="steps",
        save_steps=config.output.save_every or _NEVER,
        save_only_model=False,
    )
    # transformers counts every visible GPU as this process's, for nn.DataParallel, which TRL refuses.
    found._n_gpu = min(found.n_gpu, 1)
    return found


def _check_precision(precision: str, device: torch.device) -> None:
    if precision == "fp16" and device.type != "cuda":
        raise MachineError("`training.precision: fp16` scales the loss on a CUDA device; set bf16 or fp32 here")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise MachineError(f"{torch.cuda.get_device_name()} has no bfloat16; set `training.precision: fp16`")
