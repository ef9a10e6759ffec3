"""What a QLoRA step costs on a card: arithmetic, traffic and kernel launches, beside a plain TRL script.

    python benchmarks/step_cost.py

Nothing runs on a GPU and no weights are read. Both sides are traced by the same recorder on fake tensors, and timed by
the same rule (`seconds` of `finetune plan`): operations, bytes and launches at the card's data-sheet rates, none of
them overlapping.

- `layer`: the cost of one Llama-2-7B layer by part (NF4, rank 16, 4 rows of 2,048 tokens, every layer recomputed),
  computed by PEFT's modules and by fused kernels.
- `steps`: predicted seconds of an optimizer step of 16 rows of 2,048 tokens within 24 GiB. Ours is what `finetune fit`
  chooses with fused kernels. TRL's is the largest micro-batch that fits with checkpointing (its default), and the
  faster of that and the same without (its best). `least` is the time of the arithmetic that no exact step can do
  without (`least_flops`), at the card's peak, and how many times as fast as TRL's best a step could be at most.
  `over_least` is ours over that time, and what of it is further arithmetic, traffic and launches. `served` is ours on
  a base in the codes of a file that is served, as a multiple of the same step on one in NF4.

TRL's side is `scripts/plain_qlora.py`: `SFTTrainer.compute_loss` itself with its tiled loss, entropy and accuracy, bf16
adapters under autocast, the padding mask always given, the 8-bit optimizer. Where the rows of a micro-batch have one
length, transformers drops that mask; else it costs attention its flash kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import harness
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import SFTTrainer
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

import finetune
from finetune.config import Config
from finetune.data import batching
from finetune.data.batching import LargestBatch, MicroBatching
from finetune.forecast import gpus, traced_step
from finetune.forecast.device import Device
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.trace import Work
from finetune.forecast.trace_recorder import TraceRecorder
from finetune.kernels import mlp, ops
from finetune.model.base import load_architecture
from finetune.model.structure.quantization import changes_to
from finetune.objectives import Objective
from finetune.resolve import planning
from finetune.resolve import steps as resolution
from finetune.resolve.fit import divisors

MODELS = {"Llama-2-7B": "llama7b_qlora", "Llama-3.1-8B": "llama3_8b_qlora"}
CARDS = ("RTX 3090", "RTX 4090", "A100 80GB", "H100")
ROWS = {"one length": False, "uneven length": True}
"""Kinds of rows, and whether a micro-batch of it is padded."""

BUDGET_BYTES = 24 * 2**30
STEP_ROWS = 16
PASSES = ("forward", "recompute", "backward")
PATHS = {"peft": {"kernels.fused": "off"}, "fused": {"kernels.fused": "on"}}
SERVED = ("q4_k_m", "q6_k")
"""Kinds of quantization whose codes are served."""
SERVED_CARD = "RTX 4090"
_LAYER = 2  # of the five that are traced, the one in the middle


# -- a layer's cost by part --------------------------------------------------------------------------------------------


class Parts(TraceRecorder):
    """A recorder that also knows which part of a layer each operator belongs to, and in which pass.

    In the forward pass and in functions of Python the part is that of the module whose code calls the operator. A node
    of autograd has the part of the operator that made it, by autograd's sequence numbers.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.work: defaultdict[tuple[int | None, str, str], Work] = defaultdict(Work)
        self._part_of_node: dict[int, str] = {}
        self._part = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frames = list(_frames())
        self._pass = "recompute" if any(frame.f_code.co_name == "recompute_fn" for frame in frames) else self.phase
        part = next(filter(None, map(_part_of_code, frames)), None)
        # The engine adds gradients behind the node that made the last of them.
        self._sum = part is None and self.phase == "backward" and func.name() in _SUMS
        if part is None and not self._sum and (node := torch._C._current_autograd_node()) is not None:
            part = self._part_of_node.get(node._sequence_nr())
        self._part = self._part if self._sum else part or "other"
        if self._pass != "backward":
            self._part_of_node.setdefault(torch.autograd._get_sequence_nr() - 1, self._part)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, over_layers: Any = ()) -> None:
        before = dataclasses.replace(self._stretch().work)
        super()._count(func, args, kwargs, out, over_layers)
        after = self._stretch().work
        done = Work(*(getattr(after, each.name) - getattr(before, each.name) for each in dataclasses.fields(Work)))
        self.work[self.layer, self._pass, self._refined(func.name(), done)] += done

    def _keep_program(self, *args: Any) -> None:
        """Nothing is repeated from a recording, as each operator of a kernel has a part of its own."""

    def _refined(self, name: str, done: Work) -> str:
        """The part of an operator, where what it does says more than where it stands."""
        for pattern, part in _BY_OPERATOR.items():
            if re.search(pattern, name):
                return part
        if done.hidden_flops:
            return "low-rank products"
        if done.flops:
            return "large products"
        return "adapter: sums of gradients" if self._sum and self._part in (_ADAPTER, _DECODING) else self._part


