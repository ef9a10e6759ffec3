"""A composite checkpoint, of a model that also sees or hears: its language part alone, or whole.

Such a checkpoint is loaded with transformers' class for it, so that its modules have the names that PEFT looks up in
the checkpoint as published, but without the models beside the language model: their weights are neither read nor held.
The layers between these models and the language model stay, as the code of some reads them for text alone (Gemma 3n).
Of a few types, such as Qwen3.5 and Llama 4, transformers has a causal language model of the text alone; it is used.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from finetune.errors import ConfigError
from finetune.model.source import catalog
from finetune.model.structure import linear_layers, sequence_head

_MARK = "_without_the_models_beside_its_language_model"


def loader(architecture: Any, *, whole: bool = False) -> Any:
    """The class whose `from_pretrained` makes the model of `architecture`, `whole` or its language part alone.

    Raises ConfigError for a whole model without one for images.
    """
    from transformers import AutoModelForCausalLM

    if whole:
        return seeing_class(architecture)
    if sequence_head.is_wanted(architecture):
        return sequence_head.loader(architecture)
    known = catalog.model_class(architecture)
    return _language_alone(known) if catalog.is_whole(architecture, known) else AutoModelForCausalLM


def seeing_class(architecture: Any) -> Any:
    """transformers' class of the whole model of `architecture`. Raises ConfigError for one that sees no images."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as known

    if "vision_config" not in architecture.sub_configs or type(architecture) not in known:
        raise ConfigError(
            f"`model.vision`: transformers has no model of type `{architecture.model_type}` that sees; set `none`"
        )
    return known[type(architecture)]


def from_config(architecture: Any, *, whole: bool = False, **arguments: Any) -> Any:
    """A model of `architecture` with the weights of its own initialisation; `arguments` as for `from_pretrained`."""
    from transformers import AutoModelForImageTextToText

    made_by = loader(architecture, whole=whole)
    if not whole:
        return made_by.from_config(architecture, **arguments)
    arguments.pop("trust_remote_code", None)
    return AutoModelForImageTextToText.from_config(architecture, **arguments)


def is_language_alone(model: Any) -> bool:
    """Whether models beside the language model of `model` were left out."""
    return hasattr(type(model), _MARK)


def beside_language(model: Any) -> list[str]:
    """Names of the parts of a whole model beside its decoder and its head: the model of images, and what follows it.

    Empty for a model of text, or one whose other parts were left out.
    """
    if is_language_alone(model) or "vision_config" not in getattr(model.config, "sub_configs", {}):
        return []
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    around = [module for module in model.modules() if module is not decoder and decoder in module.modules()]
    parts = (part for module in around for part in module.children() if part not in (decoder, head, *around))
    return [names[part] for part in parts]


def adapt_images(model: Any) -> None:
    """Let adapters on the model of images in `model` count as trained, since rows with images train them."""
    encoder = model.get_encoder(modality="image")
    [part] = (name for name, module in model.named_modules() if module is encoder)
    linear_layers.trained_by_images(model, part)


@functools.cache
def _language_alone(known: type) -> type:
    """`known`, a class of composite models, made without the models beside its language model."""
    from transformers import PreTrainedModel

    def init(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        known.__init__(self, config, *arguments, **named)  # type: ignore[misc]
        decoder = self.get_decoder()
        inside, ignored = set(decoder.modules()), set[str]()
        for path, module in list(self.named_modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, PreTrainedModel) and child not in inside and decoder not in set(child.modules()):
                    setattr(module, name, None)
                    ignored.add(re.escape(f"{path}.{name}.".lstrip(".")))
        self._keys_to_ignore_on_load_unexpected.update(ignored)  # each model's own set

    # The name and the module decide how transformers names the weights of its files.
    parts = {"__init__": init, "from_config": classmethod(sequence_head.from_config), "__module__": known.__module__}
    return type(known.__name__, (known,), {**parts, _MARK: True})
