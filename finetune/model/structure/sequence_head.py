"""Sequence classifiers: a decoder with a linear head, `score`, in place of the one that predicts tokens.

Modules have the names of transformers' `AutoModelForSequenceClassification`, which loads what is published here. In a
run the head scores every token, so that what compares logits compares scores; in training only the last one with a
label, which is the last of each sequence as transformers' class finds it: the last token that is not padding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from finetune.errors import ConfigError
from finetune.model.source import catalog, chat_template
from finetune.model.structure import experts

HEAD = "score"
_MARK = "_scores_tokens"


@dataclass
class SequenceScores(ModelOutput):
    """The output of a classifier; see `_forward`."""

    logits: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


def is_wanted(architecture: Any) -> bool:
    """Whether `architecture` is of a sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in architecture.architectures or ())


def want(architecture: Any, labels: list[str]) -> Any:
    """`architecture` as that of a classifier with these labels. Raises ConfigError if transformers has none."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as known

    own = known.get(type(architecture), None)
    if own is None or catalog.is_whole(architecture, catalog.model_class(architecture)):
        raise ConfigError(
            f"`training.objective`: transformers has no sequence classifier of type `{architecture.model_type}` for "
            "text alone; use another base"
        )
    architecture.architectures = [own.__name__]
    architecture.id2label = dict(enumerate(labels))
    architecture.label2id = {label: number for number, label in enumerate(labels)}
    return architecture


def loader(architecture: Any) -> type:
    """transformers' classifier for `architecture`, whose head scores each token."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as known

    return _scoring(known[type(architecture)])


def from_config(cls: Any, architecture: Any, **arguments: Any) -> Any:
    """`from_config` of the Auto classes, as a method of a model's class that is made here."""
    arguments.pop("trust_remote_code", None)
    return cls._from_config(architecture, **arguments)


def is_classifier(model: Any) -> bool:
    """Whether `model`, wrapped by PEFT or not, was made by `loader`."""
    return hasattr(type(_base(model)), _MARK)


def new_weights(model: Any) -> dict[str, torch.Size]:
    """Names and shapes of the weights that the files of a language model lack, which are zero before training."""
    names = (f"{HEAD}.weight",) if is_classifier(model) else ()
    return {name: model.get_parameter(name).shape for name in names}


@torch.no_grad()
def start(model: Any) -> None:
    """Give the trained head of a classifier the random weights of a fresh one; others are left alone."""
    if is_classifier(model):
        head, spread = _base(model).score, getattr(model.config.get_text_config(), "initializer_range", 0.02)
        nn.init.normal_(head.weight, std=spread)


def published_scores(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """The scores (rows, labels) that transformers' own class gives padded rows (rows, tokens)."""
    own: Any = type(_base(model)).__mro__[1]
    scores: torch.Tensor = own.forward(_base(model), input_ids=input_ids, use_cache=False).logits
    return scores


def padding_for(tokenizer: Any, rows: list[list[int]]) -> int | None:
    """The padding token of a published classifier: the tokenizer's own, or another special token if rows may end so.

    transformers scores the last token that is not padding, and needs a padding token for several rows at once. EOS,
    where there is no other special token, serves if none of `rows` (token ids) ends with it; else None.
    """
    ends = {tokenizer.eos_token_id, *chat_template.stop_ids(tokenizer), *(row[-1] for row in rows if row)}
    written = str(tokenizer.chat_template)
    apart = (tokenizer.bos_token_id, tokenizer.unk_token_id)
    others = [
        number
        for number, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and token.content not in written and number not in apart
    ]
    choices = [tokenizer.pad_token_id, *others, *apart]
    found = next((number for number in choices if number is not None and number not in ends), None)
    alone = found is None and all(row[-1] != tokenizer.eos_token_id for row in rows)
    return tokenizer.eos_token_id if alone else found


def _base(model: Any) -> Any:
    model = getattr(model, "module", model)
    return model.get_base_model() if hasattr(model, "peft_config") else model


@functools.cache
def _scoring(known: type) -> type:
    """`known`, a class of classifiers, with scores of every token and a head that is found like a language model's."""
    # The name and the module decide how transformers names the weights of its files.
    parts = {
        "forward": _forward, "get_output_embeddings": lambda model: model.score,
        "from_config": classmethod(from_config), "__module__": known.__module__,
    }  # fmt: skip
    return type(known.__name__, (known,), {**parts, _MARK: True})


def _forward(
    model: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None, fused_lm_head: bool = False, **inputs: Any
) -> Any:
    """`logits` (rows, tokens, labels) of each token or, as `fused_lm_head` says that a step asks, those (sequences,
    labels), float32, of each sequence's last trained token; and the `aux_loss` of a mixture that returns router logits.
    """
    text = model.config.get_text_config()
    balanced = fused_lm_head and getattr(text, "output_router_logits", False)
    asked = {"use_cache": False, **({"output_router_logits": True} if balanced else {}), **inputs}
    output = model.base_model(input_ids=input_ids, **asked)
    hidden, aux_loss = output.last_hidden_state, None
    if balanced:
        aux_loss = experts.balancing_loss(output.router_logits, text, inputs)
    if fused_lm_head:
        assert labels is not None
        # Each sequence's last trained token, in all rows one after the other; without one, the first of the rows.
        positions = torch.where(labels != -100, torch.arange(labels.numel(), device=labels.device).view_as(labels), 0)
        starts = inputs.get("cu_seq_lens_q")
        if starts is None:
            last = positions.amax(1)
        else:
            last = torch.segment_reduce(positions[0].double(), "max", offsets=starts).long()
        hidden = hidden.flatten(0, 1)[last]
    head = model.score
    if getattr(head, "disable_adapters", False):  # wrapped by PEFT, with its adapter off
        head = head.original_module
    with torch.autocast(hidden.device.type, enabled=False):
        logits = model.score(hidden.to(head.weight.dtype))
    return SequenceScores(logits=logits.float() if fused_lm_head else logits, aux_loss=aux_loss)
