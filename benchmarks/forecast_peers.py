"""The forecast beside its peers: how far each is from the memory that a real training step takes.

    python benchmarks/forecast_peers.py [--environment FOLDER] [--measured FILE] [--only NAME]

The peers are a package, fitcheck-llm, in a virtual environment of its own and through its command line, and the
formulas that people work with. All are asked about the same jobs, a choice of forecast_cpu.py's and three larger
ones, and the truth is measured_step.py's: the peak of live tensor bytes over two real steps.

What is fair and what is not:

- The peers forecast a GPU, and the truth is a CPU's. It is one of tensors alone, so fitcheck stands here twice, with
  and without the context and allocator overhead that it lists separately (`fitcheck`, `fitcheck, tensors only`). For
  its overhead it is asked about the Tesla T4, the one card that it was measured on.
- What CPU kernels allocate in passing and CUDA's would not is in the truth, and only our forecast knows of it, since
  it is asked about a CPU: TRL's loss is here a chain of operators with a copy of the logits each, and bitsandbytes'
  optimizers and products are too. A peer that falls short by this is not wrong about a GPU. The result says in which
  operator each peak lies.
- Whatever a setting has and a peer's interface or formula has no word for is listed as `cannot`. If the peer gives a
  figure all the same, it is taken down, and counted apart: the summary's `expressed` are settings without any such.
- These jobs are small, because they must run here, and what is fixed weighs more in them: above all a buffer of TRL's
  tiled loss, with 32,768 columns however small the vocabulary. Settings above 100 million parameters, which all have a
  vocabulary of 32,000, are therefore summed up apart as well.
- Our forecast is developed beside forecast_cpu.py's settings, the peers are not; only the three larger ones are new to
  both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import harness

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

import forecast_cpu

PACKAGE, VERSION = "fitcheck-llm", "0.3.1"
MIB = 2**20


# -- the settings ------------------------------------------------------------------------------------------------------

CHOSEN = (
    "llama nf4",
    "llama nf4 single",
    "llama int8",
    "llama int8, no checkpointing",
    "llama bf16",
    "llama fp32",
    "llama, no checkpointing",
    "llama eager, no checkpointing",
    "llama, whole",
    "mha nf4",
    "mha fp32, no checkpointing",
    "mha, whole, no checkpointing",
    "wide nf4",
    "wide, whole, sgd",
    "32k nf4",
    "32k, whole",
    "qwen2 nf4",
    "qwen2 int8",
    "qwen3 fp32",
    "gemma2 nf4",
    "gemma3 int8",
    "mistral fp32",
    "mistral bf16, rslora",
    "phi3 int8, no checkpointing",
    "phi nf4",
    "110m nf4",
    "120m int8, no checkpointing",
    "120m fp32, whole",
    "110m bf16, evaluated",
)
"""Settings of forecast_cpu.py whose levers the peers know, with few exceptions, over the families and the levers."""


@dataclass(frozen=True)
class Job:
    """One setting as measured_step.py takes it, and its numbers as a formula's user would look them up."""

    name: str
    architecture: Mapping[str, Any]
    values: Mapping[str, Any]
    rows: Sequence[tuple[int, int]]
    padded: bool

    @property
    def as_json(self) -> str:
        job = {"architecture": self.architecture, "config": self.values, "rows": self.rows, "padded": self.padded}
        return json.dumps(job)

    @cached_property
    def config(self) -> Any:
        from measured_step import config_of

        return config_of(self.values)

    @cached_property
    def transformers_config(self) -> Any:
        from measured_step import architecture_of

        return architecture_of(self.architecture)

    @cached_property
    def attention(self) -> str:
        from finetune.model import attention

        section = self.config
        return attention.choose(section.model.attention, self.transformers_config, "cpu", section.training.precision)[0]

    @property
    def length(self) -> int:
        return max(length for length, _ in self.rows)

    @property
    def whole(self) -> bool:
        """Whether every weight is trained, without an adapter."""
        return self.config.adapter.kind == "none"

    @property
    def optimizer(self) -> str:
        from finetune.training import optimizers

        return optimizers.choose(self.config.optimizer, "cpu")[0]

    @property
    def quantization(self) -> str:
        return self.config.quantization.kind

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


