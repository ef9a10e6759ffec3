"""QLoRA from start to end in one file: `python examples/minimal_qlora.py [section.key=value ...]`, a minute on a CPU.

This is what `finetune train` does, flat, for a person who wants to change it: the same job has the same losses there,
to the bit. Left out is what protects a run or fits it to a machine: the memory forecast, out-of-memory retry,
checkpoints and resume, several GPUs, the self-test of kernels, reports and the merge. Copy the file and change it.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import set_seed

import finetune
from finetune import kernels, objectives
from finetune.data import batching
from finetune.data.batching import MicroBatching, RowOrder
from finetune.data.encoded import IGNORE
from finetune.data.prepare import prepare
from finetune.model import build
from finetune.model.base import load_architecture
from finetune.model.distributed import gradient_norm
from finetune.model.precision import autocast
from finetune.model.source.tokenizer import load_tokenizer
from finetune.objectives import log_probs
from finetune.runtime import libraries

# -- The job. `finetune.load_config` takes the path of a file as well. -------------------------------------------------

config = finetune.load_config(
    {
        "model": {"name": "builtin:tiny-llama", "attention": "sdpa"},
        "quantization": {"kind": "nf4", "double": True},
        "adapter": {"rank": 16, "alpha": 32, "targets": "all-linear"},
        "data": {"train": "builtin:python_docs", "max_length": 256},
        "training": {
            "precision": "bf16" if torch.cuda.is_available() else "fp32",
            "batch_size": 16,
            "micro_batch": 8,
            "max_steps": 20,
            "learning_rate": 3e-3,
            "warmup": 2,
            "schedule": "constant",
            "max_grad_norm": 1.0,
            "eval_every": 20,
        },
        "optimizer": {"kind": "adamw_torch_fused", "weight_decay": 0.0},
        "memory": {"checkpointing": "all"},
        "output": {"dir": "runs/minimal_qlora", "best": False},
    },
    sys.argv[1:],
)
training, optimization = config.training, config.optimizer
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
libraries.quiet()

# -- The data: rows become messages, and these token ids and labels, which are IGNORE where nothing is trained. --------

tokenizer = load_tokenizer(config.model, config.data)
data = prepare(config.data, tokenizer)

# -- The model: the base in NF4, adapters on its linear layers, layers that are computed again in the backward pass. ---

architecture = load_architecture(config.model)
base = build.blueprint(config, architecture, config.model.attention).load(device)
model = build.trainable(base, config.model, config.adapter, config.memory, seed=training.seed, device_type=device.type)
kernels.attach(model, config.kernels.fused)  # leave this out, and PEFT's and transformers' modules compute the same
log_probs.attach(model)  # the model now scores labels in tiles: no logits of (rows, tokens, vocabulary)
set_seed(training.seed)

# -- The optimizer, and its rate: a line up to the peak in the first steps. --------------------------------------------

weights = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.AdamW(
    weights,
    lr=training.rate,
    betas=(optimization.beta1, optimization.beta2),
    eps=optimization.epsilon,
    weight_decay=optimization.weight_decay,
    fused=True,
)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / max(1, training.warmup)))

# -- Batches: the rows of a step, cut into micro-batches of similar lengths, each padded to its longest row. -----------


def steps():
    """The rows of each optimizer step, epoch after epoch, in another order in each."""
    order = RowOrder(data.train["length"][:], training.batch_size, training.seed, training.group_by_length)
    for epoch in itertools.count():
        order.set_epoch(epoch)
        yield from in_batches([data.train[index] for index in order])


def in_batches(rows):
    return (rows[start : start + training.batch_size] for start in range(0, len(rows), training.batch_size))


def micro_batches(rows):
    """The model's arguments for these rows, a micro-batch at a time: `input_ids` and `labels`, (rows, tokens).

    The model is causal, so no token sees the padding behind it, and a mask is needless.
    """
    for part in batching.micro_batches([row["length"] for row in rows], MicroBatching(training.micro_batch)):
        ids = [torch.tensor(rows[index]["input_ids"]) for index in part]
        labels = [torch.tensor(rows[index]["labels"]) for index in part]
        yield {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id).to(device),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE).to(device),
        }


# -- The loop: a loss is a sum and a count, so it does not depend on how a step is cut. --------------------------------


@torch.no_grad()
def evaluate():
    """The loss over all evaluation rows, in nats per trained token."""
    model.eval()
    total = count = 0.0
    for rows in in_batches(list(data.eval)):
        for batch in micro_batches(rows):
            with autocast(training.precision, device):
                summed, counted = objectives.sums(objective.evaluated, model, batch)
            total, count = total + summed.item(), count + counted.item()
    return total / count


def train(rows):
    """Take an optimizer step on these rows; return its loss in nats per trained token."""
    model.train()
    batches = list(micro_batches(rows))
    count = sum(int(objective.count(batch)) for batch in batches)
    parts = []
    for batch in batches:
        with autocast(training.precision, device), log_probs.tiles(config.memory.loss_tokens, fused=True):
            total, _ = objective.loss(model, batch)
        loss = total / count
        loss.backward()
        parts.append(loss.detach())
    gradient_norm.clip(weights, training.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    schedule.step()
    return torch.stack(parts).sum().item()


objective = objectives.OBJECTIVES["supervised"]
eval_losses, losses = [evaluate()], []
print(f"before: eval loss {eval_losses[0]:.4f}")
for step, rows in enumerate(itertools.islice(steps(), training.max_steps), 1):
    losses.append(train(rows))
    print(f"step {step} of {training.max_steps}: loss {losses[-1]:.4f}")
eval_losses.append(evaluate())
print(f"after: eval loss {eval_losses[-1]:.4f}")

# -- The adapter, in PEFT's format: `PeftModel.from_pretrained` reads it. ----------------------------------------------

adapter = Path(config.output.dir) / "adapter"
model.save_pretrained(adapter)
tokenizer.save_pretrained(adapter)
print(f"wrote {adapter}")
