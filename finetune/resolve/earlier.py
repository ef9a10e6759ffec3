"""What an earlier start of a run decides for this one: steps of the resolution, which do nothing in a first start."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from finetune.model.probes import marker
from finetune.model.structure.quantization import changes_to
from finetune.resolve.job import Job
from finetune.resolve.machine import ThisMachine
from finetune.runtime import ranks
from finetune.training import oom_retry, probe_table

# Keys that keep the values of the run's start where its config leaves them to the program.
_AS_STARTED = ("quantization.kind", "training.precision", "training.learning_rate", "adapter.expert_rank")


def as_started(job: Job) -> Job:
    """Take the values that the run was started with for the keys of `_AS_STARTED` that are `auto`.

    Runs of versions before `adapter.expert_rank` left experts out of `all-linear`, and had another default rate.
    """
    left, earlier = [key for key in _AS_STARTED if job.config.value(key) == "auto"], job.earlier
    if earlier is None:
        return job
    # Each rank keeps the config of its own, which is compared with the others' afterwards.
    then = ranks.main_does(lambda: earlier.config() if left and earlier.has_results else None)
    if then is None:
        return job
    kind = changes_to(then.quantization.kind) if "quantization.kind" in left else {}
    return job.changed({**kind, **{key: then.value(key) for key in left}})


def own_kernels(job: Job) -> Job:
    """Take the `kernels.fused` that a run to resume was started with, unless the config names one itself.

    The default was `off` in earlier versions, and kernels round differently: so the run goes on to the same numbers.
    """
    earlier, now = job.earlier, job.config.kernels
    if earlier is None:
        return job
    then = ranks.main_does(lambda: earlier.config().kernels if earlier.saved_steps else None)
    if then is None:
        return job
    fused = then.fused if "fused" in then.model_fields_set else "off"
    if fused == now.fused or "fused" in now.model_fields_set:
        return job
    job = job.noting("kernels.fused", f"kernels.fused: {fused}, as this run was started with; set it to change that")
    return job.changed({"kernels.fused": fused})


def kernels_off(job: Job) -> Job:
    """Do without the fused kernels, or `loss`, in which a process ended on one of the ranks' devices, or which an
    earlier start of this run found unlike the plain path; the same on all ranks.

    Raises MachineError if the config asks for something else that a process ended in.
    """
    if not isinstance(job.machine, ThisMachine):
        return job
    ended = frozenset().union(*ranks.gathered(marker.ended(job.machine.device)))
    job = job.noting("kernels", probe_table.left_out(job.config, ended))
    earlier = job.earlier
    events = ranks.main_does(
        lambda: [one for one in earlier.events() if one["event"] == "kernels_ruled_out"] if earlier else []
    )
    off = probe_table.kernels_off(ended)
    if ruled_out := {kernel for event in events for kernel in event["kernels"]} - off:
        names = "`, `".join(sorted(ruled_out))
        job.say(f"kernels: `{names}` is off: an earlier start of this run found it unlike the plain path")
    return replace(job, kernels_off=off | ruled_out)


def micro_batch(job: Job) -> dict[str, int]:
    """The keys of a micro-batch smaller than the job's, as a rank recorded it when it ran out of memory with these
    settings in an earlier start.
    """
    if job.earlier is None:
        return {}
    lowered = {f"training.{key}": value for key, value in job.config.training.model_dump().items()}
    now = dict(lowered)
    for event in itertools.chain.from_iterable(each.events() for each in job.earlier.of_ranks):
        if event["event"] == "micro_batch_lowered" and event.get("settings") == oom_retry.settings(job.config):
            for key, value in event["lowered"].items():
                lowered[key] = min(value, lowered[key] or math.inf)
    return {key: value for key, value in lowered.items() if value != now[key]}
