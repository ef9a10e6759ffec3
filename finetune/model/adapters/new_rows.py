"""Rows of the embedding and the head that are trained alone, by PEFT's trainable tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from finetune.errors import ConfigError

TRAINED = ".trainable_tokens_delta.default"
"""End of the name of the rows' values in a PeftModel."""


def by_module(base: Any, rows: list[list[int]], whole: Sequence[str] = ()) -> dict[str, list[int]] | None:
    """PEFT's `trainable_token_indices`: the numbers of the rows for the embedding and the head. Raises ConfigError.

    PEFT trains them once if the two are tied. `whole` are modules that are trained in full, by the last parts of their
    names.
    """
    if not rows:
        return None
    modules = [base.get_input_embeddings(), base.get_output_embeddings()]
    for module in modules:
        if not isinstance(module, (nn.Embedding, nn.Linear)) or getattr(module, "bias", None) is not None:
            raise ConfigError(
                f"`data.new_tokens`: PEFT trains no rows alone in the {type(module).__name__} of {type(base).__name__}"
                f"{' with a bias' if isinstance(module, nn.Linear) else ''}; remove them, or spell them in known tokens"
            )
    names = [name for name, module in base.named_modules() if module in modules]
    if twice := [name for name in names if name.rpartition(".")[2] in whole]:
        raise ConfigError(
            f"`data.new_tokens`: their rows of `{twice[0]}` are trained alone, and `adapter.extra_modules` trains all "
            "of it; remove one of them"
        )
    return {name: [row[0] for row in rows] for name in names}


def complete(model: Any) -> None:
    """Give PEFT's wrappers what is read of them and peft 0.21 lacks: a head's `bias`, for the loss, and the flag that
    its own `disable_input_dtype_casting` restores.
    """
    for _, wrapper in wrappers(model):
        wrapper.register_parameter("bias", None)
        wrapper.token_adapter.cast_input_dtype_enabled = True


@torch.no_grad()
def start(model: Any, rows: list[list[int]]) -> None:
    """Set each row, the first number of its list, to the mean of the base's rows that the other numbers name."""
    if not rows:
        return
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    for table in tables:
        wrapped = hasattr(table, "token_adapter")
        weight = table.original_module.weight if wrapped else table.weight
        means = torch.stack([weight[pieces].float().mean(0) for _, *pieces in rows]).to(weight.dtype)
        if wrapped:
            table.token_adapter.trainable_tokens_delta["default"].copy_(means)
        else:
            weight[[row[0] for row in rows]] = means


def wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's wrappers of the embedding and the head whose rows are trained, with their names in `model`."""
    from peft.utils.other import TrainableTokensWrapper

    return ((name, part) for name, part in model.named_modules() if isinstance(part, TrainableTokensWrapper))
