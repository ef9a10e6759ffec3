"""The jobs and forecasts whose numbers are pinned to the bit. `python tests/golden/golden_jobs.py` records them anew.

A refactoring changes none of these numbers. A repaired bug changes those that it was about: record anew in the commit
that repairs it, and say why there.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

# Before torch is imported: both say how sums are ordered.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import finetune

HERE = Path(__file__).parent
CONFIGS = HERE.parent.parent / "configs"
TRAJECTORIES, FORECASTS = HERE / "trajectories.json", HERE / "forecasts.json"
FUSED_TRAJECTORIES = HERE / "fused_trajectories.json"
# What a number's last bits depend on, besides this repository.
_PACKAGES = ("torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate", "datasets", "tokenizers")

_SHORT = [
    "data.max_length=160", "data.eval_share=0.2", "training.max_steps=6", "training.eval_every=3",
    "training.batch_size=4", "training.micro_batch=2", "training.learning_rate=1e-3", "memory.check=off",
    "output.merge=false",
]  # fmt: skip
_PLAIN = "kernels.fused=off"


def _number_rows(make: Callable[[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """24 rows of uneven length."""
    return [make(f"Write {number} words", " ".join(["word"] * (1 + number * 5 % 23))) for number in range(24)]


def _turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


ROWS = {
    "messages": lambda q, a: {"messages": [*_turns(q, a), *_turns("Again", a[:40])]},
    "sharegpt": lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
    "alpaca": lambda q, a: {"instruction": q, "input": "", "output": a},
    "prompt_completion": lambda q, a: {"prompt": q, "completion": " " + a},
    "preference": lambda q, a: {"prompt": q, "chosen": a, "rejected": "no"},
    "text": lambda q, a: {"text": f"{q}: {a}"},
    "tokenized": lambda q, a: {"input_ids": [3 + ord(c) % 200 for c in q + a]},
}

# Name: format of the rows, and what the job sets besides `_SHORT`.
JOBS: dict[str, tuple[str, list[str]]] = {
    "nf4 on conversations": ("messages", []),
    "nf4, all turns learnt, linear schedule": ("messages", ["data.loss_on=all", "training.schedule=linear"]),
    "nf4 without double quantization, packed": (
        "prompt_completion", ["quantization.double=false", "data.packing=true", "memory.checkpointing=none"],
    ),
    "packed by tokens": (
        "sharegpt", ["training.precision=bf16", "data.packing=true", "training.micro_batch_tokens=256"],
    ),
    "batches by tokens": ("alpaca", ["training.micro_batch_tokens=256", "memory.checkpointing=every-2"]),
    "fp4 with weight-decomposed adapters": (
        "alpaca", ["training.precision=bf16", "quantization.kind=fp4", "adapter.dora=true"],
    ),
    "int8 with dropout": ("preference", ["quantization.kind=int8", "adapter.dropout=0.1"]),
    "16-bit base, rank-stabilised, fused AdamW": (
        "prompt_completion", [
            "quantization.kind=none", "training.precision=bf16", "adapter.rslora=true",
            "optimizer.kind=adamw_torch_fused",
        ],
    ),
    "fp32 base from principal singular values": (
        "text", [
            "quantization.kind=none", "training.precision=fp32", "adapter.init=pissa", "optimizer.kind=adamw_32bit",
        ],
    ),
    "every weight trained": (
        "text", [
            "quantization.kind=none", "adapter.kind=none", "training.learning_rate=1e-4", "memory.checkpointing=none",
        ],
    ),
    "token ids, gradients not clipped": ("tokenized", ["training.max_grad_norm=0"]),
    "last norm trained whole": ("text", ["adapter.extra_modules=[norm]", "adapter.targets=[q_proj, v_proj]"]),
    "bf16 adapter, Lion": (
        "sharegpt", ["training.precision=bf16", "adapter.dtype=bfloat16", "optimizer.kind=lion_8bit"],
    ),
    "Adafactor with weight decay": (
        "tokenized", ["optimizer.kind=adafactor", "optimizer.weight_decay=0.1", "training.group_by_length=false"],
    ),
    "SGD in small tiles of the loss": ("messages", ["optimizer.kind=sgd", "memory.loss_tokens=32"]),
    "AdEMAMix, rows split": (
        "text", [
            "optimizer.kind=ademamix_8bit", "data.too_long=split", "data.max_length=48", "training.schedule=constant",
        ],
    ),
}  # fmt: skip
# The same for jobs with `kernels.fused: auto`, in float32, beside the losses of PEFT's modules. FAMILY stands
# for the folder of a base of another family, which has norms of queries and keys, and joint heads of keys.
FAMILY = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 192,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
FUSED: dict[str, tuple[str, list[str]]] = {
    "nf4 on conversations": ("messages", []),
    "base not quantized, packed": (
        "prompt_completion", [
            "quantization.kind=none", "data.packing=true", "memory.checkpointing=none", "optimizer.kind=adamw_32bit",
        ],
    ),
    "another family, random weights": (
        "sharegpt", [
            "model.name=FAMILY", "model.weights=random", "model.tokenizer=builtin:tiny-llama", "memory.loss_tokens=64",
        ],
    ),
}  # fmt: skip
RESUMED = "nf4, resumed after three steps"
_RESUMED_AFTER = 3

# Name: config file, card, and overrides; every layer is recomputed where these say nothing of it, and none is fused.
PLANS: dict[str, tuple[str, str, list[str]]] = {
    "tiny here": ("tiny_cpu", "cpu", []),
    "tiny, packed": ("tiny_cpu", "cpu", ["data.packing=true"]),
    "tiny, int8": ("tiny_cpu", "cpu", ["quantization.kind=int8"]),
    "tiny, fp4": ("tiny_cpu", "cpu", ["quantization.kind=fp4", "quantization.double=false"]),
    "tiny, 16-bit": ("tiny_cpu", "cpu", ["quantization.kind=none"]),
    "tiny, every weight": ("tiny_cpu", "cpu", ["quantization.kind=none", "adapter.kind=none"]),
    "tiny, DoRA": ("tiny_cpu", "cpu", ["adapter.dora=true", "memory.checkpointing=none"]),
    "tiny, fp32": ("tiny_cpu", "cpu", ["training.precision=fp32", "quantization.kind=none"]),
    "tiny, merged": ("tiny_cpu", "cpu", ["output.merge=true", "memory.loss_tokens=64"]),
    "tiny, Adafactor": ("tiny_cpu", "cpu", ["optimizer.kind=adafactor", "memory.checkpointing=every-2"]),
    "tiny on a card": ("tiny_cpu", "RTX 3090", []),
    "tiny on a card, packed": ("tiny_cpu", "RTX 3090", ["data.packing=true"]),
    "tiny on a card, 16-bit, SGD": ("tiny_cpu", "RTX 4090", ["quantization.kind=none", "optimizer.kind=sgd"]),
    "tiny on a card, int8": ("tiny_cpu", "A100 80GB", ["quantization.kind=int8"]),
    "tiny on a card, fp16": ("tiny_cpu", "T4", ["training.precision=fp16"]),
    "tiny on a card, everything auto": (
        "tiny_cpu", "RTX 3090", ["training.micro_batch=auto", "memory.checkpointing=auto"],
    ),
    "7B": ("llama7b_qlora", "RTX 3090", []),
    "7B in 16 bits": ("llama7b_lora_16bit", "RTX 3090", []),
    "8B, offloaded": ("llama3_8b_qlora", "RTX 4090", ["memory.offload=checkpoints", "training.micro_batch=4"]),
    "9B with capped logits": ("gemma2_9b_qlora", "A100 80GB", ["data.max_length=1024"]),
    "tiny here, fused": ("tiny_cpu", "cpu", ["kernels.fused=auto"]),
    "7B, fused": ("llama7b_qlora", "RTX 3090", ["kernels.fused=auto"]),
}  # fmt: skip


def machine() -> dict[str, str]:
    """What the last bits of a number depend on, besides this repository."""
    return {"cpu": _processor(), **{package: metadata.version(package) for package in _PACKAGES}}


def _processor() -> str:
    """The kind of processor: MKL and oneDNN choose their products by more than its vector instructions."""
    kinds = [torch.backends.cpu.get_cpu_capability(), platform.machine()]
    if (found := Path("/proc/cpuinfo")).is_file():
        lines = dict(re.findall(r"^(vendor_id|cpu family|model)\s*: (.+)$", found.read_text(), re.MULTILINE))
        kinds += [f"{name} {value}" for name, value in lines.items()]
    return ", ".join(kinds)


def trajectory(name: str, folder: Path) -> dict[str, Any]:
    """Train the job `name` in `folder`: every step's and evaluation's numbers, and a hash of the adapter's weights."""
    if name == RESUMED:
        _train("messages", [_PLAIN, "training.schedule=constant", f"training.max_steps={_RESUMED_AFTER}"], folder)
        return _train("messages", [_PLAIN, "training.schedule=constant"], folder)
    format, changes = JOBS[name]
    return _train(format, [_PLAIN, *changes], folder)


