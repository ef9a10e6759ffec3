"""At the end of training: what is published is what was trained, or nothing is; and it can be published again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import adapter_weights, metric, save_base
from messages import refusal, reported
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import finetune
from finetune.errors import ArtifactError, ConfigError, OutOfMemoryError
from finetune.model.adapters import adapter_files, peft_format, plain_peft
from finetune.storage.rundir import RunDirectory

_DEEPSEEK = {
    "vocab_size": 2048, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """A mixture with a dense layer and shared experts, and the built-in base's tokenizer."""
    folder = tmp_path_factory.mktemp("deepseek") / "base"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **_DEEPSEEK), dtype=torch.float32)
    return save_base(model, folder, tiny_base)


JOB = ["quantization.kind=none", "training.precision=fp32", "training.learning_rate=5e-3", "training.max_steps=2",
       "training.eval_every=2"]  # fmt: skip
PISSA = ["adapter.init=pissa", "adapter.rank=4", *JOB]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using Rank-Stabilized LoRA with rank_pattern")  # as in `libraries`
@pytest.mark.parametrize(
    "overrides",
    [
        ["adapter.dora=true", "adapter.rslora=true", "adapter.extra_modules=[norm]",
         "adapter.ranks={q_proj: 2, up_proj: 8}"],
        ["deepseek", "adapter.expert_rank=0", "adapter.extra_modules=[norm, embed_tokens]"],
    ],
    ids=["dora and rslora", "deepseek"],
)  # fmt: skip
def test_pissa_is_published_with_every_tensor_that_was_trained(
    quick: Any, overrides: list[str], deepseek: Path
) -> None:
    named = [f"model.name={deepseek}" if each == "deepseek" else each for each in overrides]
    run = finetune.train(quick(*PISSA, *named)).run
    found = adapter_weights(run)
    trained = load_file(run.complete_checkpoints()[-1] / "adapter_model.safetensors")
    assert found.keys() == trained.keys()
    for name, tensor in trained.items():
        if ".lora_A." in name:
            assert torch.equal(found[name][: len(tensor)], tensor)
        elif ".lora_B." in name:
            assert torch.equal(found[name][:, : tensor.shape[1]], tensor)
        else:
            assert torch.equal(found[name], tensor)
    # The same model: that which was evaluated while training is the plain base with this adapter.
    losses = finetune.evaluate(run).losses
    assert losses["adapter"] == pytest.approx(metric(run, "eval_loss")[-1], rel=1e-4)
    assert losses["adapter"] != pytest.approx(losses["base"], rel=1e-3)
    base = AutoModelForCausalLM.from_pretrained(run.config().model.name, dtype=torch.float32)
    alone = adapter_files.weights(PeftModel.from_pretrained(base, str(run.adapter)))
    assert alone.keys() == found.keys()
    assert all(torch.equal(alone[name], found[name]) for name in found)


def older(run: RunDirectory) -> None:
    """Make adapter/ what earlier versions published: without the magnitudes, or with names that PEFT mistakes."""
    file, said = run.adapter / "adapter_model.safetensors", run.adapter / "adapter_config.json"
    kept = {name: tensor for name, tensor in load_file(file).items() if "magnitude" not in name}
    save_file(kept, file, {"format": "pt"})
    settings = json.loads(said.read_text())
    names = [name.removesuffix(".weight") for name in settings["target_parameters"] or []]
    settings |= {"target_modules": [*settings["target_modules"], *names], "target_parameters": None}
    said.write_text(json.dumps(settings))


@pytest.mark.slow
def test_an_adapter_that_peft_reads_otherwise_is_not_published_and_one_of_earlier_versions_is_published_again(
    quick: Any, deepseek: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    config = quick(*JOB, f"model.name={deepseek}")
    with monkeypatch.context() as patch:
        patch.setattr(plain_peft, "mistaken", lambda base, layers: [])
        with refusal(ConfigError, "deepseek_v3"):
            finetune.train(config)
        assert not Path(config.output.dir).exists(), "refused before there is a run"
        patch.setattr(peft_format, "check", lambda base, skeleton, section: None)
        with refusal(ArtifactError, "base_model"):
            finetune.train(config)
    run = RunDirectory(config.output.dir)
    assert not run.finished
    assert not run.adapter.exists()
    assert finetune.train(config).run.finished
    assert_published_again(config, run, capsys)


@pytest.mark.long
def test_an_adapter_without_its_magnitudes_is_published_again(quick: Any, capsys: pytest.CaptureFixture) -> None:
    config = quick(*JOB, "adapter.dora=true")
    assert_published_again(config, finetune.train(config).run, capsys)


def assert_published_again(config: Any, run: RunDirectory, capsys: pytest.CaptureFixture) -> None:
    before, settings = adapter_weights(run), (run.adapter / "adapter_config.json").read_bytes()
    assert before.keys() == load_file(run.complete_checkpoints()[-1] / "adapter_model.safetensors").keys()
    lines = run.metrics_file.read_bytes()
    finetune.train(config)
    assert [event["event"] for event in run.events()].count("finished") == 1, "all is well: nothing is done"
    older(run)
    with refusal(ArtifactError, "finetune train` again, which publishes this run's adapter"):
        finetune.merge(run)
    capsys.readouterr()
    finetune.train(config)
    reported(capsys.readouterr().out, "this is done now")
    assert run.finished
    after = adapter_weights(run)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert (run.adapter / "adapter_config.json").read_bytes() == settings
    assert run.metrics_file.read_bytes() == lines


@pytest.mark.slow
def test_a_proof_for_which_memory_is_missing_does_not_blame_the_adapter(
    quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("unable to mmap: Cannot allocate memory (os error 12)")

    config = quick(*JOB[:3], "training.max_steps=1", "data.eval=none", "training.eval_every=null")
    with monkeypatch.context() as patched:
        patched.setattr(PeftModel, "from_pretrained", full)
        with refusal(OutOfMemoryError, "out of memory while adapter/ was loaded") as refused:
            finetune.train(config)
    run = RunDirectory(config.output.dir)
    assert "not what was trained" not in str(refused.value)
    assert not run.adapter.exists()
    assert finetune.train(config).run.adapter.exists(), "the same command goes on"


@pytest.mark.slow
def test_the_adapter_is_published_although_the_base_is_gone_since_it_was_loaded(
    quick: Any, shallow_base: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(shallow_base, tmp_path / "base"))

    def take_away(metrics: dict[str, Any]) -> None:
        shutil.rmtree(base, ignore_errors=True)

    run = finetune.train(
        quick(f"model.name={base}", "training.max_steps=1", "data.eval=none", "training.eval_every=null"),
        callbacks=[take_away],
    ).run
    assert run.finished
    assert not base.exists()
    assert adapter_weights(run)
