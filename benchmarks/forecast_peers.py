"""The forecast beside its peers: how far each is from the memory that a real training step takes.

    python benchmarks/forecast_peers.py [--environment FOLDER] [--measured FILE]

The peers are a package, fitcheck-llm, in a virtual environment of its own and through its command line, and two rules
that people work with. All are asked about the same jobs above 100 million parameters, four of forecast_cpu.py's and
three larger ones that are new to our forecast too, and the truth is measured_step.py's: the peak of live tensor bytes
in two real steps. Not in an evaluation, nor in a save, which copies what it writes: the peers forecast neither.

What is fair and what is not:

- The peers forecast a GPU, and the truth is a CPU's. It is one of tensors alone, so fitcheck stands here twice, with
  and without the context and allocator overhead that it lists separately (`fitcheck`, `fitcheck, tensors only`). For
  its overhead it is asked about the Tesla T4, the one card that it was measured on.
- CPU kernels allocate what CUDA's would not (TRL's loss is a chain of operators with a copy of the logits each), and
  only our forecast knows, since it is asked about a CPU. A peer that falls short by this is not wrong about a GPU.
- What a setting has and a peer's interface or formula has no word for is listed as `cannot`. If the peer gives a figure
  all the same, it is kept, and counted apart: the summary's `expressed` are settings without any such.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import forecast_cpu
import harness

PACKAGE, VERSION = "fitcheck-llm", "0.3.1"
MIB = 2**20


# -- the settings ------------------------------------------------------------------------------------------------------

_1024 = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
forecast_cpu.ARCHITECTURES |= {
    "llama-250m": {**forecast_cpu.ARCHITECTURES["llama-32k"], **_1024, "num_hidden_layers": 16},
    "qwen2-170m": {**forecast_cpu.ARCHITECTURES["qwen2"], **_1024, "num_hidden_layers": 12},
    "mistral-200m": {**forecast_cpu.ARCHITECTURES["mistral-full"], **_1024, "num_hidden_layers": 12},
}
_FP32 = "quantization.kind=none training.precision=fp32 optimizer.kind=adamw_torch_fused"
_ABOVE_100M = ("llama-110m", "qwen2-120m", "mistral-120m")
SETTINGS = (
    *(one for one in forecast_cpu.SETTINGS if one.architecture in _ABOVE_100M and "objective" not in one.overrides),
    forecast_cpu.Setting("250m nf4", "llama-250m", 512, 2),
    forecast_cpu.Setting("170m fp32, no checkpointing", "qwen2-170m", 512, 1, 1, f"{_FP32} memory.checkpointing=none"),
    forecast_cpu.Setting("200m fp32, whole", "mistral-200m", 512, 1, 1, f"{_FP32} adapter.kind=none"),
)


class Job:
    """One setting, and its numbers as a formula's user would look them up."""

    def __init__(self, setting: forecast_cpu.Setting) -> None:
        self.setting = setting
        self.architecture = forecast_cpu.ARCHITECTURES[setting.architecture]
        self.config, self.transformers_config = setting.resolved(), setting.build_architecture()
        self.rows, self.length = setting.micro_batch, setting.length
        self.quantization = self.config.quantization.kind
        self.whole = self.config.adapter.kind == "none"  # whether every weight is trained, without an adapter

    @cached_property
    def attention(self) -> str:
        from finetune.model.attention import backends

        section = self.config
        return backends.choose(section.model.attention, self.transformers_config, "cpu", section.training.precision)[0]

    @property
    def optimizer(self) -> str:
        from finetune.training import optimizers

        return optimizers.choose(self.config.optimizer, "cpu")[0]

    @cached_property
    def model(self) -> Any:
        """The model without data, for counting."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.transformers_config)

    @cached_property
    def linears(self) -> dict[str, Any]:
        """The decoder's linear layers, which are quantized and adapted; the output head is not one of them."""
        import torch

        head = self.model.get_output_embeddings()
        modules = self.model.named_modules()
        return {name: part for name, part in modules if isinstance(part, torch.nn.Linear) and part is not head}

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def trained_parameters(self) -> int:
        """Weights of the adapter, or all without one."""
        if self.whole:
            return self.parameters
        section = self.config.adapter
        adapted = (
            layer
            for name, layer in self.linears.items()
            if section.targets == "all-linear" or name.rpartition(".")[2] in section.targets
        )
        return section.rank * sum(layer.in_features + layer.out_features for layer in adapted)


