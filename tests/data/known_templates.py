"""The chat templates that models of the field come with, and what each makes of an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conversations import TEMPLATES
from transformers import AddedToken

from finetune.model.source import chat_template
from finetune.model.source.locate import BUILTIN_BASE, locate

Said = Callable[[str, bool], str]


@dataclass(frozen=True)
class Known:
    """A template in `templates/` with its special tokens, other `added` ones, and the text of a turn that is learnt.

    The second argument of `said` is whether the turn is the last.
    """

    end: str
    eos: str
    special: tuple[str, ...]
    said: Said
    bos: str | None = None
    has_system: bool = True
    added: tuple[str, ...] = ()

    def tokenizer(self, make: Callable[..., Any], text: str) -> Any:
        bos = {"bos_token": self.bos} if self.bos else {}
        names = dict.fromkeys([self.end, self.eos, *([self.bos] if self.bos else []), *self.special])
        tokenizer = make(text, special=list(names), eos_token=self.eos, **bos)
        tokenizer.add_tokens([AddedToken(name, normalized=False) for name in self.added])
        return tokenizer


_CHATML = ("<|im_start|>", "<|im_end|>")

KNOWN = {
    "chatml": Known("<|im_end|>", "<|im_end|>", _CHATML, lambda said, last: said + "<|im_end|>"),
    "llama2": Known("</s>", "</s>", (), lambda said, last: f" {said.strip()} </s>", "<s>"),
    "llama3": Known(
        "<|eot_id|>",
        "<|end_of_text|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
        lambda said, last: said.strip() + "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "mistral": Known("</s>", "</s>", (), lambda said, last: f" {said}</s>", "<s>"),
    "gemma": Known(
        "<end_of_turn>",
        "<eos>",
        ("<start_of_turn>",),
        lambda said, last: said.strip() + "<end_of_turn>",
        "<bos>",
        has_system=False,
    ),
    "phi3": Known(
        "<|end|>", "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>"), lambda said, last: said + "<|end|>"
    ),
    "qwen2_5": Known("<|im_end|>", "<|im_end|>", _CHATML, lambda said, last: said + "<|im_end|>"),
    "qwen3": Known(
        "<|im_end|>",
        "<|im_end|>",
        _CHATML,
        lambda said, last: (said.lstrip("\n") if last else said) + "<|im_end|>",
        added=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "plain": Known("</s>", "</s>", (), lambda said, last: said + "</s>"),
}


def texts(name: str) -> dict[str, str]:
    """The template as models ship it, as this program ships it, and as the built-in base has it; those there are."""
    shipped, ours = TEMPLATES / f"{name}.jinja", chat_template.TEMPLATES.get(name)
    found = {"shipped": shipped.read_text(encoding="utf-8")} if shipped.is_file() else {}
    if ours:
        found["ours"] = chat_template.named(name)
    if name == "chatml":
        with open(f"{locate(BUILTIN_BASE)}/chat_template.jinja", encoding="utf-8") as file:
            found["built-in base"] = file.read()
    return found


VARIANTS = [(name, variant) for name in KNOWN for variant in texts(name)]
