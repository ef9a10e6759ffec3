"""Rows that a head scores are what a server makes of them, and their last token is scored as transformers does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversations import TWO_TURNS, assistant, user
from jobs import sampled
from known_templates import KNOWN, VARIANTS, texts
from transformers import AutoModelForSequenceClassification, LlamaConfig

from finetune.data.batching import MicroBatching
from finetune.data.chat import encode, is_empty
from finetune.data.encoded import IGNORE, Encoded, RowLayout
from finetune.data.examples import Chat, Completion, Several, Text, Tokens
from finetune.data.lengths import shortened
from finetune.model.attention import packing
from finetune.model.structure import sequence_head
from finetune.objectives import scored
from finetune.objectives.objective import scored_rows
from finetune.training.collator import StepCollator

PAIRS = RowLayout(("chosen", "rejected"), scored=True)
ANSWERS = [("Hello there.", "so"), ("one", "one two."), ("Because so.", "Hello.")]


def conversation(name: str, answer: str) -> list[dict[str, Any]]:
    opening = TWO_TURNS if KNOWN[name].has_system else TWO_TURNS[1:]
    return [*opening[:-1], assistant(answer)]


def served(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(messages, return_dict=False)
    return ids


def test_a_row_has_the_tokens_of_a_server_and_the_last_one_is_scored(known: tuple[str, Any]) -> None:
    name, tokenizer = known
    for messages in (conversation(name, "Hello there."), [user("Hi")]):
        row = encode(Chat(messages), tokenizer, "end")
        ids = served(tokenizer, messages)
        assert row.input_ids == ids
        assert row.labels == [IGNORE] * (len(ids) - 1) + ids[-1:]
    for example in (Text("Hello there. Why?"), Completion("Hello there.", " Why?")):
        assert encode(example, tokenizer, "end").input_ids == tokenizer("Hello there. Why?")["input_ids"]


def test_a_long_conversation_keeps_its_end_and_a_long_text_its_beginning(known: tuple[str, Any]) -> None:
    name, tokenizer = known
    messages = conversation(name, "Because so. " * 20)
    row = encode(Chat(messages), tokenizer, "end")
    for limit in (2, 20):
        what, [cut] = shortened(row, limit, "truncate")
        assert (what, len(cut.input_ids), cut.trained) == ("truncated", limit, 1)
        assert cut.labels[-1] == cut.input_ids[-1] == served(tokenizer, messages)[-1]
    text = encode(Text("Because so. " * 20), tokenizer, "end")
    _, [cut] = shortened(text, 20, "truncate")
    assert cut.input_ids == text.input_ids[:20]


def test_a_row_of_one_token_is_scored_and_one_of_none_is_not(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(None)
    assert encode(Tokens([5, 6, 7], labels=[IGNORE, 6, IGNORE]), tokenizer, "end").labels == [IGNORE, IGNORE, 7]
    assert encode(Tokens([5]), tokenizer, "end").trained == 1
    assert encode(Tokens([5]), tokenizer).trained == 0
    assert encode(Tokens([]), tokenizer, "end").trained == 0
    assert encode(Text("a"), tokenizer, "end").trained == 1


def test_an_answer_of_white_space_is_empty_but_a_conversation_without_an_answer_is_not() -> None:
    question = Chat([user("Hi"), assistant(" ")], context=frozenset([0]))
    assert is_empty(question, "end")
    assert not is_empty(Chat([user("Hi")]), "end")
    assert is_empty(Completion("Hi", " "), "end")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=None,
    )  # fmt: skip
    packing.register()
    wanted = sequence_head.want(config, ["reward"])
    return sequence_head.loader(wanted)._from_config(wanted, attn_implementation=packing.EACH).eval()


@pytest.mark.parametrize(
    ("packed", "pad"),
    sampled([(packed, pad) for packed in (False, True) for pad in ("own", "eos")], (False, "own"), (True, "eos")),
)
def test_scores_are_those_of_transformers_on_the_templates_own_text_however_rows_are_batched(
    model: Any, byte_tokenizer: Callable[..., Any], tmp_path: Path, packed: bool, pad: str, subtests: pytest.Subtests
) -> None:
    """With ids of one token and with prompts that both answers share."""
    model.save_pretrained(tmp_path)
    published = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    for name, variant in dict(VARIANTS).items():
        with subtests.test(name=name, variant=variant), torch.no_grad():
            tokenizer = KNOWN[name].tokenizer(byte_tokenizer, texts(name)[variant])
            if pad == "eos":
                tokenizer.pad_token = tokenizer.eos_token
            both = [[conversation(name, answer) for answer in answers] for answers in ANSWERS]
            rows = [
                encode(Several(dict(zip(PAIRS.segments, map(Chat, each), strict=True))), tokenizer, "end")
                for each in both
            ]
            rows.append(encode(Several({"chosen": Tokens([5]), "rejected": Tokens([6])}), tokenizer, "end"))
            ours = scores(model, rows, packed=packed)
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(sequence_head.padding_for(tokenizer, []))
            published.config.pad_token_id = tokenizer.pad_token_id
            texts_ = [messages for each in both for messages in each]
            for side in ("left", "right"):
                batch = tokenizer.apply_chat_template(
                    texts_, padding=True, return_tensors="pt", return_dict=True, tokenizer_kwargs={"padding_side": side}
                )
                found = published(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
                torch.testing.assert_close(found, ours[:-2], rtol=1e-4, atol=1e-5)
            for at, messages in enumerate(texts_):
                alone = published(input_ids=torch.tensor([served(tokenizer, messages)])).logits[0, 0]
                torch.testing.assert_close(alone, ours[at], rtol=1e-4, atol=1e-5)
            for at in (-2, -1):
                alone = published(input_ids=torch.tensor([[7 + at]])).logits[0, 0]
                torch.testing.assert_close(alone, ours[at], rtol=1e-4, atol=1e-5)


def scores(model: Any, rows: list[Encoded], *, packed: bool) -> torch.Tensor:
    """The rewards of the rows' segments as a step computes them, in one micro-batch."""
    way = MicroBatching(len(rows), 4096 if packed else None, packed, PAIRS, shares=packed)
    batch = StepCollator(way, 3).micro_batch(
        [
            {"input_ids": row.input_ids, "labels": row.labels, "segments": row.lengths, "shared": row.shared}
            for row in rows
        ]
    )
    assert ("key_parts" in batch) == packed
    assert scored_rows(batch, 2).all()
    with packing.known(batch):
        rewards: torch.Tensor = scored(model, batch).logits[:, 0]
    return rewards
