"""What ranks train and hold, by how they share the model: equal results at any number, and memory that falls.

    python benchmarks/many_gpus.py [--missing]

Processes on one machine stand for GPUs, connected by gloo. Equality: the built-in model is trained by one process and
by two and four ranks, as copies (DDP), in FSDP2's slices and in DeepSpeed's (ZeRO 1 to 3, which also share with a
single process); losses and final weights are compared with those of one process without any of it, also of DPO, whose
ranks score the reference. The optimizer is plain descent, as AdamW's first steps turn rounding into the sign of an
update. Memory: a Llama of 100 million random
parameters trains two steps on the same rows; the peaks of live tensors by phase (see measured_step.py) are compared
with the forecast, and the resident peak is measured beside. The figures are rank 0's, which also holds a copy of a
checkpoint until it is written.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import measured_step
import torch
from forecast_cpu import config_json

from finetune.forecast import devices
from finetune.resolve.planner import Planner

sys.path.insert(0, str(harness.ROOT / "tests" / "faults"))
from children import Children, Ended

WORLD_SIZES = (1, 2, 4)
_STEP = ("forward", "backward", "optimizer")
STEPS, ROWS = 8, 8
# Many thin layers, as a rank holds one or two of them whole beside its slices.
MODEL = config_json("llama", 512, 32, (8, 8), 2048, max_position_embeddings=1024, pad_token_id=None)
TOKENS, BATCH = 64, 4
# Where ranks split rows: a single long one, of which each layer keeps more than the weights are.
CONTEXT, LONG = "ddp, context", 512
TOLERANCE = 1e-5

KINDS: dict[str, dict[str, Any]] = {
    "NF4 LoRA": {},
    "16-bit LoRA": {"quantization.kind": "none"},
    "full fine-tuning": {"quantization.kind": "none", "adapter.kind": "none"},
}
PREFERENCES: dict[str, dict[str, Any]] = {
    "DPO, 16-bit LoRA": {"quantization.kind": "none", "training.objective": "dpo", "preference.reference": "cached"}
}
"""Kinds that are trained on pairs, and compared alone."""
ZERO: dict[str, dict[str, Any]] = {
    f"zero {number}": {"distributed.kind": "deepspeed", "distributed.stage": stage}
    for number, stage in enumerate(("optimizer", "gradients", "weights"), 1)
}
SHARING: dict[str, dict[str, Any]] = {"ddp": {"distributed.kind": "ddp"}, "fsdp": {"distributed.kind": "fsdp"}, **ZERO}
STAGES = {**SHARING, "fsdp, gradients": {"distributed.kind": "fsdp", "distributed.stage": "gradients"}}
OFF = 0.02
_KEY = ("kind", "sharing", "ranks")


def main() -> None:
    parser = harness.parser(__doc__, "many_gpus.json")
    parser.add_argument("--missing", action="store_true", help="measure only what the result lacks")
    options = parser.parse_args()
    result: dict[str, Any] = {name: [] for name in ("equality", "memory")}
    if options.missing:
        result = {name: harness.saved(options.output, name) or [] for name in result}
    compared = {row["kind"] for row in result["equality"]}
    with tempfile.TemporaryDirectory(prefix="many-gpus-") as scratch:
        os.environ["HF_DATASETS_CACHE"] = str(Path(scratch) / "cache")  # read by the processes that fork
        kinds = [kind for kind in (*KINDS, *PREFERENCES) if kind not in compared]
        result["equality"] += _equality(Path(scratch), kinds)
    harness.save(options.output, result, threads=1)
    there = {tuple(row[name] for name in _KEY) for row in result["memory"]}
    for job in _jobs():
        if job not in there:
            result["memory"].append(dict(zip(_KEY, job, strict=True)) | _measured(*_setting(*job)))
            harness.save(options.output, result, threads=1)  # each takes minutes
    for row in result["memory"]:
        if options.missing and "forecast_bytes" in row:
            continue
        row["forecast_bytes"] = _forecast(*_setting(*(row[name] for name in _KEY)))
    result["holds"] = _verdicts(result)
    harness.save(options.output, result, threads=1)
    print(_tables(result))
    sys.exit(0 if all(result["holds"].values()) else 1)


def _sizes(sharing: str) -> tuple[int, ...]:
    """With how many ranks: a single one shares with DeepSpeed alone."""
    return WORLD_SIZES if sharing in ZERO else WORLD_SIZES[1:]


# -- equality ----------------------------------------------------------------------------------------------------------


def _equality(scratch: Path, kinds: Sequence[str]) -> list[dict[str, Any]]:
    with Children(scratch / "children") as children:
        return [row for kind in kinds for row in _equality_of(kind, scratch, children)]


def _equality_of(kind: str, scratch: Path, children: Children) -> list[dict[str, Any]]:
    rows = scratch / "rows.jsonl"
    if kind in PREFERENCES:
        harness.write_pairs(rows, rows=ROWS * STEPS)
    else:
        harness.write_uneven_rows(rows, rows=ROWS * STEPS, tokens=512)
    fixed = {
        "data.train": rows, "data.format": "pairs" if kind in PREFERENCES else "text",
        "data.eval": "none", "data.max_length": 128, "output.merge": "false",
        "training.batch_size": ROWS, "training.micro_batch": 1, "training.max_steps": STEPS,
        "training.eval_every": "null",
        "training.precision": "fp32", "training.learning_rate": 0.1, "training.warmup": 0, "optimizer.kind": "sgd",
        "memory.check": "off",
    }  # fmt: skip

    def trained(sharing: str, world_size: int) -> Path:
        run = scratch / f"{kind}-{sharing}-{world_size}".replace(" ", "-").replace(",", "")
        values = {**fixed, **{**KINDS, **PREFERENCES}[kind], **SHARING[sharing], "output.dir": run}
        arguments = [
            "train",
            harness.ROOT / "configs" / "tiny_cpu.yaml",
            *(f"{key}={one}" for key, one in values.items()),
        ]
        harness.forget_references()
        for ended in _together(children, world_size, arguments):
            if ended.code:
                sys.exit(f"a rank ended with exit code {ended.code}:\n{ended.output[-2000:]}")
        return run

    alone = trained("ddp", 1)
    return [
        {"kind": kind, "sharing": sharing, "ranks": world_size, **_differences(alone, trained(sharing, world_size))}
        for sharing in SHARING
        for world_size in _sizes(sharing)
    ]


def _together(children: Children, world_size: int, arguments: Sequence[object]) -> list[Ended]:
    """Run the command line in that many ranks, forked from a process with all libraries, to its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    size = {name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    started = [
        children.start(
            arguments, None,
            {**size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]  # fmt: skip
    return [child.wait() for child in started]


def _differences(one: Path, other: Path) -> dict[str, float]:
    """The largest differences of losses (nats per token) and final weights."""
    losses = [[line["loss"] for line in harness.steps(run)] for run in (one, other)]
    assert len(losses[0]) == STEPS
    code = (
        "import sys; from safetensors.torch import load_file; one, other = map(load_file, sys.argv[1:]);"
        "assert one.keys() == other.keys(); print(max((one[n] - other[n]).abs().max().item() for n in one))"
    )
    files = [
        next(run.glob("adapter/adapter_model.safetensors"), run / "merged/model.safetensors") for run in (one, other)
    ]
    weights = float(harness.succeeded(harness.python("-c", code, *files)).output)
    return {"loss": max(abs(a - b) for a, b in zip(*losses, strict=True)), "weights": weights}


# -- memory ------------------------------------------------------------------------------------------------------------


def _jobs() -> Iterator[tuple[str, str, int]]:
    """Kind, sharing and ranks of each job whose memory is measured."""
    chosen = [("ddp", 1), *((sharing, size) for sharing in STAGES for size in _sizes(sharing))]
    chosen += [(CONTEXT, size) for size in WORLD_SIZES]
    return ((kind, sharing, size) for kind in KINDS for sharing, size in chosen)


def _setting(kind: str, sharing: str, world_size: int) -> tuple[dict[str, Any], int]:
    """What measured_step.py takes, and the number of ranks."""
    tokens, batch, shared = TOKENS, BATCH, STAGES.get(sharing, {})
    if sharing == CONTEXT:
        tokens, batch = LONG, 1
        shared = {"distributed.kind": "ddp", "distributed.context": world_size, "memory.checkpointing": "none"}
    setting = {
        "architecture": MODEL,
        "rows": [[tokens, tokens - 1]],
        "config": {
            "data.eval": "none", "data.max_length": tokens, "training.batch_size": batch, "training.micro_batch": 1,
            "training.precision": "fp32", "memory.loss_tokens": 64,
            "optimizer.kind": "adamw_torch_fused" if sharing in ZERO else "adamw_32bit",
            **KINDS[kind], **shared,
        },
    }  # fmt: skip
    return setting, world_size


def _measured(setting: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Rank 0's bytes."""
    command = [harness.ROOT / "benchmarks" / "measured_step.py", json.dumps(setting), "--live"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size))
    arguments = [*(() if world_size == 1 else launcher), *command]
    found = _of_rank_0(harness.succeeded(harness.python(*arguments, threads=1, extra=harness.ALLOCATOR)))
    live = {phase: found["phases"][phase] for phase in _STEP}
    return {"live_bytes": live, "resident_bytes": found["resident_bytes"]}


def _forecast(setting: dict[str, Any], world_size: int) -> dict[str, int]:
    """The bytes that the forecast gives rank 0."""
    torch.set_num_threads(1)
    config = measured_step.config_of(setting["config"])
    architecture = measured_step.architecture_of(setting["architecture"])
    found = Planner(config, architecture, devices.find("cpu", config.memory), None, world_size).forecast()
    return {phase: found.phases[phase]["allocated_bytes"] for phase in _STEP}


def _of_rank_0(done: harness.Finished) -> dict[str, Any]:
    """Only rank 0 prints."""
    return dict(json.loads(done.output.strip().splitlines()[-1]))


# -- what comes out ----------------------------------------------------------------------------------------------------


def _off(row: dict[str, Any]) -> float:
    """The error of the forecast in the peak of a step, relative to what was measured."""
    return abs(max(row["forecast_bytes"].values()) / max(row["live_bytes"].values()) - 1)


def _verdicts(result: dict[str, Any]) -> dict[str, bool]:
    verdicts = {}
    for row in result["equality"]:
        name = f"{row['kind']}, {row['sharing']}, {row['ranks']} ranks equal one process"
        verdicts[name] = max(row["loss"], row["weights"]) <= TOLERANCE
    for kind in KINDS:
        for sharing in ("fsdp", *ZERO):
            rows = [row for row in result["memory"] if row["kind"] == kind and row["sharing"] in ("ddp", sharing)]
            rows = [row for row in rows if row["sharing"] == sharing or (row["ranks"] == 1 and sharing == "fsdp")]
            if rows:
                sizes = [max(row["live_bytes"].values()) for row in rows]
                verdicts[f"{kind}, {sharing}: memory falls with ranks"] = _falls(sizes)
                if sharing == "fsdp":
                    sizes = [row["resident_bytes"] for row in rows]
                    verdicts[f"{kind}: resident memory falls with ranks"] = _falls(sizes)
    for row in result["memory"]:
        name = f"{row['kind']}, {row['sharing']}, {row['ranks']} ranks: the forecast is at most {OFF:.0%} off"
        verdicts[name] = _off(row) <= OFF
    return verdicts


def _falls(sizes: Sequence[int]) -> bool:
    return list(sizes) == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)


def _tables(result: dict[str, Any]) -> str:
    equality = [
        [f"{row['kind']}, {row['sharing']}", row["ranks"], f"{row['loss']:.1e}", f"{row['weights']:.1e}"]
        for row in result["equality"]
    ]
    memory = [
        [
            f"{row['kind']}, {row['sharing']}",
            row["ranks"],
            *(
                f"{harness.mib(row['live_bytes'][phase])} ({harness.mib(row['forecast_bytes'][phase])})"
                for phase in _STEP
            ),
            f"{_off(row):.1%}",
            harness.mib(row["resident_bytes"]),
        ]
        for row in result["memory"]
    ]
    header = ["MiB of rank 0 (forecast)", "ranks", *_STEP, "off", "resident"]
    return "\n\n".join(
        [
            harness.table(["largest difference", "ranks", "loss", "weights"], equality),
            harness.table(header, memory),
            *(f"{'yes' if holds else 'NO '}  {what}" for what, holds in result["holds"].items() if not holds),
        ]
    )


if __name__ == "__main__":
    main()
