"""Exports: the merged model is the trained one, or it is not called merged."""

import json
import re
import shutil
from pathlib import Path

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


@pytest.mark.slow
def test_merged_weights_are_base_plus_scaled_update(merged: RunDirectory, tiny_base: Path) -> None:
    """W + alpha / rank · BA, computed here from the files alone, rounded once to bfloat16."""
    base = load_file(tiny_base / "model.safetensors")
    written = load_file(merged.merged / "model.safetensors")
    update = load_file(merged.adapter / "adapter_model.safetensors")
    assert written.keys() == base.keys()
    adapted = 0
    for name, weight in base.items():
        stem = "base_model.model." + name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" in update:
            delta = update[f"{stem}.lora_B.weight"].float() @ update[f"{stem}.lora_A.weight"].float() * 32 / 16
            expected = weight.float() + delta
            assert (written[name].float() - expected).abs().max() <= expected.abs().max() * 2**-8
            assert (written[name] != weight).any()
            adapted += 1
        else:
            assert torch.equal(written[name], weight)
    assert adapted == 28


def test_proof_is_recorded_and_within_the_bound(merged: RunDirectory) -> None:
    proven = merged.events()[-1]
    assert proven["event"] == "merged"
    assert proven["error"] <= proven["bound"] == proof.bound(4, proof.ROUNDOFF[torch.bfloat16])
    assert proven["effect"] > 3 * proven["bound"], "the adapter must matter for the proof to mean something"
    assert proven["agreement"] > 0.95
    recorded = json.loads((merged.merged / "merge.json").read_text())
    assert recorded["error"] == proven["error"]
    assert len(recorded["base_sha256"]) == 64


def test_the_merged_model_answers(merged: RunDirectory) -> None:
    question = "What does `textwrap.fill` do?"
    published, base = (
        finetune.generate(merged, question, which=each, max_new_tokens=24) for each in ("merged", "base")
    )
    assert "" != published != base


def test_other_tools_read_adapter_and_merged_model(merged: RunDirectory, tiny_base: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    adapted = logits(PeftModel.from_pretrained(base, str(merged.adapter)))
    model = AutoModelForCausalLM.from_pretrained(merged.merged, dtype=torch.float32)
    assert (logits(model) - adapted).norm() / adapted.norm() < 0.01
    assert model.config.use_cache is True
    tokenizer = AutoTokenizer.from_pretrained(merged.merged)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny_base).chat_template
    kept = fingerprint.saved_in(merged.adapter)
    assert kept
    assert {**kept, **(fingerprint.saved_in(merged.merged) or {})} == kept


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
def test_merging_again_gives_the_same_files_which_a_full_disk_leaves(
    merged_run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = merged_run.merged / "model.safetensors"
    before = file.read_bytes()
    finetune.merge(merged_run)
    assert file.read_bytes() == before

    def full(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merged_files, "write_weights", full)
    with refusal(MachineError, "No space left on device"):
        finetune.merge(merged_run)
    assert file.read_bytes() == before


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
        pytest.param(["adapter.init=loftq", f"model.name={BUILTIN_BASE}"], marks=pytest.mark.long),
        pytest.param(["adapter.init=pissa", "quantization.kind=none"], marks=pytest.mark.long),
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_variant_merges_and_is_proven(quick, overrides: list[str]) -> None:
    config = quick("training.learning_rate=5e-3", "training.max_steps=3", "training.eval_every=3", *overrides)
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
def test_untied_embeddings_and_added_tokens_survive_the_merge(quick, shallow_base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(shallow_base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(shallow_base)
    tokenizer.add_tokens(["<|added|>"])
    model.resize_token_embeddings(len(tokenizer))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.to(torch.bfloat16).save_pretrained(tmp_path / "untied")
    tokenizer.save_pretrained(tmp_path / "untied")
    exact = ["quantization.kind=none", "adapter.extra_modules=[embed_tokens]", "training.max_steps=2"]
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
def test_a_whole_model_with_damaged_weights_is_not_used(quick) -> None:
    job = ["adapter.kind=none", "quantization.kind=none", "training.learning_rate=1e-4", "training.max_steps=1"]
    run = finetune.train(quick(*job)).run
    file, name = run.merged / "model.safetensors", "model.layers.0.mlp.gate_proj.weight"
    weights = load_file(file)
    weights[name].fill_(float("nan"))
    missing = {key: value for key, value in weights.items() if key != name}
    for damaged, expected in ((weights, NumbersError), (missing, ArtifactError)):
        save_file(damaged, file, {"format": "pt"})
        with pytest.raises(expected):
            finetune.evaluate(run)
        with pytest.raises(expected):
            finetune.generate(run, "x", max_new_tokens=2)
