"""What the config.json of a base says, read without transformers' class for it, whose import takes that of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config import Config, ModelSection
from finetune.errors import ArtifactError
from finetune.model.source import catalog
from finetune.model.source.locate import BUILTIN_BASE, locate
from finetune.storage import records


def leaves_rows_alone(config: Config) -> bool:
    """Whether nothing that the base allows can change the job's rows, so that a look at them need not load its config.

    The base is one of text in 16 bit, on this machine, with positions for `data.max_length`.
    """
    model, data = config.model, config.data
    asks = model.vision != "none" or model.vocabulary or model.labels or model.rope_scaling or data.new_tokens
    if asks or config.scorer or config.output.serve or config.quantization.kind in ("gguf", "published"):
        return False
    said = _config_json(model)
    positions = said.get("max_position_embeddings")
    more = any(key.endswith("_config") or key == "quantization" for key in said)  # of its parts, or of its weights
    return isinstance(positions, int) and data.max_length <= positions and not more


def _config_json(section: ModelSection) -> Mapping[str, Any]:
    """What the config.json says; nothing of a base that is not on this machine, or a GGUF file."""
    if section.weights == "random" and (entry := catalog.find(section.name)):
        return entry.facts
    if section.name != BUILTIN_BASE and not Path(section.name).is_dir():
        return {}
    try:
        return records.read(Path(locate(section.name), "config.json"), records.OBJECT)
    except ArtifactError:
        return {}
