"""What each lever does to the memory of a CPU run: fp32, bf16, int8, NF4; checkpointing none, half, all.

A Llama of 130 million random parameters trains a few steps at a fixed shape, each setting in a process of its own, so
that the resident peak (VmHWM, by phase) belongs to that setting alone. Beside the measured figures stands arithmetic:
parameters times bits for the weights, and the layer inputs that checkpointing keeps instead of the activations.

Two rows explain what is not the model's: a process that only imports the libraries, and the same job with a model of
nearly nothing. A setting's memory "of its own" is its peak less that of the second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

TOKENS, ROWS, STEPS = 512, 2, 3
"""Shape of a micro-batch (rows of so many tokens) and number of optimizer steps."""

WARM_UP_STEPS = 1
"""First steps left out of the step time: they create gradients and optimizer states."""

# glibc moves the size from which memory is returned to the system as soon as it is freed up to 32 MiB while a program
# runs, and a resident peak then counts freed tensors. Held at its initial value, the peak is what is in use.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


@dataclass(frozen=True)
class Llama:
    """The sizes of a Llama with as many key-value as query heads and a tied output head."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int = 2048
    head: int = 64

    @property
    def linear_parameters(self) -> int:
        """Weights of the decoder's linear layers: what quantization stores differently."""
        return self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.intermediate)

    @property
    def linear_rows(self) -> int:
        """Output features of those layers together: int8 keeps one float32 scale for each."""
        return self.layers * (5 * self.hidden + 2 * self.intermediate)

    @property
    def kept_parameters(self) -> int:
        """Embedding (tied to the head) and norms, which keep the training type."""
        return self.vocabulary * self.hidden + (2 * self.layers + 1) * self.hidden

    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // self.head,
            "num_key_value_heads": self.hidden // self.head,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 2 * TOKENS,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 2,
        }


MODEL = Llama(hidden=1024, intermediate=2816, layers=10)
NEARLY_NOTHING = Llama(hidden=64, intermediate=64, layers=1)


@dataclass(frozen=True)
class Setting:
    """One row of the benchmark, and the bytes that its frozen weights should take."""

    name: str
    precision: str
    quantization: str
    checkpointing: str
    weight_bytes: Callable[[Llama], float]


def _whole(bytes_each: int) -> Callable[[Llama], float]:
    return lambda model: bytes_each * (model.linear_parameters + model.kept_parameters)


def _int8(model: Llama) -> float:
    return model.linear_parameters + 4 * model.linear_rows + 2 * model.kept_parameters


def _nf4(model: Llama) -> float:
    # 4 bits, one 8-bit constant for 64 weights, one 32-bit constant for 256 of those: 4.127 bits (QLoRA, section 3).
    return model.linear_parameters * (4 + 8 / 64 + 32 / (64 * 256)) / 8 + 2 * model.kept_parameters


WEIGHTS = (
    Setting("fp32", "fp32", "none", "all", _whole(4)),
    Setting("bf16", "bf16", "none", "all", _whole(2)),
    Setting("int8", "bf16", "int8", "all", _int8),
    Setting("NF4", "bf16", "nf4", "all", _nf4),
)
CHECKPOINTING = (
    Setting("NF4, checkpointing none", "bf16", "nf4", "none", _nf4),
    Setting("NF4, checkpointing half", "bf16", "nf4", "every-2", _nf4),
    WEIGHTS[-1],
)


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="memory-") as scratch:
        bench = _Bench(Path(scratch), options.threads)
        imports = bench.imports()
        nothing = bench.measure(WEIGHTS[-1], NEARLY_NOTHING)["peak_bytes"]
        rows = {setting.name: bench.measure(setting, MODEL) for setting in dict.fromkeys(WEIGHTS + CHECKPOINTING)}
    result = {
        "command": harness.command_line(),
        "environment": harness.environment(options.threads),
        "model": {**MODEL.config(), "parameters": MODEL.linear_parameters + MODEL.kept_parameters},
        "shape": {"rows": ROWS, "tokens": TOKENS, "steps": STEPS},
        "allocator": ALLOCATOR,
        "imports_only_bytes": imports,
        "nearly_no_model_bytes": nothing,
        "rows": rows,
        "falls": verdicts(rows),
    }
    harness.write_result(options.output, result)
    print(_table(result))
    sys.exit(0 if all(result["falls"].values()) else 1)


