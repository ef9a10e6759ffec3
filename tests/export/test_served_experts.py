"""The exported adapter of experts, read by the rules of vLLM, is the one that was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import every_architecture
import pytest
import torch
from jobs import BF16, logits, sampled
from messages import refusal
from peft import PeftModel
from peft.tuners.lora import ParamWrapper
from safetensors.torch import load_file, save_file
from test_served_names import JOB, base_at
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import finetune
from finetune.config import AdapterSection, ModelSection
from finetune.errors import ConfigError
from finetune.export import adapter_export, server_commands, server_experts, server_names
from finetune.export.conversion import ExportRequest
from finetune.model import build
from finetune.model.adapters import adapter, adapter_files
from finetune.model.adapters.plain_form import FUSED, SEPARATE
from finetune.model.structure import streamed
from finetune.report.terminal import Terminal
from finetune.storage import weight_files
from finetune.storage.rundir import RunDirectory

CPU = torch.device("cpu")


def written(name: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tiny model with an adapter on everything, whose base is in `folder`/base; and the adapter's tensors as they are
    exported.
    """
    torch.manual_seed(0)
    config = every_architecture.config(name)
    made = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    made.from_config(config, dtype=torch.float32).save_pretrained(folder / "base")
    job = BF16.changed({"model.name": str(folder / "base"), "model.weights": "pretrained"})
    base, groups = adapter_export.file_groups(job.model)
    adapted = adapter.attach(base.to_empty(device="cpu"), AdapterSection(rank=6, expert_rank=3), name, seed=0)
    for weight in adapter_files.weights(adapted).values():
        torch.nn.init.normal_(weight)
    pairs, names = adapter_export.plain(adapted), adapter_export.served_names(base, groups)
    renamed = {layer: adapter_export._served(names, layer) for layer in pairs}
    on_experts = server_experts.Experts(adapted, groups, name)
    adapter_export.write(pairs, renamed, adapted.peft_config["default"], "base", folder, on_experts)
    stored = load_file(folder / adapter_files.WEIGHTS)
    layers = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in stored}
    assert server_names.served(layers, weight_files.shapes(folder / "base" / "model.safetensors"), name) == len(layers)
    return adapted.get_base_model(), {key.removeprefix("base_model.model."): tensor for key, tensor in stored.items()}


def updates(model: Any) -> dict[str, torch.Tensor]:
    """What the adapter adds to each parameter of experts."""
    return {
        f"{name.replace('.base_layer', '')}.{layer.parameter_name}": layer.get_delta_weight("default").detach()
        for name, layer in model.named_modules()
        if isinstance(layer, ParamWrapper)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SEPARATE))
def test_a_server_that_reads_experts_one_by_one_adds_what_was_trained(name: str, tmp_path: Path) -> None:
    """vLLM adds B A to the weight of the same name in the base's files, which transformers joins to the parameters."""
    model, stored = written(name, tmp_path)
    file = tmp_path / "base" / "model.safetensors"
    served = {}
    for key, weight in load_file(file).items():
        layer = key.removesuffix(".weight")
        pair = [stored.get(f"{layer}.lora_{matrix}.weight") for matrix in "AB"] if ".experts." in key else [None]
        served[key] = torch.zeros_like(weight) if pair[0] is None else pair[1] @ pair[0]
    save_file(served, file, {"format": "pt"})
    joined = streamed.Weights(build.weightless(ModelSection(name=str(tmp_path / "base"))), [file])
    assert updates(model)
    for parameter, update in updates(model).items():
        torch.testing.assert_close(joined[parameter], update, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_server_that_reads_all_experts_of_a_layer_adds_what_was_trained(name: str, tmp_path: Path) -> None:
    """Its rows of `gate_up_proj` are in the order of transformers' class, and its weights never transposed."""
    model, stored = written(name, tmp_path)
    [prefix] = {key.partition(".layers.")[0] for key in stored if ".experts." in key}
    assert updates(model)
    for parameter, update in updates(model).items():
        path, _, projection = parameter.rpartition(".")
        layer = f"{prefix}.layers.{path.partition('.layers.')[2]}{'' if projection == 'down_proj' else '.base_layer'}"
        down, up = (stored[f"{layer}.lora_{matrix}.weight"] for matrix in "AB")
        experts = len(update)
        down = down.reshape(experts, -1, down.shape[-1])
        up = up.reshape(up.shape[0], -1, experts).permute(2, 0, 1)
        transposed = model.get_submodule(path).get_base_layer().is_transposed
        torch.testing.assert_close(up @ down, update.mT if transposed else update, rtol=1e-6, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")  # which name parameters
@pytest.mark.parametrize("name", sampled(["qwen3_5_moe", "glm4_moe", "gpt_oss"], "qwen3_5_moe", "gpt_oss"))
def test_an_adapter_on_experts_is_exported_for_vllm(name: str, quick: Any, tmp_path: Path, tiny_base: Path) -> None:
    base = base_at(tmp_path / "base", name, tiny_base)
    run = finetune.train(quick(*JOB, f"model.name={base}")).run
    result = finetune.export_model(run, "adapter", terminal=Terminal(quiet=True))
    assert result["error"] <= result["bound"]
    assert result["layers_served"] == result["layers"] > 4
    assert result["expert_rank"] == 8
    commands = server_commands.commands("adapter", Path(result["path"]), str(base), result)
    assert commands.keys() == {"vLLM"}
    if name == "gpt_oss":  # PEFT's own form, under the names of the base's files
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        before = logits(plain)
        read = logits(PeftModel.from_pretrained(plain, result["path"]))
        trained = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        section = run.config().adapter
        torch.testing.assert_close(
            read, logits(adapter_files.load_adapter(trained, run.adapter, section)), rtol=1e-4, atol=1e-4
        )
        assert (read - before).norm() > 1e-3 * before.norm()


@pytest.mark.parametrize(
    ("name", "targets", "why"),
    [
        ("mixtral", ["q_proj", "gate.weight"], "it is on parameters that are no linear layers, gate.weight"),
        ("mixtral", ["experts.gate_up_proj"], "it is on experts without `down_proj`, and vLLM takes all"),
        ("mixtral", "all-linear", "the base has no safetensors files, by whose names"),
        ("llama4", "all-linear", "the form that vLLM reads for `llama4` is unknown here"),
    ],
)
def test_what_vllm_would_not_serve_is_refused(name: str, targets: Any, why: str, tmp_path: Path) -> None:
    every_architecture.config(name).save_pretrained(tmp_path)
    config = BF16.changed({"model.name": str(tmp_path), "model.weights": "random", "adapter.targets": targets})
    with refusal(ConfigError, why, "`merged`"):
        adapter_export.check(ExportRequest(RunDirectory(tmp_path), config, None, CPU, "f16"))
