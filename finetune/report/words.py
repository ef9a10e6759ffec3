"""Formats numbers, settings and counts in words, the same way on terminal and pages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetune.config import AdapterSection, ModelSection, QuantizationSection, TrainingSection
from finetune.config.field_types import source_name
from finetune.data.counts import CONTROL_TOKENS, Counts
from finetune.storage.records import SampleImage
from finetune.training.strategies import STRATEGIES

if TYPE_CHECKING:  # these import torch, which would delay the first line of a plan
    from finetune.data.batching import LargestBatch
    from finetune.data.splits import SplitUse
    from finetune.forecast.answer_memory import Serving
    from finetune.forecast.image_memory import ImageMemory
    from finetune.forecast.job_forecast import Forecast
    from finetune.model.structure.mixture import Mixture
    from finetune.report.printing import Cells
    from finetune.runtime.memory_monitor import Peak

UNITS = {"GiB": 2**30, "MiB": 2**20}
"""Bytes of the units that sizes are written in."""

MEASURES = {
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
    "device_bytes": "device",
    "resident_bytes": "resident",
}
"""The names of the monitor's measures."""

_DIVIDED = {
    "weights": "weights, gradients and optimizer states",
    "gradients": "gradients and optimizer states",
    "optimizer": "optimizer states",
}
_OFFLOADED = {"none": "on each GPU", "cpu": "in the host memory of each GPU", "nvme": "in host memory and on a disk"}

_RECOMPUTED = {
    "none": "nothing",
    "keep-both": "all but attention and large products",
    "keep-products": "all but large products",
    "keep-attention": "all but attention",
}

# Limits for lists of rows and columns in a message.
_LOCATIONS = 3
_COLUMNS = 12


def size(size_bytes: int) -> str:
    """Bytes in GiB (2^30), or in MiB (2^20) below one GiB."""
    unit = unit_of(size_bytes)
    return f"{size_bytes / UNITS[unit]:.{2 if unit == 'GiB' else 0}f} {unit}"


def unit_of(size_bytes: int) -> str:
    """The unit for a size: GiB from one GiB on, else MiB."""
    return "GiB" if size_bytes >= UNITS["GiB"] else "MiB"


def loss(nats: float | None) -> str:
    """A loss in nats per token; None, which stands for a non-finite loss in files, is "nan"."""
    return f"{math.nan if nats is None else nats:.4f}"


def number(value: float | None) -> str:
    """A number with three digits after the point; empty for a missing one."""
    return "" if value is None else f"{value:.3f}"


