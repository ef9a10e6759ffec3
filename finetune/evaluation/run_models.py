"""The models of a run, loaded and verified, for `finetune generate`, `chat` and `eval`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from typing import Any

from finetune.choices import config_of
from finetune.config import Config
from finetune.config.field_types import pick, shown
from finetune.data import examples, images
from finetune.data.media import TEXT_ALONE, Media, Shown
from finetune.data.prepare import media_of
from finetune.errors import ConfigError, DataError
from finetune.export import served_model
from finetune.export.finished_run import FinishedRun
from finetune.generation import answering, caches
from finetune.generation.answering import Answer
from finetune.generation.settings import Settings
from finetune.model import bounds, build
from finetune.model.adapters import adapter_files
from finetune.model.base import blaming_base, load_architecture
from finetune.model.source.tokenizer import load_tokenizer
from finetune.report.terminal import note_beside_output
from finetune.runtime import libraries
from finetune.runtime.device import this_device
from finetune.storage.rundir import Run, RunDirectory

UNRECORDED = "chat"
"""The kind of prompts for a run that does not record the kind of its rows."""

MODELS = {
    "base": "without the adapter",
    "adapter": "the base with the adapter, or the model of a run that trained every weight",
    "merged": "the adapter merged into the base",
    "served": "the newest export with weights of its own, in a GGUF file or quantized, as its files have it; without "
    "one, of a run whose adapter is served, the base with it",
}
"""The models that a run may have."""

EARLIER_ADAPTER = "The merged model is of an earlier adapter; `finetune merge` makes it anew."


@dataclass(frozen=True)
class Ready:
    """A model of a run, ready to answer; `kind` of its rows, and its `system` message, empty for none.

    `media` is what may be shown to its base.
    """

    config: Config
    model: Any
    tokenizer: Any
    kind: str
    system: str = ""
    media: Media = TEXT_ALONE

    def asked(self, text: str, shown: Sequence[Any] = ()) -> examples.Example:
        """A user's text in the form of the run's rows, with the images `shown`; see `with_images`."""
        return with_images(examples.asked(self.kind, text, self.config.data.separator, self.system), shown, self.media)

    def answers(
        self, prompts: Sequence[examples.Example], settings: Settings,
        cache_bytes: Callable[[int], None] = lambda size: None,
    ) -> Iterator[Answer]:  # fmt: skip
        """See `answering.answers`."""
        ids = [self._ids(prompt) for prompt in prompts]
        shown = Shown.by(prompts, self.media)
        with blaming_base(self.config.model):
            generated = answering.answers(self.model, self.tokenizer, ids, settings, cache_bytes, shown)
            self._positions.prompt(max(map(len, ids), default=0))
            for prompt, answer in zip(ids, generated, strict=True):
                yield answer
                self._positions.answer(len(prompt), answer.tokens)

    def stream(self, prompt: examples.Example, settings: Settings, say: Callable[[str], None]) -> Answer:
        """See `answering.stream`."""
        ids = self._ids(prompt)
        self._positions.prompt(len(ids))
        with blaming_base(self.config.model):
            answer = answering.stream(self.model, self.tokenizer, ids, settings, say, Shown.by([prompt], self.media))
        # The note goes on a line of its own below the answer.
        self._positions.answer(len(ids), answer.tokens, lambda: say("\n"))
        return answer

    @cached_property
    def _positions(self) -> answering.Positions:
        return answering.Positions(self.model, note_beside_output)

    def _ids(self, prompt: examples.Example) -> list[int]:
        return answering.prompt_ids(prompt, self.tokenizer, self.config.data.control_tokens, self.media)


def with_images(prompt: examples.Example, shown: Sequence[Any], media: Media) -> examples.Example:
    """`prompt` with these images, as rows may have them, measured for a base of these `media`.

    Raises ConfigError for a base that does not see, and DataError for an image that it cannot be shown.
    """
    if shown and not media:
        raise ConfigError("this run shows no images to its base: it was trained with `model.vision: none`")
    try:
        return media.measured_example(images.placed_in(prompt, {"images": [*shown]}), None)
    except examples.RowError as error:
        raise DataError(str(error)) from None


def system_of(run: RunDirectory, system: str | None) -> str:
    """The system message to begin with: `system`, or if that is None the one that all rows of the run share."""
    if (examples.learnt(run.events()) or UNRECORDED) != "chat":
        if system:
            raise ConfigError("`--system`: this run was trained on plain text, which has no system message")
        return ""
    if system is None:
        facts = run.data_facts()
        return (facts.get("system") if facts else None) or ""
    return system


def ready(
    run: RunDirectory, which: str = "adapter", *, system: str | None = None, cache: str = "dynamic",
    trust_remote_code: bool = False,
) -> Ready:  # fmt: skip
    """Load the run's `base`, `adapter`, `merged` or `served` model; `system` is that of `system_of`.

    `trust_remote_code` allows Python code shipped with the run's base. A KV cache that the model cannot have is refused
    before weights are read.
    """
    config = config_of(run, trust_remote_code=trust_remote_code)
    if config.scorer:
        raise ConfigError(
            f"{run.path} is a {config.scorer}, which gives scores and no answers; `finetune eval {run.quoted}` "
            "measures it"
        )
    system = system_of(run, system)
    if cache != "dynamic":
        caches.make(cache, load_architecture(config.model), 1)
    model, tokenizer = model_of(FinishedRun(run, config), which)
    if which == "merged" and config.adapter.kind == "lora" and not run.is_merged:
        note_beside_output(EARLIER_ADAPTER)
    kind = examples.learnt(run.events())
    if not kind:
        note_beside_output(f"{run.path} does not record the format of its rows; prompts are sent as conversations")
    return Ready(config, model, tokenizer, kind or UNRECORDED, system, media_of(config.model, config.data, tokenizer))


@libraries.alone()
def generate(
    run: Run, prompt: str, *, images: Sequence[Any] = (), which: str = "adapter",
    system: str | None = None, max_new_tokens: int = 256, trust_remote_code: bool = False,
) -> str:  # fmt: skip
    """Answer `prompt` greedily with the run's `base`, `adapter` or `merged` model.

    A run trained on conversations answers it as a user message, after the `system` message: by default the one that all
    of its rows have in common, with "" none. One trained on completions or plain text continues it. `images`, as rows
    from Python may have them, are shown before the prompt's text, or at its marks `<image>`.

    Raises ConfigError for an unknown model and for images of a run without them, DataError for a broken image, and
    ArtifactError if weights, tokenizer or base are damaged or not those of the run, or need Python code that is not
    allowed.
    """
    if not isinstance(prompt, str):
        raise ConfigError(f"`prompt` must be text, not {shown(prompt)}")
    if not isinstance(images, (list, tuple)):
        raise ConfigError(f"`images` must be a list of images, not {shown(images)}")
    opened = ready(RunDirectory.open(run), which, system=system, trust_remote_code=trust_remote_code)
    example = opened.asked(prompt, [fspath(one) if isinstance(one, PathLike) else one for one in images])
    return next(opened.answers([example], Settings(max_new_tokens))).text


def model_of(finished: FinishedRun, which: str) -> tuple[Any, Any]:
    """The run's base, base with adapter (quantized as in training), merged or served model; and the tokenizer."""
    pick(MODELS, which, "model")
    libraries.quiet()
    run, config, device = finished.run, finished.config, this_device()
    if which == "served":
        name = served_model.newest(run, config.output.way)
        if name != "adapter":
            tokenizer = finished.tokenizer()
            return served_model.load(finished, name, device, note_beside_output), tokenizer
        note_beside_output("served: the base with the adapter, as they were trained")
        which = name
    if which == "merged" or (which == "adapter" and config.adapter.kind == "none"):
        tokenizer = finished.tokenizer(run.merged)
        return finished.load_merged(device), tokenizer
    if which == "adapter":
        tokenizer = finished.tokenizer(run.adapter)
    else:
        tokenizer = load_tokenizer(config.model, run.data(config.data))
    architecture = load_architecture(config.model)
    bounds.check_tokenizer(tokenizer, architecture, config.model)
    base = build.load(config, architecture, device)
    if finished.weights.exists():
        finished.base(note_beside_output)
    if which == "base":
        return base, tokenizer
    return adapter_files.load_adapter(base, run.adapter, config.adapter), tokenizer
