"""The tokenizer, with what training and generation need: a pad token, an end-of-turn token, a chat template."""

from __future__ import annotations

from typing import Any

from finetune.config import ModelSection
from finetune.errors import ArtifactError
from finetune.model import catalog
from finetune.model import chat_template as template
from finetune.model.base import pinned_code
from finetune.model.locate import BUILTIN_BASE, hub_call, locate


def load_tokenizer(section: ModelSection, chat_template: str = "auto") -> Any:
    """The tokenizer of the base, or the one `model.tokenizer` names, with the template that `chat_template` chooses.

    A random-weight model without a tokenizer takes the built-in one: its ids are valid in any larger vocabulary.
    Padding uses the end of text where no pad token is set; labels and attention mask do not depend on its id.
    """
    from transformers import AutoTokenizer

    name = section.tokenizer or section.name
    if section.weights == "random" and section.tokenizer is None and catalog.find(section.name):
        name = BUILTIN_BASE
    # `revision` pins the base; a tokenizer from elsewhere has its own history.
    own = name == section.name
    revision = section.revision if own else None
    code = pinned_code(section) if own else {"trust_remote_code": False}
    tokenizer = hub_call(
        f"the tokenizer of `{name}`",
        lambda: AutoTokenizer.from_pretrained(locate(name), revision=revision, **code),
    )
    if tokenizer.eos_token_id is None:
        raise ArtifactError(f"the tokenizer of `{name}` has no end-of-text token; set `eos_token` in its config")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = template.choose(chat_template, tokenizer.chat_template)
    tokenizer.padding_side = "right"
    return tokenizer
