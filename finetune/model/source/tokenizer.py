"""Loads the tokenizer and makes sure it has what training and generation need: EOS, pad token, chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config import DataSection, ModelSection
from finetune.errors import ArtifactError, ConfigError
from finetune.model.source import catalog
from finetune.model.source import chat_template as template
from finetune.model.source.locate import BUILTIN_BASE, hub_call, locate, locate_tokenizer, pinned_code


def load_tokenizer(section: ModelSection, data: DataSection | None = None) -> Any:
    """The tokenizer of the base, or the one named by `model.tokenizer`, with the chat template and the new tokens of
    `data`. Raises ConfigError for a new token that is known, blank, or cannot be added.

    A catalog model with random weights uses the built-in tokenizer: its ids are valid in any larger vocabulary. EOS is
    the pad token if none is set; labels and attention mask do not depend on its id.
    """
    name = section.tokenizer or section.name
    if section.weights == "random" and section.tokenizer is None and catalog.find(section.name):
        name = BUILTIN_BASE
    # `revision` pins the base only; a tokenizer from another repository has other commits.
    own = name == section.name
    located = locate_tokenizer(name)
    folder = Path(located)
    if folder.suffix == ".unpacked" and not (folder / "tokenizer.json").is_file():  # `gguf_base` has written none
        raise ArtifactError(
            f"{name}: its tokenizer splits text in a way that is not known here, or not to this transformers; set "
            "`model.tokenizer` to that of the model it was made from"
        )
    revision = section.revision if own else None
    code = pinned_code(section) if own else {"trust_remote_code": False}
    kind = _class_of(name)
    tokenizer = hub_call(f"the tokenizer of `{name}`", lambda: kind.from_pretrained(located, revision=revision, **code))
    if tokenizer.eos_token_id is None:
        raise ArtifactError(f"the tokenizer of `{name}` has no end-of-text token; set `eos_token` in its config")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    data = DataSection() if data is None else data
    given = tokenizer.chat_template
    if own and section.vision != "none":  # older checkpoints have one of their own for rows with images
        given = processor_settings(section).get("chat_template") or given
    chosen = template.choose(data.chat_template, given)
    template.check(chosen)
    tokenizer.chat_template = template.with_defaults(chosen, data.template_arguments)
    tokenizer.padding_side = "right"
    # New tokens, whole in any text.
    if blank := [token for token in data.new_tokens if not token.strip()]:
        raise ConfigError(f"`data.new_tokens`: {blank[0]!a} is white space, which any text has; remove it")
    if known := [token for token in data.new_tokens if token in tokenizer.get_vocab()]:
        raise ConfigError(f"`data.new_tokens`: {known[0]!a} is a token of this tokenizer already; remove it")
    if tokenizer.add_tokens(data.new_tokens) != len(data.new_tokens):
        raise ConfigError("`data.new_tokens`: the tokenizer takes some of them for one token; remove duplicates")
    return tokenizer


def _class_of(name: str) -> Any:
    """The class that loads the tokenizer of this name.

    The built-in one's is known; `AutoTokenizer` imports torch, with the config of the base, to choose one.
    """
    if name == BUILTIN_BASE:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def processor_settings(section: ModelSection) -> Mapping[str, Any]:
    """What the file of the base's processor says, beside its image processor."""
    from transformers import ProcessorMixin

    settings: Mapping[str, Any]
    settings, _ = hub_call(
        f"the processor of `{section.name}`",
        lambda: ProcessorMixin.get_processor_dict(locate(section.name), revision=section.revision),
    )
    return settings


def new_rows(section: ModelSection, data: DataSection) -> list[list[int]]:
    """For each of `data.new_tokens` its id, followed by those of the tokens that spelled it. Raises ConfigError."""
    before, after = load_tokenizer(section), load_tokenizer(section, data)
    rows = [
        [after.convert_tokens_to_ids(token), *before.encode(token, add_special_tokens=False)]
        for token in data.new_tokens
    ]
    if empty := [token for token, row in zip(data.new_tokens, rows, strict=True) if len(row) == 1]:
        raise ConfigError(f"`data.new_tokens`: the tokenizer drops {empty[0]!a}, so its row has no start; remove it")
    return rows
