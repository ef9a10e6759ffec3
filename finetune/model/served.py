"""What follows for a base from the form in which its trained model is served (`finetune.config.serving`)."""

from __future__ import annotations

from typing import Any

from finetune.config import Config, serving
from finetune.errors import ConfigError
from finetune.model.source import prequantized
from finetune.model.structure import experts


def resolved(config: Config, architecture: Any) -> tuple[Config, str | None]:
    """`serving.resolved` and then `prequantized.resolved`, with their notes.

    Raises ConfigError for a base that cannot be served so, and as `prequantized.resolved`.
    """
    config, way = serving.resolved(config)
    config, published = prequantized.resolved(config, architecture)
    if way:
        _check(config, architecture.get_text_config())
    return config, "\n".join(filter(None, (way, published))) or None


def _check(config: Config, text: Any) -> None:
    serve, way = str(config.output.serve), config.output.way
    if way == "exact" and experts.count(text):
        raise ConfigError(
            f"`output.way`: the experts of {config.model.name} are not trained as they are rounded; set `adapter` or "
            "`rounded`"
        )
    block = serving.SERVED[serve].block
    widths = {name: getattr(text, name, None) for name in ("hidden_size", "intermediate_size", "moe_intermediate_size")}
    for name, width in widths.items():
        if isinstance(width, int) and width % block:
            raise ConfigError(
                f"`output.serve`: {serve} has blocks of {block} weights, which do not divide the {name} {width} of "
                f"{config.model.name}; set `q8_0` or another form of GGUF files, or `16bit`"
            )
