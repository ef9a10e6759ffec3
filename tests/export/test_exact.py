"""A run that computes with the weights it will be served with: its files hold them bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import finetune
from finetune.errors import ConfigError
from finetune.export import publish
from finetune.export.gguf import gguf_export
from finetune.inference import jobs
from finetune.model.adapters import exact_layers
from finetune.model.base import load_architecture
from finetune.model.structure import packed
from finetune.storage.rundir import RunDirectory

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
    return model, weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q4_0", "q4_k_m"])
def test_every_weight_of_the_file_is_the_one_that_was_trained_to_the_bit(quick, kind: str) -> None:
    run = finetune.train(quick(*exact(kind))).run
    model, weights = trained_weights(run)
    record = publish.export_model(run, "gguf")
    assert record["type"] == kind
    read = gguf_export.load(
        run.path / "gguf" / record["file"], load_architecture(run.config().model), torch.float32, CPU
    )
    moved = 0
    for name, expected in weights.items():
        assert torch.equal(read.get_parameter(name), expected), name
        held = dict(model.get_base_model().named_parameters()).get(name.replace(".weight", ".base_layer.weight"))
        moved += 0 if held is None else int((values(held) != expected).sum())
    assert moved > 1000, "training changed no weight"
    ids = torch.arange(3, 60)[None]
    trained, served = (each(input_ids=ids).logits.log_softmax(-1) for each in (model, read))
    assert (trained.exp() * (trained - served)).sum(-1).mean() <= 1e-6


@pytest.mark.slow
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
