"""The probes of a model before its first step, in the order in which they run: one table and one loop.

A probe is a few short passes that show on the model at hand what a step relies on. Where its claim does not hold, it
either raises a FinetuneError, or returns a line for each kernel, or other way to save time, that is turned off. What
was tried when an earlier process ended on such a device (`model.probes.marker`) counts as refuted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup

from finetune.config import Config
from finetune.data.media import TEXT_ALONE, Media
from finetune.data.vision import Vision
from finetune.errors import ConfigError, MachineError, NumbersError
from finetune.kernels import KERNELS, Attached, self_test
from finetune.model import probes
from finetune.model.attention import packing
from finetune.model.distributed import context
from finetune.model.probes import causality, marker, packed_rows, seeing, split_rows
from finetune.objectives import contract, log_probs

LOSS = "loss"
FUSED = (*KERNELS, LOSS)
"""What `kernels.fused` turns on."""

_ENDED = "an earlier process ended on such a device while it tested {}; `finetune doctor` says how to try it again"

Where = Literal["copy", "model"]
"""A small copy of the base with random weights, before data and weights are read; or the model of the job itself."""
Stage = Literal["fused", "built", "scoring", "sharing", "split", "saved"]
"""How far the model is made: with its fused kernels, complete, with the head that scores labels, with packed segments
that share tokens, with rows split; or saved and loaded again in bfloat16, as merged models are.
"""


@dataclass(frozen=True)
class Subject:
    """A model to probe, or `where` it is one, a copy: the job's config, the kernels attached to it and those that are
    off, the group that splits its rows, and what its rows may show.
    """

    config: Config
    model: Any
    attached: Attached | None = None
    off: Collection[str] = ()
    group: ProcessGroup | None = None
    media: Media = TEXT_ALONE
    where: Where = "model"


OnFailure = Literal["refused", "kernels", "loss", "sharing"]
"""What follows from a claim that does not hold: the run is refused; or the kernels that differ, the fused loss, or the
sharing of tokens is turned off.
"""


@dataclass(frozen=True)
class Probe:
    """A probe: what it `claims`, the `stage` at which it runs, what follows `on_failure`, and `where` it runs.

    `applies`: the configs that rely on the claim. `remedy`: what a config sets to do without, if it can.
    """

    claims: str
    stage: Stage
    run: Callable[[Subject], Sequence[str] | str | None]
    on_failure: OnFailure = "refused"
    applies: Callable[[Config], bool] = lambda config: True
    remedy: str = ""
    where: tuple[Where, ...] = ("model",)


@dataclass(frozen=True)
class Failure:
    """A claim that does not hold: what is turned off, and the line that says so and why."""

    off: OnFailure
    line: str


def _kernels(subject: Subject) -> Sequence[str]:
    assert subject.attached is not None
    return self_test.prove(subject.model, subject.attached)


def _loss(subject: Subject) -> str | None:
    return None if LOSS in subject.off else log_probs.prove(subject.model)


def _sharing(subject: Subject) -> str | None:
    if "sharing" in marker.ended(subject.model.device):
        return f"a prompt is computed once for each answer, not for both: {_ENDED.format('whether that is so')}"
    return packed_rows.prove_shared(subject.model)


def _images(subject: Subject) -> None:
    assert isinstance(subject.media, Vision)
    seeing.prove(subject.model, subject.media.sample())


def _objective(subject: Subject) -> None:
    training = subject.config.training
    contract.prove(training.objective, subject.model, training.precision)


def _gradient(subject: Subject) -> None:
    model = subject.model
    (ids,) = probes.rows(1, probes.TOKENS, model)
    if not model(input_ids=ids, use_cache=False).logits.requires_grad:
        raise ConfigError(
            f"`model.name`: no gradient reaches the layers of {type(model).__name__} while its embedding is frozen, as "
            "beside an adapter; use another base"
        )


def _in_16_bit(subject: Subject) -> None:
    model = subject.model
    (ids,) = probes.rows(1, probes.TOKENS, model)

    def refusal(error: Exception) -> ConfigError:
        return ConfigError(
            f"`model.name`: a pass of {type(model).__name__} in bfloat16, in which merged models are written, fails in "
            f"transformers' code ({probes.Failed(error)}); use another base"
        )

    with probes.attempt(refusal):
        probes.logits(model, input_ids=ids)


PROBES: dict[str, Probe] = {
    "kernels": Probe("fused kernels compute what they replace", "fused", _kernels, "kernels"),
    "packing": Probe(
        "packed rows do not see each other", "built", lambda subject: packed_rows.prove(subject.model),
        applies=lambda config: config.data.packing, remedy=packing.REMEDY,
    ),
    "images": Probe(
        "the base takes what its processor makes of an image, whose gradient reaches what is trained alone", "built",
        _images, applies=lambda config: config.model.vision != "none", remedy="set `model.vision: none`",
    ),
    "causality": Probe(
        "no token sees a later one", "built", lambda subject: causality.prove(subject.model), where=("copy", "model")
    ),
    "gradient": Probe("a gradient reaches layers below a frozen embedding", "built", _gradient, where=("copy",)),
    "head": Probe(
        "labels are scored as by the model's own logits", "scoring", lambda subject: log_probs.check(subject.model),
        where=("copy", "model"),
    ),
    LOSS: Probe(
        "the fused loss is that of the head's logits", "scoring", _loss, "loss", lambda config: config.fused != "off",
    ),
    "objective": Probe("sums of the objective add up over rows", "scoring", _objective),
    "sharing": Probe("a prompt computed once is seen by each answer as its own", "sharing", _sharing, "sharing"),
    "context": Probe(
        "slices of a row score it as the whole row does", "split",
        lambda subject: split_rows.prove(subject.model, subject.group),
        applies=lambda config: config.distributed.context > 1, remedy=context.REMEDY,
    ),
    "16 bit": Probe("code of the base runs in bfloat16", "saved", _in_16_bit, where=("copy",)),
}  # fmt: skip

# Passes of the whole model that no config does without, with all kernels that are fused in it.
_WHOLE = tuple(
    name
    for name, probe in PROBES.items()
    if "model" in probe.where and probe.on_failure in ("refused", "kernels") and not probe.remedy
)


def run(stage: Stage, subject: Subject) -> list[Failure]:
    """Run the probes of a stage; returns what they turn off. Raises FinetuneError.

    A copy runs on the CPU, without the kernels that may end a process, so no file marks its probes as under way.
    """
    failures: list[Failure] = []
    for name, probe in PROBES.items():
        if probe.stage == stage and subject.where in probe.where and probe.applies(subject.config):
            on_copy = subject.where == "copy"  # whose random weights may overflow
            ignored = contextlib.suppress(NumbersError) if on_copy else marker.under_way(name, subject.model.device)
            with ignored:
                found = probe.run(subject) or ()
                failures += [Failure(probe.on_failure, line) for line in ([found] if isinstance(found, str) else found)]
    return failures


def kernels_off(ended: Collection[str]) -> frozenset[str]:
    """The fused kernels, or `loss`, to do without after processes `ended` in these probes: all of them, if it was in
    passes of the whole model that no config does without.
    """
    return frozenset(FUSED if {*_WHOLE} & {*ended} else {*FUSED} & {*ended})


def off_on(device: torch.device) -> tuple[str, ...]:
    """`kernels_off` after the processes that ended on such a device, by name."""
    return tuple(sorted(kernels_off(marker.ended(device))))


def left_out(config: Config, ended: Collection[str]) -> str | None:
    """A line on the kernels that `config` does without after processes `ended` in these probes.

    Raises MachineError if it asks for something else that one ended in.
    """
    for name, probe in PROBES.items():
        if name in ended and probe.remedy and probe.applies(config):
            raise MachineError(f"{_ENDED.format(f'whether {probe.claims}')}; to do without, {probe.remedy}")
    off = kernels_off(ended)
    if config.fused == "off" or not off:
        return None
    tried = [f"whether {PROBES[name].claims}" for name in _WHOLE if name in ended]
    tried += [f"`{name}`" for name in FUSED if name in ended]
    which = "none is fused" if off == {*FUSED} else f"`{'`, `'.join(sorted(off))}` off"
    return f"kernels: {which}: {_ENDED.format(' and '.join(tried))}"
