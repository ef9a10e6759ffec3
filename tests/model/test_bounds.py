"""A base takes the tokens it has embeddings for, and rows no longer than its positions; what is more is known early."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import every_architecture
import pytest
import torch
from jobs import QUICK, sampled, write_rows
from messages import refusal
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import finetune
from finetune.choices import load_config
from finetune.config import Config
from finetune.errors import ArtifactError, ConfigError, DataError
from finetune.generation.answering import answers
from finetune.generation.settings import Settings
from finetune.model import bounds
from finetune.model.attention import backends
from finetune.report.terminal import Terminal
from finetune.storage.rundir import RunDirectory
from finetune.training import sample_answers

POSITIONS = 40
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, "eos_token_id": 0}
LLAMA: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": POSITIONS,
}  # fmt: skip


@pytest.fixture
def make_base(tmp_path: Path, tiny_base: Path):
    """A function from an architecture to a directory with a model of random weights and the built-in tokenizer."""

    def make(kind: str, values: dict[str, Any], *, more_tokens: int = 0, weights: bool = True) -> Path:
        folder = tmp_path / kind
        tokenizer = AutoTokenizer.from_pretrained(tiny_base)
        config = AutoConfig.for_model(kind, vocab_size=len(tokenizer) + more_tokens, **values)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if not weights:
            (folder / "model.safetensors").unlink()
        return folder

    return make


@pytest.fixture
def long_rows(tmp_path: Path) -> Path:
    """Rows of which some are longer than the positions of the bases here, in question or in answer."""
    sizes = [(2, 3), (2, 90), (90, 3), (3, 2)] * 6
    rows = [
        [{"role": "user", "content": f"{n} " + "ask " * asked}, {"role": "assistant", "content": "say " * said}]
        for n, (asked, said) in enumerate(sizes)
    ]
    return write_rows(tmp_path / "rows.jsonl", [{"messages": row} for row in rows])


class Notes(Terminal):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


# -- positions ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # peft, of GPT-2's layers
@pytest.mark.parametrize(("kind", "values"), sampled([("gpt2", GPT2), ("llama", LLAMA)], ("gpt2", GPT2)))
def test_the_default_length_is_lowered_to_the_bases_positions_with_a_note(
    make_base, long_rows, tmp_path, kind, values, one_sample_answer, monkeypatch
) -> None:
    monkeypatch.setattr(sample_answers, "QUESTIONS", 3)
    (tmp_path / "job.yaml").write_text("training: {precision: fp32}\nquantization: {kind: none}\n")
    job = [f"model.name={make_base(kind, values)}", f"data.train={long_rows}", "data.eval_share=0.5"]
    config = load_config(
        tmp_path / "job.yaml", [*QUICK, *job, "training.max_steps=1", f"output.dir={tmp_path / 'run'}"]
    )
    terminal = Notes()
    found = finetune.train(config, terminal=terminal)
    assert [note for note in terminal.notes if f" to {POSITIONS}, the positions" in note]
    assert found.run.config().data.max_length == POSITIONS
    assert max(line["tokens"] for line in found.run.metrics() if "tokens" in line) > 0
    finetune.train(config, terminal=terminal)
    assert "is finished" in terminal.notes[-1], "the same command goes on with the same length"
    answers = json.loads(found.run.answers_file.read_text())
    assert len(answers) >= (1 if kind == "gpt2" else 3)
    assert {"data", "plan"} == {
        name
        for name, length in {
            "data": finetune.inspect_data(config).inspection.train.longest,
            "plan": finetune.plan(config, "cpu").forecast.batch.tokens,
        }.items()
        if length == POSITIONS
    }


def test_an_explicit_length_is_refused_if_positions_are_a_table(make_base, quick) -> None:
    base = make_base("gpt2", GPT2, weights=False)
    config = quick(f"model.name={base}", f"data.max_length={POSITIONS + 1}")
    for run in (finetune.train, finetune.inspect_data, lambda config: finetune.plan(config, "cpu")):
        with refusal(ConfigError, "`data.max_length`"):
            run(config)


def test_an_explicit_length_is_kept_with_a_note_if_positions_are_computed(quick) -> None:
    config = quick("data.max_length=80")
    changes, note = bounds.within_positions(config.model, config.data, AutoConfig.for_model("llama", **LLAMA))
    assert changes == {}
    assert "`data.max_length` 80 is above the 40 positions" in str(note)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gptj", "gpt_neo", "mpt", "bloom", "falcon", "llama"])
def test_a_model_with_a_position_table_fails_beyond_its_end(kind: str) -> None:
    config = every_architecture.config(kind)
    if kind == "falcon":
        config.alibi = True
    implementation, _ = backends.choose("auto", config, "cpu", "fp32")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    model(torch.ones(1, 512, dtype=torch.long))
    try:
        model(torch.ones(1, 513, dtype=torch.long))
    except (IndexError, RuntimeError):
        assert bounds.table_size(model) == 512
    else:
        assert bounds.table_size(model) is None


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 100),
        ({"rope_type": "default"}, 100),
        ({"rope_type": "linear", "factor": 4.0}, 400),
        ({"rope_type": "dynamic", "factor": 2.5}, 250),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 50}, 400),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 50}, 100),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 50}, 100),
        ({"rope_type": "linear", "factor": float("inf")}, 100),
    ],
)
def test_rotary_scaling_counts(rope: dict[str, Any], expected: int) -> None:
    config = AutoConfig.for_model("llama", max_position_embeddings=100)
    config.rope_parameters = {"rope_theta": 10_000.0, **rope}
    assert bounds.positions(config) == expected


def test_a_base_without_a_limit_of_positions_leaves_the_length_alone() -> None:
    architecture = every_architecture.config("bloom")
    assert bounds.within_positions(Config().model, Config().data, architecture) == ({}, None)


def test_an_answer_ends_with_the_positions_and_a_prompt_that_takes_them_all_is_refused(make_base) -> None:
    base = make_base("gpt2", GPT2)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    assert len(list(answers(model, tokenizer, [tokenizer("a")["input_ids"]], Settings(500)))) == 1
    with refusal(ConfigError, "tokens, but the base only 40 positions"):
        answers(model, tokenizer, [tokenizer("word " * POSITIONS)["input_ids"]], Settings(5))


# -- vocabulary --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tokenizer_with_ids_beyond_the_embedding_is_refused_before_weights_are_loaded(
    make_base, quick, trained: RunDirectory, tmp_path: Path
) -> None:
    base = make_base("llama", LLAMA, more_tokens=-700, weights=False)
    config = quick(f"model.name={base}", "training.max_steps=1")
    for run in (finetune.train, lambda config: finetune.plan(config, "cpu")):
        with refusal(ArtifactError, "has embeddings for"):
            run(config)
    run = RunDirectory(shutil.copytree(trained.path, tmp_path / "run"))
    run.config_file.write_text(run.config_file.read_text().replace("builtin:tiny-llama", str(base)))
    for use in (lambda: finetune.generate(run, "x"), lambda: finetune.evaluate(run)):
        with pytest.raises(ArtifactError):
            use()


@pytest.mark.parametrize("wrong", [-1, 2_048, 2**31, 10**30])
def test_a_token_id_outside_the_vocabulary_is_a_problem_of_its_row(wrong: int, quick, tmp_path: Path) -> None:
    file = tmp_path / "tokens.jsonl"
    file.write_text(json.dumps({"input_ids": [5, wrong]}) + "\n")
    config: Config = quick(f"data.train={file}", "data.eval=none")
    with refusal(DataError, "tokens.jsonl:1", "`input_ids[1]`", wrong):
        finetune.inspect_data(config)


def test_a_special_token_of_a_template_that_the_base_was_not_given_is_named(make_base, quick, rows_file) -> None:
    base = make_base("llama", {**LLAMA, "max_position_embeddings": 1024})
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]}
    )
    tokenizer.save_pretrained(base)
    config = quick(f"model.name={base}", "data.chat_template=llama3")
    with refusal(ArtifactError, "rows.jsonl:"):
        finetune.train(config, terminal=Notes())
