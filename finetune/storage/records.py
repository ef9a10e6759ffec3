"""Schemas of the files that describe a run, and the only code that reads them back.

A run directory may be damaged or written by another version. Files are validated before they are used, so a wrong
value is reported with its file and field. Invalid lines of a .jsonl file are skipped; any other file is accepted or
rejected as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError, with_config
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import TypedDict  # pydantic asks for it below Python 3.12

from finetune.errors import ArtifactError

T = TypeVar("T")

# -- values ----------------------------------------------------------------------------------------------------------

Count = Annotated[int, Field(ge=0)]
StepIndex = Count
Bytes = Count
Number = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PeakRecord = dict[str, Bytes]

# Strict: "3", 3.0 and true are not the integer 3. Unknown keys, of a later version, are kept in a dict and left out of
# a dataclass.
_dict_record = with_config(ConfigDict(strict=True, extra="allow"))
_class_record = with_config(ConfigDict(strict=True, extra="ignore"))


# -- lines -----------------------------------------------------------------------------------------------------------


_MicroBatch = Literal["training.micro_batch", "training.micro_batch_tokens"]


@_dict_record
class StartFrom(TypedDict):
    """The adapter that a run started from, and the hash of its weights."""

    name: str
    sha256: str


@_dict_record
class EventLine(TypedDict):
    """A line of events.jsonl. `memory` is by phase, except for `saved`, which has a single peak.

    `lowered`: the micro-batch of the next start after a rank ran out of memory with the `settings` (a hash).
    `steps` and `learning_rate`: before and after a change of the schedule.
    """

    time: NonNegative
    event: str
    seconds: NotRequired[NonNegative]
    step: NotRequired[StepIndex]
    memory: NotRequired[PeakRecord | dict[str, PeakRecord]]
    start_from: NotRequired[StartFrom]
    sha256: NotRequired[str]
    world_size: NotRequired[Annotated[int, Field(ge=1)]]
    lowered: NotRequired[dict[_MicroBatch, Annotated[int, Field(ge=1)]]]
    settings: NotRequired[str]
    steps: NotRequired[Annotated[list[StepIndex], Field(min_length=2, max_length=2)]]
    learning_rate: NotRequired[Annotated[list[Number], Field(min_length=2, max_length=2)]]


def _check_event(event: EventLine) -> EventLine:
    saved = event["event"] == "saved"
    if "step" not in event and (saved or event["event"] in ("trained", "best_loaded")):
        raise PydanticCustomError("missing", "`step` is missing")
    if event["event"] == "schedule_changed" and not {"step", "steps", "learning_rate"} <= event.keys():
        raise PydanticCustomError("missing", "`step`, `steps` or `learning_rate` is missing")
    if any(isinstance(value, int) != saved for value in event.get("memory", {}).values()):
        raise PydanticCustomError("memory", "`memory` does not fit this event")
    return event


@_dict_record
class TrainingLine(TypedDict):
    """A line of metrics.jsonl for an optimizer step."""

    step: StepIndex
    loss: Number | None
    learning_rate: Number
    grad_norm: Number | None
    tokens: Count
    tokens_per_second: NonNegative
    padding_share: Share
    memory: dict[str, PeakRecord]


@_dict_record
class EvaluationLine(TypedDict):
    """A line of metrics.jsonl for an evaluation."""

    step: StepIndex
    eval_loss: Number | None
    memory: dict[str, PeakRecord]


@_dict_record
class AffectedRow(TypedDict):
    """A line of data.jsonl."""

    place: str


EVENT = TypeAdapter(Annotated[EventLine, AfterValidator(_check_event)])
METRIC: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        Annotated[TrainingLine, Tag("training")] | Annotated[EvaluationLine, Tag("evaluation")],
        Discriminator(lambda value: "evaluation" if isinstance(value, dict) and "eval_loss" in value else "training"),
    ]
)
AFFECTED = TypeAdapter(AffectedRow)

# -- whole files -----------------------------------------------------------------------------------------------------


@_dict_record
class SampleAnswer(TypedDict):
    """A held-out question in answers.json; `after` is None until training has ended."""

    question: str
    reference: str
    before: str
    after: str | None


@_dict_record
class _Figure(TypedDict):
    """A value and the bounds of its confidence interval; None is not finite, or not known."""

    value: Number | None
    low: Number | None
    high: Number | None


@_dict_record
class _ModelFigure(_Figure):
    difference: NotRequired[_Figure]


@_dict_record
class Measure(TypedDict):
    """A measure in eval.json, by model."""

    name: str
    better: Literal["higher", "lower"] | None
    rows: Count | None
    models: Annotated[dict[str, _ModelFigure], Field(min_length=1)]


@_dict_record
class EvaluationRecord(TypedDict):
    """eval.json. `steps` are those of the run when it was evaluated; `interval` and `notes` say how to read it.

    `gain_kept` is, by model, the share of what training took off the loss; `exports` are the proofs of the exports that
    the run had, by folder.
    """

    steps: StepIndex
    measures: list[Measure]
    interval: str
    notes: list[str]
    settings: dict[str, Any]
    gain_kept: NotRequired[dict[str, Number]]
    exports: NotRequired[dict[str, ExportProof]]


@_dict_record
class _DeviceFacts(TypedDict):
    type: str
    name: NotRequired[str]
    total_bytes: NotRequired[Bytes]


@_dict_record
class Environment(TypedDict):
    """environment.json."""

    device: _DeviceFacts
    cpu_cores: NotRequired[Count | None]
    threads: NotRequired[Count]


LARGE_DIFFERENCE = 0.03
"""A larger difference between forecast and measurement, relative to the measurement, is shown to the user."""


@_class_record
@dataclass(frozen=True)
class Difference:
    """The forecast and the measurement of one phase, in bytes."""

    phase: str
    measure: str
    forecast_bytes: Bytes
    measured_bytes: Bytes

    @property
    def relative(self) -> float:
        """Forecast over measurement, less 1: negative if the forecast was too low."""
        return self.forecast_bytes / self.measured_bytes - 1

    @property
    def large(self) -> bool:
        return abs(self.relative) > LARGE_DIFFERENCE


@_class_record
@dataclass(frozen=True)
class UpTo:
    """All layers have the checkpointing `level` in micro-batches whose padded rows have at most `tokens` tokens."""

    tokens: Count
    level: str


@_dict_record
class ForecastRecord(TypedDict):
    """forecast.json, with `differences` from the measurements at the end, and the levels of short rows `by_length`."""

    device: str
    needed_bytes: Bytes
    budget_bytes: Bytes
    differences: list[Difference]
    categories: NotRequired[dict[str, Bytes]]
    by_length: NotRequired[list[UpTo]]


@_dict_record
class SplitFacts(TypedDict):
    rows: Count
    tokens: Count
    trained_tokens: Count
    longest: Count
    segments: NotRequired[dict[str, Count]]


@_class_record
@dataclass(frozen=True)
class TokenText:
    """The text of one token, or of several tokens that together form one character."""

    text: str
    trained: bool


# Base64 in a page is what a page embeds, and must not be able to be anything else.
Thumbnail = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]*={0,2}$", max_length=2**17)]


@_class_record
@dataclass(frozen=True)
class SampleImage:
    """An image of a row: its size in pixels, how many tokens stand for it, and a small JPEG of it, in base64."""

    name: str
    height: Count
    width: Count
    tokens: Count
    thumbnail: Thumbnail = field(repr=False)


@_class_record
@dataclass(frozen=True)
class Sample:
    """A training row as the model sees it; `tokens` and `trained_tokens` count the whole row.

    `images` are the first of its `images_shown` images.
    """

    place: str
    tokens: Count
    trained_tokens: Count
    pieces: tuple[TokenText, ...]
    images: tuple[SampleImage, ...] = ()
    images_shown: Count = 0


@_dict_record
class DataFacts(TypedDict):
    """data.json: the splits in numbers, the first rows with their label masks, and the system message of all rows."""

    train: SplitFacts
    eval: SplitFacts | None
    system: NotRequired[str | None]
    samples: list[Sample]


@_dict_record
class Distance(TypedDict):
    """How far a served model is from the trained one: KL divergence in nats, and the share of equal top tokens."""

    kl: NonNegative
    kl_max: NonNegative
    agreement: Share


@_dict_record
class DifferingWeights(TypedDict):
    """The number of weights, and of those whose value is not the trained one."""

    count: Count
    differing: Count


@_dict_record
class MergedDistance(Distance):
    """How far a merged model that an export is made from is from what was trained, on a base of another kind."""

    trained_on: str
    gain_kept: NotRequired[Number | None]


@_dict_record
class ExportProof(TypedDict):
    """What export.json and merge.json say of what an export keeps; those of earlier versions have none of it."""

    weights: NotRequired[DifferingWeights]
    served: NotRequired[Distance]
    losses: NotRequired[dict[str, Number]]
    gain_kept: NotRequired[Number | None]
    gain_unknown: NotRequired[str | None]
    onto: NotRequired[str]
    merged: NotRequired[MergedDistance]


@_dict_record
class MergeProof(ExportProof):
    """merge.json."""

    rows: Count
    tokens: Count
    error: NonNegative
    bound: NonNegative
    effect: NonNegative
    agreement: Share
    rows_of: NotRequired[str]


@_dict_record
class WeightIndex(TypedDict):
    """The index of a model with sharded weights."""

    weight_map: dict[str, str]


@_dict_record
class Fingerprint(TypedDict):
    """fingerprint.json; earlier versions did not write the base, and none the `weights` of an adapter."""

    tokenizer: str
    base: NotRequired[str | None]
    weights: NotRequired[str]


@_dict_record
class _FileFacts(TypedDict):
    bytes: Bytes
    sha256: str


@_dict_record
class Manifest(TypedDict):
    """manifest.json of a checkpoint. `made_with` is a `Provenance`, validated separately where it is compared."""

    format: int
    step: StepIndex
    files: dict[str, _FileFacts]
    made_with: dict[str, Any]
    sha256: str


@_dict_record
class _SplitHashes(TypedDict):
    train: str
    eval: str | None


@_dict_record
class ImageHashes(TypedDict):
    """The hash of a split's rows without their images, and the first digits of each image's, one after the other."""

    rows: str
    images: str


@_dict_record
class Provenance(TypedDict):
    """Everything that determines the trained weights; see `finetune.recipe.provenance.of`."""

    config: dict[str, dict[str, Any]]
    data: _SplitHashes
    tokenizer: str
    base: str | None
    processes: Count
    packages: dict[str, str | None]
    images: NotRequired[dict[str, ImageHashes]]


@_dict_record
class _OptimizerState(TypedDict):
    weights: list[dict[str, Any]]
    groups: list[dict[str, Any]]


@_dict_record
class CheckpointState(TypedDict):
    """state.json of a checkpoint; its optimizer part is checked against the optimizer itself when it is restored."""

    optimizer: _OptimizerState
    schedule: dict[str, Any]
    scaler: dict[str, Any] | None
    random: list[dict[str, Any]]


ANSWERS = TypeAdapter(list[SampleAnswer])
ENVIRONMENT = TypeAdapter(Environment)
EVALUATION = TypeAdapter(EvaluationRecord)
FORECAST = TypeAdapter(ForecastRecord)
DATA = TypeAdapter(DataFacts)
OBJECT = TypeAdapter(dict[str, Any])
WEIGHT_INDEX = TypeAdapter(WeightIndex)
MERGE_PROOF = TypeAdapter(MergeProof)
EXPORT_PROOF = TypeAdapter(ExportProof)
FINGERPRINT = TypeAdapter(Fingerprint)
MANIFEST = TypeAdapter(Manifest)
PROVENANCE = TypeAdapter(Provenance)
CHECKPOINT_STATE = TypeAdapter(CheckpointState)

# -- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lines:
    """The valid lines of a .jsonl file, the errors of others by number (from 1), and whether the last was `torn` by a
    crash.
    """

    rows: list[Any]
    wrong: dict[int, str]
    torn: bool = False


def read_bytes(path: Path, size: int = -1) -> bytes:
    """The contents of a file, or its first `size` bytes. Raises ArtifactError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from None


