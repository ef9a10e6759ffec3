"""The files that describe a run: the schema of each, and the one way to read them back.

A run directory may be damaged, written by another version, or forged. Files are validated before anything is read from
them, so that a wrong value is reported where it is stored and not where it is used. Invalid lines of a .jsonl file are
skipped; any other file is accepted or refused as a whole.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, NotRequired, Required, TypeVar

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError, with_config
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import TypedDict  # pydantic asks for it below Python 3.12

from finetune.errors import ArtifactError

T = TypeVar("T")

# -- values ----------------------------------------------------------------------------------------------------------

# The largest integer that a float holds with all integers below it: steps and tokens are counted and divided.
_LARGEST = 2**53
# Losses and norms are computed in float32.
_LARGEST_FLOAT32 = 3.4028234663852886e38
# The last second of the year 9999, after which `datetime` has no date.
_LAST_SECOND = 253402300799

LARGEST_BYTES = 2**63

Step = Annotated[int, Field(ge=0, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Bytes = Annotated[int, Field(ge=0, le=LARGEST_BYTES)]
Number = Annotated[float, Field(ge=-_LARGEST_FLOAT32, le=_LARGEST_FLOAT32)]  # which a NaN is not
Positive = Annotated[float, Field(ge=0, le=_LARGEST_FLOAT32)]
Share = Annotated[float, Field(ge=0, le=1)]
Peak = dict[str, Bytes]


def _file_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{,254}", name):
        raise PydanticCustomError("file_name", "not the name of a file beside it")
    return name


FileName = Annotated[str, AfterValidator(_file_name)]

# Strict: "3", 3.0 and true are not the integer 3. Keys of a later version are kept.
_written = with_config(ConfigDict(strict=True, extra="allow"))


# -- lines -----------------------------------------------------------------------------------------------------------


@_written
class Event(TypedDict):
    """A line of events.jsonl. `memory` is by phase, but that of `saved` is one peak."""

    time: Annotated[float, Field(ge=0, le=_LAST_SECOND)]
    event: str
    seconds: NotRequired[Positive]
    step: NotRequired[Step]
    memory: NotRequired[Peak | dict[str, Peak]]


def _check_event(event: Event) -> Event:
    saved = event["event"] == "saved"
    if "step" not in event and (saved or event["event"] in ("trained", "best_loaded")):
        raise PydanticCustomError("missing", "`step` is missing")
    if any(isinstance(value, int) != saved for value in event.get("memory", {}).values()):
        raise PydanticCustomError("memory", "`memory` is not as this event has it")
    return event


@_written
class TrainingLine(TypedDict):
    """A line of metrics.jsonl for an optimizer step."""

    step: Step
    loss: Number | None
    learning_rate: Number
    grad_norm: Number | None
    tokens: Count
    tokens_per_second: Positive
    padding_share: Share
    memory: dict[str, Peak]


@_written
class EvaluationLine(TypedDict):
    """A line of metrics.jsonl for an evaluation."""

    step: Step
    eval_loss: Number | None
    memory: dict[str, Peak]


@_written
class AffectedRow(TypedDict):
    """A line of data.jsonl."""

    place: str


def _kind_of_metric(value: Any) -> str:
    return "evaluation" if isinstance(value, dict) and "eval_loss" in value else "training"


EVENT = TypeAdapter(Annotated[Event, AfterValidator(_check_event)])
METRIC: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        Annotated[TrainingLine, Tag("training")] | Annotated[EvaluationLine, Tag("evaluation")],
        Discriminator(_kind_of_metric),
    ]
)
AFFECTED = TypeAdapter(AffectedRow)

# -- whole files -----------------------------------------------------------------------------------------------------


@_written
class Answer(TypedDict):
    """A held-out question in answers.json; `after` is None until training has ended."""

    question: str
    reference: str
    before: str
    after: str | None


@_written
class _DeviceFacts(TypedDict):
    type: str
    name: NotRequired[str]
    total_bytes: NotRequired[Bytes]


@_written
class Environment(TypedDict):
    """environment.json."""

    device: _DeviceFacts
    cpu_cores: NotRequired[Count | None]
    threads: NotRequired[Count]


@_written
class MergeProof(TypedDict):
    """merge.json."""

    rows: Count
    tokens: Count
    error: Positive
    bound: Positive
    effect: Positive
    agreement: Share


@_written
class WeightIndex(TypedDict):
    """The index of a model whose weights stand in several files."""

    weight_map: dict[str, FileName]


@_written
class Fingerprint(TypedDict):
    """fingerprint.json; earlier versions did not write the base."""

    tokenizer: str
    base: NotRequired[str | None]


@_written
class _FileFacts(TypedDict):
    bytes: Bytes
    sha256: str


@_written
class Manifest(TypedDict):
    """manifest.json of a checkpoint. `made_with` is read apart from it, by what compares it."""

    format: int
    step: Step
    files: dict[FileName, _FileFacts]
    made_with: dict[str, Any]
    sha256: str


@_written
class _DataFacts(TypedDict):
    train: str
    eval: str | None


@_written
class MadeWith(TypedDict):
    """What a checkpoint says of its origin; see `finetune.lifecycle.resume.made_with`."""

    config: dict[str, dict[str, Any]]
    data: _DataFacts
    tokenizer: str
    base: str | None
    processes: Count
    packages: dict[str, str | None]


@_written
class _OptimizerState(TypedDict):
    weights: list[dict[str, Any]]
    groups: list[dict[str, Any]]


@_written
class CheckpointState(TypedDict):
    """state.json of a checkpoint; what it says of the optimizer is compared with the optimizer itself."""

    optimizer: _OptimizerState
    schedule: dict[str, Any]
    scaler: dict[str, Any] | None
    random: list[dict[str, Any]]


@_written
class _CallbackAttributes(TypedDict, total=False):
    early_stopping_patience_counter: Count
    owes_evaluation: bool


@_written
class _CallbackState(TypedDict):
    attributes: _CallbackAttributes


@_written
class TrainerState(TypedDict, total=False):
    """trainer_state.json of a checkpoint. Earlier versions had callbacks, and other keys, which are left aside."""

    global_step: Required[Step]
    epoch: Positive
    max_steps: Count
    best_metric: Number | None
    best_global_step: Step | None
    evaluations_without_gain: Count
    owes_evaluation: bool
    stateful_callbacks: dict[str, _CallbackState]


ANSWERS = TypeAdapter(list[Answer])
ENVIRONMENT = TypeAdapter(Environment)
OBJECT = TypeAdapter(dict[str, Any])
WEIGHT_INDEX = TypeAdapter(WeightIndex)
MERGE_PROOF = TypeAdapter(MergeProof)
FINGERPRINT = TypeAdapter(Fingerprint)
MANIFEST = TypeAdapter(Manifest)
MADE_WITH = TypeAdapter(MadeWith)
CHECKPOINT_STATE = TypeAdapter(CheckpointState)
TRAINER_STATE = TypeAdapter(TrainerState)

# -- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lines:
    """The lines of a .jsonl file that have their shape, and the numbers (from 1) of the others with what is wrong.

    `torn`: the last one was cut off, as a crash leaves it.
    """

    rows: list[Any]
    wrong: dict[int, str]
    torn: bool = False


def exists(path: Path) -> bool:
    """Whether anything stands there, also a link to nothing. Raises ArtifactError where that cannot be seen."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from None
    return True