def _job(setting: forecast_cpu.Setting) -> Job:
    job = setting.job
    return Job(setting.name, job["architecture"], job["config"], job["rows"], job["padded"])


def _larger(name: str, model: Mapping[str, Any], micro_batch: int, length: int, **values: Any) -> Job:
    from measured_step import worst_rows

    given = {key.replace("__", "."): value for key, value in values.items()}
    shape = {
        "data.eval": "none",
        "data.max_length": length,
        "training.micro_batch": micro_batch,
        "training.batch_size": micro_batch,
    }
    rows = worst_rows(micro_batch, length, length * 3 // 4)
    return Job(name, model, {**shape, **given}, rows, micro_batch > 1)


_1024 = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
LLAMA_16 = {**forecast_cpu.ARCHITECTURES["llama-32k"], **_1024, "num_hidden_layers": 16}
QWEN_12 = {**forecast_cpu.ARCHITECTURES["qwen2"], **_1024, "num_hidden_layers": 12}
MISTRAL_12 = {**forecast_cpu.ARCHITECTURES["mistral-full"], **_1024, "num_hidden_layers": 12}


def jobs() -> list[Job]:
    """The chosen settings and the larger ones, which only this benchmark measures."""
    settings = {setting.name: setting for setting in forecast_cpu.SETTINGS}
    return [
        *(_job(settings[name]) for name in CHOSEN),
        _larger("250m nf4", LLAMA_16, 2, 512),
        _larger(
            "170m fp32, no checkpointing",
            QWEN_12,
            1,
            512,
            quantization__kind="none",
            training__precision="fp32",
            memory__checkpointing="none",
            optimizer__kind="adamw_torch_fused",
        ),
        _larger(
            "200m fp32, whole",
            MISTRAL_12,
            1,
            512,
            quantization__kind="none",
            adapter__kind="none",
            training__precision="fp32",
            optimizer__kind="adamw_torch_fused",
        ),
    ]


# -- answers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A forecast in bytes, None where there is none, and what of the setting it could not be told."""

    size_bytes: int | None
    cannot: tuple[str, ...] = ()


def _ours(job: Job) -> Answer:
    """Our own: the most that lives at a time in the traced step. Loading is left out, as in the truth."""
    from finetune.data.batching import Batch
    from finetune.forecast import devices
    from finetune.forecast.step import rehearse

    trained = sum(trained for _, trained in job.rows)
    batch = Batch(len(job.rows), job.length, job.padded and len(job.rows) > 1, trained)
    evaluation = None if job.config.data.eval == "none" else batch
    cpu = devices.find("cpu", job.config.memory)
    trace = rehearse(job.config, job.transformers_config, batch, evaluation, cpu, job.attention)
    live = peak = 0
    for run, block, sign in trace.timeline():
        live += sign * block.bytes
        if run.phase != "load":
            peak = max(peak, live)
    return Answer(peak)


# -- the published formulas --------------------------------------------------------------------------------------------

_STATE_BYTES = {
    "adamw_8bit": 2,
    "adamw_32bit": 8,
    "adamw_torch_fused": 8,
    "sgd": 4,
    "lion_8bit": 1,
    "lion_32bit": 4,
}
"""Bytes of optimizer states for a trained weight: moments of 1 or 4 bytes (SGD here has momentum)."""

# 4 bits and the constants of 64 weights: 32 bits, or 8 and a share of a second level (QLoRA, section 3).
_BITS = {"nf4": 4, "fp4": 4, "int8": 8}
_CONSTANT_BITS = {False: 32 / 64, True: 8 / 64 + 32 / (64 * 256)}


def model_states(job: Job) -> Answer:
    """Weights, adapter, gradients and optimizer states, counted: what the activation formulas are added to.

    The decoder's linear layers take 4.127, 4.5 or 8 bits a weight where they are quantized; what is trained has a
    gradient of its own type, and states by the optimizer's description.
    """
    import torch

    from finetune.model.base import base_dtype

    section = job.config
    cannot = []
    if section.adapter.extra_modules or section.adapter.dora:
        cannot.append("what is trained beside LoRA's two matrices")
    if job.optimizer not in _STATE_BYTES:
        cannot.append(f"optimizer {job.optimizer}")
    linear = sum(layer.weight.numel() for layer in job.linears.values())
    kept_bytes = base_dtype(section.adapter, section.training).itemsize
    bits: float = 8 * kept_bytes
    if job.quantization != "none":
        bits = _BITS[job.quantization]
        bits += _CONSTANT_BITS[section.quantization.double] if job.quantization != "int8" else 0
    weights = linear * bits / 8 + (job.parameters - linear) * kept_bytes
    trained_bytes = getattr(torch, section.adapter.dtype).itemsize
    trained = job.trained_parameters * (trained_bytes + _STATE_BYTES.get(job.optimizer, 0))
    adapter = 0 if job.whole else job.trained_parameters * trained_bytes
    return Answer(round(weights + adapter + trained), tuple(cannot))


def activation_formula(job: Job, *, head: bool = False) -> Answer:
    """Korthikanti and others, "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198.

    Section 4: a layer keeps s b h (34 + 5 a s / h) bytes, and 2 s b h where it is recomputed; 5 a s / h is attention's
    matrix of scores, left out where a fused attention never writes it, as the paper does in section 5 where it is
    recomputed. With `head` also what section 4.3 adds outside of the layers: s b h for the embedding's dropout and
    4 s b h (1 + v / h) for the last norm, the output layer and its logits in float32.

    The paper counts elements of 2 bytes; 34 is 16 of these and two masks of a byte, 5 is two and a mask. With fp32
    each element is counted with 4. Its layer is GPT's, with an MLP of 4 h and dropout.
    """
    from finetune.model.checkpointing import pattern

    states = model_states(job)
    assert states.size_bytes is not None
    config = job.transformers_config
    tokens, hidden = len(job.rows) * job.length, config.hidden_size
    element = 4 if job.config.training.precision == "fp32" else 2
    layer = tokens * hidden * (16 * element + 2)
    if job.attention == "eager":
        layer += (2 * element + 1) * config.num_attention_heads * job.length * tokens
    recomputed = pattern(job.config.memory.checkpointing, config.num_hidden_layers)
    kept = sum(tokens * hidden * element if again else layer for again in recomputed)
    if head:
        kept += tokens * hidden * (1 + 2 * element) + 4 * tokens * config.vocab_size
    return Answer(states.size_bytes + kept, states.cannot)


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
    if not job.optimizer.startswith("adamw"):
        cannot += (f"optimizer {job.optimizer}",)
    if job.optimizer == "adamw_8bit":
        cannot += ("8-bit optimizer states",)
    return Answer(int(usage) if usage > 0 else None, cannot)


def deepspeed_rule(job: Job) -> Answer:
    """DeepSpeed's `estimate_zero2_model_states_mem_needs` for one GPU and no offload: 2 P + 18 P bytes.

    deepspeed/runtime/zero/stage_1_and_2.py (the documentation's "Memory Requirements"): 2 for weights in 16 bit, 18
    for gradients in 16 and 32 bit, the weights in 32 bit, and two moments. Model states only: it is told the number
    of parameters and nothing else.
    """
    cannot = [] if job.whole else ["LoRA"]
    if job.quantization != "none":
        cannot.append("quantization")
    if job.config.training.precision == "fp32":
        cannot.append("training in fp32")
    if job.optimizer not in ("adamw_32bit", "adamw_torch_fused"):
        cannot.append(f"optimizer {job.optimizer}")
    return Answer(20 * job.parameters, tuple(cannot))


FORMULAS: dict[str, Callable[[Job], Answer]] = {
    "activation formula": activation_formula,
    "activation formula, with head": lambda job: activation_formula(job, head=True),
    "accelerate": accelerate_rule,
    "deepspeed": deepspeed_rule,
}
LEAVES_OUT = {
    "activation formula": "logits and loss, and the layer at work while it is recomputed",
    "activation formula, with head": "the layer at work while it is recomputed",
    "accelerate": "activations, LoRA, optimizers other than Adam; training of quantized models",
    "deepspeed": "activations, LoRA, quantization, optimizers other than Adam",
}
"""What a formula has no term for in any setting."""


# -- fitcheck ----------------------------------------------------------------------------------------------------------

_FITCHECK_GPU = "t4"
_FITCHECK_OPTIMIZERS = {
    "adamw_8bit": "adam8bit",
    "adamw_32bit": "adamw",
    "adamw_torch_fused": "adamw",
    "sgd": "sgd-momentum",
}
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
        options, cannot = _fitcheck_options(job)
        if self.problem:
            return _both(Answer(None, (self.problem,)))
        if options is None:
            return _both(Answer(None, tuple(cannot)))
        name = re.sub(r"\W+", "-", job.name)
        self._lay(name, job.architecture)
        done = harness.run(
            [self._python, "-m", "fitcheck", f"bench/{name}", *options, "--gpu", _FITCHECK_GPU, "--json"],
            extra={"HF_HUB_CACHE": str(self._cache), "COLUMNS": "1000"},
        )
        if done.exit_code > 1:  # 1: it does not fit
            said = [line for line in done.errors.splitlines() if line.startswith("Error:")]
            reason = (said or ["Error: no answer"])[0].removeprefix("Error: ")
            return _both(Answer(None, (*cannot, harness.without_paths(reason)[:300])))
        report = json.loads(done.output)
        counted, there = report["model"]["num_params"], job.parameters
        if abs(counted / there - 1) > _FITCHECK_TOLERANCE:
            # Online it compares its count with the Hub's, and gives no figure; offline it cannot know.
            reason = f"counts {counted:,} parameters where there are {there:,}, and would refuse a model on the Hub"
            return _both(Answer(None, (*cannot, reason)))
        memory = report["memory_mib"]
        total = round(memory["total"] * MIB)
        return {
            "fitcheck": Answer(total, tuple(cannot)),
            "fitcheck, tensors only": Answer(total - round(memory["overhead"] * MIB), tuple(cannot)),
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


def _fitcheck_options(job: Job) -> tuple[list[str] | None, list[str]]:
    """The command line of a setting and what it leaves unsaid; None where it would say something else.

    Not said because no peer is told: rows shorter than the longest, tokens that are not trained, held-out evaluation.
    """
    section = job.config
    adapter, checkpointing = section.adapter, section.memory.checkpointing
    cannot = []
    if job.quantization not in ("none", "nf4", "int8"):
        cannot.append(f"quantization {job.quantization}")
    if checkpointing not in ("all", "none"):
        cannot.append(f"checkpointing of some layers ({checkpointing})")
    if job.optimizer not in _FITCHECK_OPTIMIZERS:
        cannot.append(f"optimizer {job.optimizer}")
    if adapter.dtype != "float32":
        cannot.append("an adapter in bfloat16" if not job.whole else "weights trained in bfloat16 without a master")
    if adapter.dora:
        cannot.append("DoRA")
    if adapter.extra_modules:
        cannot.append("trained modules beside the adapter")
    if cannot:
        return None, cannot
    window = job.architecture.get("sliding_window")
    if window and window < job.length:
        cannot.append("a sliding window, which by its README is outside its model")
    options = ["--precision", section.training.precision, "--optimizer", _FITCHECK_OPTIMIZERS[job.optimizer]]
    options += ["--batch-size", str(len(job.rows)), "--seq-len", str(job.length), "--quant", job.quantization]
    options += ["--grad-accum", str(section.training.batch_size // section.training.micro_batch)]
    if job.quantization == "nf4" and section.quantization.double:
        options.append("--double-quant")
    if checkpointing == "all":
        options.append("--grad-checkpoint")
    if job.attention != "eager":
        options.append("--flash-attn")  # "or flash-like": PyTorch's fused attention is what its T4 was measured with
    if job.whole:
        options.append("--no-lora")
    else:
        targets = "full" if adapter.targets == "all-linear" else ",".join(adapter.targets)
        options += ["--lora-r", str(adapter.rank), "--lora-targets", targets]
    return options, cannot


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


_MEASURED = ("peak_allocated_bytes", "peak_place", "built_bytes", "weight_bytes", "trained_bytes")
LARGE = 100_000_000
"""Parameters from which a setting is also counted apart, among its like."""


def main() -> None:
    options = _options()
    from finetune.runtime import libraries

    libraries.before_import()
    libraries.quiet()
    chosen = [job for job in jobs() if options.only is None or job.name in options.only]
    if not chosen:
        sys.exit(f"no setting of that name; there are: {', '.join(job.name for job in jobs())}")
    known = _measured_before(options.measured)
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        fitcheck = Fitcheck(options.environment, Path(scratch))
        print(f"{PACKAGE} {fitcheck.installed or 'is not there: ' + str(fitcheck.problem)}", flush=True)
        rows = {job.name: _row(job, fitcheck, known) for job in chosen}
        sweep = _sweep(fitcheck)
    compared = {name: row for name, row in rows.items() if "error" not in row}
    result = {
        "command": harness.command_line(),
        "environment": harness.environment(1),
        "fitcheck": {"package": PACKAGE, "version": fitcheck.installed, "gpu": _FITCHECK_GPU, **sweep},
        "leaves_out": LEAVES_OUT,
        "failed": [name for name in rows if name not in compared],
        "summary": summary(compared),
        "summary_above_100m_parameters": summary(_large(compared)),
        "settings": rows,
    }
    harness.write_result(options.output, result)
    print(_table(result))
    sys.exit(1 if result["failed"] else 0)


def _row(job: Job, fitcheck: Fitcheck, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A setting's measured peak and what each peer says of it."""
    row: dict[str, Any] = {
        "model_type": job.architecture["model_type"],
        "parameters": job.parameters,
        "trained_parameters": job.trained_parameters,
        "config": dict(job.values),
        "rows": [list(row) for row in job.rows],
    }
    measured = known.get(_key(job.name, row))
    if measured is None:
        script = harness.ROOT / "benchmarks" / "measured_step.py"
        done = harness.python(script, job.as_json, threads=1)
        if done.exit_code:
            row["error"] = harness.without_paths(done.errors.strip()[-500:])
            print(f"{job.name}: could not be measured: {row['error']}", flush=True)
            return row
        measured = json.loads(done.output.splitlines()[-1])
    row["measured"] = {name: measured[name] for name in _MEASURED}
    started = time.perf_counter()
    answers = {"ours": _ours(job)}
    row["our_seconds"] = round(time.perf_counter() - started, 2)
    answers |= fitcheck.ask(job)
    answers |= {name: formula(job) for name, formula in FORMULAS.items()}
    row["forecasts"] = {name: _said(answer, measured["peak_allocated_bytes"]) for name, answer in answers.items()}
    print(f"{job.name}: {row['measured']['peak_allocated_bytes'] / MIB:.1f} MiB, {_cells(row)}", flush=True)
    return row


def _said(answer: Answer, measured_bytes: int) -> dict[str, Any]:
    said: dict[str, Any] = {"bytes": answer.size_bytes}
    if answer.size_bytes is not None:
        said["error"] = round(answer.size_bytes / measured_bytes - 1, 5)
    if answer.cannot:
        said["cannot"] = list(answer.cannot)
    return said


def _key(name: str, row: Mapping[str, Any]) -> str:
    return json.dumps([name, row["config"], row["rows"]], sort_keys=True)


def _measured_before(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Measured rows of earlier results, this benchmark's or forecast_cpu.py's, by setting."""
    found = {}
    for path in files:
        for name, row in json.loads(path.read_text())["settings"].items():
            if "measured" in row:
                found[_key(name, row)] = row["measured"]
    return found


def _sweep(fitcheck: Fitcheck) -> dict[str, Any]:
    """Of all of forecast_cpu.py's settings, how many fitcheck can be asked about, and why not of the others."""
    reasons: dict[str, list[str]] = {}
    for setting in forecast_cpu.SETTINGS:
        answer = fitcheck.ask(_job(setting))["fitcheck"]
        if answer.cannot:
            reasons[setting.name] = list(answer.cannot)
    return {
        "settings_of_the_sweep": len(forecast_cpu.SETTINGS),
        "expressed": len(forecast_cpu.SETTINGS) - len(reasons),
        "cannot": reasons,
    }


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By peer, over the settings that it expresses and over all that it answers, the errors (below 0: too little)."""
    peers = next(iter(rows.values()))["forecasts"] if rows else ()
    found = {}
    for peer in peers:
        said = {name: row["forecasts"][peer] for name, row in rows.items()}
        answered = {name: each["error"] for name, each in said.items() if "error" in each}
        expressed = {name: error for name, error in answered.items() if "cannot" not in said[name]}
        found[peer] = {"settings": len(rows), "expressed": _errors(expressed), "answered": _errors(answered)}
    return found


def _large(rows: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: row for name, row in rows.items() if row["parameters"] >= LARGE}


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


# -- what is shown -----------------------------------------------------------------------------------------------------


def _cells(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{peer} {_error(said)}" for peer, said in row["forecasts"].items())


def _error(said: Mapping[str, Any]) -> str:
    if "error" not in said:
        return "cannot"
    return _percent(said["error"]) + ("*" if "cannot" in said else "")


def _percent(error: float) -> str:
    return f"{100 * error:+.1f} %" if abs(error) < 10 else f"{100 * error:+,.0f} %"


def _table(result: Mapping[str, Any]) -> str:
    rows, found = result["settings"], result["summary"]
    large = result["summary_above_100m_parameters"]
    short = {"fitcheck, tensors only": "tensors only", "activation formula": "activations"}
    short["activation formula, with head"] = "with head"
    header = ("peak in MiB, error of", "measured", *(short.get(peer, peer) for peer in found))
    lines = [
        (name, f"{row['measured']['peak_allocated_bytes'] / MIB:.1f}", *map(_error, row["forecasts"].values()))
        for name, row in rows.items()
        if "error" not in row
    ]

    def line(peer: str, which: str, errors: Mapping[str, Any], settings: int) -> tuple[str, ...]:
        if not errors["settings"]:
            return (f"{peer}, {which}", f"0 of {settings}", "", "", "")
        worst, under = errors["worst"], errors["worst_under_prediction"]
        return (
            f"{peer}, {which}",
            f"{errors['settings']} of {settings}",
            _percent(errors["mean_absolute_error"]).lstrip("+"),
            f"{_percent(worst['error'])} ({worst['setting']})",
            f"{_percent(under['error'])} ({under['setting']})" if under["error"] < 0 else "none",
        )

    def totals(summaries: Mapping[str, Any]) -> str:
        lines = [
            line(peer, which, each[which], each["settings"])
            for peer, each in summaries.items()
            for which in ("expressed", "answered")
            if which == "expressed" or each["answered"] != each["expressed"]
        ]
        return harness.table(("", "settings", "mean absolute", "worst", "worst under-prediction"), lines)

    asked = result["fitcheck"]
    return "\n".join(
        [
            harness.table(header, lines),
            "* something of the setting could not be told, and the figure was given all the same",
            "",
            "All settings:",
            totals(found),
            "",
            "Above 100 million parameters:",
            totals(large),
            "",
            f"fitcheck can be told {asked['expressed']} of the {asked['settings_of_the_sweep']} settings of the sweep",
        ]
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="only this setting (may be repeated)")
    parser.add_argument(
        "--environment",
        type=Path,
        default=Path(tempfile.gettempdir()) / "finetune-peers",
        help="folder of fitcheck's virtual environment, made if it is not there (default: in the temporary folder)",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        action="append",
        default=[],
        help="take what is measured already from this result, of this benchmark or forecast_cpu.py (may be repeated)",
    )
    parser.add_argument("--output", type=Path, default=harness.RESULTS / "forecast_peers.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
