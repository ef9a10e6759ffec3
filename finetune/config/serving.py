"""What is served, by which runtime and in which way: the tables, and what follows from them for the base in training.

Two ways lead to a served model. The base is held in training in the form that is served, and its adapter is shipped
beside it; or the merged model is rounded to that form after training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from finetune.config.field_types import Help
from finetune.config.sections import OutputSection, QuantizationSection
from finetune.forms import ALONE, FORMS, WITH_ADAPTERS_AS_PUBLISHED

_SERVED = sorted((form for form in FORMS.values() if form.is_served), key=lambda form: not form.recipe)
SERVED: dict[str, Help] = {form.name: Help(f"GGUF, {form.words}" if form.recipe else form.words) for form in _SERVED}
"""Forms that are served, those of GGUF files first. Each but `16bit` is also a kind of `quantization.kind`."""

GGUF = tuple(form.name for form in _SERVED if form.recipe)
"""The kinds whose embedding and head are quantized too, and whose files are GGUF."""
GRIDS = tuple(name for name in SERVED if name != "16bit")
"""The kinds of packed weights whose form is served."""
PACKED = (*GRIDS, "gguf")
"""All kinds of packed weights; with `gguf`, those of a GGUF file as the base, each in the form it has there."""


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for `--max-lora-rank` (vllm/config/lora.py, 2026-11)."""


@dataclass(frozen=True)
class Runtime:
    """A program that serves models: the forms that it `reads`, and those on which it takes a LoRA adapter; on a form in
    `as_published`, only if the base is published in it. `largest_rank`: of an adapter, None without a limit.
    `without_experts`: why it takes no adapter on experts in any form.
    """

    help: str
    reads: tuple[str, ...]
    adapters: tuple[str, ...]
    as_published: tuple[str, ...] = ()
    largest_rank: int | None = None
    without_experts: str | None = None

    @classmethod
    def of(cls, name: str, help: str, **others: Any) -> Runtime:
        """The runtime with what the table of forms says of it."""
        takes = {form.name: form.serving.runtimes[name] for form in _SERVED if name in form.serving.runtimes}
        as_published = tuple(form for form, how in takes.items() if how == WITH_ADAPTERS_AS_PUBLISHED)
        adapters = tuple(form for form, how in takes.items() if how != ALONE)
        return cls(help, tuple(takes), adapters, as_published, **others)


