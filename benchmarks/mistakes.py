"""Mistakes that people make in a first config or in their data, and what they are told: tests/config/mistakes.md.

    python benchmarks/mistakes.py > tests/config/mistakes.md

Each is made in an empty folder with a few files, on the built-in base. `tests/config/test_mistakes.py` holds each
message to the table, to its cure and to its length.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune.config import Config
from finetune.data.prepare import prepare
from finetune.errors import FinetuneError
from finetune.forecast import devices
from finetune.model import build
from finetune.model.base import load_architecture
from finetune.model.source.tokenizer import load_tokenizer
from finetune.settings import load_config

LONGEST = 350
"""Characters that one mistake may take to explain."""

_ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}


@dataclass(frozen=True)
class Mistake:
    """What a person wrote: lines of the config, overrides or rows; and `cure`, what the message must name."""

    source: str
    config: str
    cure: str
    rows: str | None = None
    """The content of rows.jsonl."""
    gpu: str | None = None
    overrides: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The mistake as it was written."""
        if self.rows is not None:
            return f"`{self.rows.strip().splitlines()[0]}`" + (f" with `{self.config}`" if self.config else "")
        given = [*self.config.splitlines(), *self.overrides, *([f"--gpu {self.gpu}"] if self.gpu else [])]
        return "<br>".join(f"`{part}`" for part in given if part)


def _other(tool: str, *mistakes: tuple[str, str]) -> list[Mistake]:
    return [Mistake(tool, config, cure) for config, cure in mistakes]


def _rows(*mistakes: tuple[object, str] | tuple[object, str, str]) -> list[Mistake]:
    found = []
    for row, cure, *config in mistakes:
        text = row if isinstance(row, str) else json.dumps(row)
        found.append(Mistake("data", config[0] if config else "", cure, rows=text + "\n"))
    return found


MISTAKES = [
    *_other(
        "Axolotl",
        ("base_model: Qwen/Qwen3-8B", "`model.name`"),
        ("load_in_4bit: true", "`quantization.kind: nf4`"),
        ("adapter: qlora", "`quantization.kind: nf4` and `adapter.kind: lora`"),
        ("optimizer: adamw_bnb_8bit", "`optimizer.kind: adamw_8bit`"),
        ("lora_r: 32", "`adapter.rank`"),
        ("lora_target_linear: true", "`adapter.targets: all-linear`"),
        ("sequence_len: 4096", "`data.max_length`"),
        ("sample_packing: true", "`data.packing`"),
        ("micro_batch_size: 2", "`training.micro_batch`"),
        ("gradient_accumulation_steps: 4", "`training.batch_size`"),
        ("num_epochs: 3", "`training.epochs`"),
        ("val_set_size: 0.05", "`data.eval_share`"),
        ("lora_model_dir: runs/first/adapter", "`adapter.start_from`"),
        ("datasets:\n  - path: rows.jsonl\n    type: alpaca", "`data.train`"),
    ),
    *_other(
        "LLaMA-Factory",
        ("model_name_or_path: Qwen/Qwen3-8B", "`model.name`"),
        ("stage: sft", "`training.objective"),
        ("stage: dpo", "`dpo` is not offered"),
        ("finetuning_type: lora", "`adapter.kind`"),
        ("lora_target: all", "`adapter.targets`"),
        ("quantization_bit: 4", "`quantization.kind: nf4`"),
        ("rope_scaling: yarn", "`model.rope_scaling`"),
        ("dataset: alpaca_en_demo", "`data.train`"),
        ("template: qwen", "`data.chat_template`"),
        ("cutoff_len: 2048", "`data.max_length`"),
        ("adapter_name_or_path: saves/first", "`adapter.start_from`"),
        ("val_size: 0.1", "`data.eval_share`"),
    ),
    *_other(
        "Unsloth",
        ("max_seq_length: 2048", "`data.max_length`"),
        ("adapter:\n  r: 16", "`adapter.rank`"),
        ("adapter:\n  target_modules: [q_proj]", "`adapter.targets`"),
        ("training:\n  random_state: 3407", "`training.seed`"),
        ("use_gradient_checkpointing: unsloth", "`memory.checkpointing`"),
        ("dataset_text_field: text", "`data.columns`"),
    ),
    *_other(
        "TRL",
        ("lr: 1e-4", "`training.learning_rate`"),
        ("per_device_train_batch_size: 2", "`training.micro_batch`"),
        ("training:\n  num_train_epochs: 3", "`training.epochs`"),
        ("lr_scheduler_type: cosine", "`training.schedule`"),
        ("optim: adamw_torch", "`optimizer.kind`"),
        ("bf16: true", "`training.precision: bf16`"),
        ("report_to: wandb", "`tracking.to`"),
        ("logging_steps: 1", "tracking.log_every"),
        ("rank_pattern: {q_proj: 32}", "`adapter.ranks`"),
        ("neftune_noise_alpha: 5", "`training.neftune_noise_alpha`"),
        ("assistant_only_loss: true", "`data.loss_on: assistant`"),
    ),
    *_other(
        "misspelt",
        ("adaptor:\n  rank: 16", "did you mean `adapter`?"),
        ("model:\n  nmae: x", "did you mean `name`?"),
        ("model:\n  rope_scaling: {type: yarn, factor: 4}", "did you mean `rope_type`?"),
        ("model:\n  name: builtin:tiny-lama", "did you mean `builtin:tiny-llama`?"),
        ("data:\n  train: rows.json", "did you mean `rows.jsonl`?"),
        ("quantization:\n  kind: nf", "did you mean `nf4`?"),
        ("training:\n  schedule: cosin", "did you mean `cosine`?"),
        ("adapter:\n  targets: q_prj", "did you mean `q_proj`?"),
        ("adapter:\n  ranks: {q_prj: 32}", "did you mean `q_proj`?"),
    ),
    Mistake("misspelt", "", "did you mean `max_steps`?", overrides=("training.max_step=20",)),
    Mistake("misspelt", "", "did you mean `RTX 4090`", gpu="RTX 4900"),
    Mistake("value", "", "24GiB", gpu="0GiB"),
    *_other(
        "value",
        ("training:\n  learning_rate: 20", "1e-5 to 1e-3"),
        ("adapter:\n  rank: 2000", "8 to 256"),
        ("adapter:\n  dropout: 10", "0 to 0.1"),
        ("model:\n  rope_scaling: {rope_type: dynamic, factor: 2}", "'yarn'"),
        ("memory:\n  limit: 24GB", "24GiB"),
        ("quantization:\n  kind: 4bit", "`nf4`"),
        ("quantization:\n  kind: fp8", "`int8`"),
        ("training:\n  objective: dpo", "TRL"),
        ("optimizer:\n  kind: muon", "`adamw_torch_fused`"),
        ("training:\n  precision: float16", "`fp16`"),
        ("adapter:\n  targets: q_proj,v_proj", "[q_proj, v_proj]"),
        ("training:\n\tmax_steps: 20", "indent with spaces"),
        ("training:\n  batch_size: 10\n  micro_batch: 4", "is 2"),
        ("data:\n  eval_share: 5", "less than 1"),
        ("model: builtin:tiny-llama", "`model.name: builtin:tiny-llama`"),
        ("model:\n  name:builtin:tiny-llama", "`name: builtin:tiny-llama`"),
        ("model:\n  name = builtin:tiny-llama", "`name: builtin:tiny-llama`"),
        ("training.max_steps: 20", "`training:`"),
        ("data:\n  columns: prompt", "{name: value}"),
        ("data:\n  train: *.jsonl", "./*.jsonl"),
        ("data:\n  train: https://example.com/rows.jsonl", "download"),
        ("data:\n  train: rows.jsonl\n  eval: rows.jsonl", "`data.eval: auto`"),
        ("adapter:\n  kind: none", "`quantization.kind: none`"),
    ),
    *_rows(
        ({"question": "Hi?", "answer": "Hello!"}, "`data.columns: {instruction: question, output: answer}`"),
        ({"prompt": "Hi?", "answer": "Hello!"}, "`{completion: answer}`"),
        ({"Prompt": "Hi?", "Answer": "Hello!"}, "`data.columns: {instruction: Prompt, output: Answer}`"),
        ({"customer_message": "Hi?", "agent_reply": "Hello!"}, "`{prompt: customer_message, completion: agent_reply}`"),
        ({"sender": "Ann", "text": "Hi"}, "`data.format: text`"),
        ({"chat": _ROW["messages"]}, "`data.columns: {messages: chat}`"),
        ({"title": "Hi?", "views": 3}, "`data.columns`"),
        ({"question": "Hi?", "answer": "Hello!"}, "did you mean `question`?", "columns: {prompt: questions}"),
        ({"text": "Hi"}, "did you mean `completion`?", "columns: {completions: text}"),
        ({"messages": [{"role": "bot", "content": "Hi"}]}, "assistant"),
        ({"messages": [{"role": "user", "text": "Hi"}]}, "`messages[0].content`"),
        ({"messages": "Hi"}, "list"),
        ('{"text": "Hi",}', "not valid JSON"),
        ({"prompt": "Hi?", "completion": "Hello!", "label": False}, "label"),
        ({"prompt": "Hi?", "completion": ""}, "empty answer"),
    ),
]


