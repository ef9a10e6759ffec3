"""One QLoRA job by finetune, a plain TRL script, Unsloth and LLaMA-Factory: speed, peaks and losses.

    python benchmarks/beside_peers.py [--on cpu]

On a GPU: a 7B and a 1B of random weights, the same files for all; NF4 with double quantization, rank 16 on all linear
layers, 4 rows of 2,048 tokens a step, bf16, 8-bit paged AdamW, everything recomputed. `SIDES` lists who runs it, each
in a process of its own. It consists of slices of `gpu_check.py`, which says how they are run. Nothing is installed:
where a peer is missing, the result says so. Unsloth and LLaMA-Factory need other versions of the libraries than we do,
so they live in environments of their own, whose interpreters UNSLOTH_PYTHON and LLAMA_FACTORY_PYTHON name.

With `--on cpu`: LoRA on chats beside the plain TRL script of overhead.py, which recomputes everything (TRL's default)
or nothing. Ours has that run's resident peak as its `memory.budget`, and `memory.checkpointing: auto` recomputes no
more than it must within that. Each round runs the four in turn, and ratios are taken within it. A step trains the same
rows on both sides: ours without padding, which TRL can leave out with FlashAttention alone, with fused kernels and
small tiles of logits. In float32 both sides multiply alike; in bf16, on a CPU without a unit for it, fused kernels
multiply in float32 instead, so that job stands for itself. TRL imports DeepSpeed where it is installed, which takes
memory: measure in an environment without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_check
import gpu_slices
import harness
import overhead
from memory_cpu import ALLOCATOR

from finetune import load_config

LOSS_BOUND = 0.01
"""How far losses may differ on a GPU, relative: other kernels and roundings, and other initial adapters."""

# -- on a GPU ----------------------------------------------------------------------------------------------------------

BATCH = 4

Side = Callable[[gpu_slices.Work, str, Path, Path], dict[str, Any]]
"""Runs the job on the weights in a folder and the rows in a file, under the name of the side."""


def finetune(fused: str, checkpointing: str = "all") -> Side:
    def run(work: gpu_slices.Work, name: str, weights: Path, rows: Path) -> dict[str, Any]:
        changes = {
            **gpu_slices.overrides(work.sizes, BATCH, rows),
            "model.name": weights,
            "model.weights": "pretrained",
            "kernels.fused": fused,
            "memory.checkpointing": checkpointing,
            "memory.limit": "null",
            "training.learning_rate": 2e-4,
            "training.schedule": "constant",
            "training.warmup": 0,
        }
        return gpu_slices.job(work, name, changes)

    return run


def script(file: str, module: str = "trl", checkpointing: str = "all") -> Side:
    """Another program, called by a script and found as a module of an interpreter."""

    def run(work: gpu_slices.Work, name: str, weights: Path, rows: Path) -> dict[str, Any]:
        python = os.environ.get(f"{name.upper().replace('-', '_')}_PYTHON", sys.executable)
        installed = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        if harness.run([python, "-c", installed]).exit_code:
            return {"left_out": "not installed"}
        sizes = work.sizes
        options = {
            "model": weights, "data": rows, "output": work.scratch / name, "checkpointing": checkpointing,
            "batch-size": BATCH, "max-length": sizes.tokens, "max-steps": sizes.steps,
            "warm-up-steps": sizes.warm_up_steps,
        }  # fmt: skip
        named = [f"--{option}={value}" for option, value in options.items()]
        return gpu_slices.answer(harness.run([python, harness.ROOT / "benchmarks" / "scripts" / file, *named]))

    return run


SIDES: dict[str, Side] = {
    "finetune": finetune("on"),
    "trl": script("plain_qlora.py"),
    "unsloth": script("unsloth_qlora.py", "unsloth"),
    "llama-factory": script("llama_factory_qlora.py", "llamafactory"),
    "finetune-unfused": finetune("off"),
    # Faster where the card has room for it: TRL's best setting, beside ours.
    "finetune-kept": finetune("on", "none"),
    "trl-kept": script("plain_qlora.py", checkpointing="none"),
}


def beside(work: gpu_slices.Work, model: str, names: Sequence[str]) -> gpu_slices.Findings:
    """What the sides `names` (all, if empty) make of the job on the `large` or the `small` model, then the comparison.

    That is with the sides of this model which ran earlier, in other slices of the same command.
    """
    weights, _ = gpu_slices.saved_weights(work, getattr(work.sizes, model))
    rows = work.scratch / "rows.jsonl"
    # The same rows in every step, so that their order, which is each program's own, makes no difference.
    harness.write_long_rows(rows, rows=BATCH, tokens=work.sizes.tokens)
    earlier = work.shared / f"beside-{model}.json"
    found = json.loads(earlier.read_text(encoding="utf-8")) if earlier.is_file() else {}
    for name in names or SIDES:
        found[name] = SIDES[name](work, name, weights, rows)
        yield name, found[name]
        earlier.write_text(json.dumps(found), encoding="utf-8")
    yield "beside", compared(found)


def compared(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each side's speed as a multiple of TRL's, and how far its losses are from those of the first, at most."""
    ran = {name: side for name, side in found.items() if side.get("passed")}
    first = next(iter(ran.values()), {})
    apart = {
        name: max(abs(one / other - 1) for one, other in zip(side["losses"], first["losses"], strict=True))
        for name, side in ran.items()
    }
    speeds = {name: side["tokens_per_second"] for name, side in ran.items()}
    trl = speeds.get("trl", math.nan)
    return {
        "times_as_fast_as_trl": {name: round(speed / trl, 4) for name, speed in speeds.items()},
        "losses_apart": apart,
        "passed": max(apart.values(), default=0) < LOSS_BOUND,
    }


