"""What published sweeps say about a job: its learning rate, what it loses by other choices, and what it can store."""

from __future__ import annotations

import math
import re
from typing import Any

from finetune.config import AdapterSection, Config, OptimizerSection, TrainingSection
from finetune.data.counts import Counts
from finetune.data.encoded import RowLayout
from finetune.errors import ConfigError
from finetune.model.structure import experts
from finetune.objectives import OBJECTIVES
from finetune.training.optimizers import OPTIMIZERS

_RATE, _BATCH = 2e-4, 16
"""With LoRA of alpha 32 at a batch of 128, the loss of 35 models of 1B to 1T parameters was within 1.1% of the best at
3e-4 and within 4.2% (median 0.6%) at 1e-3, whatever their size (tinker-cookbook, `chat_sl/results/sft_sweep.md`). The
rate goes with the square root of the batch (the same, `hyperparams.md`), so this is 5.7e-4 there."""
_WIDTH, _NARROWER = 2000, 1.15
"""The width of the narrowest of those, and the exponent by which the rate grows for narrower ones, so that it is 3e-3
for a width of 192 at a batch of 16, which was the best here (benchmarks/results/choices.json)."""
_EVERY_WEIGHT = 0.1
"""The best rate for training every weight, over LoRA's (the same)."""
_FAR = 5
"""At a rate five times below 5.7e-4, the loss of that sweep was 1.3% higher (median); five times above, it diverged."""
_ATTENTION = re.compile(r"(?:self_attn[.])?(?:[qkvo]|qkv|out)_proj|(?:query|key|value|c_attn|query_key_value)")


def best_rate(config: Config, architecture: Any) -> tuple[float, str]:
    """The learning rate that the evidence recommends for a job, and what it comes from."""
    width = _width(architecture)
    objective, batch = OBJECTIVES.get(config.training.objective), config.training.batch_size
    factors = {
        f"a batch of {batch}": math.sqrt(batch / _BATCH),
        f"a width of {width}": max(1.0, _WIDTH / width) ** _NARROWER,
        config.training.objective: objective.rate if objective else 1.0,
        config.optimizer.kind: OPTIMIZERS[config.optimizer.kind].rate or 1.0,
        "training every weight": _EVERY_WEIGHT if config.adapter.kind == "none" else 1.0,
    }
    why = [f"{factor:.2g} for {name}" for name, factor in factors.items() if factor != 1]
    reason = f"{_RATE:g} times {', '.join(why)}" if why else "from a published sweep of 35 models"
    return float(f"{_RATE * math.prod(factors.values()):.2g}"), reason


def _width(architecture: Any) -> int:
    return getattr(architecture.get_text_config(), "hidden_size", None) or _WIDTH


def evidence(config: Config, architecture: Any) -> str | None:
    """A note on what `training.learning_rate: auto` comes from, or on what speaks against the job's own settings.

    For an optimizer of which no sweep tells the rate, `auto` is AdamW's.
    """
    given, optimizer = config.training.learning_rate, OPTIMIZERS[config.optimizer.kind]
    rate, why = best_rate(config, architecture)
    if given == "auto":
        notes = [f"training.learning_rate: {rate:g}, {why}"]
    elif not rate / _FAR <= given <= rate * _FAR and _width(architecture) >= _WIDTH and optimizer.rate:
        way = "above" if given > rate else "below"
        notes = [f"training.learning_rate: {given:g} is far {way} {rate:g}, {why}"]
    else:
        notes = []
    if config.training.precision == "fp16" and str(getattr(architecture, "dtype", None)).endswith("bfloat16"):
        notes.append(
            "training.precision: fp16 ends at 65,504, and the base was made in bfloat16, which goes on to 3e38; if "
            "updates are skipped again and again, set fp32"
        )
    if isinstance(config.adapter.targets, list) and all(map(_ATTENTION.fullmatch, config.adapter.targets)):
        notes.append(
            "adapter.targets: adapters on attention alone learn less than as many weights on all linear layers"
        )
    return "\n".join(f"{note} (docs/choosing.md)" for note in notes) or None


def refuse_guess(training: TrainingSection, optimizer: OptimizerSection) -> None:
    """Raise ConfigError for `training.learning_rate: auto` with an optimizer of which no sweep tells the rate."""
    kind = optimizer.kind
    if training.learning_rate == "auto" and OPTIMIZERS[kind].rate is None:
        raise ConfigError(
            f"`training.learning_rate: auto`: no sweep tells the rate of `{kind}`, which is far from AdamW's; set a "
            "number, and try several with `finetune sweep`"
        )


def capacity(adapter: AdapterSection, model: Any, counts: Counts, layout: RowLayout) -> str | None:
    """How many weights an adapter has for each thing that the rows teach, and a rank for one if it has fewer.

    That is a trained token, or of an objective with one loss a row, such as a class or a preference, the row: that
    teaches no more than a bit or a few, however long it is. With fewer, an adapter may fall behind training every
    weight ("LoRA Without Regret"). None where nothing is counted.
    """
    learnt = counts.rows if layout.segments else counts.trained_tokens
    if adapter.kind == "none" or not learnt:
        return None
    share = sum(math.prod(experts.shape(weight)) for weight in model.parameters() if weight.requires_grad) / learnt
    of = "row, which teaches one comparison or label" if layout.segments else "trained token of the rows"
    said = f"{f'{share:,.0f}' if share >= 10 else f'{share:.2g}'} adapter weights for each {of}"
    if share >= 1:
        return said
    rank = 2 ** math.ceil(math.log2(adapter.rank / share))
    return f"{said}; below 1, rows that are all new may hold more than it can store: adapter.rank={rank} has 1"
