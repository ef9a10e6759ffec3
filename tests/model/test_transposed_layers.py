"""GPT-2's layers hold their weights transposed: every command takes the adapter that a run put on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import every_architecture
import pytest
import torch
from bases import loaded
from jobs import sampled
from messages import refusal

import finetune
from finetune.config import AdapterSection
from finetune.errors import ConfigError
from finetune.extras.doctor import run_check as run_directory
from finetune.model.adapters import adapter

LORA = AdapterSection(rank=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    every_architecture.model(every_architecture.config("gpt2")).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(["none", "nf4", "int8"], "nf4"))
def test_every_command_takes_the_adapter_of_a_run(kind: str, folder: Path, quick: Any) -> None:
    run = finetune.train(
        quick(f"model.name={folder}", "model.tokenizer=builtin:tiny-llama", f"quantization.kind={kind}")
    ).run
    settings = json.loads((run.adapter / "adapter_config.json").read_text())
    assert settings["fan_in_fan_out"] == (kind == "none")  # PEFT's own word for it
    assert not [found for found in run_directory.examine(run.path).findings if found.status == "error"]
    assert finetune.evaluate(run).record["steps"] == 4
    assert finetune.generate(run, "x", max_new_tokens=2)
    finetune.merge(run)
    finetune.export_model(run, "adapter")
    again = quick(
        f"model.name={folder}", "model.tokenizer=builtin:tiny-llama", f"quantization.kind={kind}",
        f"adapter.start_from={run.adapter}", "training.max_steps=1", run="again",
    )  # fmt: skip
    assert finetune.train(again).run.adapter.is_dir()


def test_transposed_layers_are_targeted_ranked_and_bounded_like_linear_ones() -> None:
    def gpt2() -> Any:
        return every_architecture.model(every_architecture.config("gpt2"))

    section = LORA.model_copy(update={"targets": ["c_attn", r".*mlp\.c_fc"], "ranks": {"c_attn": 4}})
    adapted = adapter.attach(gpt2(), section, "x", 0)
    ranks = {
        name.rpartition(".")[2]: layer.r["default"] for name, layer in adapted.named_modules() if hasattr(layer, "r")
    }
    assert ranks == {"c_attn": 4, "c_fc": 2}
    with refusal(ConfigError, "33 is more than the smaller side of each layer it would adapt, 32"):
        adapter.check_rank(gpt2(), LORA.model_copy(update={"rank": 33}))


def test_loftq_brings_it_nearer_to_the_weights_on_disk(folder: Path) -> None:
    ids = torch.arange(4, 44)[None]

    def logits(kind: str, init: str = "default") -> torch.Tensor:
        model, section = loaded(kind, folder), AdapterSection(rank=16, init=init)
        with torch.inference_mode():
            return adapter.attach(model, section, str(folder), 1).eval()(input_ids=ids).logits

    exact = logits("none")
    assert (logits("nf4", "loftq") - exact).norm() < 0.8 * (logits("nf4") - exact).norm()