# -- on a CPU ----------------------------------------------------------------------------------------------------------

BOUNDS = {"trl": 0.7, "trl-kept": 0.85}
"""Largest share of the training time of TRL with everything recomputed (its default) and with nothing."""
RECOMPUTED = {"trl": "all", "trl-kept": "none"}
OURS = {"trl": "finetune", "trl-kept": "finetune-kept"}
"""Our side of each comparison, within the memory of TRL's."""
SETTINGS = ("kernels.fused=on", "data.packing=true", "memory.loss_tokens=64")
"""Of our sides, beside those of the job."""
EQUAL = 1e-3
"""How far losses may differ in float32, in nats per token."""

QUESTIONS = ("fast", "equal", "small")
"""Asked of each job: whether its time, losses and resident peak are within their bounds."""

JOBS = {
    "tiny": overhead.Job(steps=20, threads=1),
    "25M": overhead.Job(steps=4, threads=1, batch=8, tokens=128, logged=1),
    "110M": overhead.Job(steps=3, threads=1, batch=4, tokens=128, logged=1),
    "tiny, bf16": overhead.Job(steps=10, threads=1, precision="bf16"),
}
Round = Mapping[str, dict[str, Any]]
"""What each side's run measured, by side."""


def on_cpu(names: Sequence[str], rounds: int, output: Path) -> bool:
    """Run the jobs, write after each, and tell whether those in float32 keep their bounds."""
    # Some jobs are measured again beside what stands in the file of the others.
    before = (
        json.loads(output.read_text(encoding="utf-8"))["jobs"] if output.is_file() and set(names) < set(JOBS) else {}
    )
    result: dict[str, Any] = {
        "command": harness.command_line(),
        "environment": harness.environment(1),
        "bounds": {**BOUNDS, "losses": EQUAL},
        "jobs": before,
    }
    for name in names:
        with tempfile.TemporaryDirectory(prefix="beside-") as scratch:
            found = result["jobs"][name] = _job(JOBS[name], _architecture(name), rounds, Path(scratch))
        harness.write_result(output, result)
        print(f"\n{name}\n{_table(found)}", flush=True)
    return all(
        one[question]
        for name, found in result["jobs"].items()
        for one in found["beside"].values()
        for question in QUESTIONS
        if JOBS[name].precision == "fp32"
    )


def _architecture(name: str) -> dict[str, Any] | None:
    """The config.json of random weights; None for the built-in base."""
    import forecast_cpu  # keeps a process to one thread, so no slice on a GPU should import it

    sizes = {
        "25M": forecast_cpu._architecture("llama", 512, 8, (8, 4), 2048),
        "110M": forecast_cpu.ARCHITECTURES["llama-110m"],
    }
    return sizes.get(name)


