"""The small job that many tests train, and what came of it."""

import functools
import json
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from finetune.config import Config
from finetune.storage.rundir import RunDirectory

OLD_TORCH = Version(torch.__version__).release < (2, 12)
lacks = functools.partial(pytest.mark.skipif, OLD_TORCH)
"""Marks a test of what torch 2.11 lacks, with the reason: `@lacks(reason="...")`."""

TINY = Path(__file__).parent.parent / "configs" / "tiny_cpu.yaml"

# A job of seconds: short rows, few of them, one evaluation at each end, no layer recomputed, and neither forecast
# nor fused kernels, whose proofs take as long again.
QUICK = [
    "training.max_steps=4", "training.batch_size=4", "training.micro_batch=2", "output.merge=false", "memory.check=off",
    "kernels.fused=off", "memory.checkpointing=none",
]  # fmt: skip


BF16 = Config().changed({"training.precision": "bf16"})
"""The default job, in the same precision on every processor."""

# All rows of a step at once, and no evaluation.
EIGHT = ["training.batch_size=8", "training.micro_batch=8", "data.eval=none", "training.eval_every=null"]


def in_fp32(quick: Callable[..., Any], rows: Path, *settings: str) -> Callable[..., Any]:
    """A function from overrides to a `quick` job on the file `rows` with these settings, whose numbers are exact."""

    def make(*overrides: str, run: str = "run") -> Any:
        exact = ["quantization.kind=none", "training.precision=fp32", "adapter.dropout=0"]
        return quick(f"data.train={rows}", *exact, *settings, *overrides, run=run)

    return make


def sampled(cases: Iterable[Any], *often: Any) -> list[Any]:
    """Parameters of a test, of which all but those that are tried `often` are left to the long tests."""
    found = list(cases)
    assert all(case in found for case in often), "they may have been renamed"
    return [case if case in often else _long(case) for case in found]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)


def adapter_weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    """The published adapter."""
    return load_file(run.adapter / "adapter_model.safetensors")


def same_adapter(one: RunDirectory, other: RunDirectory) -> bool:
    """Whether both published the same bits."""
    found, expected = adapter_weights(one), adapter_weights(other)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def save_base(model: Any, folder: Path, like: Path) -> Path:
    """Save `model`, with matrices drawn anew, as a base with the tokenizer of the base `like`; returns `folder`."""
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    for file in like.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    return folder


def mixture(folder: Path) -> list[str]:
    """Overrides of a job on a tiny mixture of experts, saved in `folder`, whose load-balancing loss is half of all."""
    config = Qwen3MoeConfig(
        vocab_size=2048, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=64, eos_token_id=2, pad_token_id=3, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, router_aux_loss_coef=0.5,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return [f"model.name={folder}", "model.tokenizer=builtin:tiny-llama"]


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    """Those of a language model at 64 tokens."""
    found: torch.Tensor = model.eval()(input_ids=torch.arange(100, 164)[None]).logits.float()
    return found


def metric(run: RunDirectory, *names: str) -> list[Any]:
    """The values of `names` in metrics.jsonl, in order."""
    return [line[name] for line in run.metrics() for name in names if name in line]


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write the rows as JSON Lines; returns `file`."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def mounted(folder: Path, size: str) -> Iterator[Path]:
    """For a fixture: `folder` as a file system of its own, of this size; the test is skipped without root's rights."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a disk needs root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