def read(path: Path, shape: TypeAdapter[T]) -> T:
    """The validated value of a JSON file. Raises ArtifactError naming the file and the invalid field."""
    content = read_bytes(path)
    try:
        return shape.validate_json(content)
    except ValidationError as error:
        raise ArtifactError(
            f"{path}: not as this program writes it: {_message(error)}; restore it from a backup"
        ) from None


def find(path: Path, shape: TypeAdapter[T]) -> T | None:
    """The validated value of a JSON file, as `read`; None if it does not exist."""
    return read(path, shape) if path.exists() else None


def read_lines(path: Path, shape: TypeAdapter[Any]) -> Lines:
    """The lines of a .jsonl file; none if it does not exist. Raises ArtifactError if it cannot be read."""
    if not path.exists():
        return Lines([], {})
    rows, wrong = [], {}
    *whole, last = read_bytes(path).split(b"\n")
    for number, line in enumerate([*whole, last] if last else whole, start=1):
        try:
            shape.validate_json(line)
            rows.append(from_json(line))  # validation reorders keys, and the line may be written again
        except ValidationError as error:
            wrong[number] = _message(error)
    return Lines(rows, wrong, torn=wrong.pop(len(whole) + 1, None) is not None)


def check(value: Any, shape: TypeAdapter[Any]) -> None:
    """Raise ValueError naming the field if `value` does not fit `shape`."""
    try:
        shape.validate_python(value)
    except ValidationError as error:
        raise ValueError(_message(error)) from None


def _message(error: ValidationError) -> str:
    """The first error and its field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"] if part != "[key]")
    return f"`{where}`: {first['msg']}" if where else first["msg"]