# -- answers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A forecast in bytes, None where there is none, and what of the setting could not be passed to it."""

    size_bytes: int | None
    cannot: tuple[str, ...] = ()


# -- the published rules -----------------------------------------------------------------------------------------------

_STATE_BYTES = {"adamw_8bit": 2, "adamw_torch_fused": 8}
"""Bytes of optimizer states for a trained weight: two moments of 1 or 4 bytes."""

# 4 bits and the constants of 64 weights: 32 bits, or 8 and a share of a second level (QLoRA, section 3).
_BITS = {"nf4": 4, "int8": 8}
_CONSTANT_BITS = {False: 32 / 64, True: 8 / 64 + 32 / (64 * 256)}


def model_states(job: Job) -> int:
    """Weights, adapter, gradients and optimizer states, counted: what activations are added to.

    The decoder's linear layers take 4.127, 4.5 or 8 bits a weight where they are quantized; what is trained has a
    gradient of its own type, and states by the optimizer's description.
    """
    import torch

    from finetune.model.base import base_dtype

    section = job.config
    linear = sum(layer.weight.numel() for layer in job.linears.values())
    kept_bytes = base_dtype(section.adapter, section.training.precision).itemsize
    bits: float = 8 * kept_bytes
    if job.quantization != "none":
        bits = _BITS[job.quantization]
        bits += _CONSTANT_BITS[section.quantization.double] if job.quantization != "int8" else 0
    weights = linear * bits / 8 + (job.parameters - linear) * kept_bytes
    trained_bytes = getattr(torch, section.adapter.dtype).itemsize
    trained = job.trained_parameters * (trained_bytes + _STATE_BYTES[job.optimizer])
    adapter = 0 if job.whole else job.trained_parameters * trained_bytes
    return round(weights + adapter + trained)


def activation_formula(job: Job) -> Answer:
    """Korthikanti and others, "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198.

    Section 4: a layer keeps s b h (34 + 5 a s / h) bytes, and 2 s b h where it is recomputed; 5 a s / h is attention's
    matrix of scores, left out where a fused attention never writes it, as the paper does in section 5 where it is
    recomputed. Section 4.3 adds outside of the layers s b h for the embedding's dropout and 4 s b h (1 + v / h) for the
    last norm, the output layer and its logits in float32. Left out: the layer at work while it is recomputed.

    The paper counts elements of 2 bytes; 34 is 16 of these and two masks of a byte, 5 is two and a mask. With fp32
    each element is counted with 4. Its layer is GPT's, with an MLP of 4 h and dropout.
    """
    from finetune.model.recompute.checkpointing import pattern

    config = job.transformers_config
    tokens, hidden = job.rows * job.length, config.hidden_size
    element = 4 if job.config.training.precision == "fp32" else 2
    layer = tokens * hidden * (16 * element + 2)
    if job.attention == "eager":
        layer += (2 * element + 1) * config.num_attention_heads * job.length * tokens
    levels = pattern(job.config.memory.checkpointing, config.num_hidden_layers)
    kept = sum(layer if level == "none" else tokens * hidden * element for level in levels)
    head = tokens * hidden * (1 + 2 * element) + 4 * tokens * config.vocab_size
    return Answer(model_states(job) + kept + head)


def accelerate_rule(job: Job) -> Answer:
    """`accelerate estimate-memory`, "Training using Adam": the largest part in `accelerate.commands.estimate`.

    Four times the float32 model for float32; for float16 twice it, the largest of its four parts. For int8 and int4
    the command prints N/A. Activations are left out, by its documentation.
    """
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    size, _ = calculate_maximum_sizes(job.model)
    dtype = "float32" if job.config.training.precision == "fp32" else "float16"
    if job.quantization != "none":
        dtype = "int8" if job.quantization == "int8" else "int4"
    usage = max(estimate_training_usage(size, dtype).values())
    cannot = () if job.whole else ("LoRA",)
    if job.quantization != "none":
        cannot += ("quantization in training",)
    if job.optimizer == "adamw_8bit":
        cannot += ("8-bit optimizer states",)
    return Answer(int(usage) if usage > 0 else None, cannot)


RULES: dict[str, Callable[[Job], Answer]] = {
    "activation formula, with head": activation_formula,
    "accelerate": accelerate_rule,
}


# -- fitcheck ----------------------------------------------------------------------------------------------------------

_FITCHECK_GPU = "t4"
_FITCHECK_OPTIMIZERS = {"adamw_8bit": "adam8bit", "adamw_torch_fused": "adamw"}
_FITCHECK_TOLERANCE = 0.02  # its `_PARAM_COUNT_TOLERANCE`
_REVISION = "0" * 40


