"""Anything that gives micro-batches can take the place of prepared rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from safetensors.torch import load_file
from steps import stopped_and_resumed

import finetune
from finetune.storage.rundir import RunDirectory
from finetune.training import assembly
from finetune.training import run as training
from finetune.training.collator import Inputs, MicroBatches
from finetune.training.largest_batch import LargestStep


@dataclass(frozen=True)
class MadeUp:
    """Steps of made-up rows, those of a step all as long as its number says."""

    collate: MicroBatches
    in_epoch: int = 4

    def step(self, number: int) -> list[Inputs]:
        ids = [[(7 * number + row + at) % 100 for at in range(5 + number % 3)] for row in range(8)]
        return self.collate([{"input_ids": each, "labels": each} for each in ids])

    def epoch(self, number: int, done: int) -> Iterator[list[Inputs]]:
        return (self.step(number * self.in_epoch + at) for at in range(done, self.in_epoch))

    def largest(self, most_tokens: int | None = None) -> Iterator[LargestStep]:
        inputs, *others = self.step(2)
        yield LargestStep(inputs, 1 + len(others))


def test_a_run_trains_on_the_steps_of_another_source_and_resumes_within_them(quick, monkeypatch) -> None:
    plain = training.train
    monkeypatch.setattr(training, "train", lambda job: plain(job, MadeUp(assembly.collator(job))))
    job = ["training.max_steps=null", "training.epochs=1.5", "output.save_every=1"]
    whole = finetune.train(quick(*job, run="whole")).run
    resumed = stopped_and_resumed(quick(*job, run="resumed"), 3, 4)
    tokens = [8 * (5 + step % 3) for step in range(6)]
    for run in (whole, resumed):
        assert [line["tokens"] for line in run.metrics() if "loss" in line] == tokens
    assert adapter(whole).keys() == adapter(resumed).keys()
    for name, weight in adapter(whole).items():
        assert weight.equal(adapter(resumed)[name]), name


def adapter(run: RunDirectory) -> dict:
    return load_file(run.adapter / "adapter_model.safetensors")
