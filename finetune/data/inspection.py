"""The data as training will see it: trained tokens, row lengths, and how much padding each batching would add."""

from __future__ import annotations

import base64
import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from finetune.config import Config, DataSection, TrainingSection
from finetune.data import chat, fingerprint, formats, images, sources
from finetune.data.batching import LargestBatch, MicroBatching, RowOrder, Sizes, epoch, longest_first, worst_batches
from finetune.data.counts import Counts
from finetune.data.encoded import DESIRABLE, IGNORE, MEDIA, MISMATCHED, RowLayout, Segment, segments_of
from finetune.data.examples import RowError
from finetune.data.media import TEXT_ALONE, Media
from finetune.data.prepare import Prepared, media_of, prepare
from finetune.data.splits import SplitUse
from finetune.errors import ArtifactError
from finetune.model.source import chat_template as template
from finetune.model.source.tokenizer import load_tokenizer
from finetune.storage.records import DataFacts, Sample, SampleImage, SplitFacts, TokenText

if TYPE_CHECKING:  # imports torch, which rows of text do not need
    from finetune.data.vision import Vision

# Sample rows shown with their mask: enough to notice a wrong one.
_SHOWN_ROWS = 3
# Tokens of each row that a run keeps for its report, since a row may have 131,072 and reports are sent around; and
# images of a row that are shown.
_KEPT_TOKENS, _SHOWN_IMAGES = 512, 8

# Upper ends of the length bins: 2^n and 1.5 * 2^n, so that short and long rows are both visible.
_BIN_ENDS = [4, *(end for power in range(3, 40) for end in (2**power, 3 * 2 ** (power - 1)))]

# What decoders return for an incomplete character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

BATCHINGS: dict[str, tuple[bool, bool, bool]] = {
    "grouped by length": (True, False, False),
    "shuffled": (False, False, False),
    "grouped, by tokens": (True, True, False),
    "shuffled, by tokens": (False, True, False),
    "packed": (False, True, True),
}
"""The batchings that are compared, by name: (grouped by length, micro-batches by tokens, packed)."""


@dataclass(frozen=True)
class SourceCounts:
    """Rows and tokens of one source of training data."""

    name: str
    rows: int
    tokens: int


@dataclass(frozen=True)
class Bin:
    """Number of training rows with `first` to `last` tokens, inclusive."""

    first: int
    last: int
    rows: int


@dataclass(frozen=True)
class Batching:
    """One epoch under one batching.

    `changes` are the config keys that select it; `padding_share` is the share of positions that are padding; `steps`
    counts optimizer steps, and `micro_batches` their forward and backward passes.
    """

    name: str
    changes: dict[str, Any]
    configured: bool
    padding_share: float
    steps: int
    micro_batches: int


@dataclass(frozen=True)
class AsChat:
    """A training row whose plain-text prompt and completion are turns of the chat template with other config keys."""

    changes: dict[str, Any]
    sample: Sample


@dataclass(frozen=True)
class TrainingRows:
    """Where the training rows come from, how many are of which length, and the location of the longest."""

    longest_place: str
    sources: tuple[SourceCounts, ...]
    lengths: tuple[Bin, ...]


@dataclass(frozen=True)
class Batches:
    """The configured batches, the largest of them, and an epoch under each batching.

    If `micro_batch` is `auto`, batchings and worst batch assume the whole batch at once. Batchings by tokens use
    `micro_batch_tokens`, or else the size of the largest micro-batch by rows.
    """

    batch_size: int
    micro_batch: int | Literal["auto"]
    micro_batch_tokens: int | None
    batchings: tuple[Batching, ...]
    worst_batch: LargestBatch


@dataclass(frozen=True)
class PlainText:
    """What joins plain-text prompts and completions; `as_chat` is set if all rows are such, although there is a chat
    template.
    """

    separator: str = ""
    as_chat: AsChat | None = None


