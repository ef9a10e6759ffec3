"""Whether a base can be trained, by its config alone: its modules, and passes of a small copy with random weights."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from finetune.config import AdapterSection, Config, ModelSection, QuantizationSection
from finetune.errors import ConfigError
from finetune.model import build, probes, small_copy
from finetune.model.adapters.adapter import linear_but
from finetune.model.base import load_architecture, load_base
from finetune.model.source import catalog
from finetune.model.source.locate import remote_code
from finetune.model.structure.mixture import Mixture
from finetune.objectives import log_probs
from finetune.runtime import libraries
from finetune.training import probe_table
from finetune.training.probe_table import Subject


def check_model(config: Config, architecture: Any, attention: str, adapter: AdapterSection) -> Mixture | None:
    """Check that `adapter` on a base of this architecture can be trained; returns how its experts are stored.

    Raises as `Blueprint.check` does; ArtifactError for a model that sees later tokens; and ConfigError for one whose
    logits are not those of its head, whose adapters get no gradient, or whose code fails in bfloat16.
    """
    mixture = build.blueprint(config, architecture, attention).check(adapter)
    if not hasattr(architecture.get_text_config(), "num_hidden_layers"):
        raise ConfigError(
            f"`model.name`: a model of type `{architecture.model_type}` is not one row of decoder layers, which every "
            "step here goes through; use another base"
        )
    if architecture.model_type not in catalog.families() and not remote_code(config.model):
        with torch.random.fork_rng([]):
            _try_copy(config, architecture)
    return mixture


def _try_copy(config: Config, architecture: Any) -> None:
    """Make passes through a small copy; one that cannot be made, or fails, says nothing about the model itself."""
    try:
        model = small_copy.of(architecture).eval()
        for layer in model.modules():
            if isinstance(layer, nn.Linear):  # initialised like a wide layer, a narrow one would return almost zero
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        ids, *_ = probes.rows(1, probes.TOKENS, model)
        probes.logits(model, input_ids=ids)
        with tempfile.TemporaryDirectory(prefix="finetune-trial-") as folder:
            libraries.save_model(model, folder)
            section = ModelSection(name=folder)
            # As merged models are loaded: some weights are not cast to bfloat16.
            in_16_bit = load_base(
                section, QuantizationSection(kind="none"), load_architecture(section),
                attention="eager", dtype=torch.bfloat16, device=torch.device("cpu"),
            )  # fmt: skip
    except Exception:  # models may raise anything, also for sizes that no published one has
        return
    model.requires_grad_(False)
    for name in linear_but(model):
        model.get_submodule(name).weight.requires_grad_(True)
    copy = Subject(config, model, where="copy")
    probe_table.run("built", copy)
    log_probs.attach(model)
    probe_table.run("scoring", copy)
    probe_table.run("saved", replace(copy, model=in_16_bit))