_ADAPTER, _DECODING = "adapter: copies, scaling, sum", "decoding of weights"
_BY_KERNEL = {"lora": _ADAPTER, "norm": "norms"}
_SUMS = ("aten::add.Tensor", "aten::add_.Tensor")
_BY_OPERATOR = {
    r"attn|attention": "attention",
    r"dequantize|decode": _DECODING,
    r"finetune::rms_norm": "norms",
    r"finetune::rope": "rotary embedding",
    r"finetune::gated": "activation of the MLP",
}


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _part_of_code(frame: FrameType) -> str | None:
    """The part that a function's code belongs to; None where its caller must say."""
    if frame.f_code.co_name in ("apply_rotary_pos_emb", "rotate_half"):
        return "rotary embedding"
    if frame.f_code.co_name.startswith("_gemm_4bit") or frame.f_code.co_filename.endswith("bitsandbytes/functional.py"):
        return _DECODING
    if "finetune/kernels/" in frame.f_code.co_filename and (
        part := _BY_KERNEL.get(Path(frame.f_code.co_filename).stem)
    ):
        return part
    module = frame.f_locals.get("self")
    if not isinstance(module, torch.nn.Module):
        return None
    kind = type(module).__name__
    if isinstance(module, BaseTunerLayer):
        return _ADAPTER
    if "Norm" in kind:
        return "norms"
    if "MLP" in kind:
        return "activation of the MLP"
    return "residuals and copies" if "Attention" in kind or isinstance(module, GradientCheckpointingLayer) else None


def layer(config: Config) -> dict[str, Any]:
    """Gigabytes, launches and TFLOP of a layer by part and pass."""
    config = config.changed({"training.micro_batch": 4, "training.batch_size": 4, "memory.checkpointing": "all"})
    made: list[Parts] = []

    def recorder(*args: Any) -> Parts:
        made.append(Parts(*args))
        return made[0]

    with mock.patch.object(traced_step, "TraceRecorder", recorder), rows_of(padded=False):
        planning.planner_for(config, "RTX 4090").forecast()
    work = {key[1:]: done for key, done in made[0].work.items() if key[0] == _LAYER and key[1] in PASSES}
    parts = sorted({part for _, part in work}, key=lambda part: -_sum(work, part=part).moved_bytes)
    told = {part: {each: _told(_sum(work, each, part)) for each in PASSES} for part in parts}
    return {"parts": told, "passes": {each: _told(_sum(work, each)) for each in PASSES}, "whole": _told(_sum(work))}


def _sum(work: dict[tuple[str, str], Work], of_pass: str = "", part: str = "") -> Work:
    chosen = (done for key, done in work.items() if of_pass in ("", key[0]) and part in ("", key[1]))
    return sum(chosen, Work())


