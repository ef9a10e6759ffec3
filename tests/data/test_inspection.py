"""A look at the data counts what training will see, and shows rows token by token."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import write_rows

import finetune
from finetune.config import Config, DataSection, TrainingSection
from finetune.data import fingerprint
from finetune.data.batching import MicroBatching, Sizes, worst_batches
from finetune.data.encoded import ONE_SEQUENCE
from finetune.data.inspection import Bin, Inspection, SourceCounts, _batchings, _bins, _pieces, inspect
from finetune.storage.records import TokenText

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def tokenizer(word_tokenizer: Make, chatml: str) -> Any:
    return word_tokenizer(chatml)


@pytest.fixture
def look(tmp_path: Path, tokenizer: Any) -> Callable[..., Inspection]:
    """Inspects rows that are written to `rows.jsonl`."""

    def look(rows: list[dict[str, Any]], training: TrainingSection | None = None, **section: Any) -> Inspection:
        path = write_rows(tmp_path / "rows.jsonl", rows)
        section = {"train": str(path), "eval": "none", **section}
        return inspect(DataSection(**section), training or TrainingSection(), tokenizer)

    return look


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def text(words: int) -> dict[str, str]:
    """A row of `words` words and the end of text; blanks are tokens too."""
    return {"text": "one " * (words - 1) + "one"}


# -- a row as the model sees it ----------------------------------------------------------------------------------------


def test_a_row_is_shown_by_token_with_special_and_trained_tokens_marked(look) -> None:
    [row] = look([chat("Hi", "one")]).samples
    context = ["<|im_start|>", "user", "\n", "Hi", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
    assert row.pieces == (
        *(TokenText(text, False) for text in context),
        TokenText("one", True),
        TokenText("<|im_end|>", True),
        TokenText("\n", False),
    )
    assert (row.tokens, row.trained_tokens, row.place.rpartition("/")[2]) == (12, 2, "rows.jsonl:1")


def test_the_first_token_of_a_text_is_predicted_by_nothing_and_not_shown_as_trained(look) -> None:
    [row] = look([{"text": "one two"}]).samples
    assert [piece.trained for piece in row.pieces] == [False, True, True, True]
    assert row.trained_tokens == 3


def test_few_rows_are_shown_and_all_are_counted(look) -> None:
    found = look([chat("Hi", "one")] * 7)
    assert (len(found.samples), found.train.rows) == (3, 7)
    assert set(json.loads(json.dumps(found.as_dict()))) == {
        "fingerprint", "train", "eval", "longest_place", "sources", "lengths", "batch_size", "micro_batch",
        "micro_batch_tokens", "batchings", "worst_batch", "samples", "warning", "judges", "splits",
        "separator", "as_chat",
    }  # fmt: skip
    assert found.as_dict()["samples"][0]["pieces"][9] == {"text": "one", "trained": True}


@settings(max_examples=60)
@given(written=st.text(max_size=30), cut=st.integers(0, 30))
def test_the_pieces_are_the_whole_row(byte_tokenizer: Make, written: str, cut: int) -> None:
    tokenizer = byte_tokenizer(None)
    ids = tokenizer(written)["input_ids"]
    # A mask never parts the bytes of one character.
    trained = [place >= len(tokenizer(written[:cut])["input_ids"]) for place in range(len(ids))]
    if tokenizer.decode(ids[: trained.index(True)] if True in trained else ids).endswith("\N{REPLACEMENT CHARACTER}"):
        trained = [True] * len(ids)
    pieces = _pieces(ids, trained, tokenizer)
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids)
    shown = "".join(piece.text for piece in pieces if piece.trained)
    assert shown == tokenizer.decode([id for id, keep in zip(ids, trained, strict=True) if keep])


def test_a_character_of_several_tokens_is_one_piece(byte_tokenizer: Make) -> None:
    tokenizer = byte_tokenizer(None)
    ids = tokenizer("a€🎉b")["input_ids"]
    assert len(ids) == 9
    assert [piece.text for piece in _pieces(ids, [True] * 9, tokenizer)] == ["a", "€", "🎉", "b"]


def test_the_blank_that_a_decoder_trims_from_a_lone_token_is_shown() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"▁Hello": 0, "▁there": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([1]) == "there"
    assert [piece.text for piece in _pieces([0, 1, 1], [True] * 3, tokenizer)] == ["Hello", " there", " there"]


# -- counts ------------------------------------------------------------------------------------------------------------


def test_both_splits_are_counted_with_their_supervised_share(look, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(chat("Hi", "one")) + "\n")
    found = look([chat("Hi", "one"), chat("Why?", "Because so.")], eval=str(held_out)).as_dict()
    assert found["train"]["rows"] == 2
    assert found["train"]["supervised_share"] == found["train"]["trained_tokens"] / found["train"]["tokens"] == 7 / 28
    assert (found["eval"]["rows"], found["eval"]["supervised_share"]) == (1, 2 / 12)
    assert look([chat("Hi", "one")]).as_dict()["eval"] is None


def test_the_longest_row_is_named_by_its_location(look) -> None:
    """FAULTS 13: one row of 100k tokens is found before training."""
    found = look([text(3), text(3), text(4), text(50_000)], max_length=200_000)
    assert found.rows.longest_place.endswith("rows.jsonl:4")
    assert found.train.longest == found.batches.worst_batch.tokens == 100_000


def test_the_worst_batch_is_that_of_the_forecast(look, tokenizer: Any) -> None:
    lengths = [6, 10, 4, 8, 8]
    found = look([text(length // 2) for length in lengths], TrainingSection(batch_size=4, micro_batch=2))
    sizes = Sizes(lengths, [length - 1 for length in lengths])
    assert found.batches.worst_batch == worst_batches(sizes, MicroBatching(2), 2, "the data's rows")[0]
    assert found.fingerprint == fingerprint.of(tokenizer)


@given(lengths=st.lists(st.integers(1, 200_000), min_size=1, max_size=60))
def test_every_length_is_in_one_bin_and_no_bin_is_missing_between(lengths: list[int]) -> None:
    bins = _bins(lengths)
    for these in bins:
        assert these.rows == sum(these.first <= length <= these.last for length in lengths)
    assert sum(these.rows for these in bins) == len(lengths)
    assert all(later.first == earlier.last + 1 for earlier, later in pairwise(bins))
    assert bins[0].rows
    assert bins[-1].rows


def test_bins_grow_with_the_lengths() -> None:
    assert _bins([1, 4, 5, 30]) == (
        Bin(1, 4, 2), Bin(5, 8, 1), Bin(9, 12, 0), Bin(13, 16, 0), Bin(17, 24, 0), Bin(25, 32, 1)
    )  # fmt: skip


def test_rows_and_tokens_are_counted_by_source(tmp_path: Path, tokenizer: Any) -> None:
    first = tmp_path / "corpus"
    first.mkdir()
    write_rows(first / "rows.jsonl", [text(1), text(150)])
    second = write_rows(tmp_path / "more.jsonl", [text(10)])
    found = inspect(DataSection(train=[str(first), str(second)], eval="none"), TrainingSection(), tokenizer)
    assert found.rows.sources == (SourceCounts(str(first), 2, 302), SourceCounts(str(second), 1, 20))


# -- batches -----------------------------------------------------------------------------------------------------------

_LOGNORMAL = random.Random(7)
LONG_TAILED = [max(1, int(_LOGNORMAL.lognormvariate(4.5, 1.0))) for _ in range(2001)]


@pytest.mark.slow
def test_the_padding_is_that_of_training(quick: Callable[..., Config]) -> None:
    """One epoch is really trained in each way, and its places are counted as they go through the model."""
    for group, tokens, packed in (("true", "null", "false"), ("false", 60, "false"), ("true", "null", "true")):
        way = [f"training.group_by_length={group}", f"training.micro_batch_tokens={tokens}", f"data.packing={packed}"]
        model = ["quantization.kind=none", "adapter.targets=[q_proj]", "memory.checkpointing=none"]
        way += ["training.batch_size=8", "training.max_steps=null", "data.eval=none"]
        config = quick(*model, *way, run=f"{group}-{tokens}-{packed}")
        lines = finetune.train(config).run.metrics()
        tokens = sum(line["tokens"] for line in lines)
        places = sum(round(line["tokens"] / (1 - line["padding_share"])) for line in lines)
        found = finetune.inspect_data(config).inspection
        [configured] = [batching for batching in found.batches.batchings if batching.configured]
        assert tokens == found.train.tokens
        assert configured.steps == len(lines)
        assert configured.padding_share == pytest.approx(1 - tokens / places)
        assert (configured.padding_share > 0) is (packed == "false")


def alone(lengths: list[int]) -> list[tuple[int]]:
    """Rows of one segment each."""
    return [(length,) for length in lengths]


def test_each_way_to_batch_is_chosen_by_its_keys() -> None:
    job = Config()
    for batching in _batchings(alone([3, 4, 5]), ONE_SEQUENCE, job.training, job.data):
        chosen = job.changed(batching.changes)
        found = _batchings(alone([3, 4, 5]), ONE_SEQUENCE, chosen.training, chosen.data)
        assert [way.name for way in found if way.configured] == [batching.name]


def test_grouping_pads_less_on_lengths_with_a_long_tail() -> None:
    training = TrainingSection(batch_size=16, micro_batch=16, micro_batch_tokens=512)
    grouped, shuffled, grouped_by_tokens, by_tokens, packed = _batchings(
        alone(LONG_TAILED), ONE_SEQUENCE, training.model_copy(update={"micro_batch_tokens": None}), DataSection()
    )
    assert packed.padding_share == 0
    assert packed.micro_batches <= by_tokens.micro_batches
    assert shuffled.padding_share > 0.5
    assert grouped.padding_share < shuffled.padding_share / 3
    assert grouped_by_tokens.padding_share <= grouped.padding_share
    assert (
        _batchings(alone(LONG_TAILED), ONE_SEQUENCE, training, DataSection())[3].padding_share
        < by_tokens.padding_share
        == shuffled.padding_share
    )
    assert grouped.steps == shuffled.steps == 126


def test_padding_is_the_difference_of_the_lengths_in_a_micro_batch() -> None:
    job = TrainingSection(), DataSection()
    assert {one.padding_share for one in _batchings(alone([7] * 10), ONE_SEQUENCE, *job)} == {0.0}
    pairs = TrainingSection(batch_size=2, micro_batch=2), DataSection()
    for batching in _batchings(alone([3, 9]), ONE_SEQUENCE, *pairs)[:-1]:
        assert (batching.padding_share, batching.steps) == (1 - 12 / 18, 1)


def test_padding_is_that_of_the_whole_batch_while_the_micro_batch_is_auto(look) -> None:
    rows = [text(words) for words in range(1, 30)]
    auto, whole = (look(rows, TrainingSection(batch_size=8, micro_batch=micro)) for micro in ("auto", 8))
    assert auto.batches.micro_batch == "auto"
    assert auto.batches.batchings == whole.batches.batchings
    assert auto.batches.worst_batch == whole.batches.worst_batch
