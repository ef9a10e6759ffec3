"""Facts about the committed base model `data/tiny-llama`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY_LLAMA = Path(__file__).parents[2] / "data" / "tiny-llama"


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


def test_chat_tokens_can_be_told_apart_by_frozen_embeddings(model: Any, tokenizer: Any) -> None:
    embeddings = model.get_input_embeddings().weight.detach()
    chat_tokens = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|pad|>"])
    directions = torch.nn.functional.normalize(embeddings[chat_tokens], dim=1)
    cosines = directions @ directions.T
    assert cosines.fill_diagonal_(0).abs().max() < 0.6


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    for text in ["\n  a\n\n\tb  c ", "é 中文 🙂 don't\r\n ok", " leading", "trailing \n"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