@dataclass(frozen=True)
class Inspection:
    """Statistics of a job's data before training.

    `fingerprint` is that of tokenizer and chat template. A `warning` says why nothing is held out; `judges`: whether
    the evaluation set is large enough to choose an adapter by. `splits` says what is read of sources that have several.
    """

    fingerprint: str
    train: Counts
    eval: Counts | None
    rows: TrainingRows
    batches: Batches
    samples: tuple[Sample, ...]
    warning: str | None = None
    judges: bool = True
    plain_text: PlainText = PlainText()
    splits: tuple[SplitUse, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON values, those of `rows`, `batches` and `plain_text` beside the others."""
        values: dict[str, Any] = {}
        for name, value in asdict(replace(self, train=Counts(), eval=None)).items():  # rows of both are summarised
            values |= value if name in ("rows", "batches", "plain_text") else {name: value}
        values["worst_batch"] = self.batches.worst_batch.as_dict()
        for image in chain.from_iterable(sample["images"] for sample in values["samples"]):
            del image["thumbnail"]
        for name, counts in (("train", self.train), ("eval", self.eval)):
            values[name] = counts and counts.as_dict()
        return values


def inspect_data(config: Config, architecture: Any) -> Inspection:
    """Inspect the data that a job would train on, resolved as its base allows (see `finetune.inspect_data`).

    An `architecture` that could not be loaded, None, is reported where it is needed: for images.
    """
    tokenizer = load_tokenizer(config.model, config.data)
    return inspect(
        config.data, config.training, tokenizer, media_of(config.model, config.data, tokenizer, architecture)
    )


def inspect(section: DataSection, training: TrainingSection, tokenizer: Any, media: Media = TEXT_ALONE) -> Inspection:
    """Prepare the data as training does, and collect its statistics. Raises as `prepare` does."""
    prepared = prepare(section, tokenizer, media)
    way = MicroBatching.of(_chosen(training), section, prepared.layout)
    sizes = Sizes.of(prepared.train, way)
    lengths, places, names = (prepared.train[column][:] for column in ("length", "place", "source"))
    rows, tokens = Counter(names), Counter[str]()
    for name, length in zip(names, lengths, strict=True):
        tokens[name] += length
    segments = sizes.segments or [(length,) for length in sizes.lengths]
    return Inspection(
        fingerprint=fingerprint.of(tokenizer),
        train=prepared.train_counts,
        eval=prepared.eval_counts,
        rows=TrainingRows(
            longest_place=places[longest_first(sizes.lengths)[0]],
            sources=tuple(SourceCounts(name, rows[name], tokens[name]) for name in rows),
            lengths=_bins(sizes.lengths),
        ),
        batches=Batches(
            batch_size=training.batch_size,
            micro_batch=training.micro_batch,
            micro_batch_tokens=training.micro_batch_tokens,
            batchings=_batchings(segments, prepared.layout, training, section, sizes.areas),
            worst_batch=worst_batches(sizes, way, training.batch_size, "the data's rows")[0],
        ),
        samples=_samples(prepared, tokenizer),
        warning=prepared.warning,
        judges=prepared.judges,
        plain_text=PlainText(section.separator, _as_chat(section, prepared, tokenizer)),
        splits=prepared.splits,
    )


def facts(prepared: Prepared, tokenizer: Any) -> DataFacts:
    """The contents of data.json: the splits in numbers, and the start of the first rows with their label masks."""
    train, held_out = prepared.train_counts, prepared.eval_counts
    return {
        "train": cast(SplitFacts, train.as_dict()),
        "eval": cast(SplitFacts, held_out.as_dict()) if held_out else None,
        "system": train.system,
        "samples": list(_samples(prepared, tokenizer, _KEPT_TOKENS)),
    }


def _samples(prepared: Prepared, tokenizer: Any, most: int | None = None) -> tuple[Sample, ...]:
    """The segments of the first training rows, with at most `most` tokens of each, and their first images.

    A mismatched one is not trained. Raises DataError for pixels that cannot be decoded.
    """
    samples = []
    for row in itertools.islice(prepared.train, _SHOWN_ROWS):
        place, label = str(row["place"]), row.get(DESIRABLE)
        if label is not None:
            place += " (desirable)" if label else " (undesirable)"
        for name, segment in zip(prepared.layout.segments or ("",), segments_of(row), strict=True):
            if name == MISMATCHED:
                segment = Segment(segment.input_ids, [IGNORE] * len(segment.labels))
            where = f"{place}, {name}" if name else place
            sample = _sample(where, segment, tokenizer, most, prepared.media)
            if (vision := _vision(prepared.media)) and (shown := row.get(MEDIA)):
                first = tuple(
                    SampleImage(
                        Path(image["path"]).name or "an image", image["height"], image["width"],
                        vision.count(image["height"], image["width"]),
                        base64.b64encode(images.thumbnail(image)).decode(),
                    )
                    for image in shown[:_SHOWN_IMAGES]
                )  # fmt: skip
                sample = replace(sample, images=first, images_shown=len(shown))
            samples.append(sample)
    return tuple(samples)


def _as_chat(section: DataSection, prepared: Prepared, tokenizer: Any) -> AsChat | None:
    """The first training row as the chat template renders it; None if that is `plain`, or rows are of another kind."""
    if set(prepared.train_counts.traits.kinds) != {"completion"} or template.is_plain(tokenizer):
        return None
    location = prepared.train[0]["place"]
    rows = sources.rows(section.train, encoding=section.encoding)
    # An answer of a pair that became two rows has the place of its pair, and its name.
    row = next(row for row in rows if location == row.location or location.startswith(f"{row.location}, "))
    form = section.format if section.format in ("pairs", "unpaired") else "auto"
    try:
        columns = formats.as_chat(row.fields, section.format, section.columns)
        if columns is None:
            return None
        content, _ = formats.read(row.fields, form, columns)
        encoded = chat.encode(content, tokenizer, section.loss_on, section.control_tokens)
    except (ArtifactError, RowError):  # the chat template cannot render it; plain text needs none
        return None
    other_format = {} if section.format == form else {"data.format": form}
    return AsChat({"data.columns": columns, **other_format}, _sample(location, encoded.segments[0], tokenizer, None))


def _bins(lengths: Sequence[int]) -> tuple[Bin, ...]:
    counts = Counter(bisect_left(_BIN_ENDS, length) for length in lengths)
    return tuple(
        Bin(_BIN_ENDS[number - 1] + 1 if number else 1, _BIN_ENDS[number], counts[number])
        for number in range(min(counts), max(counts) + 1)
    )


def _batchings(
    segments: Sequence[Sequence[int]], layout: RowLayout, training: TrainingSection, section: DataSection,
    areas: Sequence[int] = (),
) -> tuple[Batching, ...]:  # fmt: skip
    """One epoch of rows with segments of these lengths, and images of these areas, under each of BATCHINGS."""
    chosen = _chosen(training)
    largest = chosen.rows * layout.together * max(map(max, segments))
    tokens = MicroBatching.of(chosen, section, layout).tokens or largest
    configured = (training.group_by_length, bool(training.micro_batch_tokens))
    batchings = []
    for name, (grouped, by_tokens, packed) in BATCHINGS.items():
        way = MicroBatching(1 if by_tokens else chosen.rows, tokens if by_tokens else None, packed, layout)
        lengths = [*map(way.length, segments)]
        order = RowOrder(lengths, training.batch_size, training.seed, grouped, areas)
        parts = list(epoch(lengths, order, training.batch_size, way, areas))
        positions = sum(
            sum(part) if way.packed else len(part) * way.layout.together * max(part) for part in parts
        )  # with padding
        batching = Batching(
            name=name,
            changes={
                "training.group_by_length": grouped,
                **({"training.micro_batch_tokens": tokens} if by_tokens else {}),
                **({"data.packing": True} if packed else {}),
            },
            # Packed rows are not padded, so grouping by length makes no difference worth another line.
            configured=packed == section.packing and (packed or (grouped, by_tokens) == configured),
            padding_share=1 - sum(map(sum, segments)) / positions,
            steps=math.ceil(len(segments) / training.batch_size),
            micro_batches=len(parts),
        )
        batchings.append(batching)
    return tuple(batchings)


def _chosen(training: TrainingSection) -> TrainingSection:
    """The section, with `micro_batch: auto` replaced by the whole batch, which pads at least as much."""
    auto = training.micro_batch == "auto"
    return training.model_copy(update={"micro_batch": training.batch_size}) if auto else training


def _sample(location: str, segment: Segment, tokenizer: Any, most: int | None, media: Media = TEXT_ALONE) -> Sample:
    ids, labels = segment.input_ids, segment.labels
    vision = _vision(media)
    of_images = vision.image_tokens if vision else ()
    # Only the first token of each image is shown: they are all the same.
    kept = [at for at, token in enumerate(ids) if token not in of_images or at == 0 or ids[at - 1] != token][:most]
    trained = [at > 0 and labels[at] != IGNORE for at in kept]
    pieces = _pieces([ids[at] for at in kept], trained, tokenizer)
    if vision:
        runs = iter([len(list(run)) for token, run in groupby(ids) if token in of_images])
        pieces = [
            replace(one, text=f"{one.text} x {next(runs)}") if one.text == vision.token else one for one in pieces
        ]
    return Sample(location, len(ids), segment.trained, tuple(pieces))


def _vision(media: Media) -> Vision | None:
    return cast("Vision", media) if media else None


def _pieces(ids: Sequence[int], trained: Sequence[bool], tokenizer: Any) -> list[TokenText]:
    """The row's text token by token, special tokens included.

    Decoders strip spaces from a single token and cannot decode part of a character. So each token is decoded after its
    predecessor, and one that ends within a character is joined with the next if both are trained or both are not.
    """

    def decode(start: int, end: int) -> str:
        return tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    texts = []
    before = start = 0
    for end in range(1, len(ids) + 1):
        text = decode(before, end)
        if text.endswith(_INCOMPLETE) and end < len(ids) and trained[end] == trained[start]:
            continue
        texts.append(TokenText(text[len(decode(before, start)) :], trained[start]))
        before, start = start, end
    return texts
