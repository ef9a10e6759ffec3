"""Propose a first config for a model, data and a card: a few values, each with its reason.

The rows are inspected and the job is fitted as by `finetune data` and `finetune fit`. The number of epochs and the
batch, which these do not give, follow from the number of rows by a rule of thumb.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from finetune.config import (
    Config,
    DataSection,
    MemorySection,
    ModelSection,
    QuantizationSection,
    TrainingSection,
    inline,
)
from finetune.data import formats, inspection, sources
from finetune.data.counts import TOO_LONG
from finetune.data.examples import Completion, NoSuchField, RowError, Unusable, parts
from finetune.data.prepare import Prepared, check_columns
from finetune.data.prepared_writer import located
from finetune.errors import ForecastError, MachineError
from finetune.extras.init import questions
from finetune.extras.init.draft import Draft
from finetune.extras.init.questions import Wanted
from finetune.forecast import devices
from finetune.forecast.plan import Fitted
from finetune.model import bounds, build
from finetune.model.base import load_architecture
from finetune.model.source import chat_template, prequantized
from finetune.model.source.tokenizer import load_tokenizer
from finetune.report import words
from finetune.resolve import Job, resolve
from finetune.resolve.fit import NothingFits
from finetune.resolve.planner import Planner
from finetune.resolve.planning import job_on, planner_of
from finetune.runtime import libraries
from finetune.training import learning_rate, trial

# Weights are quantized where one row with all layers checkpointed would take a larger share of the budget without it.
_LARGEST_SHARE_UNQUANTIZED = 0.6
# The longest row is rounded up to a multiple of this: rows that are added later are seldom much longer.
_GRAIN_TOKENS = 128
_LEAST_LENGTH = 512
# Rules of thumb: a style or format is learnt in some 150 steps, and after 10 epochs small data is known by heart.
_STEPS, _MOST_EPOCHS = 150, 10
_BATCHES, _STEPS_AN_EPOCH = (16, 8, 4), 20
# Pairs are seen fewer times: with more, DPO drives the margin up and both answers become less likely.
_MOST_EPOCHS_OF_PAIRS = 3
# The objective for each format of preferences, and why.
_OF_PREFERENCES = {
    "pairs": ("dpo", "rows have a chosen and a rejected answer"),
    "unpaired": ("kto", "rows have an answer that is labelled good or bad"),
}
_TITLE = "Written by `finetune init`"
_AUTO = {"training.micro_batch": "auto", "memory.checkpointing": "auto"}


def propose(wanted: Wanted, say: Callable[[str], None]) -> Draft:
    """Look at the data and the model, fit the job to the card, and say what is being done.

    Raises a FinetuneError for data, a model or a card that cannot be used, and where nothing fits.
    """
    libraries.quiet()
    with contextlib.suppress(MachineError):  # where the hub cannot be reached, which the tokenizer's error says below
        section = ModelSection(name=wanted.model)
        # A base that cannot be trained, whatever its data and settings are, is refused as training does.
        training = TrainingSection(precision="fp32")
        config = Config(model=section, quantization=QuantizationSection(kind="none"), training=training)
        architecture = load_architecture(section, listed=True)
        attention, _ = build.choose_attention(config, architecture, "cpu")
        trial.check_model(config, architecture, attention, config.adapter)
    draft = Draft()
    draft.take("model.name", wanted.model)
    draft.take("data.train", wanted.data)
    encoding, word = questions.likely_encoding(wanted.data)
    if encoding:
        draft.take("data.encoding", encoding, f"not UTF-8; is `{word}` right? Else another, such as cp1251")
    row, columns = _recognised(wanted, encoding)
    tokenizer = None
    try:
        tokenizer = load_tokenizer(ModelSection(name=wanted.model))  # into the hub's cache, where the planner looks
    except MachineError as error:
        draft.notes.append(str(error))
    rows = "rows of the hub"
    if row:
        with located(row):
            rows = f"rows of the format {_take_format(draft, row.fields, columns, tokenizer)}"
    elif columns:
        draft.take("data.columns", columns, "as given: the rows were not read")
    draft.title = f"{_TITLE}: {rows}"
    if wanted.asks and tokenizer and sources.at_hand(wanted.data):
        job = resolve(draft.config_as_read, until="base")  # what is wrong with a row is said before more is asked
        inspection.inspect_data(job.config, job.architecture)
    gpu = questions.card(wanted, lambda name: devices.find(name, MemorySection()))
    try:
        job = _planned(draft, gpu)
    except MachineError as error:
        draft.notes.append(f"Not fitted to a card: {error}")
        return draft
    if job.data:
        rows = _by_rows(draft, job.data, rows, job.architecture)
        if draft.values["data.max_length"] > job.config.data.max_length:  # rows were cut at the default
            job = _planned(draft, gpu)
    else:
        draft.notes.append(
            "The rows were not measured (on the hub, over 16 MiB, or without a tokenizer here): all count as "
            f"{job.config.data.max_length:,} tokens long."
        )
    planner = planner_of(job)
    say(f"fitting the job to {planner.device.name}: forecasting its training step with different settings")
    try:
        fitted = _fitted(draft, job, planner)
        draft.title = f"{_TITLE}: {rows}; {words.verdict(fitted.forecast)}"
    except ForecastError as error:
        draft.notes.append(f"Not fitted to a card: {error}")
    return draft


def _planned(draft: Draft, gpu: str | None) -> Job:
    """The draft as a job on a card, with rows of any micro-batch."""
    return job_on(replace(draft, values={**draft.values, **_AUTO}).config_as_read, gpu)


def _recognised(wanted: Wanted, encoding: str | None) -> tuple[sources.Row | None, dict[str, str]]:
    """The first row, None on the hub, and `data.columns` for it: as given, or what their names likely mean."""
    row, columns = sources.first_row(wanted.data, encoding), wanted.columns
    check_columns(DataSection(columns=columns))
    if row is None:
        return None, columns
    with located(row):
        if _of_preferences(row.fields, columns):
            return row, columns
        try:
            formats.detect(row.fields, columns)
        except RowError as error:
            if columns:
                raise
            likely = formats.likely_columns(row.fields) if isinstance(error, NoSuchField) else None
            if likely is None:
                raise type(error)(f"{error}. Here columns are named by --columns FIELD=COLUMN") from None
            if not likely.sure:
                questions.confirm_columns(wanted, likely.columns)
            columns = likely.columns
    return row, columns


def _take_format(draft: Draft, fields: Mapping[str, Any], columns: dict[str, str], tokenizer: Any) -> str:
    """The rows' format; plain-text questions and answers become turns if there is a chat template to render them.

    Without one, a separator is taken if the first row has none. Pairs are trained on by DPO, labelled answers by KTO.
    """
    form = _of_preferences(fields, columns) or formats.detect(fields, columns)
    if form in _OF_PREFERENCES:
        draft.take("training.objective", *_OF_PREFERENCES[form])
    turns = None if tokenizer and chat_template.is_plain(tokenizer) else formats.as_chat(fields, form, columns)
    if turns:
        plain = {name: turns[turned] for name, turned in formats.AS_CHAT[form].items()}
        mapped = any(name != column for name, column in plain.items())
        otherwise = f"`{inline(plain)}` would be" if mapped else "left out, they are"
        draft.take("data.columns", turns, f"turns of the chat template; {otherwise} text without it")
        return form if form in _OF_PREFERENCES else formats.detect(fields, turns)
    if columns:
        draft.take("data.columns", columns, "the fields of the format, and the columns that hold them")
    with contextlib.suppress(Unusable):
        content, _ = formats.read(fields, form, columns)
        if any(isinstance(each, Completion) and each.runs_together for each in parts(content)):
            why = "no white space separates prompts and completions, nor does a chat template"
            draft.take("data.separator", "\n", why)
    return form


def _of_preferences(fields: Mapping[str, Any], columns: dict[str, str]) -> str | None:
    """The format of a row with answers that are better or worse; None for any other row."""
    if formats.holds_pairs(fields, columns):
        return "pairs"
    return "unpaired" if formats.holds_labelled_answers(fields, columns) else None


def _by_rows(draft: Draft, data: Prepared, rows: str, architecture: Any) -> str:
    """Set length, evaluation set, batch and epochs from the rows; return their number and format in words."""
    counts = [each for each in (data.train_counts, data.eval_counts) if each]
    whole = [row.tokens or 0 for each in counts for row in each.affected if row.why == TOO_LONG]
    longest = max(*whole, *(each.longest for each in counts), 1)
    positions = bounds.positions(architecture)
    length = math.ceil(longest / _GRAIN_TOKENS) * _GRAIN_TOKENS
    length = min(length, positions or length)
    cut = f"; the model has {positions:,} positions" if longest > length else ""
    draft.take("data.max_length", length, f"the longest row has {_counted(longest, 'token')}{cut}")
    if data.eval_counts:
        held = data.eval_counts.rows
        judges = "" if data.judges else f"; {words.TOO_FEW_TO_JUDGE}"
        own = any(one.use == "eval" for one in data.splits)
        how = "of the data's own split for validation" if own else "held out by hash"
        draft.take("data.eval", "auto", f"{_counted(held, 'row')} {how}{judges}")
    else:
        draft.take("data.eval", "none", "too few different rows to hold any out")
    number = data.train_counts.rows
    batch = next((size for size in _BATCHES if number >= _STEPS_AN_EPOCH * size), _BATCHES[-1])
    steps = math.ceil(number / batch)
    most = _MOST_EPOCHS_OF_PAIRS if draft.values.get("training.objective") else _MOST_EPOCHS
    epochs = min(most, math.ceil(_STEPS / steps))
    draft.take("training.batch_size", batch, f"{_counted(number, 'row')} trained: {_counted(steps, 'step')} an epoch")
    draft.take("training.epochs", epochs, _counted(epochs * steps, "step"))
    if data.eval_counts and epochs > 1:
        draft.take("training.eval_every", steps, "once an epoch")
        if data.judges:
            draft.take("output.save_every", steps, "so that the adapter of the best epoch is kept")
    return rows.replace("rows", _counted(sum(each.rows for each in counts), "row"), 1)


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _fitted(draft: Draft, job: Job, planner: Planner) -> Fitted:
    """Set quantization and what the fit chooses, with shorter rows where nothing fits with long ones."""
    if (precision := job.config.training.precision) != "bf16":  # left to each start, whose device may have another
        draft.take("training.precision", "auto", f"`{precision}` as of now: {job.why['training.precision']}")
    draft.take("training.learning_rate", *learning_rate.best_rate(draft.config_as_read, job.architecture))
    resolved = {"training.precision": precision}
    _choose_quantization(draft, planner, resolved)
    lost = "are dropped" if draft.config_as_read.data.too_long == "drop" else "lose their beginning"
    while True:
        try:
            fitted = planner.with_changes({**draft.values, **resolved}).fit()
            break
        except NothingFits:
            length = draft.values.get("data.max_length", job.config.data.max_length) // 2
            if length < _LEAST_LENGTH:
                raise
            draft.take("data.max_length", length, f"rows twice as long do not fit; longer ones {lost}")
    for key, reason in fitted.reasons.items():
        draft.take(key, fitted.value(key), reason)
    # Left to each start, which chooses by the memory that is free then, and for short rows by themselves.
    key = "memory.checkpointing"
    draft.take(key, "auto", f"`{fitted.text(key)}` as of now: {fitted.reasons[key]}")
    return fitted


def _choose_quantization(draft: Draft, planner: Planner, resolved: Mapping[str, str]) -> None:
    if form := prequantized.form(planner.architecture):
        draft.take("quantization.kind", "published", f"the base is published in {form}, which is kept")
        return
    draft.take("quantization.kind", "none")
    whole = planner.with_changes({**draft.values, **resolved})
    least = whole.forecast_with({"training.micro_batch": 1, "memory.checkpointing": "all"}, evaluates=False)
    usage = f"{words.size(least.needed_bytes)} of {words.size(least.budget_bytes)}"
    if least.needed_bytes <= _LARGEST_SHARE_UNQUANTIZED * least.budget_bytes:
        draft.take("quantization.kind", "none", f"with unquantized weights, a step of one row takes {usage}")
    else:
        draft.take("quantization.kind", "nf4", f"with unquantized weights, a step of one row would take {usage}")
