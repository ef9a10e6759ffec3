"""The files that a run has published, verified against its config before they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from finetune.config import Config
from finetune.data import fingerprint
from finetune.errors import ArtifactError
from finetune.model.adapters.adapter_files import check_files
from finetune.model.base import from_safetensors, load_architecture, refuse_missing
from finetune.model.source import identity
from finetune.model.source.locate import hub_call, pinned_code
from finetune.model.source.tokenizer import load_tokenizer
from finetune.storage.rundir import RunDirectory


@dataclass(frozen=True)
class FinishedRun:
    """A run that has published its weights, and the config by which these are read."""

    run: RunDirectory
    config: Config

    @property
    def weights(self) -> Path:
        """The folder of the trained weights: the adapter, or the model of a run that trained every weight."""
        return self.run.adapter if self.config.adapter.kind == "lora" else self.run.merged

    def tokenizer(self, folder: Path | None = None) -> Any:
        """The tokenizer, after checking that the weights in `folder` were trained with it, and an adapter's files."""
        folder = folder or self.weights
        tokenizer = load_tokenizer(self.config.model, self.run.data(self.config.data))
        if folder == self.run.adapter:
            check_files(folder, self.config.adapter)
        fingerprint.check(tokenizer, folder)
        return tokenizer

    def base(self, note: Callable[[str], None]) -> str | None:
        """The identity of the base (see `identity.of_base`), after checking that the weights are of that base."""
        base_identity = identity.of_base(self.config.model, note)
        fingerprint.check_base(self.config.model, base_identity, self.weights, note)
        return base_identity

    def load_merged(self, device: torch.device, dtype: torch.dtype | None = None) -> Any:
        """The published merged model, in `dtype` (None: as written), with the base's own code if the config allows
        it.
        """
        folder, section = self.run.merged, self.config.model
        if not (folder / "config.json").is_file():
            raise ArtifactError(f"{folder}: no merged model; run `finetune merge {self.run.quoted}`")

        def load() -> Any:
            code = pinned_code(section)
            if section.trust_remote_code:
                # transformers 5.24 loads a class without a repository prefix from the folder itself, and runs the
                # folder's `custom_generate/generate.py` when it reads the generation config; neither is the pinned
                # code.
                code["config"] = architecture = load_architecture(section)
                reference = getattr(architecture, "auto_map", {}).get("AutoModelForCausalLM")
                if reference and "--" not in reference:
                    architecture.auto_map["AutoModelForCausalLM"] = f"{section.name}--{reference}"
                code["generation_config"] = GenerationConfig.from_pretrained(str(folder))
            return from_safetensors(
                str(folder),
                whole=section.vision != "none",
                dtype=dtype or "auto",
                device_map={"": device},
                output_loading_info=True,
                **code,
            )

        model, report = hub_call(f"merged model {folder}", load)
        refuse_missing(report, f"merged model {folder}", "restore the folder from a backup, or merge or train again")
        return model
