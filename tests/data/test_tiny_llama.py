"""Facts about the committed base model `data/tiny-llama`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY_LLAMA = Path(__file__).parents[2] / "data" / "tiny-llama"

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does `textwrap.fill` do?"},
    {"role": "assistant", "content": "\n  It wraps a paragraph – ünïcode too."},
    {"role": "user", "content": "And `textwrap.wrap`?"},
    {"role": "assistant", "content": " It returns lines."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_LLAMA)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((TINY_LLAMA / "training.json").read_text())


def test_the_weights_are_small_and_as_recorded(model: Any, record: dict[str, Any]) -> None:
    weight_bytes = (TINY_LLAMA / "model.safetensors").stat().st_size
    assert weight_bytes == record["weight_bytes"] <= 4_000_000
    assert model.num_parameters() == record["parameters"]


def test_it_has_the_architecture_of_a_current_base_model(model: Any) -> None:
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    linear_layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert all(linear.in_features % 64 == 0 for linear in linear_layers)


def test_tokenizer_and_model_agree(model: Any, tokenizer: Any) -> None:
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.slow
@torch.inference_mode()
def test_the_recorded_loss_is_the_loss_of_the_weights(model: Any, tokenizer: Any, record: dict[str, Any]) -> None:
    total_nats, total_tokens = 0.0, 0
    boundary = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for text in harness.documents()["eval"][::16]:
        ids = tokenizer(text, truncation=True)["input_ids"]
        sequence = torch.tensor([[boundary, *ids, boundary]])[:, : model.config.max_position_embeddings]
        scored_tokens = sequence.shape[1] - 1
        total_nats += model(input_ids=sequence, labels=sequence).loss.item() * scored_tokens
        total_tokens += scored_tokens
    assert total_tokens > 2000
    loss = total_nats / total_tokens
    assert loss < record["held_out_unigram_loss_nats_per_token"] - 1.5
    # Not closer, because this is a sixteenth of the documents.
    assert loss == pytest.approx(record["held_out_loss_nats_per_token"], abs=0.5)


def test_the_recorded_figures_are_plausible(record: dict[str, Any]) -> None:
    loss = record["held_out_loss_nats_per_token"]
    unigram_loss = record["held_out_unigram_loss_nats_per_token"]
    assert 1.0 < loss < unigram_loss - 1.5
    assert unigram_loss < math.log(2048)
    settings = record["settings"]
    assert record["tokens_seen"] == (settings["steps"] * settings["batch_sequences"] * settings["sequence_tokens"])


def test_chat_tokens_can_be_told_apart_by_frozen_embeddings(model: Any, tokenizer: Any) -> None:
    embeddings = model.get_input_embeddings().weight.detach()
    chat_tokens = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|pad|>"])
    directions = torch.nn.functional.normalize(embeddings[chat_tokens], dim=1)
    cosines = directions @ directions.T
    assert cosines.fill_diagonal_(0).abs().max() < 0.6


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    for text in ["\n  a\n\n\tb  c ", "é 中文 🙂 don't\r\n ok", " leading", "trailing \n"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_chat_template_is_chatml(tokenizer: Any) -> None:
    assert tokenizer.apply_chat_template(CONVERSATION[:2], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat does `textwrap.fill` do?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_assistant_mask_covers_replies_and_their_end_of_turn(tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(CONVERSATION, return_assistant_tokens_mask=True, return_dict=True)
    pairs = zip(rendered["input_ids"], rendered["assistant_masks"], strict=True)
    trained = [token for token, mask in pairs if mask]
    replies = [message["content"] for message in CONVERSATION if message["role"] == "assistant"]
    assert tokenizer.decode(trained) == "".join(reply + "<|im_end|>" for reply in replies)


@pytest.mark.parametrize("reply", [2, 4])
def test_a_prompt_is_a_token_prefix_of_the_conversation(tokenizer: Any, reply: int) -> None:
    prompt = tokenizer.apply_chat_template(CONVERSATION[:reply], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    conversation = tokenizer.apply_chat_template(CONVERSATION[: reply + 1], return_dict=True)["input_ids"]
    assert conversation[: len(prompt)] == prompt


def test_it_generates(model: Any, tokenizer: Any) -> None:
    prompt = tokenizer("Return a", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert generated.shape[1] > prompt["input_ids"].shape[1]
