"""Checks that a base takes what its processor makes of an image, and that images train what they should."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from finetune.errors import ArtifactError, ConfigError
from finetune.model import probes
from finetune.model.structure import composite, linear_layers


def prove(model: Any, inputs: Mapping[str, Tensor]) -> None:
    """Check on `model` itself, by a pass of a row with an image, that its gradient reaches all trained weights beside
    the language model, and that a frozen model of images computes without a graph.

    `inputs` are the model's arguments for the row. Raises ArtifactError if the pass fails, as it does where the files
    of the processor are not of this model, and ConfigError for weights that images do not train.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    tower = base.get_encoder(modality="image")
    graphs: list[bool] = []

    def saw(module: Any, _: Any, output: Any) -> None:
        graphs.append(any(isinstance(value, Tensor) and value.requires_grad for value in output.values()))

    def refusal(error: Exception) -> ArtifactError:
        return ArtifactError(
            f"a pass of {type(base).__name__} with an image fails ({probes.Failed(error)}): the files of its processor "
            "are not of this model; download the base again, or set `model.vision: none`"
        )

    watching = tower.register_forward_hook(saw)
    try:
        with probes.training(model), probes.attempt(refusal), torch.enable_grad():
            given = {name: value.to(base.device) for name, value in inputs.items()}
            reached = linear_layers.leaves(model(**given, use_cache=False).logits)
    finally:
        watching.remove()
    if graphs != [any(weight.requires_grad for weight in tower.parameters())]:
        raise ConfigError(
            f"`model.vision`: images do not pass the model of images in {type(base).__name__} once, with a graph where "
            "that is trained alone; set `none`"
        )
    parts = [f"{part}." for part in composite.beside_language(base)]
    for name, weight in base.named_parameters():
        if weight.requires_grad and name.startswith(tuple(parts)) and weight not in reached:
            raise ConfigError(
                f"`model.vision`: images do not train `{name}`; choose other `adapter.targets`, or set `frozen`"
            )