class Fitcheck:
    """fitcheck-llm in an environment of its own, by its command line with --json.

    It reads a model's config.json from the Hub, or offline from the Hub's cache in which each setting's is laid here.
    """

    def __init__(self, environment: Path, scratch: Path) -> None:
        self._python = environment / "bin" / "python"
        self._cache = scratch / "hub"
        self.installed = _installed(environment)
        self.problem = None if self.installed else f"{PACKAGE} could not be installed"

    def ask(self, job: Job) -> dict[str, Answer]:
        """Its total as reported, and without the part that it lists as overhead."""
        if self.problem:
            return _both(Answer(None, (self.problem,)))
        name = re.sub(r"\W+", "-", job.setting.name)
        self._lay(name, job.architecture)
        command = [self._python, "-m", "fitcheck", f"bench/{name}", *_fitcheck_options(job)]
        extra = {"HF_HUB_CACHE": str(self._cache), "COLUMNS": "1000"}
        done = harness.run([*command, "--gpu", _FITCHECK_GPU, "--json"], extra=extra)
        if done.exit_code > 1:  # 1: it does not fit
            said = [line for line in done.errors.splitlines() if line.startswith("Error:")]
            reason = (said or ["Error: no answer"])[0].removeprefix("Error: ")
            return _both(Answer(None, (harness.without_paths(reason)[:300],)))
        report = json.loads(done.output)
        counted, there = report["model"]["num_params"], job.parameters
        if abs(counted / there - 1) > _FITCHECK_TOLERANCE:
            # Online it compares its count with the Hub's, and gives no figure; offline it cannot know.
            reason = f"counts {counted:,} parameters where there are {there:,}, and would refuse a model on the Hub"
            return _both(Answer(None, (reason,)))
        memory = report["memory_mib"]
        total = round(memory["total"] * MIB)
        return {
            "fitcheck": Answer(total),
            "fitcheck, tensors only": Answer(total - round(memory["overhead"] * MIB)),
        }

    def _lay(self, name: str, architecture: Mapping[str, Any]) -> None:
        """Put a config.json into the cache, as a download from the Hub leaves it."""
        folder = self._cache / f"models--bench--{name}"
        snapshot = folder / "snapshots" / _REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(_REVISION)
        (snapshot / "config.json").write_text(json.dumps(architecture))


def _both(answer: Answer) -> dict[str, Answer]:
    return {"fitcheck": answer, "fitcheck, tensors only": answer}


def _fitcheck_options(job: Job) -> list[str]:
    """The command line of a setting.

    Not listed, because no peer takes it: rows shorter than the longest, tokens that are not trained, evaluation.
    """
    section = job.config
    options = ["--precision", section.training.precision, "--optimizer", _FITCHECK_OPTIMIZERS[job.optimizer]]
    options += ["--batch-size", str(job.rows), "--seq-len", str(job.length), "--quant", job.quantization]
    options += ["--grad-accum", str(section.training.batch_size // section.training.micro_batch)]
    if job.quantization == "nf4" and section.quantization.double:
        options.append("--double-quant")
    if section.memory.checkpointing == "all":
        options.append("--grad-checkpoint")
    if job.attention != "eager":
        options.append("--flash-attn")  # "or flash-like": PyTorch's fused attention is what its T4 was measured with
    if job.whole:
        return [*options, "--no-lora"]
    return [*options, "--lora-r", str(section.adapter.rank), "--lora-targets", "full"]


def _installed(environment: Path) -> str | None:
    """The version of the package in `environment`, made and filled if need be; None where that failed."""
    python = environment / "bin" / "python"
    ask = "import importlib.metadata as m; print(m.version('fitcheck-llm'))"
    if not python.exists():
        made = harness.python("-m", "venv", environment)
        if made.exit_code:
            print("no virtual environment could be made", file=sys.stderr)
            return None
    for wanted in (None, f"{PACKAGE}=={VERSION}", PACKAGE):
        if wanted:
            harness.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted])
        found = harness.run([python, "-c", ask])
        if found.exit_code == 0:
            return found.output.strip()
    return None


