"""Ranks with shards of the model train what one process trains, and any number of them resumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from children import Children
from jobs import QUICK, metric, sampled, save_base
from safetensors.torch import load_file, save_file
from together import Together, assert_all
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.storage.rundir import RunDirectory

STEP = "finetune.training.step:Step.clip"
FSDP = "distributed.kind=fsdp"
# 19 rows: three steps of six and one of one row an epoch.
ROWS = [*QUICK, "data.eval_share=0.2", "training.batch_size=6", "training.micro_batch=1", "training.max_steps=5",
        "training.precision=fp32", "training.eval_every=2", "output.save_every=2"]  # fmt: skip
EXACT = ["optimizer.kind=sgd", "training.learning_rate=0.1", "training.warmup=0"]
"""Plain descent, so that a gradient that is off shows as such."""
KINDS = {
    "nf4": ["adapter.dropout=0", "training.neftune_noise_alpha=5"],
    "16 bit": ["quantization.kind=none", "distributed.stage=gradients", "memory.checkpointing=keep-products"],
    "full": ["quantization.kind=none", "adapter.kind=none", "distributed.offload=cpu",
             "training.neftune_noise_alpha=5"],
}  # fmt: skip
UNTIED = ("16 bit", "full")

Make = Callable[..., Together]


@pytest.fixture(scope="module")
def untied(shallow_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base with a head of its own."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    shutil.copytree(shallow_base, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return folder


@pytest.fixture
def job(children: Children, rows_file: Path, tmp_path: Path) -> Make:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(rows_file.read_text().splitlines(keepends=True)[:21]))

    def make(*overrides: str, run: str = "run") -> Together:
        return Together(children, [*ROWS, f"data.train={rows}", *overrides], RunDirectory(tmp_path / run))

    return make


def weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    folder, name = (run.adapter, "adapter_model") if run.adapter.exists() else (run.merged, "model")
    return load_file(folder / f"{name}.safetensors")


def assert_close(found: RunDirectory, expected: RunDirectory, *, rounded: bool = False) -> None:
    """`rounded`: now and then 8-bit states round another way, by a hundredth of an update."""
    one, other = weights(found), weights(expected)
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(one[name], tensor, rtol=0, atol=1e-3 if rounded else 1e-5)
        assert (one[name] - tensor).abs().mean() < 1e-6
    for name in ("loss", "grad_norm", "eval_loss"):
        assert metric(found, name) == pytest.approx(metric(expected, name), rel=1e-5)


@pytest.mark.parametrize("kind", ["nf4", pytest.param("16 bit", marks=pytest.mark.long), "full"])
def test_sharded_ranks_train_what_one_process_trains(job: Make, kind: str, untied: Path) -> None:
    """Also at other stages, offloaded to the host, with layers that keep some results, and with a head of its own."""
    unsharded = [key for key in KINDS[kind] if not key.startswith("distributed")]
    head = [f"model.name={untied}"] if kind in UNTIED else []
    alone = job(*EXACT, *unsharded, *head, run="alone")
    sharded = job(*EXACT, *KINDS[kind], *head, FSDP, run="sharded")
    assert_all(alone.go(1), 0)
    assert_all(sharded.go(2), 0)
    assert_close(sharded.run, alone.run)


@pytest.fixture(scope="module")
def mixture(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts of two layers, whose router sends tokens to all of them."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=2048, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, max_position_embeddings=256,
    )  # fmt: skip
    return save_base(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder, tiny_base)


@pytest.mark.parametrize("way", sampled([[], [FSDP]], [FSDP]), ids=["copies", "shards"])
def test_ranks_train_adapters_on_experts_as_one_process_does(job: Make, mixture: Path, way: list[str]) -> None:
    """Also with shards of the experts, which the layer that holds them gathers."""
    shared = [*EXACT, f"model.name={mixture}", "quantization.kind=none", "adapter.dropout=0"]
    alone, together = job(*shared, run="alone"), job(*shared, *way, run="together")
    assert_all(alone.go(1), 0)
    assert any(".experts." in name for name in weights(alone.run))
    assert_all(together.go(2), 0)
    assert_close(together.run, alone.run)


def test_killed_ranks_resume_to_the_same_bits_and_one_process_goes_on(job: Make) -> None:
    """With every weight trained, and 8-bit states, which one process updates alike, and in the same files."""
    full = [FSDP, "optimizer.kind=adamw_8bit", "quantization.kind=none", "adapter.kind=none"]
    whole, killed = job(*full, run="whole"), job(*full, run="killed")
    assert_all(whole.go(2), 0)
    killed.kill(2, step=4, saved=2)
    shutil.copytree(killed.run.path, killed.run.path.with_name("fewer"))
    assert_all(killed.go(2), 0)
    assert all(torch.equal(weights(killed.run)[name], tensor) for name, tensor in weights(whole.run).items())
    fewer = job(*full, run="fewer")
    assert_all(fewer.go(1), 0)
    assert [event["step"] for event in fewer.run.events() if event["event"] == "resumed"] == [2]
    assert_close(fewer.run, whole.run, rounded=True)


def test_ranks_that_would_cut_blocks_of_8_bit_states_are_refused(job: Make) -> None:
    ended = job(FSDP, "optimizer.kind=adamw_8bit", "training.batch_size=3").go(3)
    assert_all(ended, 2)
    assert "within blocks of 256 numbers" in ended[0].output