def fused_trajectory(name: str, folder: Path) -> dict[str, Any]:
    """The same for the job `name` of FUSED."""
    format, changes = FUSED[name]
    return _train(format, ["kernels.fused=auto", *changes], folder)


def _with_plain_steps(name: str, folder: Path) -> dict[str, Any]:
    """A trajectory of FUSED, and the steps of that job with PEFT's modules."""
    format, changes = FUSED[name]
    plain = folder / "plain"
    plain.mkdir()
    return {**fused_trajectory(name, folder), "plain_steps": _train(format, [_PLAIN, *changes], plain)["steps"]}


def _train(format: str, changes: list[str], folder: Path) -> dict[str, Any]:
    rows = folder / f"{format}.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in _number_rows(ROWS[format])))
    if "model.name=FAMILY" in changes:
        base = folder / "base"
        base.mkdir()
        (base / "config.json").write_text(json.dumps(FAMILY))
        changes = [change.replace("FAMILY", str(base)) for change in changes]
        torch.manual_seed(0)  # of the base's weights
    job = [*_SHORT, f"data.train={rows}", f"data.format={format}", f"output.dir={folder / 'run'}", *changes]
    run = finetune.train(finetune.load_config(CONFIGS / "tiny_cpu.yaml", job)).run
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    folder = run.path / ("merged" if "adapter.kind=none" in changes else "adapter")
    [weights] = sorted(folder.glob("*.safetensors"))
    return {
        "steps": [[line["loss"], line["grad_norm"]] for line in lines if "loss" in line],
        "evaluations": [line["eval_loss"] for line in lines if "eval_loss" in line],
        "weights": hashlib.sha256(_tensors(weights)).hexdigest(),
    }


