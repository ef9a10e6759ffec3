"""Rotary scaling: what it makes of a base's configuration, which bases it refuses, and what carries it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_in_llama_cpp as bench
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from jobs import BF16
from messages import refusal
from transformers import AutoConfig

import finetune
from finetune.config import Config, ModelSection
from finetune.config.sections import RopeScaling
from finetune.errors import ConfigError
from finetune.export import adapter_export, card, server_commands
from finetune.export.conversion import ExportRequest
from finetune.export.gguf import gguf_model
from finetune.model import bounds, build
from finetune.model.base import load_architecture
from finetune.model.skeleton import make_buffers
from finetune.model.source import catalog, gguf_families, identity, rope
from finetune.report.terminal import Terminal
from finetune.storage.rundir import RunDirectory

TYPES = ("linear", "yarn", "llama3")


def section(kind: str, factor: float = 4) -> ModelSection:
    return ModelSection(rope_scaling=RopeScaling.model_validate({"rope_type": kind, "factor": factor}))


@pytest.mark.parametrize("kind", TYPES)
def test_rows_may_be_as_many_times_longer_and_their_angles_change(kind: str) -> None:
    plain = load_architecture(ModelSection())
    known = bounds.positions(plain)
    assert known
    config = BF16.model_copy(update={"model": section(kind)})
    architecture = load_architecture(config.model)
    assert bounds.positions(architecture) == 4 * known

    def frequencies(architecture: Any) -> torch.Tensor:
        base = build.blueprint(config, architecture, "eager").weightless()
        found: torch.Tensor = make_buffers(base, torch.device("cpu")).model.rotary_emb.inv_freq
        return found

    before, after = frequencies(plain), frequencies(architecture)
    assert (after <= before).all()
    assert after[-1] == pytest.approx(before[-1] / 4)
    assert after[0] == pytest.approx(before[0] / (4 if kind == "linear" else 1)), "yarn and llama3 keep the fastest"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("meta-llama/Llama-3.1-8B", "is scaled already (`llama3`)"),
        ("google/gemma-3-1b-it", "several rotary embeddings"),
    ],
)
def test_a_base_that_cannot_be_scaled_is_refused(name: str, why: str) -> None:
    config = section("yarn").model_copy(update={"name": name, "weights": "random"})
    with refusal(ConfigError, "`model.rope_scaling`", name, why):
        load_architecture(config)
    with refusal(ConfigError, "no rotary embedding that transformers can scale"):
        rope.scaled(AutoConfig.for_model("gpt2"), config)


def test_a_plan_scales_a_base_of_the_catalog() -> None:
    name = "mistralai/Mistral-7B-v0.1"
    assert catalog.find(name)
    found = load_architecture(section("yarn").model_copy(update={"name": name}), listed=True)
    assert found.rope_parameters["rope_type"] == "yarn"


def test_a_scaled_base_is_another_base() -> None:
    assert len({identity.of_base(one) for one in (ModelSection(), section("yarn"), section("yarn", 2))}) == 3


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_gguf_file_carries_it(kind: str, tmp_path: Path) -> None:
    shape = bench.SHAPES["qwen2.5"]
    config = bench.architecture(bench.Shape(shape.tokenizer, {**shape.fields, "rope_parameters": None}), 600)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    original = config.max_position_embeddings
    rope.scaled(config, section(kind))
    found = gguf_families.family(config)
    writer = GGUFWriter(tmp_path / "a.gguf", found.arch)
    gguf_model._add_parameters(writer, config, found)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = GGUFReader(tmp_path / "a.gguf").fields
    read = {name.removeprefix("qwen2."): field.contents() for name, field in fields.items()}
    assert (read["rope.scaling.type"], read["rope.scaling.factor"]) == (kind, 4)
    assert read["context_length"] == 4 * original
    assert read.get("rope.scaling.original_context_length") == (original if kind == "yarn" else None)


def test_llama_cpp_reads_the_factors_of_llama3_for_llama_alone() -> None:
    shape = bench.SHAPES["qwen2.5"]
    config = bench.architecture(
        bench.Shape(shape.tokenizer, {**shape.fields, "rope_parameters": bench._LLAMA3_ROPE}), 600
    )
    with refusal(ConfigError, "`llama3`"):
        gguf_families.family(config)


def test_the_commands_that_serve_an_adapter_scale_the_base() -> None:
    job = ExportRequest(RunDirectory("x"), Config(model=section("yarn")), None, torch.device("cpu"), "")
    overrides = adapter_export._overrides(job)
    assert overrides["rope_parameters"]["factor"] == 4
    record = {"rank": 8, "gguf": "adapter.gguf", "base_overrides": overrides}
    commands = server_commands.commands("adapter", Path("run/plain-adapter"), "base", record)
    assert f"--hf-overrides '{json.dumps(overrides)}'" in commands["vLLM"]
    assert f"--json-model-override-args '{json.dumps(overrides)}'" in commands["SGLang"]
    assert "--rope-scaling yarn --rope-scale 4" in commands["llama.cpp"]
    plain = server_commands.commands("adapter", Path("run/plain-adapter"), "base", {**record, "base_overrides": {}})
    assert not any("rope" in command for command in plain.values())


@pytest.mark.parametrize(
    ("file", "kind", "expected"),
    [
        ("base/model-q4_k_m.gguf", "yarn", ""),
        ("base/model-q4_k_m.gguf", "llama3", ""),
        ("/models/base.gguf", "yarn", "--rope-scaling yarn --rope-scale 4"),
        ("/models/base.gguf", "llama3", None),
    ],
)
def test_a_base_in_gguf_is_scaled_by_its_file_if_that_was_written_with_the_adapter(
    file: str, kind: str, expected: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = {"rope_parameters": {"rope_type": kind, "factor": 4.0}}
    record = {"rank": 8, "gguf": "adapter.gguf", "base_overrides": overrides, "held_base": {"file": file}}
    commands = server_commands.commands("adapter", Path("run/plain-adapter"), "base", record)
    Terminal().serves(commands, None)
    assert ("serve it with" in capsys.readouterr().out) == bool(commands) == (expected is not None)
    if expected is not None:
        assert file in commands["llama.cpp"]
        assert ("--rope" in commands["llama.cpp"]) == bool(expected)
        assert expected in commands["llama.cpp"]


@pytest.mark.slow
def test_a_run_is_scaled_until_it_is_merged_and_resumed(quick) -> None:
    scaling = "model.rope_scaling={rope_type: linear, factor: 2}"
    run = finetune.train(quick(scaling, "training.max_steps=1", "output.merge=true")).run
    found = json.loads((run.merged / "config.json").read_text())["rope_parameters"]
    assert (found["rope_type"], found["factor"]) == ("linear", 2)
    assert "| rotary scaling | linear, factor 2 |" in (run.merged / "README.md").read_text()
    assert card._settings(run.config())["rotary scaling"] == "linear, factor 2"
    for other in (["model.rope_scaling={rope_type: linear, factor: 3}"], []):
        with refusal(ConfigError, "model.rope_scaling"):
            finetune.train(quick(*other, "training.max_steps=2"))
    plain = finetune.train(quick("training.max_steps=1", run="plain")).run
    first = [next(line["eval_loss"] for line in one.metrics() if "eval_loss" in line) for one in (run, plain)]
    assert first[0] != first[1]
