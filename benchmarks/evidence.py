"""What docs/choosing.md quotes from the literature, tried on a CPU: each setting at its own best rate, over seeds.

    python benchmarks/evidence.py [--only PART]

Every setting is a `finetune.sweep` of learning rates and seeds. Its loss is the mean over the seeds at the rate where
that is least, its best rate the lowest point of a parabola through the losses around it. Settings are compared within
each seed, with 95% intervals of Student's t over the seeds. The parts:

- capacity: random facts told to a base that learned others, with fewer and more adapter weights than trained tokens;
- batch and every-weight: the same rows in steps of 4, 16 and 64, by adapters and by all weights;
- rank, targets at equal weights, and variants of LoRA, at a batch of 16.

All but the facts are short rows of the built-in data, for the built-in base. Each part is written as it ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

ROWS, HELD_OUT, CHARACTERS = 384, 64, 90
SYMBOLS, KEY, ANSWER = 64, 3, 8
"""A fact is a key of three symbols and an answer of eight, drawn at random."""
TOLD, LEARNED_BEFORE = {"many": 512, "few": 128}, 1024

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
Losses = dict[str, list[float]]
"""By rate, the loss of each seed; infinite where one diverged."""


@dataclass(frozen=True)
class Setting:
    """The keys that a setting changes, and the rates that it is tried with."""

    changes: Mapping[str, Any]
    rates: Sequence[float]


@dataclass(frozen=True)
class Part:
    """Settings by name, each trained with all `seeds`."""

    settings: Mapping[str, Setting]
    seeds: Sequence[int] = (1, 2, 3, 4)
    facts: bool = False


def _batch(size: int, *rates: float, **changes: Any) -> Setting:
    return Setting({"training.batch_size": size, "training.micro_batch": min(size, 16), **changes}, rates)


_EVERY_WEIGHT = {"adapter.kind": "none"}
_AROUND = (1e-3, 2e-3, 4e-3)
PARTS = {
    "capacity": Part(
        {f"{told} facts, rank {rank}": Setting({"data.train": f"{told}.jsonl", "adapter.rank": rank}, (4e-3, 8e-3))
         for told, ranks in {"many": (1, 2, 4, 8, 32), "few": (1, 2)}.items() for rank in ranks},
        seeds=(1, 2, 3), facts=True,
    ),
    "batch": Part({
        "batch 4": _batch(4, 5e-4, 1e-3, 2e-3, 4e-3),
        "batch 16": _batch(16, 1e-3, 2e-3, 4e-3, 8e-3),
        "batch 64": _batch(64, 2e-3, 4e-3, 8e-3, 1.6e-2),
    }),
    "every-weight": Part({
        "batch 4": _batch(4, 1e-4, 2e-4, 4e-4, 8e-4, **_EVERY_WEIGHT),
        "batch 64": _batch(64, 4e-4, 8e-4, 1.6e-3, 3.2e-3, **_EVERY_WEIGHT),
    }),
    "rank": Part({f"rank {rank}": Setting({"adapter.rank": rank}, _AROUND) for rank in (1, 64)}),
    "targets": Part({
        # With these ranks the first two have the same weights, and all linear layers 4% fewer.
        "attention": Setting({"adapter.targets": ATTENTION, "adapter.rank": 33}, (*_AROUND, 8e-3)),
        "mlp": Setting({"adapter.targets": MLP, "adapter.rank": 20}, _AROUND),
        "all-linear": Setting({"adapter.rank": 12}, _AROUND),
    }),
    "variants": Part({
        "rsLoRA": Setting({"adapter.rslora": True}, (5e-4, 1e-3, 2e-3)),
        "DoRA": Setting({"adapter.dora": True}, _AROUND),
        "LoRA+": Setting({"optimizer.lora_plus": 16}, (6.25e-5, 1.25e-4, 2.5e-4, 5e-4)),
    }),
}  # fmt: skip

JOB: dict[str, Any] = {
    "model.name": "builtin:tiny-llama", "quantization.kind": "none", "data.train": "rows.jsonl",
    "data.eval": "held_out.jsonl", "data.max_length": 96, "training.precision": "fp32", "training.batch_size": 16,
    "training.micro_batch": 16, "training.eval_every": None, "memory.check": "off", "memory.checkpointing": "none",
    "output.merge": False, "output.save_every": None,
}  # fmt: skip
FACTS: dict[str, Any] = {
    "model.name": "base/merged", "data.max_length": 32, "training.max_steps": 200,
    "training.batch_size": 128, "training.micro_batch": 128,
}  # fmt: skip


def main() -> None:
    parser = harness.parser(__doc__, "evidence.json")
    parser.add_argument("--only", action="append", choices=PARTS, help="only this part (may be repeated)")
    options = parser.parse_args()
    parts = harness.saved(options.output, "parts")
    for name in options.only or PARTS:
        with tempfile.TemporaryDirectory(prefix="evidence-") as scratch:
            for _ in measure(PARTS[name], parts.setdefault(name, {"cpu_seconds": 0.0, "losses": {}}), Path(scratch)):
                parts = {name: parts[name] for name in PARTS if name in parts}
                harness.save(options.output, {"findings": findings(parts), "job": JOB, "parts": parts}, threads=1)
        print(json.dumps({name: findings(parts)[name]}, indent=1), flush=True)


def measure(part: Part, into: dict[str, Any], scratch: Path) -> Iterator[None]:
    """Add the losses that are missing, by setting, rate and seed, and the CPU seconds; yields after each setting."""
    import torch

    from finetune.training import sample_answers

    torch.set_num_threads(1)
    sample_answers.TOKENS = 1  # sample answers are not what is compared
    started, before = time.process_time(), into["cpu_seconds"]
    for name, setting in part.settings.items():
        losses = into["losses"].setdefault(name, {})
        if missing := [rate for rate in setting.rates if f"{rate:g}" not in losses]:
            with contextlib.chdir(scratch):
                prepare(part)
                losses |= tried(name, setting.changes, missing, part)
            into["losses"][name] = {rate: losses[rate] for rate in sorted(losses, key=float)}
            into["cpu_seconds"] = round(before + time.process_time() - started, 1)
            yield


def tried(name: str, changes: Mapping[str, Any], rates: Sequence[float], part: Part) -> Losses:
    """The losses of a setting: of a sweep, or of runs one by one for one rate, or for every weight of the base."""
    import finetune
    from finetune.errors import NumbersError
    from finetune.report.terminal import Terminal

    values = {**JOB, **(FACTS if part.facts else {}), **changes, "output.dir": name}
    if part.facts:
        values["data.eval"] = f"again_{values['data.train']}"
    if len(rates) > 1 and values.get("adapter.kind") != "none":
        keys = {"training.learning_rate": rates, "training.seed": part.seeds}
        table = finetune.sweep(nested(values), keys, full=True).table
        return {
            f"{each.values['training.learning_rate']:g}": [last_loss(Path(run)) for run in each.runs]
            for each in table.settings
        }
    losses: Losses = {}
    for rate, seed in itertools.product(rates, part.seeds):
        run = Path(name, f"{rate:g}-{seed}")
        own = {"training.learning_rate": rate, "training.seed": seed, "output.dir": str(run)}
        with contextlib.suppress(NumbersError):
            finetune.train(finetune.load_config(nested(values | own)), terminal=Terminal(quiet=True))
        losses.setdefault(f"{rate:g}", []).append(last_loss(run))
    return losses


def nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Keys such as `adapter.rank` as sections."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def last_loss(run: Path) -> float:
    """The evaluation loss at the end of a run in nats per trained token; infinite if it diverged."""
    lines = [line for line in harness.read_lines(run / "metrics.jsonl") if "eval_loss" in line]
    loss = lines[-1]["eval_loss"] if lines[-1]["step"] else None
    return math.inf if loss is None else round(loss, 5)


# -- rows --------------------------------------------------------------------------------------------------------------


def prepare(part: Part) -> None:
    """Write what the runs of a part read to the working directory, unless it is there."""
    if not Path("rows.jsonl").exists():
        write_rows()
    if part.facts and not Path("base").exists():
        write_facts()


def write_rows() -> None:
    """Short rows of the built-in data, other ones held out."""
    from finetune.data import sources

    rows = [row.fields for row in sources.rows("builtin:python_docs")]
    short = [row for row in rows if sum(len(turn["content"]) for turn in row["messages"]) <= CHARACTERS]
    random.Random(0).shuffle(short)
    _write("rows.jsonl", short[:ROWS])
    _write("held_out.jsonl", short[ROWS : ROWS + HELD_OUT])


def write_facts() -> None:
    """Random facts, and a base of two layers that has learned others."""
    import finetune
    from finetune.report.terminal import Terminal

    words = [f"w{number}" for number in range(SYMBOLS)]
    _write_base(words)
    for seed, (name, count) in enumerate({**TOLD, "before": LEARNED_BEFORE}.items()):
        draw = random.Random(seed)
        facts = [
            {"prompt": f"{' '.join(words[key // SYMBOLS**place % SYMBOLS] for place in range(KEY))} :",
             "completion": " " + " ".join(draw.choices(words, k=ANSWER))}
            for key in draw.sample(range(SYMBOLS**KEY), count)
        ]  # fmt: skip
        _write(f"{name}.jsonl", facts)
        _write(f"again_{name}.jsonl", facts)  # what was learned is asked: a file that is trained is not evaluated
    own = {"model.name": "raw", "data.train": "before.jsonl", "data.eval": "again_before.jsonl", "output.dir": "base"}
    learned = {"training.max_steps": 400, "training.learning_rate": 3e-3, **_EVERY_WEIGHT}
    finetune.train(finetune.load_config(nested({**JOB, **FACTS, **own, **learned})), terminal=Terminal(quiet=True))


def _write_base(words: Sequence[str]) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    known = {word: number for number, word in enumerate(["<pad>", "<end>", "<unk>", ":", *words])}
    spelled = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    spelled.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=spelled, eos_token="<end>", pad_token="<pad>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(known), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        tie_word_embeddings=False, initializer_range=0.05,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained("raw")
    tokenizer.save_pretrained("raw")


def _write(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# -- what follows ------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> dict[str, float]:
    """The mean of one value a seed with its 95% interval."""
    from finetune.evaluation.intervals import half_width

    half = half_width(values)
    mean = statistics.fmean(values)
    return {name: round(value, 4) for name, value in {"mean": mean, "low": mean - half, "high": mean + half}.items()}


def tuned(losses: Losses) -> list[float]:
    """The loss of each seed at the rate where their mean is least."""
    return min(losses.values(), key=statistics.fmean)


def best_rates(losses: Losses) -> list[float] | None:
    """The logarithm (base 2) of each seed's best rate: the lowest point of a parabola through three rates, the best
    of the mean and those beside it. None if that is an end of the ladder, or a parabola has no lowest point.
    """
    rates = sorted(losses, key=float)
    at = rates.index(min(rates, key=lambda rate: statistics.fmean(losses[rate])))
    if at in (0, len(rates) - 1):
        return None
    found = []
    for below, here, above in zip(*(losses[rate] for rate in rates[at - 1 : at + 2]), strict=True):
        bend = below - 2 * here + above
        if not 0 < bend < math.inf:
            return None
        found.append(math.log2(float(rates[at])) + (below - above) / (2 * bend))
    return found


def findings(parts: Mapping[str, Any]) -> dict[str, Any]:
    """By part, each setting's loss and best rate, and its loss over that of the part's reference; see `REFERENCES`."""
    found: dict[str, Any] = {}
    for part, measured in parts.items():
        reference = _reference(part, parts)
        for name, losses in measured["losses"].items():
            at_best = tuned(losses)
            one = {"loss": interval(at_best)}
            if rates := best_rates(losses):
                logs = interval(rates)
                one["rate"] = {key: float(f"{2**value:.3g}") for key, value in logs.items()}
            if reference and reference is not losses:
                apart = [own - other for own, other in zip(at_best, tuned(reference), strict=True)]
                one["over reference"] = interval(apart)
            found.setdefault(part, {})[name] = one
    if slope := _slope(parts.get("batch", {}).get("losses", {})):
        found["batch"]["exponent of the batch"] = slope
    return found


REFERENCES = {
    "batch": ("batch", "batch 4"), "rank": ("batch", "batch 16"), "every-weight": ("every-weight", "batch 4"),
    "targets": ("targets", "mlp"), "variants": ("batch", "batch 16"),
}  # fmt: skip
"""By part, the part and the setting that its settings are compared with; rank 16 is that of the batch of 16. What is
left of many facts and of few is not compared.
"""


def _reference(part: str, parts: Mapping[str, Any]) -> Losses | None:
    other, name = REFERENCES.get(part, ("", ""))
    return parts[other]["losses"].get(name) if other in parts else None


def _slope(by_batch: Mapping[str, Losses]) -> dict[str, float] | None:
    """The power of the batch that the best rate goes with, from the smallest to the largest."""
    sizes = {int(name.split()[1]): best_rates(losses) for name, losses in by_batch.items()}
    if len(sizes) < 2:
        return None
    small, large = (sizes[size] for size in (min(sizes), max(sizes)))
    if not (small and large):
        return None
    doublings = math.log2(max(sizes) / min(sizes))
    return interval([(high - low) / doublings for low, high in zip(small, large, strict=True)])


if __name__ == "__main__":
    main()
