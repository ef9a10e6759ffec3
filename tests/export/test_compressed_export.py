"""Quantized safetensors files: the bytes that were packed, as compressed-tensors, transformers and vLLM read them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refusal, reported
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3MoeConfig

from finetune.config import ModelSection, QuantizationSection
from finetune.errors import ConfigError
from finetune.export import compressed_export, served_model
from finetune.export.compressed_export import RoundedWeights, write
from finetune.export.gguf import llama_cpp
from finetune.forms import packed
from finetune.model import build
from finetune.model.base import load_architecture
from finetune.model.source import prequantized
from finetune.report import words
from finetune.storage.files import write_json
from finetune.storage.rundir import RunDirectory

SMALL = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "mixture": lambda: Qwen3MoeConfig(**SMALL, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2),
    "gpt-oss": lambda: GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    """A function that saves a small model of a family in 16 bit, as merging does."""

    def save(family: str) -> Path:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / "merged")
        return tmp_path / "merged"

    return save


def written(source: Path, form: str) -> tuple[Path, dict[str, nn.Parameter], compressed_export.Written]:
    folder = source.parent / form
    folder.mkdir()
    config = AutoConfig.from_pretrained(source)
    weights = dict(RoundedWeights(source, config, form))
    return folder, weights, write(source, folder, config, form, weights)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", "fp8"), ("llama", "nvfp4"), ("llama", "mxfp4"), ("llama", "int4"), ("mixture", "fp8"),
        ("mixture", "nvfp4"), ("mixture", "int4"), ("gpt-oss", "mxfp4"),
    ],
)  # fmt: skip
def test_files_decode_to_what_was_packed_and_to_all_other_weights(
    family: str, form: str, saved: Callable[[str], Path]
) -> None:
    source = saved(family)
    folder, weights, read = written(source, form)
    model = AutoModelForCausalLM.from_pretrained(source)
    assert weights.keys() < dict(model.named_parameters()).keys()
    assert any("experts" in name for name in weights) == (family != "llama")
    for name, weight in model.named_parameters():
        expected = packed.exact(weights[name]) if name in weights else weight
        assert torch.equal(read[name], expected), name
    if family != "gpt-oss":
        # The config names each linear layer that stays in 16 bit.
        stated = json.loads((folder / "config.json").read_text())["quantization_config"]
        kept = stated.get("ignore") or stated["modules_to_not_convert"]
        assert kept == ["lm_head"] or set(kept) > {"lm_head"}
        assert not any(f"{name}.weight" in weights for name in kept)
    if (family, form) in (("llama", "fp8"), ("llama", "nvfp4"), ("mixture", "fp8"), ("gpt-oss", "mxfp4")):
        # The files are a base for training in that form.
        section = ModelSection(name=str(folder))
        architecture = load_architecture(section)
        assert prequantized.form(architecture) == form
        blueprint = build.Blueprint(section, QuantizationSection(kind=form), architecture, "eager", torch.float32)
        model = blueprint.load(torch.device("cpu"))
        found = {name: weight for name, weight in model.named_parameters() if packed.packing_of(weight)}
        assert found.keys() == weights.keys()
        assert all(torch.equal(packed.exact(found[name]), packed.exact(weights[name])) for name in weights)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "int4"])
def test_compressed_tensors_decodes_to_what_was_packed(form: str, saved: Callable[[str], Path]) -> None:
    library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    folder, weights, _ = written(saved("llama"), form)
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    given = library.quantization.QuantizationConfig.model_validate(stated)
    scheme, tensors = given.config_groups["group_0"], load_file(folder / "model.safetensors")
    compressor = library.compressors.BaseCompressor.get_value_from_registry(stated["format"])
    for name, weight in weights.items():
        start = name.removesuffix("weight")
        parts = {key.removeprefix(start): one for key, one in tensors.items() if key.startswith(start)}
        decoded = compressor.decompress(parts, scheme)["weight"]
        assert torch.equal(decoded.float(), packed.exact(weight).to(decoded.dtype).float()), name


def test_layers_that_vllm_joins_have_one_factor_of_nvfp4(saved: Callable[[str], Path]) -> None:
    source = saved("llama")
    folder, weights, _ = written(source, "nvfp4")
    tensors = load_file(folder / "model.safetensors")
    layer = "model.layers.1"
    for parts in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        factors = {float(tensors[f"{layer}.{part}.weight_global_scale"]) for part in parts}
        assert len(factors) == 1
    merged = load_file(source / "model.safetensors")
    alone = packed.pack("nvfp4", merged[f"{layer}.mlp.up_proj.weight"] * 2)
    config = AutoConfig.from_pretrained(source)
    with refusal(ConfigError, "gate_proj", "up_proj"):
        write(source, folder, config, "nvfp4", {**weights, f"{layer}.mlp.up_proj.weight": alone})


def test_a_run_is_exported_in_quantized_files(
    merged_run: RunDirectory, call: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = call("export", merged_run.path, "--to", "fp8")
    assert code == 0, out + err
    facts = json.loads((merged_run.path / "fp8" / "export.json").read_text())
    assert 0 < facts["error"] <= facts["bound"]
    assert f"vllm serve {merged_run.path / 'fp8'}" in out


def test_what_is_served_was_exported_last_whatever_the_times_of_the_files(run: RunDirectory) -> None:
    for form in ("int4", "fp8", "gguf", "adapter", "fp8", "merged"):
        (run.path / form).mkdir(exist_ok=True)
        write_json(run.path / form / "export.json", {})
        run.event("exported", format=form, error=0.0, agreement=1.0)
    for seconds, form in enumerate(("fp8", "int4", "gguf")):  # as in a copy, or after the clock went back
        os.utime(run.path / form / "export.json", (seconds, seconds))
    assert served_model.newest(run, "merged") == "fp8"


@pytest.mark.parametrize("form", ["int4", pytest.param("gguf", marks=pytest.mark.slow)])
def test_eval_measures_what_is_served(
    form: str, merged_run: RunDirectory, call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = merged_run
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)
    code, _, err = call("eval", run.path, "--model", "served")
    assert code == 2
    reported(err, "has no export")
    assert call("export", run.path, "--to", form)[0] == 0
    models = [word for name in ("base", "adapter", "merged", "served") for word in ("--model", name)]
    code, out, err = call("eval", run.path, *models)
    assert code == 0, out + err
    assert f"served: {run.path / form}" in err
    record = json.loads(run.eval_file.read_text())
    [loss] = [one["models"] for one in record["measures"] if one["name"] == "loss"]
    base, adapter, served = (loss[name]["value"] for name in ("base", "adapter", "served"))
    assert record["gain_kept"].keys() == {"merged", "served"}
    assert record["gain_kept"]["served"] == pytest.approx((base - served) / (base - adapter))
    assert f"Served keeps {record['gain_kept']['served']:.1%} of what training took off the loss." in out
    proof = json.loads((run.path / form / "export.json").read_text())
    assert record["exports"].keys() == {"merged", form}
    merge = json.loads((run.merged / "merge.json").read_text())
    assert proof["merged"] == {"trained_on": "nf4", **merge["served"], "gain_kept": merge.get("gain_kept")}
    assert "The adapter was trained on the base in nf4" in (run.path / form / "README.md").read_text()
    assert record["exports"][form] == {key: proof[key] for key in record["exports"][form]}
    assert record["exports"][form].keys() >= {"weights", "served", "losses", "gain_kept"}
    assert " ".join(f"{form}/, as exported: {words.served(proof)}".split()) in " ".join(out.split())
    difference = abs(loss["served"]["value"] - loss["merged"]["value"])
    assert difference < (0.2 if form == "int4" else 0.002)
    assert (difference > 0) == (form == "int4")
