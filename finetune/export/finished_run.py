"""The files that a run has published, verified against its config before they are used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from finetune.config import AdapterSection, Config, ModelSection
from finetune.data import fingerprint
from finetune.errors import ArtifactError
from finetune.model.adapters.adapter_files import check_files
from finetune.model.base import from_safetensors, load_architecture, refuse_missing
from finetune.model.source import identity
from finetune.model.source.locate import hub_call, pinned_code
from finetune.model.source.tokenizer import load_tokenizer
from finetune.storage.rundir import RunDirectory


def weights_folder(run: RunDirectory, adapter: AdapterSection) -> Path:
    """The folder of the trained weights: the adapter, or the model of a run that trained every weight."""
    return run.adapter if adapter.kind == "lora" else run.merged


def tokenizer_of(run: RunDirectory, config: Config, folder: Path) -> Any:
    """The run's tokenizer, after checking that the weights in `folder` were trained with it, and an adapter's files."""
    tokenizer = load_tokenizer(config.model, run.data(config.data))
    if folder == run.adapter:
        check_files(folder, config.adapter)
    fingerprint.check(tokenizer, folder)
    return tokenizer


def base_of(run: RunDirectory, model: ModelSection, adapter: AdapterSection, note: Callable[[str], None]) -> str | None:
    """The identity of the base (see `identity.of_base`), after checking that the trained weights are of that base."""
    base_identity = identity.of_base(model, note)
    fingerprint.check_base(model, base_identity, weights_folder(run, adapter), note)
    return base_identity


def load_merged(
    run: RunDirectory, section: ModelSection, device: torch.device, dtype: torch.dtype | None = None
) -> Any:
    """The published merged model of the base in `section`, in `dtype` (None: as written), with the base's own code if
    `section` allows it.
    """
    folder = run.merged
    if not (folder / "config.json").is_file():
        raise ArtifactError(f"{folder}: no merged model; run `finetune merge {run.quoted}`")

    def load() -> Any:
        code = pinned_code(section)
        if section.trust_remote_code:
            # transformers 5.23 loads a class without a repository prefix from the folder itself, and runs the folder's
            # `custom_generate/generate.py` when it reads the generation config; neither is the pinned code.
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