RUNTIMES: dict[str, Runtime] = {
    "llama.cpp": Runtime.of(
        "llama.cpp", "llama.cpp, and programs made of it but Ollama",
        without_experts="llama.cpp has no form for an adapter on experts",
    ),
    "ollama": Runtime.of("ollama", "Ollama, which since 0.34.1 takes no adapters"),
    "vllm": Runtime.of("vllm", "vLLM", largest_rank=VLLM_RANKS[-1]),
    "sglang": Runtime.of(
        "sglang", "SGLang",
        without_experts="the names by which SGLang finds an adapter on experts are unknown here",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A way to a served model; `words` say what becomes of the trained one."""

    help: str
    words: str


WAYS: dict[str, Way] = {
    "auto": Way("`adapter` where the runtime takes one on that form of the base, else `rounded`", ""),
    "adapter": Way(
        "train on a base in the very form that is served, and ship the adapter beside it: nothing differs from what "
        "was trained", "an adapter beside its base",
    ),
    "rounded": Way("merge in 16 bit after training, and round with the rows", "one file, rounded after training"),
}  # fmt: skip


@dataclass(frozen=True)
class Followed:
    """What followed from `output.serve`, and `why` it is served so; `held` is the kind of a base held in that form."""

    serve: str
    runtime: str
    way: str
    why: str
    held: str | None

    def __str__(self) -> str:
        held = f"; quantization.kind: {self.held}" if self.held else ""
        return f"output.serve: {self.serve} for {self.runtime} as {WAYS[self.way].words} ({self.why}){held}"


def consequences(
    output: OutputSection, kind: str, obstacle: str | None = None
) -> tuple[dict[str, Any], Followed | None]:  # fmt: skip
    """The changes of a config that follow from `output.serve`: a runtime, a way and the kind of quantization, `kind` so
    far; and a note on them.

    `obstacle` says why the base, once it is known, cannot be served beside an adapter; `auto` is then `rounded`.
    """
    if output.serve is None:
        return {}, None
    serve, runtime, way = output.serve, runtime_of(output), output.way
    without = without_adapters(runtime, serve) or obstacle
    if way == "auto":
        way = "rounded" if without else "adapter"
    why = (way == "rounded" and without) or "as asked"
    if way == "adapter":
        why = f"{runtime} takes adapters on {serve}"
    changes: dict[str, Any] = {"output.runtime": runtime, "output.way": way}
    if way == "rounded":
        return changes, Followed(serve, runtime, way, why, None)
    is_file = kind == "gguf" and serve in GGUF  # a saved config of a base that is served itself
    held = "gguf" if is_file else kind_of(serve)
    changes |= {"quantization.kind": held, "quantization.double": True}
    return changes, Followed(serve, runtime, way, why, held)


def kind_of(serve: str) -> str:
    """The kind of quantization of a base that is held as it is served."""
    return "none" if serve == "16bit" else serve


def without_adapters(runtime: str, serve: str) -> str | None:
    """In words, that the runtime takes no adapters on a form; None if it does."""
    takes = RUNTIMES[runtime].adapters
    return None if serve in takes else f"{runtime} takes no adapters {f'on {serve}' if takes else 'at all'}"


def with_adapters(serve: str) -> str:
    """The runtimes that take an adapter on a form, as advice lists them."""
    takers = {name: one for name, one in RUNTIMES.items() if serve in one.adapters}
    if_published = f" for a base that is published in {serve}"
    return ", ".join(f"`{name}`{if_published if serve in one.as_published else ''}" for name, one in takers.items())


def runtime_of(output: OutputSection) -> str:
    """The runtime that is named, or the usual one of the form."""
    return output.runtime or ("llama.cpp" if output.serve in GGUF else "vllm")


def export_of(output: OutputSection) -> str | None:
    """The format of `finetune export` that writes what is served; None if the config does not say what is."""
    if output.serve is None:
        return None
    if output.way == "adapter":
        return "adapter"
    runtime = runtime_of(output)
    if runtime in ("ollama", "llama.cpp") or output.serve in GGUF:
        return "ollama" if runtime == "ollama" else "gguf"
    return "merged" if output.serve == "16bit" else output.serve


def contradictions(
    output: OutputSection, quantization: QuantizationSection, *, without_adapter: bool = False
) -> Iterator[tuple[str, str]]:
    """(key, message with remedy) of each choice that excludes another beside `output.serve`; `without_adapter`: for a
    base that cannot be served beside one.
    """
    serve, way, kind = output.serve, output.way, quantization.kind
    if serve is None:
        return
    name = runtime_of(output)
    runtime = RUNTIMES.get(name)
    if runtime is None or serve not in SERVED:  # refused by the fields themselves
        return
    if serve not in runtime.reads:  # refused by rules
        return
    if way == "adapter" and serve not in runtime.adapters:
        yield (
            "output.way",
            f"{name} takes no adapters on {serve}; set `rounded` for one file, or `output.runtime` to one of "
            f"{with_adapters(serve)}",
        )
        return
    given = "kind" in quantization.model_fields_set and kind not in ("auto", "published", "gguf")
    if not given:
        return
    if consequences(output, kind)[0]["output.way"] == "rounded":
        if kind in GRIDS and not FORMS[kind].published:  # a published one is rounded from what it is
            as_adapter = ", or `output.way: adapter`" if serve in runtime.adapters and not without_adapter else ""
            yield (
                "quantization.kind",
                f"an update of weights in {kind} is mostly lost when they are rounded again to {serve}; set `none` or "
                f"`nf4`{as_adapter}",
            )
    elif kind != kind_of(serve):
        yield (
            "quantization.kind",
            f"trains on {kind}, and {serve} is served beside the adapter; remove it, or set `output.way: rounded`",
        )