def open_file(path: Path) -> IO[bytes]:
    """An existing file, for reading. Raises ArtifactError where there is none, and for a pipe, device or folder."""
    try:
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 -- the caller closes it
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ArtifactError(f"{path}: not a file; remove what is there")
    return file


def _without_waiting(path: str, flags: int) -> int:
    """Opens a pipe without waiting for its writer; the same as always for a file."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_bytes(path: Path, size: int = -1) -> bytes:
    """What a file holds, or the first `size` bytes of it. Raises ArtifactError where it cannot be read."""
    with open_file(path) as file:
        try:
            return file.read(size)
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from None


def read(path: Path, shape: TypeAdapter[T]) -> T:
    """The value of a JSON file. Raises ArtifactError naming the file, and the field that is not as written."""
    content = read_bytes(path)
    try:
        return shape.validate_json(content)
    except ValidationError as error:
        raise ArtifactError(
            f"{path}: not as this program writes it: {_message(error)}; restore it from a copy"
        ) from None


def read_lines(path: Path, shape: TypeAdapter[Any]) -> Lines:
    """The lines of a .jsonl file; none where there is no file. Raises ArtifactError where it cannot be read."""
    if not exists(path):
        return Lines([], {})
    rows, wrong = [], {}
    *whole, last = read_bytes(path).split(b"\n")
    for number, line in enumerate([*whole, last] if last else whole, start=1):
        try:
            shape.validate_json(line)
            rows.append(from_json(line))  # what is validated has its keys in another order, and may be written again
        except ValidationError as error:
            wrong[number] = _message(error)
    torn = wrong.pop(len(whole) + 1, None) is not None
    return Lines(rows, wrong, torn)


def check(value: Any, shape: TypeAdapter[Any]) -> None:
    """Raise ValueError naming the field where `value` has not the shape."""
    try:
        shape.validate_python(value)
    except ValidationError as error:
        raise ValueError(_message(error)) from None


def _message(error: ValidationError) -> str:
    """The first thing wrong, with its field in printable letters."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"] if part != "[key]")
    shown = "".join(letter if letter.isprintable() else "?" for letter in where)[:200]
    return f"`{shown}`: {first['msg']}" if shown else first["msg"]