def as_in_a_file(value: Any) -> str:
    """`true`, `null` and `[a, b]`, as a config has them, not as Python does."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def statistic(name: str) -> str:
    """A statistic of an objective, such as `rewards_margins`, in words."""
    return name.replace("_", " ")


def preferred(line: Mapping[str, Any]) -> str:
    """The reward margin and the accuracy of a line of metrics.jsonl, to follow the loss; empty without them."""
    margin, accuracy = line.get("rewards_margins"), line.get("rewards_accuracies")
    return ("" if margin is None else f"  margin {margin:.3f}") + (
        "" if accuracy is None else f"  accuracy {accuracy:.0%}"
    )


def served(record: Mapping[str, Any]) -> str | None:
    """What is lost between the trained and an exported model, as sentences; None if the record does not say."""
    if not (like := record.get("served")):
        return None
    made_of = record.get("merged")
    model = "merged" if made_of else "trained"
    text = (
        f"Its KL divergence from the {model} model is {like['kl']:.2g} nats a token (at most {like['kl_max']:.2g}), "
        f"with the same most likely token in {share(like['agreement'])} of places"
    )
    if weights := record.get("weights"):
        text = f"{weights['differing']:,} of {weights['count']:,} weights differ from the {model} ones. {text}"
    losses = record.get("losses") or {}
    name = "served" if "served" in losses else record.get("onto", "16-bit")
    if record.get("gain_kept") is not None and losses.keys() >= {name, "base", "trained"}:
        text += (
            f"; its held-out loss is {losses[name]:.4f}, beside {losses['base']:.4f} of the base and "
            f"{losses['trained']:.4f} as {model}: {record['gain_kept']:.1%} of the gain is kept"
        )
    elif record.get("gain_unknown"):
        text += f". The share of the gain that is kept is unknown: {record['gain_unknown']}"
    if made_of:
        text += (
            f". The adapter was trained on the base in {made_of['trained_on']}, and the KL divergence of the merged "
            f"model from that is {made_of['kl']:.2g}"
        )
        if made_of.get("gain_kept") is not None:
            text += f", with {share(made_of['gain_kept'])} of the gain"
    return f"{text}."


def share(value: float) -> str:
    return f"{value:.1%}"


def change(value: float) -> str:
    """A relative change with its sign."""
    return f"{value:+.1%}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def significant(value: float, digits: int = 3) -> str:
    """A number to that many digits; a larger one, below a thousand billions, as a whole number and not as 1e+03."""
    return count(value) if 10**digits - 0.5 <= value < 1e12 else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, such as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def hours(value: float) -> str:
    """Hours to three digits in the unit that suits them, such as `27.8 seconds`, `2.17 minutes` or `12.5 hours`."""
    per_hour, unit = (3600, "seconds") if value < 1 / 60 else (60, "minutes") if value < 1 else (1, "hours")
    return f"{significant(per_hour * value)} {unit}"


def image_size(image: SampleImage) -> str:
    """The size of an image of a row in pixels and tokens."""
    return f"{count(image.width)} x {count(image.height)} pixels, {count(image.tokens)} tokens"


def base(model: ModelSection, quantization: QuantizationSection, precision: str) -> str:
    """The base and how it is stored, such as `meta-llama/Llama-2-7b-hf in nf4; bf16 arithmetic`."""
    double = ", constants quantized too" if quantization.double and quantization.kind in ("nf4", "fp4") else ""
    named = {
        "none": ", unquantized;", "auto": ", as little quantized as fits;",
        **dict.fromkeys(("published", "gguf"), ", as published;"),
    }  # fmt: skip
    # A GGUF base has no other quantization.
    of_file = model.name.endswith(".gguf") and quantization.kind != "none"
    stored = named.get("gguf" if of_file else quantization.kind, f" in {quantization.kind}{double};")
    weights = " with random weights" if model.weights == "random" else ""
    if rope := model.rope_scaling:
        weights += f" and {rope.rope_type} rotary scaling by {rope.factor:g},"
    return f"{model.name}{weights}{stored} {'native' if precision == 'auto' else precision} arithmetic"


def adapter(section: AdapterSection) -> str:
    """The trained weights, such as `LoRA of rank 16, alpha 32, on all-linear`."""
    if section.kind == "none":
        return "none: every weight is trained"
    targets = section.targets if isinstance(section.targets, str) else ", ".join(section.targets)
    kinds = [name for name, on in (("rsLoRA", section.rslora), ("DoRA", section.dora)) if on] or ["LoRA"]
    ranks = ", ".join(f"{rank} on {name}" for name, rank in section.ranks.items())
    rank = f"{section.rank} ({ranks})" if ranks else section.rank
    start = f", from {section.start_from}" if section.start_from else ""
    return f"{' '.join(kinds)} of rank {rank}, alpha {section.alpha:g}, on {targets}{start}"


def training(section: TrainingSection, optimizer: str) -> str:
    """Steps, objective, optimizer and learning rate, such as `20 steps, supervised, adamw_8bit, ...`."""
    steps, epochs = section.max_steps, section.epochs
    length = f"{steps:,} step{'s' * (steps != 1)}" if steps else f"{epochs:,g} epoch{'s' * (epochs != 1)}"
    return f"{length}, {section.objective}, {optimizer}, learning rate {learning_rate(section)}, {section.schedule}"


def learning_rate(section: TrainingSection) -> str:
    """The peak learning rate; `auto` in the config of a run that was not started."""
    return section.learning_rate if section.learning_rate == "auto" else f"{section.learning_rate:g}"


def verdict(planned: Forecast | Serving) -> str:
    """The answer of a forecast: fits or not, needed and available memory, and the device."""
    needed, budget = size(planned.needed_bytes), size(planned.budget_bytes)
    if needed.split()[1] == budget.split()[1]:
        needed = needed.split()[0]
    where = planned.device.name if planned.gpus == 1 else f"each of {count(planned.gpus)} x {planned.device.name}"
    usage = f"{needed} of {budget} on {where}"
    if planned.fits:
        return f"fits: {usage}"
    return f"does NOT fit: {usage}, {size(planned.needed_bytes - planned.budget_bytes)} too much"


def sharing(section: Mapping[str, Any]) -> str:
    """Describe how ranks share a model, from the values of the section `distributed`."""
    context = section.get("context", 1)  # earlier versions did not write it
    split = "" if context == 1 else f"; each row split over {context} GPUs"
    kind, stage = section["kind"], section["stage"]
    if STRATEGIES[kind].updates == "weight":
        return f"a copy of the model on each GPU ({kind}){split}"
    return f"shards of {_DIVIDED[stage]} {_OFFLOADED[section['offload']]} ({kind}, stage {stage}){split}"


def batch(shape: LargestBatch) -> str:
    """The largest micro-batch in words, such as `4 rows x 2,048 tokens, padded, with 3 images`."""
    if shape.packed:
        return f"{count(len(shape.by_row))} rows packed into {count(shape.tokens)} tokens"
    rows = f"{count(shape.rows)} row{'' if shape.rows == 1 else 's'}"
    each = f"{shape.segments} x " if shape.segments > 1 else ""
    shown = sum(map(len, shape.images)) // 3
    images = f", with {count(shown)} image{'s' * (shown > 1)}" if shown else ""
    return f"{rows} x {each}{count(shape.tokens)} tokens{', padded' if shape.padded else ''}{images}"


def shorter(forecast: Forecast) -> dict[str, str]:
    """The lesser recomputation of short micro-batches: `rows of up to 512 tokens recompute nothing`."""
    parts = (f"of up to {count(each.tokens)} tokens recompute {_RECOMPUTED[each.level]}" for each in forecast.by_length)
    return {"by length": f"micro-batches of rows {', '.join(parts)}"} if forecast.by_length else {}


def reference(cached: bool, forecast: Forecast | None, in_step: float) -> dict[str, str]:
    """Describe where the reference of a preference objective comes from, and why.

    `in_step`: the time that it takes in all steps, over that of scoring all rows once.
    """
    if not cached:
        return {"reference": f"the base, computed in each step: {in_step:.2g} times the time of scoring all rows once"}
    if forecast and (scored := scoring(forecast)):
        return scored
    return {"reference": "the starting model, which scores all rows before the first step"}


def scoring(forecast: Forecast) -> dict[str, str]:
    """The pass that scores the reference: `2,400 rows scored before the first step in at least 95 s, ...`."""
    scored = forecast.reference
    if scored is None or scored.row_seconds is None:
        return {}
    if scored.seconds is None or scored.in_step_seconds is None:
        many = f"1,000 in at least {significant(1000 * scored.row_seconds)} s"
        return {"reference": f"each row is scored once before the first step, {many}"}
    return {
        "reference": f"{count(scored.rows or 0)} rows scored once before the first step, in at least "
        f"{significant(scored.seconds)} s; in the steps it would take {significant(scored.in_step_seconds)} s"
    }


def mixture(stored: Mixture) -> str:
    """Describe how experts are stored, and how many of all parameters stay unquantized."""
    text = f"{count(stored.experts)} a layer" if stored.experts else "all"
    kind = "the types of the file" if stored.kind == "gguf" else stored.kind
    if stored.kind == "none":
        return f"{text} unquantized"
    if stored.quantized_experts == 1:
        text += f" in {kind}"
    elif stored.quantized_experts == 0:
        form = "linear layers only" if stored.kind == "int8" else "no experts kept as this architecture keeps them"
        text += f" unquantized (bitsandbytes has {stored.kind} for {form})"
    else:
        text += f", {share(stored.quantized_experts)} of their parameters in {kind}"
    return f"{text}; {count(stored.unquantized)} of all {count(stored.parameters)} parameters stay unquantized"


def routing(forecast: Forecast) -> dict[str, str]:
    """What a mixture needs at least and at most, by what its router decides; empty where that changes nothing."""
    if forecast.experts.evenly_routed_bytes is None:
        return {}
    least, most = size(forecast.experts.evenly_routed_bytes), size(forecast.needed_bytes)
    return {"routing": f"{least} if experts get equally many tokens, {most} if one gets all"}


def images(memory: ImageMemory | None) -> dict[str, str]:
    """What an image takes, and the largest that fits; empty for rows of text."""
    if memory is None:
        return {}
    each = f"{memory.width} x {memory.height} pixels are {count(memory.tokens)} tokens and {size(memory.bytes)} a row"
    if memory.most_pixels is None:
        return {"images": f"{each}, as any image"}
    if not memory.most_pixels:
        return {"images": f"{each}; no `data.image_pixels` makes them fit"}
    return {"images": f"{each}; one a row fits up to `data.image_pixels: {memory.most_pixels}`"}


def device(environment: Mapping[str, Any] | None, device: str) -> str:
    """The device as environment.json describes it, or its bare name."""
    if environment is None:
        return device
    described = environment["device"]
    if "name" in described and "total_bytes" in described:
        return f"{described['name']} ({device}), {size(described['total_bytes'])}"
    cores, threads = environment.get("cpu_cores"), environment.get("threads")
    return f"{device}, {cores} core{'s' * (cores != 1)}, {threads} thread{'s' * (threads != 1)}"


def counts(split: Counts, max_length: int) -> str:
    """A split in one line: its size, and how many rows were changed or dropped."""
    facts = split.as_dict()
    trained = share(split.supervised_share) if split.tokens else "nothing"
    duplicates = "duplicates" if facts["duplicates"] > 1 else "duplicate"
    ordered = split.traits.schema_ordered
    parts = {
        f"{count(split.rows)} row{'s' * (split.rows != 1)}, {count(split.tokens)} tokens, {trained} trained, longest "
        f"{count(split.longest)}": 1,
        f"{count(facts['truncated'])} cut to {count(max_length)}": facts["truncated"],
        f"{count(facts['answers_truncated'])} of them in the answer": facts["answers_truncated"],
        f"{count(facts['split'])} split": facts["split"],
        f"{count(facts['duplicates'])} {duplicates}": facts["duplicates"],
        f"{count(facts['control_tokens'])} with control tokens as text": facts["control_tokens"],
        f"{count(facts['lost_thoughts'])} with earlier turns untrained, whose thoughts the template drops": (
            facts["lost_thoughts"]
        ),
        f"{count(ordered)} whose tool calls have their arguments in the order of the column's type (JSON text keeps "
        "that of the row)": ordered,
        f"{count(split.dropped)} dropped: {dropped(split)}": split.dropped,
        "listed in data.jsonl": len(split.affected),
    }
    return ", ".join(part for part, rows in parts.items() if rows)


def prompts(separator: str, *splits: Counts | None) -> str | None:
    """Describe how plain-text prompts and completions are joined; None if there are no such rows."""
    counts = [each for each in splits if each]
    rows = sum(each.traits.kinds.get("completion", 0) for each in counts)
    joined = sum(each.traits.run_together for each in counts)
    if not rows:
        return None
    text = f"plain text in {count(rows)} row{'s' * (rows != 1)}, without the chat template"
    if separator:
        text += f", each followed by {json.dumps(separator, ensure_ascii=False)}"
    if joined:
        text += f"; no white space before the answer in {count(joined)} (see data.separator)"
    return text


TOO_FEW_TO_JUDGE = "too few different rows to choose an adapter by, so the last one is published"
"""Said of an evaluation set too small to choose the published weights by."""


def dropped(counts: Counts) -> str:
    """The reasons why rows were dropped, and the first locations: `2 empty answer (rows.jsonl:3, rows.jsonl:9)`."""
    why = ", ".join(f"{count(rows)} {reason}" for reason, rows in counts.dropped_why.items())
    return f"{why} ({_locations(counts.places(what='dropped'))})"


def control_tokens(counts: Counts) -> str:
    """Number and first locations of the rows with control tokens in their text, and how these are treated."""
    locations = counts.places(why=CONTROL_TOKENS)
    contain = "row contains" if len(locations) == 1 else "rows contain"
    return (
        f"{count(len(locations))} {contain} some ({_locations(locations)}), which stay ordinary text; if the rows were "
        "rendered in advance, set data.control_tokens: parse"
    )


def splits(uses: Iterable[SplitUse]) -> str:
    """What is read of the sources that have splits, with files and rows, and what is not; "" if none has any."""
    said: dict[str, list[str]] = {}
    for use in uses:
        does = {"train": "trained", "eval": "the evaluation set", "none": "left out"}[use.use]
        names = " and ".join(name or f"what is in no split, such as {use.first}," for name in use.names)
        counted = ((use.files, "file"), (use.rows, "row"))
        sizes = ", ".join(f"{count(number)} {what}{'s' * (number != 1)}" for number, what in counted if number)
        aside = sizes + ("; name it to use it" if use.use == "none" else "")
        said.setdefault(use.source, []).append(
            f"{names} {'is' if len(use.names) == 1 else 'are'} {does}" + (f" ({aside})" if sizes else aside)
        )
    return "; ".join(f"{source_name(source)}: {', '.join(parts)}" for source, parts in said.items())


def unused(*splits: Counts | None) -> str:
    """The unused fields of rows; a long list is shortened."""
    names = list(dict.fromkeys(name for counts in splits if counts for name in counts.traits.unused))
    more = len(names) - _COLUMNS
    return ", ".join(names[:_COLUMNS]) + (f" and {count(more)} more" if more > 0 else "")


def _locations(locations: Sequence[str]) -> str:
    return ", ".join(locations[:_LOCATIONS]) + (", ..." if len(locations) > _LOCATIONS else "")


def is_nothing(size_bytes: int) -> bool:
    """Whether a size is too small to mention."""
    return size(size_bytes) == size(0)


def measures(peaks: dict[str, Peak]) -> list[str]:
    """The measures that occur in `peaks`, in the order of MEASURES."""
    return [measure for measure in MEASURES if any(measure in peak for peak in peaks.values())]


def peak_table(peaks: dict[str, Peak]) -> Cells:
    """The peaks by phase, with a column for each measure present."""
    shown = measures(peaks)
    rows = [
        (phase, *(size(peak[measure]) if measure in peak else "" for measure in shown)) for phase, peak in peaks.items()
    ]
    return ("phase", *(MEASURES[measure] for measure in shown)), rows
