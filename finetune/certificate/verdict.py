"""The certificate of a job on a device: read or made, and what follows from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from finetune.certificate import making, store, trials
from finetune.certificate.trials import FUSED, LARGE, TRIALS
from finetune.config import Config, KernelsSection, MemorySection, ModelSection, TrainingSection
from finetune.forecast import devices
from finetune.forecast.devices import Device
from finetune.forecast.planning import Planner
from finetune.model import build
from finetune.model.source.locate import remote_code
from finetune.storage.records import TrialResult
from finetune.training import optimizers

# Bounds of a micro-batch, whose size is not known before the plan and differs between data sets.
_LEAST_TOKENS, _MOST_TOKENS = 256, 2**15


@dataclass(frozen=True)
class Certificate:
    """The results of the trials; without any, nothing is off and nothing was measured."""

    results: Sequence[TrialResult] = ()

    def failed(self, trial: str) -> bool:
        """Whether a trial was made and did not hold."""
        return any(result.trial == trial and result.is_off for result in self.results)

    @property
    def kernels_off(self) -> frozenset[str]:
        """Kernels, or `loss`, that are not used: those whose trial did not hold; all if that of `model` did not."""
        off = {result.trial for result in self.results if result.is_off}
        if "large" in off:
            off.update(LARGE)
        return frozenset(FUSED) if "model" in off else frozenset(off & set(FUSED))

    def without(self, kernels: Sequence[str]) -> Certificate:
        """This certificate with further kernels off, which the model itself has ruled out."""
        return Certificate([*self.results, *(TrialResult(kernel, "failed") for kernel in kernels)])

    def lines(self, fused: str) -> list[str]:
        """One line for each trial that did not hold: what is off, why, what that costs, and whether it is kept."""
        return [
            f"certificate: {TRIALS[result.trial].tries} is off: {result.reason}; {_costs(result.trial, fused)}"
            + ("; it is tried again at the next start" if result.transient else "")
            for result in self.results
            if result.is_off and result.trial in TRIALS and TRIALS[result.trial].costs
        ]

    def changes(self, config: Config, device_type: str) -> dict[str, Any]:
        """Values of `section.key` without the optimizer, attention, packing or offload of `config` that failed."""
        changes: dict[str, Any] = {}
        twin = optimizers.OPTIMIZERS[config.optimizer.kind].unpaged
        if self.failed("optimizer") and twin and device_type == "cuda":
            changes["optimizer.kind"] = twin
        if self.failed("attention_implementation"):
            changes["model.attention"] = "eager"
        if config.data.packing and (self.failed("packing") or self.failed("attention_implementation")):
            changes["data.packing"] = False
        if config.memory.offload != "none" and self.failed("offload"):
            changes["memory.offload"] = "none"
        return changes

    def here(self, device: torch.device, memory: MemorySection) -> Device:
        """`device` as a plan should take it: measured figures in place of its data sheet, and without what failed."""
        figures = {(result.trial, name): value for result in self.results for name, value in result.figures.items()}
        plain = devices.here(device, memory, int(figures.get(("memory", "context_bytes"), 0)))
        reserved, forecast = (figures.get(("reserved", f"{of}reserved_bytes"), 0) for of in ("", "forecast_"))
        return replace(
            plain,
            kernels_off=tuple(sorted(self.kernels_off)),
            expandable_segments=plain.expandable_segments and not self.failed("segments"),
            managed_memory=plain.managed_memory and not self.failed("optimizer"),
            offloads=not self.failed("offload"),
            flops=figures.get(("rates", "flops"), plain.flops),
            fp32_flops=figures.get(("rates", "fp32_flops"), plain.fp32_flops),
            bandwidth_bytes=figures.get(("rates", "bandwidth_bytes"), plain.bandwidth_bytes),
            measured_workspace_bytes=int(figures.get(("rates", "workspace_bytes"), 0)),
            reserved_share=reserved / forecast if 0 < forecast < reserved else 1.0,
        )

    def summary(self) -> dict[str, Any]:
        """The results for environment.json: what did not hold, and the figures."""
        return {
            "held": [result.trial for result in self.results if result.status == "held"],
            "off": {result.trial: result.reason for result in self.results if result.is_off},
            "figures": {result.trial: result.figures for result in self.results if result.figures},
        }


def _costs(trial: str, fused: str) -> str:
    if trial == "model" and fused == "off":
        return "the run goes on; `memory.checkpointing=none` leaves out what may differ"
    return TRIALS[trial].costs


def request(
    config: Config, architecture: Any, attention: str, device: torch.device, rows: int, tokens: int
) -> dict[str, Any]:  # fmt: skip
    """What `making.make` is asked to try for a job, as JSON values. `rows` of `tokens` are a micro-batch."""
    given = config.model_dump(mode="json")
    sections = {
        "model": {"name": "tried", "weights": "random", "attention": config.model.attention},
        "quantization": given["quantization"],
        "adapter": {**given["adapter"], "init": "default", "start_from": None, "dropout": 0.0},
        "data": {"train": "tried", "packing": config.data.packing},
        "optimizer": given["optimizer"],
        "memory": {name: given["memory"][name] for name in ("checkpointing", "offload", "loss_tokens", "limit")},
        "training": {"precision": given["training"]["precision"]},
        "kernels": {"fused": "off" if config.fused == "off" else "auto"},
    }
    values = json.loads(architecture.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version", "architectures"):
        values.pop(name, None)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    return {
        "config": sections, "architecture": values, "attention": attention, "device": str(device),
        "rows": rows, "tokens": tokens, "free_bytes": free_bytes, "total_bytes": total_bytes,
    }  # fmt: skip


def micro_batch(training: TrainingSection, longest: int) -> tuple[int, int]:
    """Rows and tokens of the micro-batch to try, a little less than a power of two, so that data of about the same
    length has the same certificate.
    """
    rows = training.micro_batch if isinstance(training.micro_batch, int) else 1
    rows = min(rows, 8)
    positions = min(max(rows * longest, _LEAST_TOKENS), _MOST_TOKENS)
    return rows, max(2 ** (positions - 1).bit_length() // rows - 3, 8)


def is_tried(kernels: KernelsSection, model: ModelSection, device_type: str) -> bool:
    """Whether the config asks for a certificate on a device, and its model can be made without foreign code."""
    wanted = kernels.certificate
    return (wanted == "on" or (wanted == "auto" and device_type == "cuda")) and remote_code(model) is None


def standing(request: dict[str, Any]) -> Certificate:
    """Return what is known about the device before any trial.

    That is the certificate of this kind of job; or else that of the same model with other rows or memory settings; or
    else what was measured for any job.
    """
    key = store.made_for(request)
    if kept := store.read(key):
        return Certificate(kept)
    others = store.of_device(torch.device(request["device"]))
    for other in others:
        if _model_of(other["made_for"]["job"]) == _model_of(key["job"]):
            return Certificate(other["results"])
    newest = others[0]["results"] if others else []
    return Certificate([one for one in newest if one.trial in TRIALS and TRIALS[one.trial].of_device])


def _model_of(job: dict[str, Any]) -> dict[str, Any]:
    """The part of a request that kernels compute."""
    sections = {name: keys for name, keys in job["config"].items() if name not in ("memory", "optimizer")}
    return {"config": sections, "architecture": job["architecture"], "attention": job["attention"]}


def follow(planner: Planner, own_device: bool) -> Planner:
    """The `planner` adjusted to what is known of this machine's device, if its job is for `own_device`."""
    config, device = planner.job, torch.device(planner.device.type)
    if not own_device or not is_tried(config.kernels, config.model, device.type):
        return planner
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    longest = max(planner.data.train["length"]) if planner.data else config.data.max_length
    attention, _ = build.choose_attention(config, planner.architecture, device.type)
    rows, tokens = micro_batch(config.training, longest)
    certificate = standing(request(config, planner.architecture, attention, device, rows, tokens))
    changes = certificate.changes(config, device.type)
    return replace(planner, job=config.changed(changes), device=certificate.here(device, config.memory))


def obtain(
    request: dict[str, Any], note: Callable[[str], None], began: Callable[[str], None], *, anew: bool = False
) -> Certificate:
    """The kept certificate, once the trials that it lacks are made (`anew`: all of them, without a limit of time).

    Calls `began` with what is tried, and `note` if the results cannot be kept.
    """
    key = store.made_for(request)

    def kept() -> list[TrialResult]:
        return [] if anew else store.read(key) or []

    if not trials.missing(request, kept()):
        return Certificate(kept())
    with store.one_process():
        earlier = kept()
        if not trials.missing(request, earlier):  # another process has made them meanwhile
            return Certificate(earlier)
        results = making.make(request, began, earlier, complete=anew)
        if not any(result.status == "held" for result in results):  # the trials could not run at this moment
            return Certificate(results)
        if why := store.write(key, trials.lasting(results)):
            note(f"certificate: the results are used for this run and not kept: {why}")
    return Certificate(results)
