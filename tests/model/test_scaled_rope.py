"""Bases with a scaled rotary embedding train as in plain transformers and PEFT, on short rows and long ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import EIGHT, in_fp32, metric, same_adapter, sampled, save_base, write_rows
from peft import LoraConfig, get_peft_model
from steps import assert_gradients_close, gradients, micro_batches, ready, stopped_and_resumed
from transformers import AutoConfig, AutoModelForCausalLM

import finetune
from finetune.model.source import rope

ORIGINAL = 48
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "longrope": {
        "short_factor": [1 + n / 10 for n in range(8)], "long_factor": [1.0 + n for n in range(8)],
        "original_max_position_embeddings": ORIGINAL, "factor": 4.0,
    },
}  # fmt: skip


def base_of(folder: Path, like: Path, family: str, kind: str, *, older: bool = False) -> Path:
    """A base of random weights whose config.json says `rope_parameters`, or `rope_scaling` as `older` ones do."""
    includes = kind in ("yarn", "llama3", "longrope")  # the factor, in its positions
    config = AutoConfig.for_model(
        family, vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=ORIGINAL * (4 if includes else 1),
        bos_token_id=0, eos_token_id=2, pad_token_id=3,
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **SCALED[kind]},
    )  # fmt: skip
    torch.manual_seed(0)
    save_base(AutoModelForCausalLM.from_config(config), folder, like)
    if older:
        values = json.loads((folder / "config.json").read_text())
        del values["rope_parameters"]
        values |= {"rope_theta": 10_000.0, "rope_scaling": {"type": kind, **SCALED[kind]}}
        (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def job(tmp_path: Path, quick):
    """A function from overrides to a job on rows that are shorter and longer than the original positions."""
    rows = [
        {"prompt": f"Row {n}: ", "completion": " ".join(f"word{(n * k) % 7}" for k in range(words))}
        for n, words in enumerate([2, 40, 5, 3, 30, 4, 2, 6])
    ]
    return in_fp32(quick, write_rows(tmp_path / "rows.jsonl", rows), "data.max_length=160", "adapter.rank=4")


def plainly(folder: Path, loop: Any, rows: list[list[dict[str, Any]]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers and PEFT, batch by batch, with the adapter's weights of `loop`."""
    weights = {name: weight for name, weight in loop.step.model.named_parameters() if weight.requires_grad}
    settings = LoraConfig(
        r=4, lora_alpha=loop.step.model.peft_config["default"].lora_alpha, target_modules="all-linear"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), settings).train()
    own = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    count = sum(label != -100 for batch in rows for row in batch for label in row["labels"][1:])
    total = 0.0
    for batch in rows:
        longest = max(len(row["input_ids"]) for row in batch)
        filled = [longest - len(row["input_ids"]) for row in batch]
        ids = torch.tensor([[*row["input_ids"], *[3] * more] for row, more in zip(batch, filled, strict=True)])
        labels = torch.tensor([[*row["labels"], *[-100] * more] for row, more in zip(batch, filled, strict=True)])
        mask = torch.tensor([[1] * (longest - more) + [0] * more for more in filled])
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        (loss / count).backward()
        total += float(loss.detach()) / count
    return total, {name: weight.grad for name, weight in own.items()}


WAYS = {
    "padded": [], "fused": ["kernels.fused=on"], "checkpointed": ["memory.checkpointing=all"],
    "packed": ["data.packing=true"], "packed and fused": ["data.packing=true", "kernels.fused=on"],
}  # fmt: skip
OFTEN = [
    *(("llama", kind, ("padded", "packed and fused")) for kind in ("dynamic", "longrope")),  # which follow the rows
    ("llama", "yarn", ("packed and fused",)),
]


@pytest.mark.parametrize(
    ("family", "kind", "ways"),
    sampled(
        [(family, kind, tuple(WAYS)) for family in ("llama", "qwen3") for kind in SCALED] + OFTEN,
        *OFTEN,
    ),
)
def test_losses_and_gradients_are_those_of_plain_transformers(family, kind, ways, job, tiny_base, tmp_path) -> None:
    folder = base_of(tmp_path / "base", tiny_base, family, kind)
    for way in ways:
        loop = ready(job(*EIGHT, f"model.name={folder}", *WAYS[way], run=way))
        rows = [loop.steps.rows[number] for number in range(8)]
        assert min(len(row["input_ids"]) for row in rows) < ORIGINAL < max(len(row["input_ids"]) for row in rows) < 160
        loss, found = gradients(loop, micro_batches(loop, range(8), 8))
        expected, theirs = plainly(folder, loop, [rows])
        assert loss == pytest.approx(expected, rel=1e-5), way
        assert_gradients_close(found, theirs)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])  # whose angles depend on the longest row
def test_a_batch_is_trained_alike_whatever_came_before(kind: str, job, tiny_base, tmp_path) -> None:
    """transformers itself keeps the angles of the longest row, if later ones are not within the original positions."""
    loop = ready(job(*EIGHT, f"model.name={base_of(tmp_path / 'base', tiny_base, 'llama', kind)}"))
    rows = sorted(range(8), key=lambda row: len(loop.steps.rows[row]["input_ids"]))
    longest, second = rows[-1], rows[-2]
    assert ORIGINAL < len(loop.steps.rows[second]["input_ids"]) < len(loop.steps.rows[longest]["input_ids"])
    loss, expected = gradients(loop, micro_batches(loop, [second], 1))
    gradients(loop, micro_batches(loop, [longest], 1))
    again, found = gradients(loop, micro_batches(loop, [second], 1))
    assert again == loss
    assert_gradients_close(found, expected, within=0)


def test_each_kind_of_layer_forgets_longer_batches() -> None:
    """Gemma 3 has angles of its own for sliding layers and for those with full attention."""
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    config = AutoConfig.for_model(
        "gemma3_text", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=ORIGINAL,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": plain, "full_attention": plain | {"rope_type": "dynamic", "factor": 4.0}},
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    rope.forget_longer_batches(model)
    shorter, longer = (torch.arange(tokens)[None] % 64 for tokens in (ORIGINAL + 10, ORIGINAL * 3))
    with torch.no_grad():
        before = model(shorter).logits
        model(longer)
        assert torch.equal(model(shorter).logits, before)


@pytest.mark.parametrize(
    ("kind", "older"),
    sampled([(kind, older) for kind in SCALED for older in (False, True)], ("dynamic", True)),
)
def test_a_run_is_planned_evaluated_resumed_and_merged(kind, older, job, tiny_base, tmp_path) -> None:
    folder = base_of(tmp_path / "base", tiny_base, "llama", kind, older=older)
    settings = [
        f"model.name={folder}", "training.batch_size=2", "training.micro_batch=2", "training.max_steps=4",
        "data.eval_share=0.25", "output.save_every=2", "training.learning_rate=1e-3", "output.merge=false",
    ]  # fmt: skip
    planned = finetune.plan(job(*settings), "cpu")
    assert planned.forecast
    whole = finetune.train(job(*settings, run="whole")).run
    stopped = stopped_and_resumed(job(*settings), 2)
    assert metric(whole, "loss", "eval_loss") == metric(stopped, "loss", "eval_loss")
    assert same_adapter(whole, stopped)
    finetune.merge(whole)
    before, after = (AutoConfig.from_pretrained(place) for place in (folder, whole.merged))
    assert (after.rope_parameters, after.max_position_embeddings) == (
        before.rope_parameters,
        before.max_position_embeddings,
    )
