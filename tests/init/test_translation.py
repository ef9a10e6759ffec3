"""Facts about `finetune init --from`: what a config of another tool is in our keys, and what is said of the rest."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from finetune.config import other_names
from finetune.errors import ConfigError
from finetune.init import job
from finetune.init.translation import translate
from finetune.settings import load_config

AXOLOTL = """
    base_model: NousResearch/Llama-3.2-1B
    load_in_8bit: false
    load_in_4bit: true
    datasets:
      - path: teknium/GPT4-LLM-Cleaned
        type: alpaca
        split: train
    dataset_prepared_path: last_run_prepared
    val_set_size: 0.1
    output_dir: ./outputs/qlora-out
    adapter: qlora
    lora_model_dir:
    sequence_len: 2048
    sample_packing: true
    lora_r: 32
    lora_alpha: 16
    lora_target_modules: [gate_proj, down_proj]
    wandb_project:
    gradient_accumulation_steps: 4
    micro_batch_size: 2
    early_stopping_patience: 3
    eval_steps: 50
    optimizer: adamw_bnb_8bit
    lr_scheduler: cosine
    learning_rate: 0.0002
    bf16: auto
    tf32: false
    gradient_checkpointing: true
    logging_steps: 1
    saves_per_epoch: 1
    special_tokens:
      pad_token: "<|end_of_text|>"
    """

LLAMA_FACTORY = """
    model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
    trust_remote_code: true
    stage: sft
    do_train: true
    finetuning_type: lora
    lora_target: all
    dataset: identity,alpaca_en_demo
    template: llama3
    max_samples: 1000
    overwrite_cache: true
    output_dir: saves/llama3-8b
    save_steps: 500
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 8
    learning_rate: 1.0e-4
    bf16: true
    """


def write(folder: Path, text: str) -> Path:
    (folder / "theirs.yaml").write_text(textwrap.dedent(text))
    return folder / "theirs.yaml"


def test_an_axolotl_config_is_translated_and_what_has_no_counterpart_is_listed(tmp_path: Path) -> None:
    said: list[str] = []
    ours = tmp_path / "ours.yaml"
    job.create(None, None, None, write(tmp_path, AXOLOTL), ours, yes=False, say=said.append)
    config = load_config(ours)
    assert config.model.name == "NousResearch/Llama-3.2-1B"
    assert config.quantization.kind == "nf4"
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.targets) == (32, 16, ["gate_proj", "down_proj"])
    assert (config.data.train, config.data.eval_share) == ("teknium/GPT4-LLM-Cleaned", 0.1)
    assert (config.data.max_length, config.data.packing) == (2048, True)
    assert (config.training.batch_size, config.training.micro_batch) == (8, 2)
    assert (config.training.eval_every, config.training.early_stopping) == (50, 3)
    assert config.optimizer.kind == "adamw_8bit"
    assert config.memory.checkpointing == "all"
    assert config.output.dir == "./outputs/qlora-out"
    [missing] = [line for line in ours.read_text().splitlines() if line.startswith("# Without a counterpart here: ")]
    for key in ("tf32: false", "saves_per_epoch: 1", "special_tokens"):
        assert key in missing
    for key in ("logging_steps", "dataset_prepared_path", "lora_model_dir", "wandb_project", "adapter"):
        assert key not in missing
    assert "# No counterpart here in `datasets`: split" in ours.read_text()
    assert "batch_size: 8  # 2 rows, 4 times, on one GPU" in said[-1]


def test_what_llama_factory_does_by_default_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps({"identity": {"file_name": "identity.json"}}))
    draft = translate(write(tmp_path, LLAMA_FACTORY))
    config = draft.config
    assert config.quantization.kind == "none"
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.targets) == (8, 16, "all-linear")
    assert config.data.train == ["data/identity.json", "alpaca_en_demo"]
    assert (config.data.eval, config.data.max_length, config.data.chat_template) == ("none", 2048, "llama3")
    assert (config.training.batch_size, config.training.micro_batch, config.training.epochs) == (8, 1, 3)
    assert (config.training.schedule, config.training.warmup) == ("linear", 0)
    assert config.optimizer.kind == "adamw_torch_fused"
    assert draft.reasons["adapter.rank"] == "its default there"
    # Foreign code needs a commit, which is not named there.
    assert draft.notes == ["Without a counterpart here: trust_remote_code: true, max_samples: 1000"]


def test_the_project_and_the_name_of_a_tracker_are_kept(tmp_path: Path) -> None:
    draft = translate(write(tmp_path, "base_model: x\nwandb_project: faq\nwandb_name: first\n"))
    found = draft.config.tracking
    assert (found.to, found.project, found.name) == (["wandb"], "faq", "first")


def test_an_adapter_and_its_ranks_are_kept(tmp_path: Path) -> None:
    text = "base_model: x\nlora_model_dir: out/first\nrank_pattern: {q_proj: 32}\nalpha_pattern: {q_proj: 64}\n"
    text += "neftune_noise_alpha: 5\n"
    draft = translate(write(tmp_path, text))
    assert (draft.config.adapter.start_from, draft.config.adapter.ranks) == ("out/first", {"q_proj": 32})
    assert draft.values["training.neftune_noise_alpha"] == 5
    assert 'Without a counterpart here: alpha_pattern: {"q_proj": 64}' in draft.notes
    draft = translate(write(tmp_path, "model_name_or_path: x\nadapter_name_or_path: one,two\n"))
    assert 'Without a counterpart here: adapter_name_or_path: "one,two"' in draft.notes


def test_rotary_scaling_needs_a_factor(tmp_path: Path) -> None:
    draft = translate(write(tmp_path, "base_model: x\nrope_scaling: {type: yarn, factor: 4.0}\n"))
    assert draft.config.model.rope_scaling.model_dump() == {"rope_type": "yarn", "factor": 4}
    for value in ("yarn", "{type: dynamic, factor: 2.0}"):
        draft = translate(write(tmp_path, f"model_name_or_path: x\nrope_scaling: {value}\n"))
        assert draft.config.model.rope_scaling is None
        assert any("rope_scaling" in note for note in draft.notes)


def test_what_contradicts_itself_here_is_said(tmp_path: Path) -> None:
    draft = translate(write(tmp_path, "base_model: x\nadapter: qlora\npissa_init: true\nval_set_size: 20\n"))
    assert any(note.startswith("To be decided: `adapter.init`: PiSSA") for note in draft.notes)
    assert "Without a counterpart here: val_set_size: 20" in draft.notes
    assert "No data set is named: write `data.train`" in draft.notes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("model:\n  name: x\n", "has `base_model` \\(Axolotl\\) or `model_name_or_path` \\(LLaMA-Factory\\)"),
        ("base_model: [x\n", "not valid YAML"),
        ("- x\n", "expected `section:` lines"),
    ],
)
def test_a_config_of_no_tool_is_refused(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        translate(write(tmp_path, text))
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        translate(tmp_path / "none.yaml")


def test_every_key_of_the_table_becomes_keys_that_are_allowed_or_none() -> None:
    for key in other_names.NAMES:
        for value in (True, False, 1, 0.1, "auto", "x", ["x"], {"x": 1}):
            found = other_names.taken(key, value)
            assert found is None or all(name.count(".") == 1 for name in found)