def _told(work: Work) -> dict[str, Any]:
    return {
        "gigabytes": round(work.moved_bytes / 1e9, 3), "calls": work.calls, "teraflop": round(work.flops / 1e12, 3),
    }  # fmt: skip


# -- a whole step beside TRL -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def rows_of(*, padded: bool) -> Iterator[None]:
    """Within the block every row counts as `data.max_length` long, in micro-batches that are padded or not."""

    def longest(way: MicroBatching, step_rows: int, length: int) -> list[LargestBatch]:
        rows = min(way.rows, step_rows)
        return [LargestBatch(rows, length, padded and rows > 1, rows * (length - 1))]

    with (
        harness.nothing_kept(),
        mock.patch.object(batching, "longest_batches", longest),
        mock.patch.object(resolution, "_at_hand", lambda job: None),
    ):
        yield


@contextlib.contextmanager
def as_trl() -> Iterator[None]:
    """Within the block a traced step computes what `SFTTrainer` computes (trl 1.16).

    Its Triton kernels cannot run on fake tensors: our operators that go over a tile as often are traced instead.
    """

    def head(model: Any) -> None:
        add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "is_top1"))

    def loss(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
        return SFTTrainer.compute_loss(_trainer(model), model, dict(batch), num_items_in_batch=1), 1

    with (
        mock.patch.object(traced_step.objectives, "of", lambda config: Objective("TRL's", loss)),
        mock.patch.object(traced_step, "needs_mask", lambda *args: True),
        mock.patch.object(traced_step.log_probs, "attach", head),
        mock.patch.object(mlp, "tile", lambda module: None),
        mock.patch.object(chunked_logprob, "_use_triton", lambda device: True),
        mock.patch.object(chunked_logprob, "_forward_kernel", _Launched(_folded)),
        mock.patch.object(chunked_logprob, "_backward_kernel", _Launched(_unfolded)),
        mock.patch.object(chunked_logprob, "_addmm_fp32", ops.add_product_),
    ):
        yield


class _Launched:
    """A Triton kernel as Python calls it, `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._function


def _folded(tile: torch.Tensor, stride: int, targets: torch.Tensor, *others: Any, **constants: Any) -> None:
    ops.fold_logits_(tile.new_empty(3, len(tile), dtype=torch.float32), tile, targets, 0, 1.0, None, 1.0)


def _unfolded(
    tile: torch.Tensor, stride: int, targets: torch.Tensor, log_z: torch.Tensor, *others: Any, **constants: Any
) -> None:
    ops.unfold_logits_(tile, targets, log_z, log_z, 0, 1.0, None, 1.0)


def _trainer(model: Any) -> Any:
    """As much of an `SFTTrainer` as its `compute_loss` reads, with the defaults of `SFTConfig`."""
    return SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(parallelism_config=None, num_processes=1, gather_for_metrics=lambda value: value),
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=True),
        aux_loss_enabled=False,
        compute_loss_func=None,
        label_smoother=None,
        get_tp_size=lambda: 1,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )


def ours(config: Config, card: str) -> dict[str, Any]:
    """What `finetune fit` chooses; its model gets no mask, so padding makes no difference."""
    with rows_of(padded=False):
        fitted = planning.fit(config.changed(PATHS["fused"]), card)
    return _step(fitted.config, fitted.forecast)


def trl(config: Config, card: str) -> dict[str, Any]:
    """TRL with checkpointing (its default) and at its best, with the largest micro-batch that fits, by kind of rows."""
    config = config.changed({"adapter.dtype": "bfloat16", "optimizer.kind": "paged_adamw_8bit", **PATHS["peft"]})
    found: dict[str, Any] = {}
    for kind, padded in ROWS.items():
        with rows_of(padded=padded), as_trl():
            default, other = (_largest(config, card, checkpointing) for checkpointing in ("all", "none"))
        found[kind] = {"default": default, "best": min(default, other or default, key=lambda each: each["seconds"])}
    return found


def _largest(config: Config, card: str, checkpointing: str) -> Any:
    """A step with the largest micro-batch that fits; None where none does."""
    for rows in divisors(STEP_ROWS):
        tried = config.changed({"training.micro_batch": rows, "memory.checkpointing": checkpointing})
        if (forecast := planning.planner_for(tried, card).forecast()).fits:
            return _step(tried, forecast)
    return None


def least_flops(config: Config) -> int:
    """Operations of a step of Llama that every exact method does, in products taken as they are written.

    Per token, with a multiply-add as two: the linear layers forward, and backward to their inputs, but not to those of
    the first queries, keys and values, before which nothing is trained; the causal half of attention's two products
    forward, and of the four backward; and of each trained token the logits, and the way back from them. Nothing is
    computed twice. Left out are the products of rank r, norms, activations, rotary embedding, softmax, loss, update,
    and the decoding of weights.
    """
    model = load_architecture(config.model, listed=True)
    hidden, head_dim = model.hidden_size, model.hidden_size // model.num_attention_heads
    queries, others = hidden * hidden, 2 * hidden * model.num_key_value_heads * head_dim
    layer = queries + others + hidden * hidden + 3 * hidden * model.intermediate_size
    length = config.data.max_length
    tokens, pairs = STEP_ROWS * length, STEP_ROWS * length * (length + 1) // 2
    linear = tokens * (2 * model.num_hidden_layers * layer - queries - others)
    attention = 6 * pairs * model.num_hidden_layers * hidden
    head = 2 * STEP_ROWS * (length - 1) * hidden * model.vocab_size
    return 2 * (linear + attention + head)


_CHOSEN = {
    "training.micro_batch": "micro_batch", "memory.checkpointing": "checkpointing", "memory.loss_tokens": "loss_tokens",
}  # fmt: skip
"""What `fit` chose of a step."""


def served(config: Config, card: str, step: dict[str, Any]) -> dict[str, Any]:
    """The step that `ours` takes, on a base in served codes, and its time as a multiple of that in NF4, by kind."""
    config = config.changed({key: step[name] for key, name in _CHOSEN.items()} | PATHS["fused"])
    found = {}
    for kind in SERVED:
        other = config.changed(changes_to(kind))
        with rows_of(padded=False):
            found[kind] = _step(other, planning.planner_for(other, card).forecast())
        found[kind]["times"] = round(found[kind]["seconds"] / step["seconds"], 4)
    return found


def steps(config: Config, card: str) -> dict[str, Any]:
    """Both sides on a card, how many times as fast ours is, and the most that arithmetic allows."""
    config = config.changed({"memory.budget": BUDGET_BYTES})
    one, others = ours(config, card), trl(config, card)
    times = {
        kind: {setting: round(each["seconds"] / one["seconds"], 3) for setting, each in settings.items()}
        for kind, settings in others.items()
    }
    bound = least(config, card, others)
    over = over_least(planning.planner_for(config, card).device, one, bound["seconds"])
    return {
        "ours": one, "trl": others, "times_as_fast": times, "least": bound, "over_least": over,
        **({"served": served(config, card, one)} if card == SERVED_CARD else {}),
    }  # fmt: skip


def least(config: Config, card: str, others: dict[str, Any]) -> dict[str, Any]:
    """The least time of a step on a card, and how many times as fast as TRL's best that is."""
    flops = least_flops(config)
    seconds = flops / gpus.find(card).rates.flops
    best = min(settings["best"]["seconds"] for settings in others.values())
    return {"flops": flops, "seconds": round(seconds, 4), "times_as_fast": round(best / seconds, 3)}


def over_least(card: Device, step: dict[str, Any], least_seconds: float) -> dict[str, float]:
    """A step's time as a multiple of the least, and what each kind of work adds to it, as the same multiples."""
    traffic, launches = step["moved_bytes"] / card.rates.bandwidth_bytes, step["calls"] * card.rates.call_seconds
    arithmetic = step["seconds"] - traffic - launches - least_seconds
    parts = {"times": step["seconds"], "arithmetic": arithmetic, "traffic": traffic, "launches": launches}
    return {name: round(seconds / least_seconds, 4) for name, seconds in parts.items()}


def _step(config: Config, forecast: Forecast) -> dict[str, Any]:
    return {
        "seconds": round(forecast.seconds, 4),
        "tokens_per_second": round(forecast.tokens_per_second),
        "flops": forecast.work.flops,
        "moved_bytes": forecast.work.moved_bytes,
        "calls": forecast.work.calls,
        "needed_bytes": forecast.needed_bytes,
        "micro_batch": config.training.micro_batch,
        "checkpointing": config.memory.checkpointing,
        "loss_tokens": config.memory.loss_tokens,
    }


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = harness.parser(__doc__, "step_cost.json")
    parser.add_argument("--served", action="store_true", help="only bases in served codes, beside an earlier result")
    options = parser.parse_args()
    started = time.perf_counter()
    configs = {
        name: finetune.load_config(
            harness.ROOT / "configs" / f"{file}.yaml", ["data.eval=none", f"training.batch_size={STEP_ROWS}"]
        )
        for name, file in MODELS.items()
    }
    if options.served:
        _add_served(options.output, configs)
        return
    result: dict[str, Any] = {
        "layer": {name: layer(configs["Llama-2-7B"].changed(path)) for name, path in PATHS.items()},
        "steps": {},
    }
    for name, found in result["layer"].items():
        print(name, _layer_table(found), sep="\n", flush=True)
    for model in MODELS:
        for card in CARDS:
            result["steps"].setdefault(model, {})[card] = found = steps(configs[model], card)
            print(_step_line(model, card, found), f"({time.perf_counter() - started:.0f} s)", flush=True)
            harness.save(options.output, result)


def _add_served(path: Path, configs: dict[str, Config]) -> None:
    """Measure what `served` does against the steps in NF4 of an earlier result, and add it there."""
    result = {key: harness.saved(path, key) for key in ("command", "environment", "layer", "steps")}
    for model, config in configs.items():
        step = result["steps"][model][SERVED_CARD]
        config = config.changed({"memory.budget": BUDGET_BYTES})
        with rows_of(padded=False):
            again = config.changed({key: step["ours"][name] for key, name in _CHOSEN.items()} | PATHS["fused"])
            nf4 = planning.planner_for(again, SERVED_CARD).forecast().seconds
        assert abs(nf4 / step["ours"]["seconds"] - 1) < 1e-3, "the earlier result is of another program"
        step["served"] = served(config, SERVED_CARD, step["ours"])
        print(model, {name: one["times"] for name, one in step["served"].items()}, flush=True)
    environment = harness.environment(None)
    harness.write_result(path, {**result, "served": {"command": harness.command_line(), "environment": environment}})


def _layer_table(found: dict[str, Any]) -> str:
    rows = {**found["parts"], "all": found["passes"]}
    lines = [
        (part, *(f"{each['gigabytes']:.2f} GB, {each['calls']}, {each['teraflop']:.2f}" for each in passes.values()))
        for part, passes in rows.items()
    ]
    whole = found["whole"]
    return harness.table(("GB, calls, TFLOP", *PASSES), lines) + (
        f"\na layer: {whole['gigabytes']:.2f} GB, {whole['calls']} calls, {whole['teraflop']:.2f} TFLOP"
    )


def _step_line(model: str, card: str, found: dict[str, Any]) -> str:
    times = (
        f"{value:.2f} times as fast as TRL ({setting}, rows of {kind})"
        for kind, settings in found["times_as_fast"].items()
        for setting, value in settings.items()
    )
    return f"{model}, {card}: {found['ours']['seconds']:.2f} s, {', '.join(times)}"


if __name__ == "__main__":
    main()
