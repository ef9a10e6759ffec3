"""What the process that runs trials does; `making` starts it.

It writes each result as a line of JSON to a file descriptor as soon as it has it, so that a crash costs one trial.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Collection
from typing import Any

import psutil
import torch

from finetune.certificate.small_model import TriedJob, is_shared
from finetune.certificate.trials import FUSED, TRIALS, Refuted, Skipped
from finetune.config import Config
from finetune.errors import FinetuneError, first_line
from finetune.forecast import devices
from finetune.runtime import libraries, segments
from finetune.settings import CHOICES

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(results: int, request: dict[str, Any]) -> None:
    """Run the trials of a request of `making`."""
    _end_with(request["parent"])
    libraries.quiet()
    job = _job(request)
    off = {*request["off"], *(FUSED if job.config.kernels.fused == "off" else ())}
    _bound_memory(job, off)

    def write(line: dict[str, Any]) -> None:
        os.write(results, (json.dumps(line) + "\n").encode())

    for name in request["trials"]:
        write({"began": name})
        result = _attempt(name, job, off)
        write({"trial": name, **result})
        if result["status"] in ("failed", "slower"):
            off |= {name}
            if name == "segments":
                segments.disable()
            with contextlib.suppress(torch.OutOfMemoryError):
                job.wait()  # raises if the CUDA context is gone; another process does the rest
        libraries.return_freed_memory()


def _attempt(name: str, job: TriedJob, off: Collection[str]) -> dict[str, Any]:
    """The result of one trial as JSON values."""
    try:
        return {"status": "held", "figures": TRIALS[name].run(job, off)}
    except Skipped as skipped:
        return {"status": "skipped", "reason": str(skipped)}
    except Refuted as refuted:
        return {"status": "slower" if refuted.slower else "failed", "reason": str(refuted)}
    except (torch.OutOfMemoryError, MemoryError):
        shared = job.device.type == "cpu" or is_shared(job.free_bytes, job.total_bytes)
        return {"status": "failed", "reason": "it ran out of memory", "transient": shared}
    except FinetuneError as error:
        return {"status": "failed", "reason": first_line(error)}
    except Exception as error:  # kernels and models may raise anything
        return {"status": "failed", "reason": f"it raised {type(error).__name__}: {first_line(error)}"}


def _job(request: dict[str, Any]) -> TriedJob:
    from transformers import AutoConfig

    return TriedJob(
        Config.model_validate(request["config"], context={"choices": CHOICES}),
        AutoConfig.for_model(**request["architecture"]),
        request["attention"],
        torch.device(request["device"]),
        request["rows"],
        request["tokens"],
        request["free_bytes"],
        request["total_bytes"],
    )


def _bound_memory(job: TriedJob, off: Collection[str]) -> None:
    """Configure the allocator as a run does, and let this process run out of memory before the machine does."""
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
        if "segments" not in off:
            segments.enable(torch.cuda.current_device())
        devices.cap(job.config.memory.limit, job.device)
        if not job.has_triton:
            libraries.without_triton()
        return
    free_bytes = min(psutil.virtual_memory().available, devices.left_by_control_groups())
    mapped_bytes = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (int(mapped_bytes + free_bytes), resource.RLIM_INFINITY))


def _end_with(parent: int) -> None:
    """Have this process killed when its parent ends, on Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        sys.exit(1)
