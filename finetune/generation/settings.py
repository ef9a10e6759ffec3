"""Settings of answers, with the options of the command line that set them. Importing this module loads no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.errors import ConfigError
from finetune.generation.caches import CACHES


def _option(default: Any, help: str | None = None, **limits: float) -> Any:
    """A field that is also an option of `generate` and `chat`."""
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True)
class Settings:
    """Sampling, end and batching of answers.

    Temperature 0 is greedy: `top_p`, `top_k` and `min_p` then have no effect. `stop` are texts that end an answer.
    `cache` is a key of `caches.CACHES`. The same seed gives the same answers to the same prompts at the same
    `batch_size`. Raises ConfigError for invalid values.
    """

    max_new_tokens: int = _option(256, min=1)
    temperature: float = _option(0.0, "0 is greedy.", min=0)
    top_p: float = _option(1.0, min=0, max=1)
    top_k: int = _option(0, "0 is off.", min=0)
    min_p: float = _option(0.0, min=0, max=1)
    repetition_penalty: float = _option(1.0, "1 is none.")
    seed: int = _option(0, "Of sampled answers.")
    stop: Sequence[str] = _option((), "A text that ends an answer; may be repeated.")
    batch_size: int = 16
    cache: str = _option("dynamic", "; ".join(f"{name}: {cache.help}" for name, cache in CACHES.items()))

    def __post_init__(self) -> None:
        allowed = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "min_p": (0 <= self.min_p <= 1, "from 0 (off) to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0; 1 is none"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
            "stop": (all(self.stop), "texts that are not empty"),
        }
        if wrong := [f"`{key}` must be {rule}" for key, (right, rule) in allowed.items() if not right]:
            raise ConfigError("\n".join(wrong))

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate`, complete, so that those in the base's own generation_config.json do not apply."""
        greedy = self.temperature == 0
        return {
            "do_sample": not greedy,
            "temperature": None if greedy else self.temperature,
            "top_p": None if greedy else self.top_p,
            "top_k": None if greedy else self.top_k,
            "min_p": self.min_p or None,
            "repetition_penalty": self.repetition_penalty,
        }
