"""Facts about `finetune init --from`: what a config of another tool is in our keys, and what is said of the rest."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st
from messages import refusal

from finetune.choices import load_config
from finetune.config import other_names
from finetune.errors import ConfigError
from finetune.extras.init import first_config, translation
from finetune.extras.init.translation import TOOLS, Tool, translate
from finetune.report.visible import LINES, visible

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


AXOLOTL_SHARDED = """
    base_model: Qwen/Qwen3-30B-A3B
    plugins:
      - axolotl.integrations.liger.LigerPlugin
      - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
    liger_rope: true
    liger_rms_norm: true
    chat_template: qwen3
    datasets:
      - path: json
        data_files: rows.jsonl
        type: chat_template
        field_messages: conversations
        message_property_mappings: {role: from, content: value}
        roles_to_train: [assistant]
        train_on_eos: turn
      - path: mlabonne/FineTome-100k
        type: chat_template
        split: train[:20%]
      - path: allenai/c4
        data_files: en/c4-train.00000.json.gz
        split: train[:20%]
    val_set_size: 0.0
    adapter: lora
    lora_r: 16
    lora_alpha: 32
    lora_target_modules: [q_proj, v_proj]
    lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]
    sequence_len: 4096
    excess_length_strategy: raise
    micro_batch_size: 1
    gradient_accumulation_steps: 2
    num_epochs: 1
    optimizer: adamw_torch_8bit
    lr_scheduler: cosine
    learning_rate: 2e-4
    bf16: false
    fp16: true
    gradient_checkpointing_kwargs: {use_reentrant: false}
    special_tokens: {eos_token: <|im_end|>}
    tokens: [<|think|>]
    evals_per_epoch: 0
    loss_watchdog_threshold: 5.0
    fsdp_version: 2
    fsdp_config:
      offload_params: true
      reshard_after_forward: true
      transformer_layer_cls_to_wrap: Qwen3MoeDecoderLayer
    """

TRL = """
    model_name_or_path: Qwen/Qwen3-0.6B
    attn_implementation: flash_attention_2
    dtype: bfloat16
    use_peft: true
    lora_alpha: 16
    load_in_4bit: true
    dataset_name: trl-lib/Capybara
    dataset_train_split: train
    dataset_config: default
    eval_strategy: steps
    eval_steps: 100
    learning_rate: 2.0e-4
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 8
    packing: true
    eos_token: <|im_end|>
    output_dir: out
    push_to_hub: true
    use_liger_kernel: true
    """


AXOLOTL_PAIRS = """
    base_model: x
    adapter: lora
    datasets: [{path: pairs.jsonl, type: chat_template.default}]
    micro_batch_size: 2
    gradient_accumulation_steps: 4
    learning_rate: 5e-6
    """


FACTORY = "model_name_or_path: x\nstage: sft\nfinetuning_type: lora\n"
ZERO = {"distributed.kind": "deepspeed"}
FSDP = {"distributed.kind": "fsdp"}
FULL = {"adapter.kind": "none", "quantization.kind": "none"}

# A config of another tool, our values that follow from it, those of the `...` as well, and notes or their beginnings.
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    (AXOLOTL, {
        "model.name": "NousResearch/Llama-3.2-1B", "quantization.kind": "nf4", "adapter.rank": 32, "adapter.alpha": 16,
        "adapter.targets": ["gate_proj", "down_proj"], "data.train": "teknium/GPT4-LLM-Cleaned", "data.eval_share": 0.1,
        "data.max_length": 2048, "data.packing": True, "training.batch_size": 8, "training.micro_batch": 2,
        "training.eval_every": 50, "training.early_stopping": 3, "optimizer.kind": "adamw_8bit",
        "memory.checkpointing": "all", "output.dir": "./outputs/qlora-out",
    }, [
        "To be decided: saves_per_epoch: 1, here `output.save_every`, in steps",
        "Left out, as it does not change the result: tf32: false",
    ]),
    (AXOLOTL_SHARDED, {
        "data.train": ["rows.jsonl", "mlabonne/FineTome-100k", "allenai/c4"], "data.too_long": "error",
        "adapter.targets": ["q_proj", "v_proj", "experts.gate_up_proj", "experts.down_proj"],
        "optimizer.kind": "adamw_8bit", "training.precision": "fp16", "kernels.fused": None, **FSDP,
        "distributed.stage": "weights", "distributed.offload": "cpu",
    }, [
        'To be decided: chat_template: "qwen3", here `data.chat_template`; `qwen3` is not offered: ',
        'May change the result, and has no counterpart here: special_tokens: {"eos_token": "<|im_end|>"}, '
        'tokens: ["<|think|>"], datasets.split: "train[:20%]", datasets.data_files: "en/c4-train.00000.json.gz"',
        'Left out, as it does not change the result: gradient_checkpointing_kwargs: {"use_reentrant": false}, '
        "loss_watchdog_threshold: 5.0, fsdp_version: 2",
        "To be decided: `training.precision`: ",
    ]),
    (LLAMA_FACTORY, {
        "quantization.kind": "none", "adapter.rank": 8, "adapter.alpha": 16, "adapter.targets": "all-linear",
        "data.train": ["data/identity.json", "alpaca_en_demo"], "data.eval": "none", "data.max_length": 2048,
        "data.chat_template": "llama3", "training.batch_size": 8, "training.micro_batch": 1, "training.epochs": 3,
        "training.schedule": "linear", "training.warmup": 0, "optimizer.kind": "adamw_torch_fused",
    }, [
        "To be decided: trust_remote_code: true, here `model.trust_remote_code`",  # needs a commit, not named there
        "May change the result, and has no counterpart here: max_samples: 1000",
    ]),
    (TRL, {
        "quantization.kind": "nf4", "quantization.double": False, "adapter.rank": 16, "adapter.alpha": 16,
        "adapter.dropout": 0.05, "data.train": "trl-lib/Capybara", "data.eval": "auto", "data.max_length": 1024,
        "training.batch_size": 16, "training.micro_batch": 2, "training.epochs": 3, "training.schedule": "linear",
        "training.warmup": 0, "kernels.fused": "auto",
    }, [
        "To be decided: `data.loss_on`; of messages, TRL trains `all` tokens",
        "To be decided: `adapter.targets`, which PEFT chooses there, often [q_proj, v_proj]",
        'May change the result, and has no counterpart here: dataset_config: "default", eos_token: "<|im_end|>"',
        'Left out, as it does not change the result: eval_strategy: "steps", push_to_hub: true',
    ]),
    ("base_model: x\nwandb_project: faq\nwandb_name: first\n",
     {"tracking.to": ["wandb"], "tracking.project": "faq", "tracking.name": "first"}, [...]),
    ("base_model: x\nadapter: lora\nlora_model_dir: out/first\nrank_pattern: {q_proj: 32}\n"
     "alpha_pattern: {q_proj: 64}\nneftune_noise_alpha: 5\n",
     {"adapter.start_from": "out/first", "adapter.ranks": {"q_proj": 32}, "training.neftune_noise_alpha": 5},
     ['To be decided: alpha_pattern: {"q_proj": 64}, here leave it out', ...]),
    (f"{FACTORY}adapter_name_or_path: one,two\n", {},
     ['To be decided: adapter_name_or_path: "one,two", here `adapter.start_from`', ...]),
    ("base_model: x\nrope_scaling: {type: yarn, factor: 4.0}\n",
     {"model.rope_scaling": {"rope_type": "yarn", "factor": 4}}, [...]),
    (f"{FACTORY}rope_scaling: yarn\n", {"model.rope_scaling": None}, ["To be decided: rope_scaling: ", ...]),
    (f"{FACTORY}rope_scaling: {{type: dynamic, factor: 2.0}}\n", {"model.rope_scaling": None},
     ["To be decided: rope_scaling: ", ...]),
    ("base_model: x\nadapter: qlora\npissa_init: true\nval_set_size: 20\n", {}, [
        "No data set is named: write `data.train`", "To be decided: val_set_size: 20, here `data.eval_share`",
        "To be decided: `adapter.init`: PiSSA", ...,
    ]),
    (f"{FACTORY}neat_packing: true\nenable_liger_kernel: true\nmask_history: true\n",
     {"data.packing": True, "kernels.fused": "auto", "data.loss_on": "last"}, [...]),
    (f"{FACTORY}deepspeed: examples/deepspeed/ds_z3_config.json\n", {**ZERO, "distributed.stage": "weights"}, [...]),
    (f"{FACTORY}deepspeed: ds_z2_offload_config.json\n",
     {**ZERO, "distributed.stage": "gradients", "distributed.offload": "cpu"}, [...]),
    (f"{FACTORY}deepspeed: deepspeed_configs/zero1.json\n", {**ZERO, "distributed.stage": "optimizer"}, [...]),
    (f"{FACTORY}deepspeed: zero3_bf16_cpuoffload_all.json\n",
     {**ZERO, "distributed.stage": "weights", "distributed.offload": "cpu"}, [...]),
    (f"{FACTORY}deepspeed: ds_z0_config.json\n", {"distributed.kind": None}, [...]),
    (f"{FACTORY}fsdp: full_shard auto_wrap\n", {**FSDP, "distributed.stage": "weights"}, [...]),
    (f"{FACTORY}fsdp: [shard_grad_op, auto_wrap]\n", {**FSDP, "distributed.stage": "gradients"}, [...]),
    ("model_name_or_path: x\nuse_peft: true\ndataset_name: y\nloss_type: sigmoid\nlabel_smoothing: 0.1\n",
     {"training.objective": "dpo", "training.learning_rate": 1e-6, "preference.label_smoothing": None},
     ["Left out, as TRL does not read it for `dpo`: label_smoothing: 0.1", ...]),
    (f"{AXOLOTL_PAIRS}rl: orpo\n    rpo_alpha: 0.5\n    dpo_norm_loss: true\n", {"preference.nll_weight": None},
     ["Left out, as `orpo` ignores it: rpo_alpha: 0.5",
      "May change the result, and has no counterpart here: dpo_norm_loss", ...]),
    ("model_name_or_path: x\ndataset_name: y\nbeta: 0.1\n", {"preference.beta": None},
     ["Left out, as `supervised` ignores it: beta: 0.1", ...]),
    ("model_name_or_path: x\nstage: pt\ndataset: c4_demo\n",
     {"data.train": "c4_demo", "data.format": "text", "data.too_long": "split"}, [...]),
    ("base_model: x\npretraining_dataset: [{path: c4_demo, type: pretrain}]\n",
     {"data.train": "c4_demo", "data.format": "text", "data.too_long": "split"}, [...]),
    # Without an adapter every weight is trained, as there.
    ("base_model: x\n", FULL, [...]),
    ("model_name_or_path: x\ndataset_name: y\nlora_r: 8\n", FULL, [...]),
    # Two keys with one counterpart are both mentioned.
    ("base_model: x\nadapter: lora\nwarmup_steps: 10\nwarmup_ratio: 0.2\n", {"training.warmup": 10},
     ["To be decided: warmup_ratio: 0.2, beside warmup_steps: 10", ...]),
    ("base_model: x\nadapter: lora\ndeepspeed: zero2.json\nfsdp: full_shard\n", ZERO,
     ['To be decided: fsdp: "full_shard", beside deepspeed: "zero2.json"', ...]),
    ("base_model: x\nadapter: lora\nlora_target_modules: [q_proj]\nlora_target_linear: true\n",
     {"adapter.targets": "all-linear"}, ["No data set is named: write `data.train`"]),
    ("base_model: x\nadapter: lora\nload_in_4bit: true\nbnb_4bit_quant_type: nf4\n", {"quantization.kind": "nf4"},
     ["No data set is named: write `data.train`"]),
    # Accumulation follows from the batch.
    ("base_model: x\nmicro_batch_size: 2\nbatch_size: 8\n",
     {"training.batch_size": 8, "training.micro_batch": 2}, [...]),
    ("base_model: x\nmicro_batch_size:\n", {"training.batch_size": 1, "training.micro_batch": 1}, [...]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "ours", "noted"), CASES)
def test_a_config_is_translated_and_what_has_no_counterpart_is_named(
    text: str, ours: dict[str, Any], noted: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value of None is not written. Notes are all there are, but for those that `...` stands for."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps({"identity": {"file_name": "identity.json"}}))
    draft = translate(write(tmp_path, text))
    assert {key: draft.values.get(key) for key in ours} == ours
    wanted = [note for note in noted if note is not ...]
    assert [any(found.startswith(note) for found in draft.notes) for note in wanted] == [True] * len(wanted)
    assert ... in noted or len(draft.notes) == len(noted)
    (tmp_path / "ours.yaml").write_text(draft.text())
    if not any("To be decided: `" in note for note in draft.notes):
        load_config(tmp_path / "ours.yaml")


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        (f"{AXOLOTL_PAIRS}rl: dpo\n    rl_beta: 0.2\n    dpo_label_smoothing: 0.1\n    rpo_alpha: 1.0\n",
         {"objective": "dpo", "beta": 0.2, "label_smoothing": 0.1, "nll_weight": 1.0}),
        (f"{AXOLOTL_PAIRS}rl: ipo\n    rl_beta: 0.01\n    precompute_ref_log_probs: true\n",
         {"objective": "ipo", "beta": 0.01, "reference": "cached"}),
        (f"{AXOLOTL_PAIRS}rl: simpo\n    simpo_gamma: 0.8\n",
         {"objective": "simpo", "beta": 0.1, "target_margin": 0.8, "nll_weight": 1.0}),
        (f"{AXOLOTL_PAIRS}rl: orpo\n    orpo_alpha: 0.3\n", {"objective": "orpo", "beta": 0.3}),
        (f"{AXOLOTL_PAIRS}reward_model: true\n    num_labels: 1\n    center_rewards_coefficient: 0.01\n",
         {"objective": "reward", "reward_centering": 0.01}),
        (f"{AXOLOTL_PAIRS}rl: kto\n    rl_beta: 0.2\n    kto_desirable_weight: 0.5\n",
         {"objective": "kto", "beta": 0.2, "desirable_weight": 0.5}),
        ("model_name_or_path: x\nstage: kto\ndataset: pairs.jsonl\nkto_rejected_weight: 2\n",
         {"objective": "kto", "undesirable_weight": 2}),
        ("model_name_or_path: x\nstage: dpo\ndataset: pairs.jsonl\npref_beta: 0.3\npref_ftx: 0.2\n",
         {"objective": "dpo", "beta": 0.3, "nll_weight": 0.2}),
        ("model_name_or_path: x\nstage: dpo\ndataset: pairs.jsonl\npref_loss: simpo\n",
         {"objective": "simpo", "beta": 0.1, "target_margin": 0.5}),
        ("model_name_or_path: x\nstage: rm\ndataset: pairs.jsonl\nlora_rank: 8\n", {"objective": "reward"}),
        ("model_name_or_path: x\nuse_peft: true\ndataset_name: pairs.jsonl\nloss_type: [robust]\nbeta: 0.2\n",
         {"objective": "robust_dpo", "beta": 0.2, "label_smoothing": 0.0}),
    ],
)  # fmt: skip
def test_training_on_preferences_has_its_counterpart(text: str, ours: dict[str, Any], tmp_path: Path) -> None:
    """Defaults that differ there, such as SimPO's, are written out."""
    path = tmp_path / "ours.yaml"
    first_config.create(None, None, None, write(tmp_path, text), path, yes=True, say=print)
    config = load_config(path)
    section = config.preference.model_dump(exclude_unset=True)
    assert {"objective": config.training.objective, **section} == ours
    assert config.data.format == ("unpaired" if ours["objective"] == "kto" else "pairs")
    assert config.data.too_long == "drop"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("model:\n  name: x\n", "has `base_model` \\(Axolotl\\) or `model_name_or_path`"),
        ("model_name_or_path: x\nlearning_rate: 1.0e-4\n", "LLaMA-Factory or TRL, whose defaults differ"),
        ("base_model: [x\n", "not valid YAML"),
        ("- x\n", "expected `section:` lines"),
    ],
)
def test_a_config_of_an_unknown_tool_is_refused(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        translate(write(tmp_path, text))


COUNTS = translation._COUNTS


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("base_model: x\nrl: grpo\ntrl: {num_generations: 4}\n", 2, "`grpo` is not offered: no answers are written"),
        ("base_model: x\nrl: ebft\n", 2, "`ebft` is not offered"),
        ("base_model: x\nrl: of_tomorrow\n", 2, "`of_tomorrow` is not offered"),
        ("model_name_or_path: x\nstage: sft\nreward_model: y\n", 3, "no answers are written while training here"),
        ("base_model: x\nprocess_reward_model: true\n", 2, "whole answers are scored here"),
        ("base_model: x\nprocessor_type: AutoProcessor\n", 2, "training on images, video and sound is not translated"),
        ("base_model: x\ndiffusion: {noise_schedule: cosine}\n", 2, "text is generated token by token here"),
        ("base_model: x\nadapter: llama-adapter\n", 2, "adapters are LoRA here"),
        ("model_name_or_path: x\nstage: ppo\n", 2, "`ppo` is not offered"),
        ("model_name_or_path: x\nstage: sft\nimage_max_pixels: 262144\n", 3, "images, video and sound"),
        ("model_name_or_path: x\nstage: sft\nfinetuning_type: oft\n", 3, "`oft` is not offered: adapters are LoRA"),
        ("model_name_or_path: x\nstage: sft\ndo_predict: true\n", 3, "that is no training"),
        ("model_name_or_path: x\nadapter_name_or_path: y\nexport_dir: z\n", 3, "`finetune merge`"),
        ("model_name_or_path: x\ndataset_name: y\nnum_generations: 8\n", 3, "no answers are written while training"),
        ("model_name_or_path: x\ndataset_name: y\nloss_type: [sigmoid, sft]\n", 3, "`training.objective` is one of"),
        ("model_name_or_path: x\ndataset_name: y\nloss_type: hinge\n", 3, "`hinge` is not offered: write `dpo`"),
        ("model_name_or_path: x\nstage: dpo\npref_loss: kto_pair\n", 3, "`kto_pair` is not offered"),
        ("model_name_or_path: x\nstage: dpo\nref_model: y\n", 3, "the reference is the model that training starts"),
        *(
            (f"base_model: x\n{key}: {value}\n", 2, "a whole number above 0 is needed")
            for key, value in zip(
                COUNTS * 3, ["0", "-1", "2.5", "'4'", "two", "[4]", "{rows: 4}", "true", "2147483648"], strict=False
            )
        ),
    ],
)
def test_another_kind_of_training_is_refused(text: str, line: int, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        translate(write(tmp_path, text))
    assert str(error.value).startswith(f"{tmp_path / 'theirs.yaml'}:{line}: `")
    assert why in str(error.value)


def test_a_refused_config_leaves_no_file(tmp_path: Path) -> None:
    ours = tmp_path / "ours.yaml"
    theirs = write(tmp_path, "base_model: x\nrl: grpo\nprocessor_type: AutoProcessor\n")
    with refusal(ConfigError, "theirs.yaml:2", "theirs.yaml:3"):
        first_config.create(None, None, None, theirs, ours, yes=True, say=print)
    assert not ours.exists()


def test_rows_of_images_in_dataset_info_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    entry = {"file_name": "mllm_demo.json", "columns": {"messages": "messages", "images": "images"}}
    Path("data/dataset_info.json").write_text(json.dumps({"mllm_demo": entry}))
    with refusal(ConfigError, "`mllm_demo`"):
        translate(write(tmp_path, f"{FACTORY}dataset: mllm_demo\n"))


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["auto", "none", "all", "lora", "dpo", "1e-4", "cosine", "nf4", "a.json", "zero3.json"]),
    st.lists(st.one_of(st.text(max_size=4), st.integers()), max_size=3),
    st.dictionaries(st.text(max_size=4), st.one_of(st.integers(), st.text(max_size=4), st.none()), max_size=3),
)  # fmt: skip
KEYS = sorted({*other_names.NAMES, *translation.CONVERTED, *COUNTS, *translation._DATA, translation._FUSED})


@pytest.mark.slow
@hypothesis.settings(max_examples=100, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(
    tool=st.sampled_from(list(TOOLS.values())), given=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6)
)
def test_any_values_of_any_keys_become_a_config_or_a_refusal(tool: Tool, given: dict[str, Any], tmp_path: Path) -> None:
    """A config that is written can be read: what contradicts itself in it was said in its head."""
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(yaml.safe_dump({tool.model: "x", **{key: given[key] for key in given if key != tool.model}}))
    try:
        text = translate(theirs).text()
    except ConfigError:
        return
    ours.write_text(text)
    try:
        load_config(ours)
    except ConfigError as error:
        for problem in visible(str(error), LINES).splitlines():
            assert f"To be decided: {problem.partition(': ')[2]}" in text
