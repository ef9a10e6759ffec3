"""Ranks that are killed resume to the same bits, whatever they share, and any number of them goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gguf_in_llama_cpp as bench
import pytest
from jobs import sampled
from rank_jobs import (
    EXACT,
    FSDP,
    PLAIN,
    UNEVALUATED,
    ZERO,
    Jobs,
    assert_close,
    resumed_at,
    same_weights,
    untied_base,
    weights,
)
from together import assert_all
from transformers import AutoTokenizer

from tests.published_bases import published

JOB = ["training.batch_size=4", "training.micro_batch=1", "training.max_steps=3", "output.save_every=2"]
FULL = [PLAIN, "adapter.kind=none"]


def gguf(base: Path, folder: Path) -> Path:
    file = folder / "base.gguf"
    bench.export(base, AutoTokenizer.from_pretrained(base), file, "q4_k_m")
    return file


@dataclass(frozen=True)
class Killed:
    """A job, how ranks train it, and what their resumed run is compared with; `base` makes one in a folder.

    `within`: now and then 8-bit states round another way, by a hundredth of an update.
    """

    job: list[str]
    way: list[str] = field(default_factory=list)
    base: Callable[[Path, Path], Path] | None = None
    whole: bool = False
    alone: bool = True
    fewer: bool = False
    within: float = 1e-6


SERVED = [*EXACT, *UNEVALUATED, "output.serve=q4_k_m"]
KILLED = {
    "copies: random numbers of each, 8-bit states, packed rows": Killed(
        ["adapter.dropout=0.1", "optimizer.kind=adamw_8bit", "data.packing=true", "kernels.fused=auto", *UNEVALUATED],
        whole=True, alone=False
    ),
    "shards: every weight, a head of its own, 8-bit states, offloaded": Killed(
        [*FULL, "optimizer.kind=adamw_8bit", "training.precision=fp32", "training.neftune_noise_alpha=5"],
        [FSDP, "distributed.offload=cpu"], base=untied_base, whole=True, fewer=True, within=1e-3,
    ),
    "ZeRO: every weight": Killed(
        [*FULL, "optimizer.kind=adamw_torch_fused", "optimizer.weight_decay=0.1", "training.learning_rate=0.001",
         "training.precision=fp32"], [ZERO], fewer=True, within=1e-5,
    ),
    "served as GGUF": Killed(SERVED, base=gguf, whole=True, alone=False),
    "served adapter": Killed(SERVED),
    "mxfp4": Killed([*EXACT, *UNEVALUATED], base=lambda base, folder: published("mxfp4", base, folder / "base")),
    "fp8": Killed([*EXACT, *UNEVALUATED], base=lambda base, folder: published("fp8", base, folder / "base")),
}  # fmt: skip
OFTEN = ("shards: every weight, a head of its own, 8-bit states, offloaded",)


@pytest.mark.parametrize("name", sampled(KILLED, *OFTEN))
def test_killed_ranks_resume(name: str, odd_jobs: Jobs, shallow_base: Path, tmp_path: Path) -> None:
    """To the bits of ranks that were not killed, and to what one process trains, which goes on in their place, too.

    The same 8-bit states and files are one process's; both ranks make the folder of a GGUF file at once.
    """
    case = KILLED[name]
    if ZERO in case.way:
        pytest.importorskip("deepspeed")
    base = [f"model.name={case.base(shallow_base, tmp_path)}"] if case.base else []
    job = [*JOB, *case.job, *base]
    killed = odd_jobs(*job, *case.way)
    killed.kill(2, step=3, saved=2)
    assert not killed.run.adapter.exists()
    if case.fewer:
        fewer = odd_jobs(*job, *case.way[:-1])
        shutil.copytree(killed.run.path, fewer.run.path)
    assert_all(killed.go(2), 0)
    assert resumed_at(killed.run) == [2]
    if case.whole:
        whole = odd_jobs(*job, *case.way)
        assert_all(whole.go(2), 0)
        assert same_weights(killed.run, whole.run)
    if case.alone:
        assert_close(killed.run, odd_jobs.alone(*job), within=case.within)
    if case.fewer:
        assert_all(fewer.go(1), 0)
        assert resumed_at(fewer.run) == [2]
        assert_close(fewer.run, killed.run, within=case.within)
    assert any(weight.any() for key, weight in weights(killed.run).items() if "lora_B" in key or case.job[:2] == FULL)
    if "output.serve=q4_k_m" in job:
        assert len([event for event in killed.run.events() if event["event"] == "base_packed"]) == 1
    if name in ("mxfp4", "fp8"):
        assert killed.run.config().quantization.kind == name


def test_two_ranks_train_with_the_kind_that_the_first_decides(jobs: Jobs) -> None:
    job = jobs(*JOB, *UNEVALUATED, "training.max_steps=1", "quantization.kind=auto")
    first, second = job.go(2)
    assert_all([first, second], 0)
    assert "quantization.kind: none (the smallest step takes" in first.in_one_line
    assert second.output == ""
    assert job.run.config().quantization.kind == "none"


def test_ranks_that_would_cut_blocks_of_8_bit_states_are_refused(jobs: Jobs) -> None:
    ended = jobs(FSDP, "optimizer.kind=adamw_8bit", "training.batch_size=3", "training.micro_batch=1").go(3)
    assert_all(ended, 2)
    assert "within blocks of 256 numbers" in ended[0].output
