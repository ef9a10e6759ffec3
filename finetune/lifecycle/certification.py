"""Before the plan: the device of each machine is tried, unless its certificate is known, and the job follows it."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch

from finetune.certificate import verdict
from finetune.certificate.verdict import Certificate
from finetune.config import Config
from finetune.lifecycle.preparation import JobInputs
from finetune.model import build
from finetune.report.terminal import Terminal
from finetune.runtime import ranks, segments
from finetune.runtime.stages import stage


def certify(
    config: Config, inputs: JobInputs, device: torch.device, terminal: Terminal
) -> tuple[Config, JobInputs, Certificate]:  # fmt: skip
    """The certificate of the device, and the job without what it says is off; the same on all ranks.

    The first rank of each machine tries its GPU, and the others take its word.
    """
    if not verdict.is_tried(config.kernels, config.model, device.type):
        return config, inputs, Certificate()
    blueprint = inputs.blueprint
    rows, tokens = verdict.micro_batch(config.training, max(inputs.data.train["length"]))
    request = verdict.request(config, blueprint.architecture, blueprint.attention, device, rows, tokens)

    def began(tries: str) -> None:
        stage(f"trying on this device, once for this kind of job: {tries}")

    made = verdict.obtain(request, terminal.note, began) if ranks.is_local_main() else None
    by_rank = ranks.gathered(None if made is None else tuple(made.results))
    certificate = Certificate(list(chain.from_iterable(filter(None, by_rank))))
    for line in dict.fromkeys(certificate.lines(config.fused)):
        terminal.note(line)
    if device.type == "cuda" and certificate.failed("segments"):
        segments.disable()
    changes = certificate.changes(config, device.type)
    asked = {key: getattr(getattr(config, section), name) for key in changes for section, name in [key.split(".")]}
    config = config.changed(changes)
    attention, reason = build.choose_attention(config, blueprint.architecture, device.type)
    return (
        config,
        replace(
            inputs,
            blueprint=build.blueprint(config, blueprint.architecture, attention),
            attention=f"{attention} ({reason})",
            environment={**inputs.environment, "certificate": certificate.summary()},
            asked=asked,
        ),
        certificate,
    )