class _Bench:
    """Runs one setting after the other, each in a fresh process and run directory."""

    def __init__(self, scratch: Path, threads: int) -> None:
        self.scratch, self.threads = scratch, threads
        self.rows = scratch / "rows.jsonl"
        harness.write_long_rows(self.rows, rows=ROWS * STEPS, tokens=TOKENS)
        self.config = scratch / "memory.yaml"
        self.config.write_text("")

    def imports(self) -> int:
        """Resident peak in bytes of a process that imports what a run imports and does nothing."""
        code = (
            "import bitsandbytes, datasets, peft, trl, transformers.models.llama.modeling_llama, finetune.recipe\n"
            "from finetune.measure.monitor import HostMeter\n"
            "print(HostMeter().read()['resident_bytes'])"
        )
        return int(harness.succeeded(harness.python("-c", code, threads=self.threads, extra=ALLOCATOR)).output)

    def measure(self, setting: Setting, model: Llama) -> dict[str, Any]:
        """Peaks, losses and step time of one setting, in bytes, nats per token and seconds."""
        folder = self.scratch / f"model-{model.hidden}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model.config()))
        run = self.scratch / f"{setting.name}-{model.hidden}".replace(" ", "-").replace(",", "")
        overrides = {
            "model.name": folder,
            "model.weights": "random",
            "model.tokenizer": "builtin:tiny-llama",
            "quantization.kind": setting.quantization,
            "data.train": self.rows,
            "data.format": "text",
            "data.eval": "none",
            "data.max_length": TOKENS,
            "training.batch_size": ROWS,
            "training.micro_batch": ROWS,
            "training.max_steps": STEPS,
            "training.learning_rate": 1e-3,
            "training.precision": setting.precision,
            "memory.checkpointing": setting.checkpointing,
            "output.dir": run,
        }
        arguments = [f"{key}={value}" for key, value in overrides.items()]
        command = ("-m", "finetune", "train", self.config, *arguments)
        harness.succeeded(harness.python(*command, threads=self.threads, extra=ALLOCATOR))
        return _row(setting, model, run)


def _row(setting: Setting, model: Llama, run: Path) -> dict[str, Any]:
    steps = harness.steps(run)
    peaks = harness.largest([harness.event(run, "trained")["memory"], *(line["memory"] for line in steps)])
    resident = {phase: peak["resident_bytes"] for phase, peak in peaks.items()}
    row = {
        "precision": setting.precision,
        "quantization": setting.quantization,
        "checkpointing": setting.checkpointing,
        "expected_weight_bytes": round(setting.weight_bytes(model)),
        "resident_bytes": resident,
        "peak_bytes": max(resident.values()),
        "losses": [line["loss"] for line in steps],
        "tokens_a_step": steps[-1]["tokens"],
        "step_seconds": statistics.median(line["tokens"] / line["tokens_per_second"] for line in steps[WARM_UP_STEPS:]),
    }
    name = setting.name if model is MODEL else "nearly no model"
    print(f"{name}: peak {harness.mib(row['peak_bytes'])} MiB, {row['step_seconds']:.1f} s a step", flush=True)
    return row


def verdicts(rows: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """What must hold: each lever lowers the peak, the weights take what arithmetic says, and the loss falls too."""

    def falls(settings: tuple[Setting, ...]) -> bool:
        peaks = [rows[setting.name]["peak_bytes"] for setting in settings]
        return all(less < more for more, less in itertools.pairwise(peaks))

    return {
        "fp32_bf16_int8_nf4": falls(WEIGHTS),
        "checkpointing_none_half_all": falls(CHECKPOINTING),
        "weights_as_computed": all(
            abs(found / expected - 1) < 0.1 for found, expected in (saved(rows, setting) for setting in WEIGHTS[1:])
        ),
        "every_setting_trains": all(row["losses"][-1] < row["losses"][0] for row in rows.values()),
    }


def saved(rows: dict[str, dict[str, Any]], setting: Setting) -> tuple[int, int]:
    """Bytes that the weights take less than in fp32, measured and computed.

    Measured in the optimizer phase: activations are gone by then, and what stands beside the weights (adapter,
    gradients, optimizer states) is the same in every setting. Loading peaks higher by what quantizing one module needs.
    """
    fp32, row = rows[WEIGHTS[0].name], rows[setting.name]
    return (
        fp32["resident_bytes"]["optimizer"] - row["resident_bytes"]["optimizer"],
        fp32["expected_weight_bytes"] - row["expected_weight_bytes"],
    )


def _table(result: dict[str, Any]) -> str:
    rows = result["rows"]

    def line(setting: Setting) -> tuple[str, ...]:
        row = rows[setting.name]
        phases = (row["resident_bytes"][phase] for phase in ("load", "forward", "backward", "optimizer"))
        own = row["peak_bytes"] - result["nearly_no_model_bytes"]
        less, computed = saved(rows, setting)
        return (
            setting.name,
            harness.mib(row["expected_weight_bytes"]),
            f"{harness.mib(less)} of {harness.mib(computed)}",
            *(harness.mib(phase) for phase in phases),
            harness.mib(row["peak_bytes"]),
            harness.mib(own),
            f"{row['step_seconds']:.1f}",
        )

    header = ("MiB", "weights", "less than fp32", "load", "forward", "backward", "optimizer", "peak", "own", "s/step")
    lines = [
        harness.table(header, [line(setting) for setting in dict.fromkeys(WEIGHTS + CHECKPOINTING)]),
        f"imports alone {harness.mib(result['imports_only_bytes'])} MiB, "
        f"the job with nearly no model {harness.mib(result['nearly_no_model_bytes'])} MiB",
        "weights: computed; less than fp32: optimizer phase, measured of computed; own: peak less nearly no model",
        *(f"{name.replace('_', ' ')}: {'yes' if held else 'NO'}" for name, held in result["falls"].items()),
    ]
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for arithmetic (default 1)")
    parser.add_argument("--output", type=Path, default=harness.RESULTS / "memory_cpu.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
