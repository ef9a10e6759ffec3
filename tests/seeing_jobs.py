"""Jobs of the tiny bases that see, and their rows as transformers' own processors make them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import seeing
import torch
from PIL import Image
from transformers import ProcessorMixin

import finetune
from finetune.config import Config
from finetune.storage.rundir import RunDirectory

AFTER = {"qwen3_vl": "none", "gemma3": "nf4", "idefics3": "none"}
"""The families whose runs are looked at after training, and the quantization of their bases."""

ANSWERS = ("a red square", "a blue circle and a red one", "two")


def example(folder: Path, number: int) -> dict[str, Any]:
    """A row of none, one or two images, (34, 20) to (60, 58) pixels, with an answer of its own length."""
    names = [
        seeing.picture(folder, f"{number}_{at}.png", (34 + 13 * at, 20 + 19 * at), number) for at in range(number % 3)
    ]
    shown = [{"type": "image", "path": name} for name in names]
    asked = [*shown[:1], {"type": "text", "text": f"Row {number}: what is it?"}, *shown[1:]]
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": ANSWERS[number % len(ANSWERS)]},
        ]
    }


def dialogue(folder: Path, number: int) -> dict[str, Any]:
    """A row of two or three questions, each with as many images as a digit says, of different sizes, and answers."""
    turns: list[dict[str, Any]] = []
    for turn, digit in enumerate(("12", "01", "20", "102", "111", "00")[number % 6]):
        names = [
            seeing.picture(folder, f"d{number}_{turn}_{at}.png", (60 - 13 * turn, 24 + 17 * at), 9 * turn + at)
            for at in range(int(digit))
        ]
        shown = [{"type": "image", "path": name} for name in names]
        asked = [*shown[:1], {"type": "text", "text": f"Row {number}, question {turn}?"}, *shown[1:]]
        answer = ANSWERS[(number + turn) % len(ANSWERS)]
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def config(folder: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "model.name": str(folder / "base"), "model.vision": "frozen", "quantization.kind": "none",
        "data.train": str(folder / "rows.jsonl"), "data.eval": "none", "data.max_length": 256,
        "training.batch_size": 6, "training.micro_batch": 3, "training.max_steps": 1, "training.precision": "fp32",
        "memory.check": "off", "output.dir": str(folder / "run"), **changes,
    }  # fmt: skip
    if "training.micro_batch_tokens" in changes:
        del values["training.micro_batch"]
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return finetune.load_config(sections)


def as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a list, as each family's chat template reads it."""
    content = message["content"]
    return message if isinstance(content, list) else {**message, "content": [{"type": "text", "text": content}]}


apply_chat_template = ProcessorMixin.apply_chat_template  # without the arguments that SmolVLM's adds for films


def plain_inputs(folder: Path, processor: Any, row: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A row as the family's processor makes it, with labels on each answer and the token that ends it."""
    messages = [as_parts(message) for message in row["messages"]]

    def processed(several: list[dict[str, Any]], **options: Any) -> Any:
        parts = [part for message in several for part in message["content"]]
        shown = [Image.open(folder / part["path"]) for part in parts if part["type"] == "image"]
        text = apply_chat_template(processor, several, **options)
        images = [shown] if shown else None
        return processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)

    whole = processed(messages)
    ids, labels = whole["input_ids"], torch.full_like(whole["input_ids"], -100)
    ends = {processor.tokenizer.convert_tokens_to_ids(name) for name in seeing.ENDS}
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            first = processed(messages[:turn], add_generation_prompt=True)["input_ids"].shape[1]
            end = next(at for at in range(first, ids.shape[1]) if int(ids[0, at]) in ends)
            labels[:, first : end + 1] = ids[:, first : end + 1]
    return {**whole, "labels": labels}


@dataclass(frozen=True)
class SeeingRun:
    """A finished run of a family on `rows.jsonl` in `folder`, beside `base/`. Do not write to it."""

    family: str
    folder: Path

    def train(self) -> None:
        """Make the base and the rows, and train enough for the adapter to matter."""
        self.folder.mkdir()
        seeing.base(self.folder / "base", self.family)
        seeing.rows(self.folder, [example(self.folder, number) for number in range(6)])
        changes = {
            "quantization.kind": AFTER[self.family], "training.max_steps": 6, "training.learning_rate": 0.005,
            "data.eval": str(self.folder / "held_out.jsonl"), "output.merge": False,
        }  # fmt: skip
        seeing.rows(self.folder, [example(self.folder, number) for number in range(6, 12)], "held_out.jsonl")
        finetune.train(config(self.folder, **changes))

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.folder / "run")

    def copied(self, folder: Path) -> RunDirectory:
        """A copy in `folder`, to write to."""
        return RunDirectory(shutil.copytree(self.run.path, folder / "run"))

    @property
    def processor(self) -> Any:
        """The family's own, from transformers."""
        return seeing.FAMILIES[self.family]()[1]

    def rows(self) -> list[dict[str, Any]]:
        """The held-out rows: none, one and two images, twice."""
        return [json.loads(line) for line in (self.folder / "held_out.jsonl").read_text().splitlines()]