def _job(job: overhead.Job, architecture: Mapping[str, Any] | None, rounds: int, scratch: Path) -> dict[str, Any]:
    if architecture:
        (scratch / "model").mkdir()
        values = {**architecture, "architectures": ["LlamaForCausalLM"]}
        (scratch / "model" / "config.json").write_text(json.dumps(values))
        work = gpu_slices.Work("cpu", scratch, scratch / "weights", scratch)
        job = dataclasses.replace(job, model=gpu_slices.saved_weights(work, str(scratch / "model"))[0])
    bench = overhead.Bench(scratch, job)
    # The first round is the warm-up (page cache, byte code), and shows memory: what is freed is given back at once.
    bench.allocator = ALLOCATOR
    memory, chosen = _within_memory(bench)
    bench.allocator = overhead.ALLOCATORS["kept"]
    runs = [_round(bench, chosen) for _ in range(rounds)]
    return {
        "settings": list(map(harness.without_paths, [*job.settings, *SETTINGS])),
        "checkpointing": {**RECOMPUTED, **chosen},
        "resident_bytes": {name: side["resident_bytes"] for name, side in memory.items()},
        "beside": {name: beside_trl(runs, memory, name, bound) for name, bound in BOUNDS.items()},
        "losses": {name: side["losses"] for name, side in runs[-1].items()},
        "runs": [{name: overhead.seconds(side) for name, side in run.items()} for run in runs],
    }


def _within_memory(bench: overhead.Bench) -> tuple[Round, dict[str, Any]]:
    """TRL's sides, each followed by ours with its peak for a budget; and what each of ours then recomputes."""
    memory, chosen = {}, {}
    for trl, recomputed in RECOMPUTED.items():
        ours = OURS[trl]
        memory[trl] = bench.plain(f"--checkpointing={recomputed}")
        budget = f"memory.budget={memory[trl]['resident_bytes']}"
        memory[ours] = bench.finetune(*SETTINGS, "memory.checkpointing=auto", budget)
        chosen[ours] = load_config(bench.scratch / "finetune" / "config.yaml").memory.checkpointing
    return memory, chosen


def _round(bench: overhead.Bench, chosen: Mapping[str, Any]) -> Round:
    measured = {}
    for trl, recomputed in RECOMPUTED.items():
        measured[trl] = bench.plain(f"--checkpointing={recomputed}")
        measured[OURS[trl]] = bench.finetune(*SETTINGS, f"memory.checkpointing={json.dumps(chosen[OURS[trl]])}")
    return measured


def beside_trl(runs: Sequence[Round], memory: Round, name: str, bound: float) -> dict[str, Any]:
    """Time, losses and resident peak of finetune beside those of one of TRL's settings."""
    ours = OURS[name]
    found = overhead.summary([{"finetune": run[ours], "plain": run[name]} for run in runs])
    apart = overhead.loss_difference(runs[-1][ours], runs[-1][name])
    return {
        **found,
        "largest_loss_difference": apart,
        "fast": found["ratios"]["loop_seconds"]["median"] <= bound,
        "equal": apart <= EQUAL,
        "small": memory[ours]["resident_bytes"] <= memory[name]["resident_bytes"],
    }


def _table(found: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            *(f"{one['ratios'][measure]['median']:.3f}" for measure in ("loop_seconds", "process_seconds")),
            f"{one['ratios']['loop_seconds']['least']:.3f} to {one['ratios']['loop_seconds']['largest']:.3f}",
            " / ".join(harness.mib(found["resident_bytes"][side]) for side in (OURS[name], name)),
            f"{one['largest_loss_difference']:.1e}",
            *("yes" if one[question] else "NO" for question in QUESTIONS),
        )
        for name, one in found["beside"].items()
    ]
    header = ("finetune beside", "loop", "process", "of the rounds", "MiB", "losses apart", *QUESTIONS)
    return harness.table(header, rows)


def main() -> None:
    options = _options()
    if options.on == "cpu":
        output = options.output or harness.RESULTS / "beside_peers_cpu.json"
        sys.exit(0 if on_cpu(options.job or list(JOBS), options.rounds, output) else 1)
    slices = [name for name in gpu_slices.SLICES if name.startswith("beside")]
    sys.exit(gpu_check.run(slices, options.output or harness.RESULTS / "beside_peers.json"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=gpu_slices.SIZES, default="cuda")
    parser.add_argument("--job", action="append", choices=JOBS, help="on a CPU, only this job (may be repeated)")
    parser.add_argument("--rounds", type=int, default=3, help="on a CPU, after a warm-up (default 3)")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
