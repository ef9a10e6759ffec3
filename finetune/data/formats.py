"""Row formats: how the fields of a row become an example. A new format is one entry in FORMATS."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from finetune.config import DataSection, inline
from finetune.config.field_types import Help, name_of, nearest, not_given, shortened
from finetune.data import examples, images, labelled, pairs, teachers, unpaired
from finetune.data import fields as row
from finetune.data.examples import (
    Completion,
    Content,
    Example,
    NoSuchField,
    RowError,
    Several,
    Text,
    Tokens,
    Unusable,
)
from finetune.data.fields import Fields
from finetune.data.messages import (
    conversation,
    instruction_messages,
    read_messages,
    refuse_other_training,
    refuse_unseen,
    sharegpt_messages,
)


@dataclass(frozen=True)
class RowFormat:
    """A row format, recognised by its `required` fields (if any) and parsed by `read`.

    `of_answers`: the rows hold answers, so rows labelled as good or bad (KTO) are refused. `detected`: by its fields;
    else only where `data.format` or the objective names it. `completed` adds what the data section decides. `rows`, if
    one may become several, are those, each with what its location adds. `rewritten`: the function of a format given
    from Python.
    """

    help: str
    required: tuple[str, ...]
    read: Callable[[Fields], Content]
    optional: tuple[str, ...] = ()
    of_answers: bool = True
    detected: bool = True
    completed: Callable[[Content, DataSection], Content] | None = None
    rows: Callable[[Content], Mapping[str, Content]] | None = None
    rewritten: Callable[[Fields], Fields] | None = None


def _sharegpt(fields: Fields) -> Example:
    turns = sharegpt_messages(fields)
    if not row.is_nothing(fields.get("rejected")):
        raise RowError(
            "`rejected` beside `conversations`: the preferred answer is not in the conversation, so it would not be "
            "trained. Write the row as `prompt` (a list of messages), `chosen` and `rejected`"
        )
    return conversation(turns, fields, where="conversations")


def _prompt_completion(fields: Fields) -> Example:
    if isinstance(fields.get("prompt"), list) and isinstance(fields.get("completion"), list):
        prompt, completion = read_messages(fields, "prompt"), read_messages(fields, "completion")
        return conversation([*prompt, *completion], fields, range(len(prompt)))
    return Completion(row.text(fields, "prompt"), row.text(fields, "completion"))


def _alpaca(fields: Fields) -> Example:
    asked = instruction_messages(fields)
    return conversation([*asked, {"role": "assistant", "content": row.text(fields, "output")}], fields)


def _preference(fields: Fields) -> Example:
    """The chosen answer after the prompt; without a prompt, after the common prefix of chosen and rejected."""
    if isinstance(fields.get("chosen"), list):
        chosen, rejected = read_messages(fields, "chosen"), read_messages(fields, "rejected")
        if isinstance(fields.get("prompt"), list):
            prompt = read_messages(fields, "prompt")
        elif fields.get("prompt") is not None:
            prompt = [{"role": "user", "content": row.text(fields, "prompt")}]
        else:
            prompt = [] if fields.get("instruction") is None else instruction_messages(fields)
        common = min(examples.in_common(chosen, rejected), len(chosen) - 1)
        # Some data sets repeat the prompt at the start of each answer.
        if chosen[: len(prompt)] == prompt:
            return conversation(chosen, fields, range(common))
        return conversation([*prompt, *chosen], fields, range(len(prompt) + common))
    chosen_text, rejected_text = row.text(fields, "chosen"), row.text(fields, "rejected")
    if fields.get("prompt") is not None:
        return Completion(row.text(fields, "prompt"), chosen_text)
    if fields.get("instruction") is not None:
        asked = instruction_messages(fields)
        return conversation([*asked, {"role": "assistant", "content": chosen_text}], fields, range(len(asked)))
    shared = examples.whole_words_in_common(chosen_text, rejected_text)
    return Completion(chosen_text[:shared], chosen_text[shared:], one_text=True)


def _unpadded(fields: Fields) -> tuple[Tokens, int]:
    """Ids and labels without the padding marked by `attention_mask`, and where they start."""
    ids = row.integers(fields, "input_ids")
    labels = None if fields.get("labels") is None else row.integers(fields, "labels", len(ids))
    mask = [1] * len(ids) if fields.get("attention_mask") is None else row.integers(fields, "attention_mask", len(ids))
    if not set(mask) <= {0, 1}:
        raise RowError("`attention_mask` must contain only 0 and 1")
    start = mask.index(1) if 1 in mask else len(mask)
    end = start + sum(mask)
    if 0 in mask[start:end]:
        raise RowError(
            f"`attention_mask[{mask.index(0, start)}]` masks a token in the middle; it may only mask padding"
        )
    return Tokens(ids[start:end], None if labels is None else labels[start:end]), start


# -- which format, which columns -------------------------------------------------------------------------------------

# Limits for error messages: a wide table has thousands of fields.
_NAMED_FIELDS = 20
_FIELD_CHARACTERS = 60
_COMPARED_FIELDS = 1000


# Common column names for a format's field.
_OFTEN = {
    "messages": ("conversation", "dialogue", "dialog", "chat", "turns"),
    "conversations": (),
    "prompt": ("question", "query", "problem", "input", "source", "user"),
    "completion": ("answer", "response", "output", "solution", "target", "reply", "assistant"),
    "instruction": ("task",),
    "output": ("response", "answer"),
    "text": ("content", "body", "document"),
}


# English words in the names of columns that hold a question, an answer, or neither.
_ASKING = frozenset({
    "ask", "asked", "client", "customer", "human", "input", "instruction", "problem", "prompt", "query", "question",
    "request", "user",
})  # fmt: skip
_ANSWERING = frozenset({
    "agent", "answer", "answered", "assistant", "bot", "completion", "output", "reply", "response", "solution",
    "support",
})  # fmt: skip
_NO_TEXT = frozenset({
    "at", "count", "date", "email", "id", "ids", "index", "label", "lang", "language", "mail", "name", "number",
    "phone", "rating", "score", "time", "timestamp", "type", "url",
})  # fmt: skip
_WORD = re.compile(r"[^\W\d_](?:[^\W\d_A-Z]+|[A-Z]+(?![^\W\d_A-Z]))?")

# Columns of a chat export with one message per row: its author and its text.
_SPEAKERS = ("sender", "speaker", "from", "role", "participant", "sender_name", "from_name", "sent_by")
_AUTHORS = ("author", "user", "username", "name")  # any text has one, unless it is called a message
_SAID = ("message", "content", "text", "body", "value", "msg")


class _Recorded(dict[str, Any]):
    """The fields of a row; records which of them are read."""

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def read(fields: Fields, form: str, columns: Mapping[str, str], separator: str = "") -> tuple[Content, list[str]]:
    """A row's content, `separator` after a plain-text prompt, and the names of its non-empty fields that are not used.

    Raises RowError for a row that does not fit `form`, and for one that only other kinds of training can use.
    """
    form = detect(fields, columns) if form == "auto" else form
    fields = mapped(fields, columns)
    recorded = _Recorded(fields)
    own = {name: fields[name] for name in fields.keys() - columns.values()}
    if form not in FORMATS:  # a trained run's format, whose function another process had
        raise RowError(not_given(form))
    refuse_other_training(own, answers=FORMATS[form].of_answers)
    try:
        content = FORMATS[form].read(recorded)
    except NoSuchField as error:
        other = "their format in `data.format`"
        if form != "unpaired" and holds_labelled_answers(fields, {}):
            other = "set `training.objective: kto` for rows of an answer that is labelled good or bad"
        elif not FORMATS[form].detected:
            other = "set `training.objective: supervised` for rows of one answer"
        raise NoSuchField(
            f"{error} in rows of the format `{form}`; name its column in `data.columns`, or {other}"
        ) from None
    refuse_unseen(own, recorded.read)
    if isinstance(content, Several):
        segments = {name: _separated(example, separator) for name, example in content.segments.items()}
        content = replace(content, segments=segments)
    else:
        content = _separated(content, separator)
    unused = fields.keys() - recorded.read - set(columns.values())
    return content, [name for name in fields if name in unused and not row.is_nothing(fields[name])]


def _separated(example: Example, separator: str) -> Example:
    """The example with `separator` after a plain-text prompt that was written apart from its completion."""
    if isinstance(example, Completion) and not example.one_text:
        return replace(example, prompt=example.prompt + separator)
    return example


def detect(fields: Fields, columns: Mapping[str, str]) -> str:
    """The first format whose required fields the row has. Raises NoSuchField, or RowError for a lone message."""
    fields = mapped(fields, columns)
    forms = {name: form for name, form in FORMATS.items() if form.detected}
    name = next((name for name, form in forms.items() if form.required and fields.keys() >= {*form.required}), None)
    if name in (None, "text") and not columns:
        _refuse_one_message(fields)
    if name:
        return name
    names = ", ".join(shortened(str(name), _FIELD_CHARACTERS) for name in islice(fields, _NAMED_FIELDS))
    names += " and more" if len(fields) > _NAMED_FIELDS else ""
    if likely := likely_columns(fields):
        cure = f"set `data.columns: {inline(likely.columns)}` to read them so"
        if turns := as_chat(fields, "auto", likely.columns):
            cure = (
                f"set `data.columns: {inline(turns)}` to train them as turns of the chat template, or "
                f"`{inline(likely.columns)}` as plain text"
            )
        raise NoSuchField(f"no format has the fields {names}; {cure}")
    wanted = "; ".join(f"{name} ({', '.join(form.required)})" for name, form in forms.items())
    raise NoSuchField(f"no format has the fields {names}; `data.columns` can map them. Known formats: {wanted}")


def _refuse_one_message(fields: Fields) -> None:
    """Raise RowError for a row of a chat export: one message, and who says it."""
    spelt = {name.lower(): name for name in islice(fields, _COMPARED_FIELDS)}
    said = next((spelt[name] for name in _SAID if name in spelt), None)
    who = [spelt[name] for name in _SPEAKERS if name in spelt]
    if said and said.lower() in ("message", "content", "msg"):
        who += [spelt[name] for name in _AUTHORS if name in spelt]
    if not said or not who:
        return
    alone = "`data.format: text`" if said == "text" else f"`data.columns: {inline({'text': said})}`"
    raise RowError(
        f"`{who[0]}` and `{said}` make each row one message of a conversation, which would be trained without what it "
        f"answers. Write a conversation a row, as `messages`; or set {alone} if each is a text by itself"
    )


class Likely(NamedTuple):
    """`data.columns` for a row; `sure` if its columns have names that are often used for just these fields."""

    columns: dict[str, str]
    sure: bool


def likely_columns(fields: Fields) -> Likely | None:
    """`data.columns` from common column names, for the first format whose fields they cover; else from words in the
    names, if those single out one question and one answer.
    """
    spelt = {name.lower(): name for name in islice(fields, _COMPARED_FIELDS)} | {name: name for name in fields}
    for form in filter(lambda form: form.required and form.detected, FORMATS.values()):
        columns = {
            field: next((spelt[name] for name in (field, *_OFTEN.get(field, ())) if name in spelt), None)
            for field in form.required
        }
        if all(columns.values()):
            return Likely({field: name for field, name in columns.items() if name and field != name}, sure=True)
    asking, answering = [], []
    for name in islice(fields, _COMPARED_FIELDS):
        words = {word.lower() for word in _WORD.findall(name)}
        if isinstance(fields[name], str) and not words & _NO_TEXT:
            asks, answers = bool(words & _ASKING), bool(words & _ANSWERING)
            asking += [name] * (asks and not answers)
            answering += [name] * (answers and not asks)
    if len(asking) == len(answering) == 1:
        return Likely({"prompt": asking[0], "completion": answering[0]}, sure=False)
    return None


def holds_pairs(fields: Fields, columns: Mapping[str, str]) -> bool:
    """Whether a row is a prompt with a chosen and a rejected answer, in any of the layouts of `pairs`."""
    try:
        pairs.read(mapped(fields, columns))
    except Unusable:
        return True
    except RowError:
        return False
    return True


def holds_labelled_answers(fields: Fields, columns: Mapping[str, str]) -> bool:
    """Whether a row is an answer labelled good or bad, in any of the layouts of `unpaired`."""
    try:
        return unpaired.ANSWER in unpaired.read(mapped(fields, columns)).segments
    except (RowError, Unusable):
        return False


def as_chat(fields: Fields, form: str, columns: Mapping[str, str]) -> dict[str, str] | None:
    """The `data.columns` that make two turns of a conversation of a plain-text prompt and its completion.

    None if the row lacks either, or has fields that would then be read in addition.
    """
    form = detect(fields, columns) if form == "auto" else form
    plain = mapped(fields, columns)
    if form not in AS_CHAT or not isinstance(plain.get("prompt"), str) or isinstance(plain.get("chosen"), list):
        return None
    turns = {AS_CHAT[form].get(name, name): columns.get(name, name) for name in ("prompt", *columns, *AS_CHAT[form])}
    # A column of such a name need not mean what it means in Alpaca.
    others = mapped(fields, turns)
    return None if any(name in others and name not in turns for name in ("input", "history")) else turns


AS_CHAT = {
    "prompt_completion": {"prompt": "instruction", "completion": "output"},
    "preference": {"prompt": "instruction"},
    "pairs": {"prompt": "instruction"},
    "unpaired": {"prompt": "instruction"},
}
"""By format, the fields that the chat template renders if they have these names."""


def mapped(fields: Fields, columns: Mapping[str, str]) -> Fields:
    """The fields renamed by `columns` (format's field name to the row's column name).

    A column that holds a field of another name is not a field under its own name as well: of `{instruction: input}`,
    Alpaca's `input` would be the question again. Raises RowError for a column that the row lacks.
    """
    for name, column in columns.items():
        if column not in fields:
            near = nearest(column, islice(fields, _COMPARED_FIELDS))
            raise NoSuchField(
                f"`data.columns` takes `{name}` from `{shortened(column)}`, which is no column of this row; {near}"
            )
    renamed = {name: fields[column] for name, column in columns.items()}
    return pairs.unpacked({name: value for name, value in fields.items() if name not in columns.values()} | renamed)


def known_fields(form: str) -> list[str]:
    """The fields that a format reads; for `auto`, those of all formats."""
    forms = [each for name, each in FORMATS.items() if name == form or (form == "auto" and each.detected)]
    return list(dict.fromkeys(name for each in forms for name in (*each.required, *each.optional)))


PREFERENCES = "of preferences only the chosen answer is trained; to train on both, set `training.objective: dpo`"
"""The note for rows with a chosen and a rejected answer."""

MARGINS = "a reward model reads it with `data.format: pairs_with_margin`"
"""The note for pairs whose margin is not read."""

_BESIDE_MESSAGES = ("tools", "functions", "system", *images.COLUMNS)

FORMATS: dict[str, RowFormat] = {
    "messages": RowFormat(
        "`messages` with role and content, optionally `tool_calls`, and `tools` of the row (OpenAI's)",
        ("messages",), lambda fields: conversation(read_messages(fields, "messages"), fields), _BESIDE_MESSAGES,
    ),
    "sharegpt": RowFormat(
        "`conversations` with from and value, optionally `system` and `tools`",
        ("conversations",), _sharegpt, _BESIDE_MESSAGES,
    ),
    "preference": RowFormat(
        "`chosen` and `rejected`, optionally `prompt`, text or messages; the chosen answer is trained",
        ("chosen", "rejected"), _preference, ("prompt", "instruction", "input", "history", *_BESIDE_MESSAGES),
    ),
    "pairs": RowFormat(
        "`chosen` and `rejected` after a prompt, text or messages, in any of the published layouts; both are trained",
        ("chosen", "rejected"), pairs.read, pairs.OPTIONAL, of_answers=False, detected=False,
    ),
    "pairs_with_margin": RowFormat(
        "the same with `margin`, a number, for reward models",
        ("chosen", "rejected", "margin"), pairs.read_with_margin, pairs.OPTIONAL, of_answers=False, detected=False,
    ),
    "labelled": RowFormat(
        "`label`, the name or number of a class, and `text`, `messages` or `prompt`; for classification",
        ("label",), labelled.read, labelled.OPTIONAL, of_answers=False, detected=False,
        completed=lambda content, section: labelled.numbered(content, section.labels),
    ),
    "prompt_completion": RowFormat(
        "`prompt` and `completion`, text or messages; the completion is trained",
        ("prompt", "completion"), _prompt_completion, _BESIDE_MESSAGES,
    ),
    "unpaired": RowFormat(
        "a prompt and an answer with `label`, true if it is desirable, in any of the published layouts; of a pair, the "
        "chosen answer is, and the rejected one is not",
        ("prompt", "completion", "label"), unpaired.read, unpaired.OPTIONAL, of_answers=False, detected=False,
        rows=unpaired.rows_of,
    ),
    "alpaca": RowFormat(
        "`instruction`, `output` and optionally `input`, `system` and `history`",
        ("instruction", "output"), _alpaca, ("input", "history", *_BESIDE_MESSAGES),
    ),
    "tokenized": RowFormat(
        "`input_ids`, optionally `labels` (default: all are trained) and `attention_mask`",
        ("input_ids",), lambda fields: _unpadded(fields)[0], ("labels", "attention_mask"), of_answers=False,
    ),
    "distilled": RowFormat(
        "`input_ids`, optionally `labels`, with `teacher_ids` and `teacher_logprobs`, or vLLM's `prompt_logprobs`",
        ("input_ids",), lambda fields: teachers.read(fields, *_unpadded(fields)), teachers.OPTIONAL,
        of_answers=False, detected=False,
        completed=lambda content, section: teachers.kept(content, section.teacher_tokens),
    ),
    "text": RowFormat(
        "`text`, all of it trained",
        ("text",), lambda fields: Text(row.text(fields, "text")), of_answers=False,
    ),
}  # fmt: skip

DETECTED = Help("the format of the first row")
"""Help for `auto`, a value of `data.format` that is not in FORMATS."""


def given(rewrite: Callable[[dict[str, Any]], Mapping[str, Any]]) -> str:
    """Add a format from Python, a function from a row to a row of another format; its name for `data.format`."""
    name = name_of(rewrite)

    def rewritten(fields: Fields) -> Fields:
        # A copy, as a function may change what it is given: a row is read more than once.
        own = _Recorded(copy.deepcopy(dict(fields)))
        try:
            made = rewrite(own)
        except Exception as error:  # anything may be wrong with the row or the function
            raise RowError(f"`{name}` fails: {type(error).__name__}: {error}") from error
        if not isinstance(made, Mapping):
            raise RowError(f"`{name}` must return the fields of a row, not {row.kind_of(made)}")
        if isinstance(fields, _Recorded):
            fields.read |= own.read
        return row.plain(made)

    help = rewrite.__doc__ or "given from Python"
    FORMATS[name] = RowFormat(help, (), _reads(rewritten, "auto"), of_answers=False, rewritten=rewritten)
    return name


def _reads(rewritten: Callable[[Fields], Fields], form: str) -> Callable[[Fields], Content]:
    """A reader of rows that a function rewrites into those of `form`."""

    def read(fields: Fields) -> Content:
        made = rewritten(fields)
        return FORMATS[detect(made, {}) if form == "auto" else form].read(made)

    return read


def of_objective(form: str, wanted: str) -> str:
    """`data.format` where an objective reads rows of `wanted`; a function given from Python returns such rows."""
    own = FORMATS.get(form)
    if own is None or own.rewritten is None or form.endswith(f".{wanted}"):
        return wanted if form == "auto" else form
    name = f"{form}.{wanted}"
    known = FORMATS[wanted]
    FORMATS[name] = replace(
        own, read=_reads(own.rewritten, wanted), completed=known.completed, rows=known.rows
    )  # fmt: skip
    return name
