"""The inputs of an export format that is converted from a finished run, and the comparison that proves it."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.config import Config, QuantizationSection
from finetune.data.chat import prompt_ids
from finetune.data.examples import RowError, asked, learnt
from finetune.data.prepare import HELD_OUT, ComparedRows
from finetune.export import proof
from finetune.export.export_formats import ExportFormat
from finetune.model import build
from finetune.model.base import load_architecture
from finetune.model.build import Blueprint
from finetune.model.structure import experts
from finetune.runtime import libraries
from finetune.storage.rundir import RunDirectory


@dataclass(frozen=True)
class ExportRequest:
    """A run, finished or yet to be trained, and the form in which it is asked for: `kind` is the type of a GGUF file.

    `learns`: the kind of example, of a run that does not say it yet.
    """

    run: RunDirectory
    config: Config
    tokenizer: Any
    device: torch.device
    kind: str
    learns: str | None = None

    @cached_property
    def architecture(self) -> Any:
        """transformers' configuration of the base."""
        return load_architecture(self.config.model)

    @property
    def example(self) -> Any:
        """A prompt in the format that the run was trained on, to compare how programs render and tokenize it."""
        kind = self.learns or learnt(self.run.events()) or "chat"
        return asked(kind, "What is two and two?", self.config.data.separator)

    @property
    def prompt(self) -> list[int]:
        """The tokens of `example` as in training; empty if the chat template cannot render it."""
        try:
            return prompt_ids(self.example, self.tokenizer, self.config.data.control_tokens)
        except RowError:
            return []

    @property
    def starts_with_bos(self) -> bool:
        """Whether prompts began with the BOS token in training."""
        return self.prompt[:1] == [self.tokenizer.bos_token_id]


@dataclass(frozen=True, kw_only=True)
class Conversion(ExportRequest):
    """The conversion of a finished run: outputs are compared on the rows `compared`.

    `base_identity` is that of `model.source.identity.of_base`. `load_merged` loads the merged model, which was proven
    when it was published, to compute in a dtype (None: as written). `packed` weights, by the model's names, were
    `rounded` with the training rows (the facts of that) and take the place of its own.
    """

    compared: ComparedRows
    base_identity: str | None
    load_merged: Callable[[torch.dtype | None], Any]
    packed: Mapping[str, nn.Parameter] = field(default_factory=dict)
    rounded: dict[str, Any] | None = None

    @property
    def rows(self) -> list[list[int]]:
        """Token ids."""
        return self.compared.ids

    @property
    def answers(self) -> list[list[int]]:
        """The labels of the rows' tokens; without any, every token counts for the loss."""
        return self.compared.labels or self.rows

    def base_logits(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The unquantized base's logits; zero for a base of random weights, which were not saved."""
        if self.config.model.weights == "random":
            return [torch.zeros(len(row), 1) for row in self.rows]
        architecture, plain = copy.deepcopy(self.architecture), QuantizationSection(kind="none")  # loading changes it
        implementation = build.attention_of_exports(
            self.config.model, architecture, self.device.type, self.config.training.precision
        )
        base = Blueprint(self.config.model, plain, architecture, implementation, dtype).load(self.device)
        logits = proof.logits(base, self.rows, self.compared.shown)
        del base
        libraries.return_freed_memory()
        return logits

    def compare(
        self, name: str, model: Any, written: list[torch.Tensor], trained: list[torch.Tensor],
        base: list[torch.Tensor], roundoff: float,
    ) -> proof.Proof:  # fmt: skip
        """The proof of the written files, from logits of three models. `model` is any of them, for its depth;
        `roundoff` is the relative rounding error of a written weight.
        """
        layers = model.config.get_text_config().num_hidden_layers
        result = proof.compare(written, trained, base, proof.bound(layers, roundoff), mixture=experts.is_mixture(model))
        proof.refuse_unless_equal(result, name)
        return result

    def served(
        self, written: list[torch.Tensor], trained: list[torch.Tensor], base: list[torch.Tensor],
        following: list[list[int]] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """What is lost between the trained and the served model; see `proof.served`. Empty for a classifier.

        `following`: the labels of what follows the tokens with logits, if those are not all of the rows.
        """
        if self.config.scorer:
            return {}
        unknown = None
        if self.config.model.weights == "random":
            unknown = "the base had random weights, which were not saved"
        elif self.compared.name != HELD_OUT:
            unknown = f"no rows are held out, and the loss of {self.compared.name} says nothing of new ones"
        return proof.served(
            trained, written, None if unknown else base, following or [row[1:] for row in self.answers], unknown
        )


@dataclass(frozen=True)
class Exporter:
    """How a format is exported.

    `check` raises ConfigError for a run that the format cannot express, before anything is loaded, and MachineError for
    one that this machine cannot make or prove. `make` writes the files to a folder, proves them, and returns the facts
    of export.json. `forms`, of a format with packed weights: the form of each by name, of a model on the meta device in
    a file of a kind.
    """

    check: Callable[[ExportRequest], None]
    make: Callable[[Conversion, Path], dict[str, Any]]
    forms: Callable[[Any, str], Mapping[str, str]] | None = None


def exporter_of(form: ExportFormat) -> Exporter | None:
    """The exporter of a format, with the libraries that it needs; None for the merged model itself."""
    if not form.module:
        return None
    exporter: Exporter = importlib.import_module(f"finetune.export.{form.module}").EXPORTER
    return exporter
