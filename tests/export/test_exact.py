"""A run that computes with the weights it will be served with: its files hold them bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

import finetune
from finetune.config.serving import GGUF
from finetune.errors import ArtifactError, ConfigError
from finetune.export import compressed_export, publish
from finetune.export.gguf import gguf_export
from finetune.export.rounding import calibration, exact_start
from finetune.inference import jobs
from finetune.model import build
from finetune.model.adapters import exact_layers
from finetune.model.adapters.expert_adapter import ParamWrapper
from finetune.model.base import load_architecture
from finetune.model.structure import fixed_point, packed
from finetune.storage.rundir import RunDirectory
from tests.jobs import sampled, save_base

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def exact(kind: str) -> list[str]:
    # A rate at which some thousand weights change their level.
    return [f"output.serve={kind}", "output.way=exact", "training.learning_rate=0.01"]


def values(weight: torch.nn.Parameter) -> torch.Tensor:
    how = packed.packing_of(weight)
    assert how is not None
    return how.decoded(weight.data, torch.float32)


def trained_weights(run: RunDirectory) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model of a run, and the values of each packed weight as its layers compute with them."""
    model, _ = jobs.model_of(run, run.config(), "adapter")
    weights = {
        name: values(weight)
        for name, weight in model.get_base_model().named_parameters()
        if packed.packing_of(weight) and ".base_layer." not in name
    }
    for path, layer in model.get_base_model().named_modules():
        if isinstance(layer, exact_layers.ExactLinear):
            update = exact_layers.update_of(layer)
            weights[f"{path}.weight"] = exact_layers.rounded(layer.base_layer.weight, *update, torch.float32)
        elif isinstance(layer, ParamWrapper):
            update = layer.current_update()
            name = f"{path.replace('.base_layer', '')}.{layer.parameter_name}"
            weights[name] = fixed_point.rounded(layer.get_param(), update, torch.float32)
    return model, weights


@pytest.mark.parametrize("kind", sampled(["q4_0", "q4_k_m", "mxfp4", "nvfp4"], "q4_k_m", "mxfp4"))
def test_every_weight_that_is_served_is_the_one_that_was_trained_to_the_bit(quick, kind: str) -> None:
    assert_served_as_trained(finetune.train(quick(*exact(kind))).run, kind)


@pytest.mark.parametrize("kind", sampled(["mxfp4", "nvfp4"], "nvfp4"))
def test_floats_for_llama_cpp_are_written_beside_tables_in_their_own_type(quick, kind: str) -> None:
    run = finetune.train(quick(*exact(kind), "output.runtime=llama.cpp", "training.precision=fp32")).run
    record = publish.export_model(run, "gguf")
    assert record["weights"]["differing"] == 0 < record["weights"]["count"]


@pytest.mark.parametrize("kind", ["q4_0", "int4"])
def test_every_weight_of_experts_is_the_one_that_was_trained_to_the_bit(
    quick, kind: str, tiny_base: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=AutoConfig.from_pretrained(tiny_base).vocab_size, hidden_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=128, moe_intermediate_size=128, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    base = save_base(AutoModelForCausalLM.from_config(config), tmp_path / "base", tiny_base)
    run = finetune.train(quick(f"model.name={base}", *exact(kind))).run
    assert_served_as_trained(run, kind)


def assert_served_as_trained(run: RunDirectory, kind: str) -> None:
    format = "gguf" if kind in GGUF else kind
    model, weights = trained_weights(run)
    record = publish.export_model(run, format)
    assert record["weights"]["differing"] == 0 < record["weights"]["count"]
    assert record["served"]["kl"] <= 1e-6
    architecture = load_architecture(run.config().model)
    if format == "gguf":
        read = gguf_export.load(run.path / format / record["file"], architecture, torch.float32, CPU)
        found: Any = dict(read.named_parameters())
    else:
        found = compressed_export.read(run.merged, run.path / format, architecture, kind)
    moved = 0
    held = {name.replace(".base_layer", ""): one for name, one in model.get_base_model().named_parameters()}
    for name, expected in weights.items():
        assert torch.equal(found[name], expected), name
        moved += int((values(held[name]) != expected).sum())
    assert moved > 1000, "training changed no weight"
    assert any("experts" in name for name in weights) == hasattr(architecture, "num_experts")


def test_training_starts_from_what_its_rows_moved_and_goes_on_only_from_that(
    quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "TOKENS", 512)  # as many as the run has rows for
    config = quick(*exact("q4_0"), "training.max_steps=2", "output.save_every=1")
    run = finetune.train(config).run
    architecture, started = load_architecture(config.model), exact_start.of_run(run)
    base = build.load(run.config(), architecture, CPU, started)
    assert packed.digest(base) == run.packed_base
    alone = build.load(run.config(), architecture, CPU)
    moved = {path: one for path, one in base.named_parameters() if fixed_point.of(one)}
    assert len(moved) == 14
    assert not [path for path, one in moved.items() if torch.equal(one.data, alone.get_parameter(path).data)]
    record = json.loads((run.start / "rounding.json").read_text())
    assert record["by_themselves"] == {}
    assert record["forecast_bytes"] == publish.rounding_bytes(config, "cpu"), "as planned"
    before = {file: file.stat().st_ino for file in run.start.iterdir()}
    finetune.train(config.changed({"training.max_steps": 3}))
    assert {file: file.stat().st_ino for file in run.start.iterdir()} == before
    assert packed.digest(base) == run.packed_base
    with open(run.start / "layer-00000.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    again = config.changed({"training.max_steps": 4})
    for use in (
        lambda: finetune.train(again), lambda: jobs.model_of(run, run.config(), "adapter"),
        lambda: publish.export_model(run, "gguf"), lambda: publish.merge(run),
    ):  # fmt: skip
        with pytest.raises(ArtifactError, match="were changed since the run was started"):
            use()


def test_runs_side_by_side_share_where_they_start(quick) -> None:
    """As the members of a sweep do, but for one that was changed since, or with rows in another order."""
    short = [*exact("q4_0"), "training.max_steps=1"]
    first, same, other = (
        finetune.train(quick(*short, *changed, run=name)).run
        for name, changed in (("a", ()), ("b", ("optimizer.weight_decay=0.1",)), ("c", ("training.seed=5",)))
    )
    inodes = [{file.stat().st_ino for file in run.start.glob("*.safetensors")} for run in (first, same, other)]
    assert inodes[0] == inodes[1]
    assert not inodes[0] & inodes[2]
    assert first.packed_base == same.packed_base != other.packed_base


def test_a_base_of_random_weights_is_where_training_starts(quick) -> None:
    snapped = ["quantization.kind=q4_0", "quantization.snap=true"]
    run = finetune.train(quick(*snapped, "model.weights=random", "training.max_steps=1")).run
    assert exact_start.of_run(run) is None
    assert not run.start.exists()


def test_the_merged_model_has_the_rounded_weights_and_the_adapter_alone_is_refused(quick) -> None:
    run = finetune.train(quick(*exact("q4_0"))).run
    _, weights = trained_weights(run)
    publish.merge(run)
    merged = load_file(run.merged / "model.safetensors")
    assert all(
        torch.equal(tensor, weights[name].to(tensor.dtype)) for name, tensor in merged.items() if name in weights
    )
    with pytest.raises(ConfigError, match="less than the base alone; export `gguf`"):
        publish.export_model(run, "adapter")
    with pytest.raises(ConfigError, match="merge onto `quantized`"):
        publish.merge(run, onto="16-bit")
