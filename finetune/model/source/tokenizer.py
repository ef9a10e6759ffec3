"""Loads the tokenizer and makes sure it has what training and generation need: EOS, pad token, chat template."""

from __future__ import annotations

from typing import Any

from finetune.config import DataSection, ModelSection
from finetune.errors import ArtifactError
from finetune.model.source import catalog
from finetune.model.source import chat_template as template
from finetune.model.source.locate import BUILTIN_BASE, hub_call, locate, pinned_code


def load_tokenizer(section: ModelSection, data: DataSection | None = None) -> Any:
    """The tokenizer of the base, or the one named by `model.tokenizer`, with the chat template that `data` chooses.

    A catalog model with random weights uses the built-in tokenizer: its ids are valid in any larger vocabulary. EOS is
    the pad token if none is set; labels and attention mask do not depend on its id.
    """
    from transformers import AutoTokenizer

    name = section.tokenizer or section.name
    if section.weights == "random" and section.tokenizer is None and catalog.find(section.name):
        name = BUILTIN_BASE
    # `revision` pins the base only; a tokenizer from another repository has other commits.
    own = name == section.name
    revision = section.revision if own else None
    code = pinned_code(section) if own else {"trust_remote_code": False}
    tokenizer = hub_call(
        f"the tokenizer of `{name}`", lambda: AutoTokenizer.from_pretrained(locate(name), revision=revision, **code)
    )
    if tokenizer.eos_token_id is None:
        raise ArtifactError(f"the tokenizer of `{name}` has no end-of-text token; set `eos_token` in its config")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    data = DataSection() if data is None else data
    chosen = template.choose(data.chat_template, tokenizer.chat_template)
    tokenizer.chat_template = template.with_defaults(chosen, data.template_arguments)
    tokenizer.padding_side = "right"
    return tokenizer
