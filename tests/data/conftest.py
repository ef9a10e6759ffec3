"""Small tokenizers made on the spot, so that a mask can be written down token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from known_templates import KNOWN, VARIANTS, texts

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<unk>"]
WORDS = [
    "system", "user", "assistant", "tool", "Be", "brief", "Hi", "Hello", "there", "Why", "Because", "so", "one", "two",
    *" \n.?!#:",
]  # fmt: skip


@pytest.fixture(scope="session")
def word_tokenizer() -> Callable[..., Any]:
    """Makes a tokenizer whose tokens are words, single spaces, newlines and marks, each a token of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(template: str | None, pad_token: str = "<|pad|>", special: Sequence[str] = (), **tokens: str) -> Any:
        vocabulary = {token: index for index, token in enumerate(dict.fromkeys([*SPECIAL, *special, *WORDS]))}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|\w+|[^\s\w]"), behavior="isolated")
        backend.decoder = decoders.Fuse()
        backend.add_special_tokens([*SPECIAL, *special])
        named = {"eos_token": "<|im_end|>", "unk_token": "<unk>", "pad_token": pad_token, **tokens}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Any]:
    """Makes a byte-level BPE tokenizer that can spell any text and knows a few words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    def make(
        template: str | None,
        trim_offsets: bool = False,
        special: Sequence[str] = (),
        eos_token: str = "<|im_end|>",
        **tokens: str,
    ) -> Any:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=320 + len(special),
            special_tokens=list(dict.fromkeys([*SPECIAL, *special])),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(["system user assistant hello hello there", "the answer is the answer"], trainer)
        named = {"eos_token": eos_token, "pad_token": "<|pad|>", **tokens}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def chatml() -> str:
    """ChatML with generation marks around the assistant's words and their end of turn."""
    return (
        "{%- for message in messages -%}"
        "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
        "{%- if message['role'] == 'assistant' -%}"
        "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
        "{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}"
        "{{- '\\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


# Without marks; with them the same templates, whose masks are equal (test_known_templates.py), are always tried.
SELDOM = [(name, "shipped") for name in ("llama2", "mistral", "phi3", "qwen2_5")]
PARAMS = [pytest.param(each, marks=[pytest.mark.long] * (each in SELDOM)) for each in VARIANTS]


@pytest.fixture(params=PARAMS, ids="-".join, scope="module")
def known(request: pytest.FixtureRequest, byte_tokenizer: Callable[..., Any]) -> tuple[str, Any]:
    """A template's name, and a tokenizer with it."""
    name, variant = request.param
    return name, KNOWN[name].tokenizer(byte_tokenizer, texts(name)[variant])
