"""What went wrong elsewhere between training and serving, each with its report, and why it cannot here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf_in_llama_cpp as bench
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from jobs import BF16
from messages import refusal
from safetensors.torch import load_file
from transformers import AutoConfig

from finetune.config import serving
from finetune.data.encoded import IGNORE
from finetune.errors import ArtifactError, ConfigError
from finetune.export import compressed_export, proof, server_commands
from finetune.export.gguf import gguf_model, gguf_packed
from finetune.forms.packed import exact, pack
from finetune.resolve import resolve

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small Llama in 16 bit, with its tokenizer."""
    shape = bench.SHAPES["llama"]
    tokenizer = shape.tokenizer()
    config = bench.architecture(shape, len(tokenizer) + 3)
    bench.write(bench.train(config, tokenizer, steps=0), tokenizer, tmp_path / "model")
    return tmp_path / "model"


def gguf_file(folder: Path, kind: str, weights: dict[str, Any]) -> Path:
    tokenizer, file = bench.SHAPES["llama"].tokenizer(), folder.parent / f"{kind}.gguf"
    gguf_model.write(
        folder, AutoConfig.from_pretrained(folder), tokenizer, file, kind, packed=weights, starts_with_bos=True
    )
    return file


def logits(weight: torch.Tensor) -> torch.Tensor:
    """Those of a model of one matrix (vocabulary, hidden), on 400 tokens; an update of it moves them along."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(400, weight.shape[1], generator=generator) @ weight.T


# Traps 1 and 2: mlx-lm#1564, mflux#668, whose change had a cosine of 0.22 with the update.
@pytest.mark.parametrize(("steps", "kept", "cosine"), [(1 / 12, 0.09, 0.17), (0.3, 0.78, 0.74)])
def test_an_update_that_a_grid_swallows_is_not_published(steps: float, kept: float, cosine: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 64, generator=generator) * 0.1
    on_grid = exact(pack("q4_0", weight))
    step = 0.277 * on_grid.square().mean().sqrt()
    up, down = torch.randn(256, 2, generator=generator), torch.randn(2, 64, generator=generator)
    update = up @ down * (steps * step / math.sqrt(2))

    def rounded(base: torch.Tensor) -> tuple[torch.Tensor, proof.Proof]:
        served = exact(pack("q4_0", base + update))
        return served, proof.compare(*[[logits(each)] for each in (served, base + update, base)], bound=1.0)

    served, found = rounded(on_grid)
    assert torch.cosine_similarity((served - on_grid).flatten(), update.flatten(), dim=0) == pytest.approx(
        cosine, abs=0.02
    )
    assert found.kept == pytest.approx(kept, abs=0.02)
    assert rounded(weight)[1].kept == pytest.approx(1, abs=0.03), "a base in 16 bit rounds without bias"
    if kept < proof.KEPT:
        with refusal(ArtifactError, "rounded more coarsely than that"):
            proof.refuse_unless_equal(found, "file")


def test_a_small_share_of_the_gain_is_reported() -> None:  # trap 1
    trained, base = torch.full((100,), 2.0), torch.linspace(2.9, 3.1, 100)
    assert proof.gain_kept(base, trained, base - 0.06) == (pytest.approx(0.06), None)
    kept, why = proof.gain_kept(base, base + torch.linspace(-1, 1, 100), base)
    assert kept is None
    assert why is not None
    assert "two standard errors" in why


def test_the_gain_is_that_of_trained_tokens() -> None:
    labels = [[IGNORE, IGNORE, *range(20)], [IGNORE] * 5]
    trained, base = ([torch.zeros(len(row) + 1, 30) for row in labels] for _ in range(2))
    for row, likely in zip(trained, labels, strict=True):
        row[range(len(likely)), [max(label, 0) for label in likely]] = 3.0
    served = [row / 2 for row in trained]
    untrained_too = [row.clone() for row in base]
    untrained_too[0][:2, 5] = 9.0  # where no label is
    found = proof.served(trained, served, untrained_too, labels, None)
    assert found["losses"]["base"] == pytest.approx(math.log(30))
    assert found["losses"]["trained"] == pytest.approx(math.log(29 + math.exp(3)) - 3)
    gained, kept = (found["losses"]["base"] - found["losses"][name] for name in ("trained", "served"))
    assert found["gain_kept"] == pytest.approx(kept / gained)
    nothing = proof.served(trained, served, base, [[IGNORE] * len(row) for row in labels], None)
    assert (nothing["gain_kept"], "losses" in nothing) == (None, False)
    assert "no loss on any token" in nothing["gain_unknown"]


def test_a_weight_on_another_grid_is_refused_and_not_rounded_again(
    model: Path, tmp_path: Path
) -> None:  # trap 5: ao#2419
    config, name = AutoConfig.from_pretrained(model), "model.layers.0.self_attn.q_proj.weight"
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    written = {one.name: one for one in GGUFReader(gguf_file(model, "q8_0", {name: pack("q4_0", weight)})).tensors}
    assert written["blk.0.attn_q.weight"].tensor_type.name == "Q4_0"
    assert written["blk.1.attn_q.weight"].tensor_type.name == "BF16"
    (tmp_path / "fp8").mkdir()
    with refusal(ConfigError, "q4_0"):
        compressed_export.write(model, tmp_path / "fp8", config, "fp8", {name: pack("q4_0", weight)})


def test_a_file_that_decodes_to_other_values_than_trained_is_refused(model: Path) -> None:  # trap 6: ao#2937
    name = "model.layers.0.mlp.up_proj.weight"
    weights = {name: pack("q4_0", torch.randn(128, 64, generator=torch.Generator().manual_seed(0)))}
    file, config = gguf_file(model, "f16", weights), AutoConfig.from_pretrained(model)
    found = gguf_model.differing(model, config, file, weights)
    assert found["differing"] == 0 < found["count"]  # what is beside them is in bfloat16, as it was
    other = {name: pack("q4_0", exact(weights[name]) * 1.5)}
    with refusal(ArtifactError, "are not those that were trained"):
        gguf_model.differing(model, config, file, other)


@pytest.mark.parametrize(("base", "kept"), [("q4_0", 0.1), ("iq4_xs", 0.1), ("nvfp4", 0.3), ("fp8", 0.9), ("q8_0", 1)])
def test_a_form_swallows_updates_of_weights_that_are_in_it_already(base: str, kept: float) -> None:  # traps 1 and 2
    """What is left, along it, of an update of a tenth of a 4-bit step; see `served._COARSE_BITS`."""
    generator = torch.Generator().manual_seed(0)
    weights = exact(pack(base, torch.randn(128, 256, generator=generator) * 0.05))
    update = torch.randn(128, 4, generator=generator) @ torch.randn(4, 256, generator=generator)
    update *= 0.0277 * weights.square().mean().sqrt() / update.square().mean().sqrt()

    def share(form: str) -> float:
        moved = exact(pack(form, weights + update)) - exact(pack(form, weights))
        return float((moved * update).sum() / update.square().sum())

    assert share(base) <= kept + 0.05
    assert share("q8_0") > 0.9
    if base in ("fp8", "q8_0"):
        assert share("q4_k") > 0.9 < share("q4_0")


def test_a_mixture_in_fp8_is_served_merged(model: Path) -> None:  # trap 10: vllm#42007
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    (model / "config.json").write_text(
        json.dumps({"model_type": "qwen3_moe", "num_experts": 4, "num_attention_heads": 4, "vocab_size": 64, **sizes})
    )
    job = BF16.changed({"model.name": str(model), "output.serve": "fp8"})
    resolved = resolve(job, until="form")
    config, line = resolved.config, resolved.notes["output.serve"]
    assert (config.output.runtime, config.output.way, serving.export_of(config.output)) == ("vllm", "rounded", "fp8")
    assert "vLLM computes nonsense with an adapter on experts in FP8 (vllm#42007)" in str(line)
    with refusal(ConfigError, "`rounded`", "adapter.expert_rank") as refused:
        resolve(job.changed({"output.way": "adapter"}), until="form")
    assert refused.value.exit_code == 2
    config = resolve(job.changed({"adapter.expert_rank": 0}), until="form").config
    assert config.output.way == "adapter"


def test_no_projection_is_left_in_16_bit(model: Path, tmp_path: Path) -> None:  # trap 7: unsloth#3948
    written = {one.name: one.tensor_type.name for one in GGUFReader(gguf_file(model, "nvfp4", {})).tensors}
    matrices = {name: stored for name, stored in written.items() if "blk." in name and "norm" not in name}
    assert {stored for name, stored in matrices.items() if not name.endswith(".scale")} == {"NVFP4"}
    config, folder = AutoConfig.from_pretrained(model), tmp_path / "compressed"
    folder.mkdir()
    compressed_export.write(model, folder, config, "nvfp4", compressed_export.RoundedWeights(model, config, "nvfp4"))
    files, merged = (load_file(each / "model.safetensors") for each in (folder, model))
    assert {name.split(".")[-2] for name in files if name.endswith("weight_packed")} == set(PROJECTIONS)
    assert not any(name.endswith("_proj.weight") for name in files)
    # Trap 9: the factor of compressed-tensors divides.
    name = "model.layers.0.self_attn.o_proj.weight"
    assert files[f"{name}_global_scale"] == 448 * 6 / merged[name].float().abs().max()


def test_small_weights_keep_their_values_in_nvfp4(tmp_path: Path) -> None:  # trap 8: llama.cpp#22858
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 0.002

    def error(values: torch.Tensor) -> float:
        return float((values - weight).norm() / weight.norm())

    (_, _, kind, load), (name, shape, _, factor) = gguf_packed.rounded(
        "blk.0.ffn_up.weight", [64, 128], GGMLQuantizationType.NVFP4, lambda: weight
    )
    assert (name, shape) == ("blk.0.ffn_up.scale", [1])
    values = torch.from_numpy(dequantize(load().numpy(), kind))
    assert error(values * factor()) < 0.1


def test_the_command_for_vllm_asks_for_no_larger_rank_than_needed() -> None:  # trap 12: vllm#14435
    record = {"rank": 17, "gguf": None}
    assert "--max-lora-rank 32 " in server_commands.commands("adapter", Path("runs/a/b"), "base", record)["vLLM"]
