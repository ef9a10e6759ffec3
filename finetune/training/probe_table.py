"""The probes of a model before its first step, in the order in which they run: one table and one way to fail.

A probe is a few short passes that show on the model at hand what a step relies on. It raises a FinetuneError where the
job cannot be trained, and returns a line for each kernel, or other way to save time, that is to be turned off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed import ProcessGroup

from finetune.config import Config
from finetune.kernels import Attached, self_test
from finetune.model.probes import causality, packed_rows, seeing, split_rows
from finetune.model.source.vision import Vision
from finetune.objectives import contract, log_probs

Stage = Literal["fused", "built", "scoring", "sharing", "split"]
"""How far the model is made: with its fused kernels, complete, with the head that scores labels, with packed segments
that share tokens, with rows split.
"""


@dataclass(frozen=True)
class Subject:
    """A model to probe: the job's config, the kernels attached to it, the group that splits its rows, and the images of
    its rows, if any.
    """

    config: Config
    model: Any
    attached: Attached | None = None
    group: ProcessGroup | None = None
    vision: Vision | None = None


@dataclass(frozen=True)
class Probe:
    """A probe: what it `shows`, the `stage` at which it runs, and the configs to which it `applies`."""

    shows: str
    stage: Stage
    run: Callable[[Subject], Sequence[str] | str | None]
    applies: Callable[[Config], bool] = lambda config: True


def _kernels(subject: Subject) -> Sequence[str]:
    assert subject.attached is not None
    return self_test.prove(subject.model, subject.attached)


def _images(subject: Subject) -> None:
    assert subject.vision is not None
    seeing.prove(subject.model, subject.vision.sample())


def _objective(subject: Subject) -> None:
    training = subject.config.training
    contract.prove(training.objective, subject.model, training.precision)


PROBES: dict[str, Probe] = {
    "kernels": Probe("fused kernels compute what they replace", "fused", _kernels),
    "packing": Probe(
        "packed rows do not see each other", "built", lambda subject: packed_rows.prove(subject.model),
        lambda config: config.data.packing,
    ),
    "images": Probe(
        "the base takes what its processor makes of an image, whose gradient reaches what is trained alone", "built",
        _images, lambda config: config.model.vision != "none",
    ),
    "causality": Probe("no token sees a later one", "built", lambda subject: causality.prove(subject.model)),
    "head": Probe(
        "labels are scored as by the model's own logits", "scoring", lambda subject: log_probs.check(subject.model)
    ),
    "loss": Probe(
        "the fused loss is TRL's", "scoring", lambda subject: log_probs.prove(subject.model),
        lambda config: config.fused != "off",
    ),
    "objective": Probe("sums of the objective add up over rows", "scoring", _objective),
    "sharing": Probe(
        "a prompt computed once is seen by each answer as its own", "sharing",
        lambda subject: packed_rows.prove_shared(subject.model),
    ),
    "context": Probe(
        "slices of a row score it as the whole row does", "split",
        lambda subject: split_rows.prove(subject.model, subject.group),
    ),
}  # fmt: skip


def run(stage: Stage, subject: Subject) -> list[str]:
    """Run the probes of a stage; a line for each kernel that was turned off. Raises FinetuneError."""
    probes = [probe for probe in PROBES.values() if probe.stage == stage and probe.applies(subject.config)]
    found = [probe.run(subject) or () for probe in probes]
    return [line for lines in found for line in ([lines] if isinstance(lines, str) else lines)]
