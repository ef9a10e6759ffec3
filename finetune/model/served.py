"""What follows for a base from the form in which its trained model is served (`finetune.config.serving`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from finetune.config import Config, contradictions, serving
from finetune.errors import ConfigError
from finetune.forms import FORMS
from finetune.model import build
from finetune.model.adapters import adapter, plain_form
from finetune.model.adapters.plain_form import Obstacle
from finetune.model.source import gguf_families, identity, prequantized
from finetune.model.structure import experts

_COARSE_BITS = 5
"""Bits of forms of which a small update is partly lost. Of one of a tenth of a 4-bit step of normally distributed
weights, rounding from one such form to another kept 34 to 106%, from 16 bit, Q8_0 or FP8 to any 96 to 102%, and from a
form to the same 1 to 17% in 4 bit, 60% in Q5_K, 81% in FP8 and all in Q8_0."""


def consequences(config: Config, architecture: Any) -> tuple[dict[str, Any], str | None]:
    """`serving.consequences`, as the base allows, and their note.

    Raises ConfigError for a base that cannot be served so.
    """
    if config.output.serve is None:
        return {}, None
    base, asked = _ServedBase(config, architecture), config.output.way
    base.check_form()
    beside = base.obstacle("adapter") if asked == "auto" else None
    changes, note = serving.consequences(config.output, config.quantization.kind, beside.why if beside else None)
    way = changes["output.way"]
    if found := base.obstacle(way):
        if beside:
            found = Obstacle(f"{beside.why}, and {found.why}", (*beside.cures, *found.cures))
        raise ConfigError(f"`output.way`: {base.refusal(found, way)}")
    if beside:  # rules on the way just chosen, which were not checked on loading
        for key, message in contradictions(config, changes, without_adapter=True):
            raise ConfigError(f"`{key}`: {message}")
    if base.published == "gguf" and way == "adapter":
        changes["quantization.kind"] = "gguf"
        note = note and replace(note, held="gguf, the file is what is served")
    lost = base.loss_of(way)
    return changes, "\n".join(str(line) for line in (note, lost) if line) or None


def note_on_experts(config: Config, architecture: Any) -> str | None:
    """A note on adapters on experts of a base that is a GGUF file."""
    if config.quantization.kind != "gguf" or not _ServedBase(config, architecture).adapts_experts:
        return None
    return "adapter.expert_rank: llama.cpp takes no adapter on experts; set 0 to serve the file itself"


def _is_coarse(form: str | None) -> bool:
    return form in FORMS and FORMS[form].bits <= _COARSE_BITS


@dataclass(frozen=True)
class _ServedBase:
    """A base, as its config.json describes it, and the ways in which its trained model can be served."""

    config: Config
    architecture: Any

    @property
    def name(self) -> str:
        return self.config.model.name

    @property
    def serve(self) -> str:
        return str(self.config.output.serve)

    @property
    def text(self) -> Any:
        return self.architecture.get_text_config()

    @property
    def published(self) -> str | None:
        return prequantized.form(self.architecture)

    @cached_property
    def weightless(self) -> Any:
        return build.weightless(self.config.model, self.architecture)

    @cached_property
    def adapts_experts(self) -> bool:
        section = self.config.adapter
        if not experts.count(self.text):
            return False
        if section.targets == "all-linear":
            return section.expert_rank != 0
        return bool(adapter.adapted_experts(self.weightless, section))

    def check_form(self) -> None:
        """Raise ConfigError if the model cannot have the form that is served, in any way."""
        if self._in_file:
            cure = "`output.runtime: vllm`" if self.serve == "16bit" else "`16bit`, or another form for vLLM"
            if why := self._without_gguf:
                raise ConfigError(f"`output.serve`: {why}; set {cure}")
        if self.published == self.serve:
            return
        if odd := self._undivided(FORMS[self.serve].serving.block):
            raise ConfigError(f"`output.serve`: {self.serve} has {odd} of {self.name}; set {self._other_forms}")
        if not self._in_file and (why := self._without_place(self.serve)):
            raise ConfigError(
                f"`output.serve`: {self.name} {why}, for which files in {self.serve} have no place; set "
                f"{self._other_forms}"
            )

    @property
    def _without_gguf(self) -> str | None:
        """In words, why llama.cpp has no form for the model; None if it has one."""
        try:
            gguf_families.family(self.architecture)
        except ConfigError as error:
            return str(error)
        return None

    def _without_place(self, form: str) -> str | None:
        from finetune.model.structure import quantizers

        in_blocks = FORMS[form].serving.block > 1
        return quantizers.without_place(self.weightless, form, self._stored) if in_blocks else None

    @cached_property
    def _stored(self) -> frozenset[str]:
        """The names of the tensors in the base's files; none if these are not here yet."""
        return identity.stored_names(self.config.model)

    @property
    def _other_forms(self) -> str:
        """The forms that the model has, as advice lists them."""
        files = [
            form
            for form, block in ((name, FORMS[name].serving.block) for name in serving.SERVED)
            if block > 1 and not self._undivided(block) and not self._without_place(form)
        ]
        in_files = [] if self._in_file else files
        in_gguf = [] if self._without_gguf else ["q8_0"]
        return " or ".join(f"`{form}`" for form in (*in_files, *in_gguf, "16bit"))

    @property
    def _in_file(self) -> bool:
        """Whether a GGUF file is served."""
        return self.serve in serving.GGUF or serving.runtime_of(self.config.output) in ("llama.cpp", "ollama")

    def _undivided(self, block: int) -> str | None:
        """In words, the first layer whose number of inputs is no multiple of `block`; None without one."""
        from finetune.model.structure import quantizers

        odd = next(quantizers.undivided(self.weightless, block), None) if block > 1 else None
        return odd and f"blocks of {block} weights, which do not divide the {odd[1]} inputs of `{odd[0]}`"

    def obstacle(self, way: str) -> Obstacle | None:
        """The first obstacle to a way to serve the model; None if there is none."""
        if way == "adapter":
            return next(self._to_adapter(), None)
        if self._grid != self._main or self._main == "q8_0":
            return None
        return Obstacle(
            f"weights of {self.name} are in {self._grid} already, and rounding them to it again undoes most of a small "
            "update",
            ("name its 16-bit original",),
        )

    def refusal(self, found: Obstacle, way: str) -> str:
        """The reason, and every way out."""
        others = [f"`{other}`" for other in serving.WAYS if other not in ("auto", way) and not self.obstacle(other)]
        ways = (f"set {' or '.join(others)}",) if others else ()
        return f"{found.why}; {', or '.join(dict.fromkeys((*ways, *found.cures)))}"

    def loss_of(self, way: str) -> str | None:
        """A note on small updates that are lost when a base in one coarse form is rounded to another; None if not."""
        if way != "rounded" or not _is_coarse(self._grid) or not _is_coarse(self._main):
            return None
        beside = "" if self.obstacle("adapter") else "beside an adapter, or "
        return (
            f"output.way: weights of {self.name} are in {self._grid} already, and a part of a small update is lost "
            f"when they are rounded to {self._main}; {beside}with a 16-bit original, nothing is"
        )

    @property
    def _grid(self) -> str | None:
        """The form that most of the weights with an adapter are in already; None if that is 16 bit."""
        published = FORMS.get(self.published or "")
        experts_alone = published is not None and published.codec.files.experts_alone
        return None if experts_alone and not self.adapts_experts else prequantized.main_form(self.architecture)

    @property
    def _main(self) -> str:
        """The form of most weights that are served."""
        return FORMS[self.serve].main

    def _to_adapter(self) -> Iterator[Obstacle]:
        runtime, published = serving.runtime_of(self.config.output), self.published
        if without := serving.without_adapters(runtime, self.serve):
            yield Obstacle(without, (f"set `output.runtime` to one of {serving.with_adapters(self.serve)}",))
        kinds = serving.GGUF if published == "gguf" else (published,)
        if published and serving.kind_of(self.serve) not in kinds:
            itself = "set `output.serve: q4_k_m`, which serves the file itself"
            cure = itself if published == "gguf" else f"set `output.serve: {published}`"
            usual = f"{self.name} is published in {prequantized.METHODS[published]}"
            yield Obstacle(f"{usual}, which is not quantized again to {self.serve}", (cure,))
        yield from self._to_packed()
        known = serving.RUNTIMES[runtime]
        why = FORMS[self.serve].serving.without_experts.get(runtime) or known.without_experts
        if why and self.adapts_experts:
            yield Obstacle(why, (plain_form.without_experts(self.config.adapter),))
        base = self.weightless if self.adapts_experts else None
        largest = known.largest_rank
        found = plain_form.obstacle(
            self.config.adapter, base, self.architecture.model_type, largest_rank=largest,
            stored=self._stored if base else (),
        )  # fmt: skip
        if found:
            yield Obstacle(f"the adapter would have no form for {runtime}: {found.why}", found.cures)
        if published is None and self.serve in known.as_published:
            yield Obstacle(
                f"{runtime} computes several weights as one, with one factor of {self.serve}, and a base that is held "
                "in training has one for each weight",
                (f"name a base that is published in {self.serve}",),
            )

    def _to_packed(self) -> Iterator[Obstacle]:
        """Obstacles to a base that is held as files have it."""
        targets = self.config.adapter.targets
        follows = self.serve != "16bit" or targets == "all-linear" or any("out_proj" in one for one in targets)
        if self._in_file and follows and getattr(self.text, "linear_num_value_heads", None):
            yield Obstacle(
                f"llama.cpp stores columns of `linear_attn.out_proj` of {self.name} in another order, in which packed "
                "weights and adapters cannot follow"
            )
        form = FORMS[self.serve]
        wider = form.gguf.block if form.gguf and form.gguf.block > form.serving.block else 1
        if self._in_file and (odd := self._undivided(wider)):
            yield Obstacle(f"{self.serve} in a GGUF file has {odd}", ("set `output.serve: q8_0`",))
        of_experts = form.is_of_safetensors and form.codec.files.of_experts and self.text.model_type == "gpt_oss"
        if of_experts and not self._in_file and self.published is None:
            yield Obstacle(
                f"files for vLLM have {form.published} of the experts of gpt-oss alone, and training would hold all "
                "layers in it",
                (f"name a base that is published in {self.serve}",),
            )
