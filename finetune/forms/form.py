"""What a form of weights is: the facts of its name, and where its codec is.

Importing this module loads no library: configs are checked against the table of forms.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.forms.codec import Codec

ALONE, WITH_ADAPTERS, WITH_ADAPTERS_AS_PUBLISHED = "alone", "with adapters", "with adapters as published"
"""How a runtime reads a form; the last takes an adapter only on a base that is published in the form."""


@dataclass(frozen=True)
class Recipe:
    """The forms of a file of llama.cpp: `main` of most matrices, `head` of the output head and of an embedding that is
    tied to it.

    `more_bits`: about half of the layers have some matrices in `head`'s form.
    """

    main: str
    head: str
    more_bits: bool = False


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file whose matrices are of a form: llama.cpp's name of its `type`, and the values in a `block` there.

    `recipe`: the forms of its matrices, if training holds a base in them. `mixed`: whether llama.cpp gives each tensor
    its own type.
    """

    type: str
    recipe: Recipe | None = None
    mixed: bool = True
    block: int = 1


@dataclass(frozen=True)
class Serving:
    """How a form is served: by each runtime, `ALONE`, `WITH_ADAPTERS` or `WITH_ADAPTERS_AS_PUBLISHED`.

    The width of a row must be a multiple of `block` (1: other rows get another form). `without_experts`: why a runtime
    takes no adapter on experts in this form.
    """

    runtimes: Mapping[str, str] = field(default_factory=dict)
    block: int = 1
    without_experts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Form:
    """A form of weights. A new one is one entry of `table.FORMS`, and a file of this folder with its codec.

    `bits` of a weight, without scales. `words` describe files in the form, `held` a base that is held in it (empty: it
    is no `quantization.kind`), `published` is the usual name of bases published in it (empty: none is). `roundoff`:
    root mean square error of normally distributed weights, rounded up, relative to theirs. `module` of this folder has
    its codec (empty: bitsandbytes has, with these `arguments` of BitsAndBytesConfig, or a recipe's forms have).
    """

    name: str
    bits: int
    words: str = ""
    held: str = ""
    published: str = ""
    roundoff: float = 0.0
    module: str = ""
    arguments: Mapping[str, Any] | None = None
    gguf: GgufFile | None = None
    serving: Serving = Serving()

    @cached_property
    def codec(self) -> Codec:
        """How its values become bytes; imports torch."""
        codec: Codec = importlib.import_module(f"finetune.forms.{self.module}").CODECS[self.name]
        return codec

    @property
    def recipe(self) -> Recipe | None:
        """The forms of the matrices in a file of this form; None for a form that all matrices have."""
        return self.gguf.recipe if self.gguf else None

    @property
    def is_served(self) -> bool:
        return bool(self.serving.runtimes)

    @property
    def is_of_gguf(self) -> bool:
        """Whether GGUF files have matrices in this very form, in blocks that hold their scales."""
        return bool(self.module) and (not self.is_served or self.recipe is not None)

    @property
    def is_of_safetensors(self) -> bool:
        """Whether exports hold weights in this form in safetensors files."""
        return bool(self.module) and self.is_served and self.recipe is None

    @property
    def main(self) -> str:
        """The form of most of the matrices."""
        return self.recipe.main if self.recipe else self.name