def _tensors(file: Path) -> bytes:
    """The tensors of a safetensors file without its header, whose metadata name versions."""
    content = file.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def plan(name: str) -> dict[str, Any]:
    """The forecast of `name` as `plan --json` prints it; for a CPU without what is this process's or machine's."""
    config, card, changes = PLANS[name]
    changes = ["memory.checkpointing=all", _PLAIN, *changes]
    budget = ["memory.budget=4GiB"] if card == "cpu" else []
    made = finetune.plan(finetune.load_config(CONFIGS / f"{config}.yaml", [*changes, *budget]), card).as_dict()
    del made["quantization"], made["precision"], made["learning_rate"], made["evidence"]  # as configured
    if card == "cpu":
        del made["device"], made["needed_bytes"], made["host_bytes"], made["categories"]["context"]
        del made["moved_bytes"], made["seconds"]  # what bandwidth bounds depends on the rates measured here
    return made


def record() -> None:
    """Write the files of pinned numbers."""
    torch.set_num_threads(1)
    _write(TRAJECTORIES, "trajectories", _each([*JOBS, RESUMED], trajectory))
    _write(FUSED_TRAJECTORIES, "trajectories", _each(FUSED, _with_plain_steps))
    _write(FORECASTS, "forecasts", {name: plan(name) for name in PLANS})


def _each(names: Iterable[str], train: Callable[[str, Path], dict[str, Any]]) -> dict[str, Any]:
    trajectories = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            trajectories[name] = train(name, Path(folder))
    return trajectories


def _write(file: Path, what: str, found: dict[str, Any]) -> None:
    # One line a job: a change of one shows as such.
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    file.write_text(f'{{"machine": {json.dumps(machine())},\n "{what}": {{\n{lines}\n}}}}\n')


def differences(pinned: Any, found: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """Where two JSON values differ: numbers by more than `tolerance`, relative; everything else at all."""
    if isinstance(pinned, dict) and isinstance(found, dict) and pinned.keys() == found.keys():
        for key in pinned:
            yield from differences(pinned[key], found[key], tolerance, f"{where}.{key}")
    elif isinstance(pinned, list) and isinstance(found, list) and len(pinned) == len(found):
        for number, (one, other) in enumerate(zip(pinned, found, strict=True)):
            yield from differences(one, other, tolerance, f"{where}[{number}]")
    elif all(isinstance(one, int | float) and not isinstance(one, bool) for one in (pinned, found)):
        if abs(pinned - found) > tolerance * abs(pinned):
            yield f"{where}: {pinned!r} is now {found!r}"
    elif pinned != found:
        yield f"{where}: {pinned!r} is now {found!r}"


if __name__ == "__main__":
    record()
