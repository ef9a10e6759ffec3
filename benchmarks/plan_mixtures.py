"""Plans of published models on one card, by forecasts alone: what docs/memory.md shows of adapters on experts, and
docs/shipping.md of 8B in each way to what is served.

    python benchmarks/plan_mixtures.py

Writes benchmarks/results/plan_mixtures.json. No GPU, no weights: the mixtures are the fields of their config.json on
the hub (Qwen/Qwen3-30B-A3B, openai/gpt-oss-20b) that define the architecture.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import harness

import finetune
from finetune.export.rounding import rounded_run

CONFIG = "configs/qwen3_8b_qlora.yaml"
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    },
}  # fmt: skip
JOBS: list[tuple[str, str, int, int, list[str]]] = [
    ("Qwen3-30B-A3B", "RTX 4090", 4, 2048, []),
    ("Qwen3-30B-A3B", "RTX 4090", 4, 2048, ["adapter.expert_rank=0"]),
    ("Qwen3-30B-A3B", "H100", 4, 2048, ["quantization.kind=none"]),
    ("Qwen3-30B-A3B", "H100", 4, 2048, ["quantization.kind=none", "adapter.expert_rank=0"]),
    ("gpt-oss-20b", "RTX 4090", 4, 2048, ["quantization.kind=published"]),
    ("gpt-oss-20b", "RTX 4080", 1, 2048, ["quantization.kind=published"]),
    ("gpt-oss-20b", "RTX 4080", 1, 1024, ["quantization.kind=published", "adapter.expert_rank=1"]),
]
"""Model, GPU, rows of a micro-batch, tokens of a row, and what else the job changes of the config."""

SERVED_CONFIG = "configs/llama3_8b_q4_k_m.yaml"
SERVED = [("adapter", "q4_k_m"), ("rounded", "q4_k_m")]
"""`output.way` and `output.serve` of a job on each card."""
CARDS = ("RTX 4090", "RTX 4080")


def main() -> None:
    harness.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="plans-") as scratch:
        for name, fields in MODELS.items():
            folder = Path(scratch) / name
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        plans = [_plan(Path(scratch), *job) for job in JOBS]
    served = [_served(gpu, *job) for job in SERVED for gpu in CARDS]
    result = {"config": CONFIG, "plans": plans, "served_config": SERVED_CONFIG, "served": served}
    harness.save(harness.RESULTS / "plan_mixtures.json", result)
    header = ["model", "GPU", "rows", "tokens", "needs GiB", "of", "fits", "changes"]
    rows = [
        [*(one[key] for key in ("model", "gpu", "rows", "tokens")),
         *(harness.gib(one["plan"][key]) for key in ("needed_bytes", "budget_bytes")), one["plan"]["fits"],
         " ".join(one["changes"])]
        for one in plans
    ]  # fmt: skip
    print(harness.table(header, rows))


def _plan(folder: Path, model: str, gpu: str, rows: int, tokens: int, changes: list[str]) -> dict[str, Any]:
    job = [f"data.max_length={tokens}", f"model.name={folder / model}", *changes]
    plan = _planned(CONFIG, gpu, rows, *job)
    return {"model": model, "gpu": gpu, "rows": rows, "tokens": tokens, "changes": changes, "plan": plan}


def _served(gpu: str, way: str, serve: str) -> dict[str, Any]:
    """The smallest micro-batch of a way to what is served, and the memory of the rounding where one follows."""
    changes = [f"output.serve={serve}", f"output.way={way}", *(["output.runtime=ollama"] if way == "rounded" else [])]
    plan = _planned(SERVED_CONFIG, gpu, 1, *changes)
    config = finetune.load_config(harness.ROOT / SERVED_CONFIG, [*changes, "training.precision=bf16"])
    rounding = rounded_run.planned_bytes(config, "cuda")
    return {"gpu": gpu, "way": way, "serve": serve, "rounding_bytes": rounding, "plan": plan}


def _planned(config: str, gpu: str, rows: int, *changes: str) -> dict[str, Any]:
    job = [f"training.micro_batch={rows}", "memory.checkpointing=all", *changes]
    done = harness.python("-m", "finetune", "plan", config, *job, "--gpu", gpu, "--json")
    if done.exit_code != 6:  # it may not fit
        harness.succeeded(done)
    plan = json.loads(done.output)
    return {key: plan[key] for key in ("fits", "needed_bytes", "budget_bytes", "phases", "categories")}


if __name__ == "__main__":
    main()
