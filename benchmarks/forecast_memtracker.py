"""The forecast beside torch's own: `torch.distributed._tools.mem_tracker.MemTracker` on the same training steps.

    python benchmarks/forecast_memtracker.py [--measured FILE] [--only NAME]

The settings are some of forecast_cpu.py's (`--only` takes any of them), and so is the truth: the peak of live tensor
bytes over two real steps. With `--measured` it is taken from a result of forecast_cpu.py, which must come from a CPU
like this one: what oneDNN allocates depends on its vector instructions, and so does our forecast. MemTracker watches
our own training step (model, loss, clipping and optimizer as in training) on fake tensors: what differs is what is
counted, not what is run. It needs help for that, which it has not in a script of one's own:

- fake weights in bitsandbytes' layers, whose parameter classes cannot hold a fake tensor; what lies beside a quantized
  weight is registered by hand;
- answers where a program reads data that fake tensors do not have ("is nothing padded?", an optimizer's step);
- frozen weights kept from its hooks for gradients, with which any adapter fails (torch 2.13).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forecast_cpu
import harness
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

MIB = 2**20
NAMES = (
    "llama fp32", "llama nf4", "llama, no checkpointing", "llama eager, no checkpointing", "qwen3-moe nf4",
    "small-llama, small tiles",
)  # fmt: skip


class Answering(TorchDispatchMode):
    """Answers a program's questions about data, as our forecast does."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self._recorder = recorder
        self._made_by = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answers, name = self._recorder.answers, func.name()
        if name == "aten::_local_scalar_dense":
            return answers.scalar(args[0], self._made_by.get(args[0]))
        if name in answers.shapes:
            func, args = answers.shapes[name](func, args)
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 0:
            self._made_by[out] = name
        return out


def tracked(setting: forecast_cpu.Setting) -> dict[str, int]:
    """MemTracker's peak in bytes over two steps (the first makes the optimizer's states) and an evaluation."""
    from torch.distributed._tools.mem_tracker import MemTracker

    from finetune.forecast import device_paths, fake_model, traced_step
    from finetune.forecast.extrapolate import whole
    from finetune.forecast.fake_values import Answers
    from finetune.forecast.trace_recorder import TraceRecorder
    from finetune.model.adapters import adapter
    from finetune.objectives import log_probs
    from finetune.training.eval_loss import summed_loss

    [job] = forecast_cpu.step_settings(setting)
    config, cpu, batch = job.config, job.device, job.train
    recorder = TraceRecorder(cpu.operators, Answers(uneven=False, trained_tokens=0))  # records nothing here
    with (
        device_paths.undisturbed(),
        log_probs.tiles(config.memory.loss_tokens, fused=config.kernels.fused != "off"),
        device_paths.like(cpu, recorder) as mode,
    ):
        traced = traced_step._TracedStep(job, mode, recorder, whole, None)
        traced.make_step(job)
        step, tracker = traced._step, MemTracker()
        beside = [tensor for weight in step.model.parameters() for tensor in fake_model.quantization_state(weight)]
        inputs = traced._inputs(batch)
        values = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
        tracker.track_external(step.model, *beside, *values)
        unhooked = SimpleNamespace(remove=lambda: None)
        for weight in step.model.parameters():
            if not weight.requires_grad:  # "cannot register a hook on a tensor that doesn't require gradient"
                tracker._param_to_grad_hook_handles[weight] = unhooked, unhooked
        micro_batches = [inputs] * (config.training.batch_size // config.training.rows)
        casting = adapter.casts_by_autocast(step.model, config.adapter, config.training.precision)
        with casting, mode, Answering(recorder), tracker:
            for _ in range(2):
                step.forward_backward(micro_batches, batch.trained_tokens)
                step.clip()
                step.update()
                step.model.zero_grad(set_to_none=True)
                tracker.reset_mod_stats()  # or a second forward pass is refused
            if config.data.eval != "none":
                summed_loss(step.model, [[inputs]], precision=config.training.precision, masked=step.masked)
        return {"peak": tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]}


# -- the comparison ----------------------------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    from finetune.runtime import libraries

    libraries.before_import()
    libraries.quiet()
    known = forecast_cpu.measured_peaks(options.measured)
    rows = {setting.name: _row(setting, known) for setting in forecast_cpu.named(options.only or NAMES)}
    failed = [name for name, row in rows.items() if "error" in row]
    harness.save(options.output, {"failed": failed, "summary": _summary(rows), "settings": rows}, threads=1)
    print(table(rows))
    sys.exit(1 if failed else 0)


def _row(setting: forecast_cpu.Setting, known: Mapping[str, int]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    try:
        measured = known.get(setting.name) or forecast_cpu.apart(forecast_cpu.measure, setting)["peak"]
        row["measured_bytes"] = measured
        for name, ask in (("ours", forecast_cpu.forecast), ("mem_tracker", tracked)):
            size = forecast_cpu.apart(ask, setting)["peak"]
            row[name] = {"bytes": size, "error": round(size / measured - 1, 5)}
    except forecast_cpu.Failed as failure:
        row["error"] = harness.without_paths(str(failure))
    print(f"{setting.name}: {row}", flush=True)
    return row


def _summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By forecast, the mean and the largest error of the peak (below 0: too little)."""
    found = {}
    for name in ("ours", "mem_tracker"):
        errors = {setting: row[name]["error"] for setting, row in rows.items() if "error" not in row}
        if errors:
            worst = max(errors, key=lambda setting: abs(errors[setting]))
            found[name] = {
                "settings": len(errors),
                "mean_absolute_error": round(statistics.mean(map(abs, errors.values())), 5),
                "worst": {"setting": worst, "error": errors[worst]},
            }
    return found


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        (
            name,
            f"{row['measured_bytes'] / MIB:.1f}",
            *(f"{row[each]['error']:+.2%}" for each in ("ours", "mem_tracker")),
        )
        for name, row in rows.items()
        if "error" not in row
    ]
    return harness.table(("peak in MiB, error of", "measured", "ours", "MemTracker"), lines)


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__, "forecast_memtracker.json")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this setting (may be repeated)")
    parser.add_argument("--measured", type=Path, help="take what is measured from this result of forecast_cpu.py")
    return parser.parse_args()


if __name__ == "__main__":
    main()