# -- the comparison ----------------------------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    from finetune.runtime import libraries

    libraries.before_import()
    libraries.quiet()
    known = harness.saved(options.measured, "settings") if options.measured else {}
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        fitcheck = Fitcheck(options.environment, Path(scratch))
        print(f"{PACKAGE} {fitcheck.installed or 'is not there: ' + str(fitcheck.problem)}", flush=True)
        rows = {setting.name: _row(setting, fitcheck, known) for setting in SETTINGS}
    result = {
        "fitcheck": {"package": PACKAGE, "version": fitcheck.installed, "gpu": _FITCHECK_GPU},
        "failed": [name for name, row in rows.items() if "error" in row],
        "summary_above_100m_parameters": summary(rows),
        "settings": rows,
    }
    harness.save(options.output, result, threads=1)
    print(_table(result))
    sys.exit(1 if result["failed"] else 0)


def _row(setting: forecast_cpu.Setting, fitcheck: Fitcheck, known: Mapping[str, Any]) -> dict[str, Any]:
    """A setting's measured peak and each peer's forecast; `known` are rows of forecast_cpu.py's result."""
    job = Job(setting)
    row: dict[str, Any] = {"parameters": job.parameters}
    try:
        there = known.get(setting.name, {}).get("measured")
        peak = _of_step(there or forecast_cpu.apart(forecast_cpu.measure, setting))
        answers = {"ours": Answer(_of_step(forecast_cpu.apart(forecast_cpu.forecast, setting)))}
    except forecast_cpu.Failed as failure:
        row["error"] = harness.without_paths(str(failure))
        print(f"{setting.name}: FAILED: {row['error']}", flush=True)
        return row
    answers |= fitcheck.ask(job)
    answers |= {name: rule(job) for name, rule in RULES.items()}
    row["measured"] = {"peak": peak}
    row["forecasts"] = {name: _forecast(answer, peak) for name, answer in answers.items()}
    print(f"{setting.name}: {peak / MIB:.1f} MiB, {', '.join(_cells(row))}", flush=True)
    return row


def _of_step(phases: Mapping[str, int]) -> int:
    return max(phases[phase] for phase in ("forward", "backward", "optimizer"))


def _forecast(answer: Answer, measured_bytes: int) -> dict[str, Any]:
    found: dict[str, Any] = {"bytes": answer.size_bytes}
    if answer.size_bytes is not None:
        found["error"] = round(answer.size_bytes / measured_bytes - 1, 5)
    if answer.cannot:
        found["cannot"] = list(answer.cannot)
    return found


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By peer, over the settings that it expresses and over all that it answers, the errors (below 0: too little)."""
    compared = {name: row["forecasts"] for name, row in rows.items() if "forecasts" in row}
    found = {}
    for peer in next(iter(compared.values()), ()):
        answered = {name: each[peer]["error"] for name, each in compared.items() if "error" in each[peer]}
        expressed = {name: error for name, error in answered.items() if "cannot" not in compared[name][peer]}
        found[peer] = {"settings": len(compared), "expressed": _errors(expressed), "answered": _errors(answered)}
    return found


def _errors(errors: Mapping[str, float]) -> dict[str, Any]:
    if not errors:
        return {"settings": 0}
    worst = max(errors, key=lambda name: abs(errors[name]))
    least = min(errors, key=errors.__getitem__)
    return {
        "settings": len(errors),
        "mean_absolute_error": round(statistics.mean(abs(error) for error in errors.values()), 5),
        "worst": {"setting": worst, "error": errors[worst]},
        "worst_under_prediction": {"setting": least, "error": min(errors[least], 0.0)},
    }


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        "cannot" if "error" not in found else f"{100 * found['error']:+.1f} %{'*' if 'cannot' in found else ''}"
        for found in row["forecasts"].values()
    ]


def _table(result: Mapping[str, Any]) -> str:
    lines = [
        (name, f"{row['measured']['peak'] / MIB:.1f}", *_cells(row))
        for name, row in result["settings"].items()
        if "error" not in row
    ]
    found = result["summary_above_100m_parameters"]
    for kind in ("expressed", "answered"):
        means = (each[kind].get("mean_absolute_error") for each in found.values())
        lines.append((f"mean error, {kind}", "", *("" if mean is None else f"{100 * mean:.1f} %" for mean in means)))
    note = "* part of the setting could not be passed to the tool, which gave a figure anyway"
    return harness.table(("peak in MiB, error of", "measured", *found), lines) + "\n" + note


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__, "forecast_peers.json")
    parser.add_argument(
        "--environment",
        type=Path,
        default=Path(tempfile.gettempdir()) / "finetune-peers",
        help="folder of fitcheck's virtual environment, made if it is not there (default: in the temporary folder)",
    )
    parser.add_argument("--measured", type=Path, help="take what forecast_cpu.py measured from its result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