@contextlib.contextmanager
def workplace() -> Iterator[None]:
    """A folder with rows.jsonl, the current one within the block."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def message(mistake: Mistake) -> str:
    """What a person is told, in a folder of `workplace`. Raises AssertionError if the mistake goes unnoticed."""
    Path("rows.jsonl").write_text(mistake.rows or json.dumps(_ROW) + "\n")
    config = mistake.config
    if mistake.rows is not None:
        config = "data:\n  train: rows.jsonl\n" + (f"  {config}\n" if config else "")
    Path("job.yaml").write_text(config + "\n")
    try:
        _check(load_config("job.yaml", mistake.overrides), mistake.gpu)
    except FinetuneError as error:
        return str(error)
    raise AssertionError(f"nothing is said of {mistake.shown}")


def _check(job: Config, gpu: str | None) -> None:
    """What `finetune train` checks before the weights are loaded."""
    devices.find(gpu or "cpu", job.memory)
    tokenizer = load_tokenizer(job.model, job.data.chat_template)
    build.blueprint(job, load_architecture(job.model), "eager").check(job.adapter)
    prepare(job.data, tokenizer)


def told() -> list[tuple[Mistake, str]]:
    """Each mistake with what is said of it."""
    with workplace():
        return [(mistake, message(mistake)) for mistake in MISTAKES]


def page(told: Sequence[tuple[Mistake, str]]) -> str:
    """tests/config/mistakes.md."""
    lines = [
        "# Mistakes and messages",
        "",
        "What is said of mistakes that people make in a first config: keys of other tools, misspellings, values and",
        "columns. Made by `python benchmarks/mistakes.py`; a test holds each message to the table, to at most",
        f"{LONGEST} characters, and to the cure in it.",
        "",
        "| | written | said | characters | names the cure |",
        "| --- | --- | --- | --- | --- |",
    ]
    for mistake, said in told:
        named = "yes" if mistake.cure in said else "no"
        cells = [mistake.source, mistake.shown, said.replace("\n", "<br>"), str(len(said)), named]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(page(told()))
