"""Exports: the merged model is the trained one, or it is not called merged."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import logits
from messages import refusal
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune
from finetune.data import fingerprint
from finetune.errors import ArtifactError, ConfigError, MachineError, NumbersError
from finetune.export import proof
from finetune.export.merging import merged_files
from finetune.model.source.locate import BUILTIN_BASE
from finetune.report.terminal import Terminal
from finetune.storage.rundir import RunDirectory

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def merged_run(trained: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, dict[str, Any]]:
    """The trained run, merged, and what the merge returned. Do not write to it."""
    run = RunDirectory(shutil.copytree(trained.path, tmp_path_factory.mktemp("merged") / "run"))
    return run, finetune.merge(run)


@pytest.mark.slow
def test_merged_weights_are_base_plus_scaled_update(merged_run, tiny_base: Path) -> None:
    """W + alpha / rank · BA, computed here from the files alone, rounded once to bfloat16."""
    run, _ = merged_run
    base = load_file(tiny_base / "model.safetensors")
    merged = load_file(run.merged / "model.safetensors")
    update = load_file(run.adapter / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    adapted = 0
    for name, weight in base.items():
        stem = "base_model.model." + name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" in update:
            delta = update[f"{stem}.lora_B.weight"].float() @ update[f"{stem}.lora_A.weight"].float() * 32 / 16
            expected = weight.float() + delta
            assert (merged[name].float() - expected).abs().max() <= expected.abs().max() * 2**-8
            assert (merged[name] != weight).any()
            adapted += 1
        else:
            assert torch.equal(merged[name], weight)
    assert adapted == 28


def test_proof_is_recorded_and_within_the_bound(merged_run) -> None:
    run, result = merged_run
    recorded = json.loads((run.merged / "merge.json").read_text())
    assert result["error"] <= result["bound"] == proof.bound(4, proof.ROUNDOFF[torch.bfloat16])
    assert result["effect"] > 3 * result["bound"], "the adapter must matter for the proof to mean something"
    assert result["agreement"] > 0.95
    assert recorded["error"] == result["error"]
    assert len(recorded["base_sha256"]) == 64
    assert run.events()[-1]["event"] == "merged"


def test_the_merged_model_answers(merged_run) -> None:
    run, _ = merged_run
    question = "What does `textwrap.fill` do?"
    merged, base = (finetune.generate(run, question, which=which, max_new_tokens=24) for which in ("merged", "base"))
    assert merged
    assert merged != base


@pytest.mark.slow
def test_merging_again_gives_the_same_files(run: RunDirectory, merged_run) -> None:
    finetune.merge(run)
    first, again = ((each.merged / "model.safetensors").read_bytes() for each in (merged_run[0], run))
    assert again == first


def test_other_tools_read_adapter_and_merged_model(merged_run, tiny_base: Path) -> None:
    run, _ = merged_run
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    adapted = logits(PeftModel.from_pretrained(base, str(run.adapter)))
    merged_model = AutoModelForCausalLM.from_pretrained(run.merged, dtype=torch.float32)
    merged = logits(merged_model)
    assert (merged - adapted).norm() / adapted.norm() < 0.01
    assert merged_model.config.use_cache is True
    tokenizer = AutoTokenizer.from_pretrained(run.merged)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny_base).chat_template
    kept = fingerprint.saved_in(run.adapter)
    assert kept
    assert {**kept, **(fingerprint.saved_in(run.merged) or {})} == kept


@pytest.mark.slow
def test_an_unequal_merge_is_not_published(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the staged files is changed before they are read back."""

    def damaging(merging, folder: Path) -> None:
        write(merging, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.down_proj.weight"] *= 1.5
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    write = merged_files.write_weights
    monkeypatch.setattr(merged_files, "write_weights", damaging)
    with refusal(ArtifactError, "the merged model is not the trained model") as refused:
        finetune.merge(run)
    # Of a quantized base, the model that was trained is another one.
    assert re.search(r"differ by [\d.]+% from base plus adapter, .*\(the adapter itself changed", str(refused.value))
    assert not run.merged.exists()
    assert (run.adapter / "adapter_model.safetensors").exists()


def test_a_merge_without_the_adapter_is_detected_however_small_its_change() -> None:
    torch.manual_seed(0)
    base, noise = [torch.randn(8, 32)], 0.02 * torch.randn(8, 32)
    for mixture in (False, True):
        for strength in (0.2, 0.01):
            adapted = [base[0] + strength * torch.randn(8, 32)]

            def holds(merged: torch.Tensor, adapted=adapted, mixture=mixture) -> bool:
                return proof.compare([merged], adapted, base, bound=0.3, mixture=mixture).holds

            assert not holds(base[0])
            assert not holds(base[0] + noise), "rounding alone"
            assert holds(adapted[0])
            assert holds(adapted[0] + noise), "as coarse as a format may be"
            assert not holds(base[0] * float("nan"))
        assert proof.compare(base, base, base, bound=0.1, mixture=mixture).holds, "an adapter that was not trained"


@pytest.mark.slow
def test_disk_full_leaves_the_adapter_and_the_old_merge(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    finetune.merge(run)
    before = (run.merged / "model.safetensors").read_bytes()

    def full(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merged_files, "write_weights", full)
    with refusal(MachineError, "No space left on device"):
        finetune.merge(run)
    assert (run.merged / "model.safetensors").read_bytes() == before


def test_a_run_without_adapter_is_refused(run: RunDirectory) -> None:
    shutil.rmtree(run.adapter)
    with refusal(ArtifactError, "did training finish"):
        finetune.merge(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["adapter.dora=true"],
        pytest.param(
            ["adapter.rslora=true", "adapter.targets=[q_proj, v_proj]", "adapter.extra_modules=[norm]"],
            marks=pytest.mark.long,
        ),
        ["adapter.init=loftq", f"model.name={BUILTIN_BASE}"],  # near its base, as a cut one is not
        ["adapter.init=pissa", "quantization.kind=none"],
        pytest.param(
            ["quantization.kind=int8", "adapter.dtype=bfloat16", "training.precision=bf16"], marks=pytest.mark.long
        ),
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_variant_merges_and_is_proven(quick, overrides: list[str]) -> None:
    config = quick("training.learning_rate=5e-3", "training.max_steps=6", "training.eval_every=6", *overrides)
    run = finetune.train(config).run
    in_training = [line["eval_loss"] for line in run.metrics() if "eval_loss" in line]
    published = finetune.evaluate(run).losses
    # Two forward passes of the same weights: what was written is what was evaluated while training.
    assert published["adapter"] == pytest.approx(in_training[-1], rel=2e-3)
    assert published["base"] == pytest.approx(in_training[0], rel=1e-2 if "init" in overrides[0] else 1e-5)
    result = finetune.merge(run)
    assert result["error"] < result["effect"]


@pytest.mark.slow
def test_full_fine_tuning_publishes_the_whole_model(quick, shallow_base: Path, tmp_path: Path) -> None:
    base = shutil.copytree(shallow_base, tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.9, "do_sample": false}')
    job = ["adapter.kind=none", "quantization.kind=none", "training.learning_rate=1e-4", f"model.name={base}"]
    run = finetune.train(quick(*job)).run
    model = AutoModelForCausalLM.from_pretrained(run.merged)
    assert model.num_parameters() == 1_180_608
    assert model.config.use_cache
    assert model.generation_config.eos_token_id == [0, 2], "also the end of a turn"
    with refusal(ConfigError, "--to"):
        finetune.merge(run)
    with refusal(ConfigError, "`merged`", "`gguf`"):
        finetune.export_model(run, "adapter")
    made = finetune.export_model(run, "merged", terminal=Terminal(quiet=True))
    assert str(run.merged) in made["serve"]["vLLM"]
    text = (run.merged / "README.md").read_text()
    assert "All weights were trained" in text
    assert "## Proof" not in text


@pytest.mark.slow
def test_untied_embeddings_and_added_tokens_survive_the_merge(quick, tiny_base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.add_tokens(["<|added|>"])
    model.resize_token_embeddings(len(tokenizer))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.to(torch.bfloat16).save_pretrained(tmp_path / "untied")
    tokenizer.save_pretrained(tmp_path / "untied")
    exact = ["quantization.kind=none", "adapter.extra_modules=[embed_tokens]", "training.max_steps=6"]
    run = finetune.train(quick(f"model.name={tmp_path / 'untied'}", *exact)).run
    assert finetune.merge(run)["agreement"] > 0.9
    merged = AutoModelForCausalLM.from_pretrained(run.merged)
    assert merged.get_input_embeddings().weight.shape[0] == 2049
    assert not torch.equal(merged.lm_head.weight, merged.get_input_embeddings().weight)


def test_a_token_routed_to_another_expert_fails_a_dense_model_but_not_a_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    trained, base = (torch.randn(20, 8, generator=generator) for _ in range(2))
    rerouted, wrong = trained.clone(), trained * 1.1
    rerouted[3] = torch.randn(8, generator=generator)

    def holds(merged: torch.Tensor, mixture: bool) -> bool:
        return proof.compare([merged], [trained], [base], 0.01, mixture=mixture).holds

    assert holds(rerouted, mixture=True)
    assert not holds(rerouted, mixture=False)
    assert not holds(wrong, mixture=True)
    assert not holds(trained * float("nan"), mixture=True)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "not a number"])
def test_a_whole_model_with_damaged_weights_is_not_used(damage: str, quick) -> None:
    job = ["adapter.kind=none", "quantization.kind=none", "training.learning_rate=1e-4", "training.max_steps=1"]
    run = finetune.train(quick(*job)).run
    file, name = run.merged / "model.safetensors", "model.layers.0.mlp.gate_proj.weight"
    weights = load_file(file)
    if damage == "missing":
        del weights[name]
    else:
        weights[name].fill_(float("nan"))
    save_file(weights, file, {"format": "pt"})
    expected = ArtifactError if damage == "missing" else NumbersError
    with pytest.raises(expected):
        finetune.evaluate(run)
    with pytest.raises(expected):
        finetune.generate(run, "x", max_new_tokens=2)
