"""The base of an adapter in the bytes that it was trained on: read back, the two compute what was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refusal
from transformers import AutoConfig, AutoModelForCausalLM

import finetune
from finetune.config import Config
from finetune.config.serving import GGUF, kind_of
from finetune.errors import ArtifactError
from finetune.export import compressed_export, publish
from finetune.export.gguf import held_base, llama_cpp
from finetune.forms import packed
from finetune.report.terminal import Terminal
from finetune.storage.rundir import RunDirectory
from tests.jobs import sampled, save_base

pytestmark = pytest.mark.slow


def export(run: RunDirectory) -> dict[str, Any]:
    return publish.export_model(run, "adapter", terminal=Terminal(quiet=True))


@pytest.fixture(scope="module")
def base(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with rows that blocks of 256 divide, and with a head of its own."""
    config = AutoConfig.from_pretrained(tiny_base)
    for name, value in {
        "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False,
    }.items():  # fmt: skip
        setattr(config, name, value)
    torch.manual_seed(0)
    return save_base(AutoModelForCausalLM.from_config(config), tmp_path_factory.mktemp("base") / "wide", tiny_base)


@pytest.fixture
def trained(quick: Callable[..., Config]) -> Callable[..., RunDirectory]:
    """A function from a base and overrides to a finished run."""

    def train(base: Path | str, *overrides: str) -> RunDirectory:
        exact = ["training.precision=fp32", "training.learning_rate=5e-3", "training.max_steps=2"]
        job = [f"model.name={base}", *exact, *overrides]
        return finetune.train(quick(*job), terminal=Terminal(quiet=True)).run

    return train


Trained = Callable[..., RunDirectory]


@pytest.mark.parametrize("kind", sampled((*GGUF, "mxfp4", "16bit"), "q4_k_m", "mxfp4"))
def test_base_and_adapter_compute_what_was_trained(kind: str, base: Path, trained: Trained) -> None:
    run = trained(base, f"output.serve={kind}", *([] if kind in GGUF else ["output.runtime=llama.cpp"]))
    assert run.config().quantization.kind == kind_of(kind)
    assert run.config().output.runtime == "llama.cpp"
    record = export(run)
    held = record["held_base"]
    assert held["file"] == f"base/model-{'bf16' if kind == '16bit' else kind}.gguf"
    assert (held["kind"], held["weights_differing"]) == (kind, 0)
    assert held["kl"] <= 1e-6
    assert held["agreement"] == 1
    folder = run.path / "plain-adapter"
    assert record["weights"]["differing"] == 0 < record["weights"]["count"]
    assert (llama_cpp.FLOOR in record["known_differences"]) == (kind != "16bit")
    assert f"0 of {record['weights']['count']:,} weights differ from" in (folder / "README.md").read_text()
    assert {folder / held["file"], folder / "adapter.gguf"} <= {*folder.rglob("*.gguf")}
    assert record["serve"].keys() == {"llama.cpp"}
    assert record["serve"]["llama.cpp"].startswith(f"llama-server -m {folder / held['file']} --lora ")
    if held["llama_cpp"]:  # from its 8-bit activations
        assert held["llama_cpp"]["kl"] <= 0.005
        assert held["llama_cpp"]["agreement"] >= 0.9


@pytest.mark.long
def test_a_base_in_float32_is_shipped_in_half_of_it_with_a_note(base: Path, trained: Trained, tmp_path: Path) -> None:
    whole = shutil.copytree(base, tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for weight in model.parameters():
        weight.data += 1e-5 * torch.randn_like(weight)  # between the values of 16 bit
    model.save_pretrained(whole)
    record = export(trained(whole, "output.serve=16bit", "output.runtime=llama.cpp"))
    assert record["held_base"]["file"] == "base/model-f16.gguf"
    assert record["held_base"]["weights_differing"] == record["weights"]["differing"] > 0
    assert 0 < record["held_base"]["kl"] < 1e-4


@pytest.mark.long
def test_a_tied_base_with_rows_that_blocks_do_not_divide_is_shipped_as_trained(
    shallow_base: Path, trained: Trained
) -> None:
    run = trained(shallow_base, "quantization.kind=q4_k_m", "training.max_steps=4")
    record = export(run)
    held = record["held_base"]
    assert (held["weights_differing"], held["agreement"]) == (0, 1)
    assert held["kl"] <= 1e-6
    scores = finetune.evaluate(run, models=["base", "adapter", "served"]).record
    assert scores["gain_kept"] == {"served": 1}
    assert scores["exports"]["plain-adapter"]["weights"] == record["weights"]
    run.event("trained", step=5)
    assert finetune.evaluate(run, models=["served"]).record["exports"] == {}, "of an earlier adapter"


@pytest.mark.parametrize(("kind", "method"), sampled([("int4", "compressed-tensors"), ("fp8", "fp8")], ("fp8", "fp8")))
def test_a_base_for_vllm_is_written_as_it_reads_it(kind: str, method: str, base: Path, trained: Trained) -> None:
    run = trained(base, f"output.serve={kind}")
    assert (run.config().output.runtime, run.config().output.way) == ("vllm", "adapter")
    record = export(run)
    folder = run.path / "plain-adapter" / "base"
    assert record["held_base"] == {"file": "base", "kind": kind, "weights_differing": 0}
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert stated["quant_method"] == method
    assert (compressed_export.ACTIVATIONS in record["known_differences"]) == (kind == "fp8")
    assert record["serve"].keys() == {"vLLM"}, "SGLang takes no adapters on such a base, llama.cpp reads another"
    assert record["serve"]["vLLM"].startswith(f"vllm serve {folder} --enable-lora ")


def test_other_bytes_than_those_of_the_training_are_not_shipped(
    shallow_base: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(shallow_base, "output.serve=q4_0")
    write = held_base.write

    def damaged(*arguments: Any) -> Any:
        file, held, differences = write(*arguments)
        weight = held["model.layers.0.mlp.up_proj.weight"]
        weight.data[0, 5] ^= 1
        assert packed.packing_of(weight)
        return file, held, differences

    with monkeypatch.context() as patch, refusal(ArtifactError, "holds 1 other weights than were trained on, 1 of"):
        patch.setattr(held_base, "write", damaged)
        export(run)
    [recorded] = [event for event in run.events() if event["event"] == "base_packed"]
    assert recorded["kind"] == "q4_0"
    run.event("base_packed", kind="q4_0", sha256="0" * 64)
    with refusal(ArtifactError, "q4_0"):
        export(run)
    assert not (run.path / "plain-adapter").exists()
