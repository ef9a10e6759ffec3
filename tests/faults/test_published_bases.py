"""A base that is kept in the form it is published in, or as `auto` decides, is trained by several processes."""

from __future__ import annotations

from pathlib import Path

import gguf_in_llama_cpp as bench
import pytest
import torch
from children import Children
from jobs import QUICK, adapter_weights, metric, same_adapter, sampled
from together import Together, assert_all
from transformers import AutoTokenizer

from finetune.storage.rundir import RunDirectory
from tests.published_bases import published

# Plain descent, so that a gradient that is off shows as such.
JOB = [*QUICK, "data.eval=none", "training.eval_every=null", "training.batch_size=4", "training.micro_batch=1",
       "training.max_steps=4", "optimizer.kind=sgd", "training.learning_rate=0.1", "training.warmup=0",
       "output.save_every=2"]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("form", ["mxfp4", "fp8"])
def test_two_ranks_train_what_one_trains_and_resume_to_the_same_bits(
    form: str, children: Children, rows_file: Path, shallow_base: Path, tmp_path: Path
) -> None:
    base = published(form, shallow_base, tmp_path / "base")

    def job(run: str) -> Together:
        return Together(children, [*JOB, f"model.name={base}", f"data.train={rows_file}"], RunDirectory(tmp_path / run))

    alone, whole, killed = map(job, ("alone", "whole", "killed"))
    assert_all(alone.go(1), 0)
    assert_all(whole.go(2), 0)
    assert whole.run.config().quantization.kind == form
    torch.testing.assert_close(adapter_weights(whole.run), adapter_weights(alone.run), rtol=0, atol=1e-6)
    assert metric(whole.run, "loss") == pytest.approx(metric(alone.run, "loss"), rel=1e-5)
    killed.kill(2, step=3, saved=2)
    assert_all(killed.go(2), 0)
    assert [event["step"] for event in killed.run.events() if event["event"] == "resumed"] == [2]
    assert same_adapter(killed.run, whole.run)


@pytest.mark.parametrize("way", sampled(["adapter", "gguf"], "gguf"))
def test_two_ranks_on_what_is_served_train_what_one_trains_and_resume_to_the_same_bits(
    way: str, children: Children, rows_file: Path, shallow_base: Path, tmp_path: Path
) -> None:
    """Also on a GGUF file, whose folder both make at once."""
    base = shallow_base
    if way == "gguf":
        base = tmp_path / "base.gguf"
        bench.export(shallow_base, AutoTokenizer.from_pretrained(shallow_base), base, "q4_k_m")
    job = [*JOB, "output.serve=q4_k_m", f"model.name={base}", f"data.train={rows_file}"]
    whole, killed, alone = (
        Together(children, job, RunDirectory(tmp_path / name)) for name in ("whole", "killed", "alone")
    )
    assert_all(whole.go(2), 0)
    killed.kill(2, step=3, saved=2)
    assert_all(killed.go(2), 0)
    assert [event["step"] for event in killed.run.events() if event["event"] == "resumed"] == [2]
    assert same_adapter(killed.run, whole.run)
    assert_all(alone.go(1), 0)
    torch.testing.assert_close(adapter_weights(whole.run), adapter_weights(alone.run), rtol=0, atol=1e-6)
    assert metric(whole.run, "loss") == pytest.approx(metric(alone.run, "loss"), rel=1e-5)
    assert len([event for event in killed.run.events() if event["event"] == "base_packed"]) == 1
    assert any(tensor.any() for name, tensor in adapter_weights(whole.run).items() if "lora_B" in name)


def test_two_ranks_train_with_the_kind_that_the_first_decides(
    children: Children, rows_file: Path, shallow_base: Path, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    job = [*JOB, f"model.name={shallow_base}", f"data.train={rows_file}", "quantization.kind=auto"]
    first, second = Together(children, job, run).go(2)
    assert_all([first, second], 0)
    assert "quantization.kind: none (the smallest step takes" in " ".join(first.output.split())
    assert second.output == ""
    assert run.config().quantization.kind == "none"
