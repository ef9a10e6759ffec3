"""Certificates in the user's cache: a file for each device, driver, set of versions, code and kind of job.

The folder and its files belong to this user alone; anything else there is not trusted and made anew. A file is replaced
atomically. Deleting it only means that the trials run again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from finetune.runtime import driver, environment
from finetune.runtime.libraries import triton_obstacle
from finetune.storage import private, records
from finetune.storage.files import cause
from finetune.storage.private import cache_folder, not_private
from finetune.storage.records import CertificateRecord, TrialResult

# Longer than the trials of another process take.
_WAIT_SECONDS = 120


def made_for(request: dict[str, Any]) -> dict[str, Any]:
    """Everything that the results of a request depend on, as JSON values."""
    job = {name: value for name, value in request.items() if name not in ("device", "free_bytes", "total_bytes")}
    return {**_here(torch.device(request["device"])), "job": job}


def _here(device: torch.device) -> dict[str, Any]:
    versions = {**environment.packages(), "triton": environment.version_of("triton")}
    return {"device": _device(device), "versions": versions, "code": environment.code_hash()}


def read(made_for: dict[str, Any]) -> list[TrialResult] | None:
    """The stored results; None if there are none, if they are damaged, or if other users can write them."""
    path = _path(made_for)
    record = _record(path)
    if record is None or record["made_for"] != made_for:
        return None
    with contextlib.suppress(OSError):
        os.utime(path.parent)  # entries of the cache that are not used for a month are removed
    return record["results"]


def _record(path: Path) -> CertificateRecord | None:
    content = None if not_private(cache_folder()) else private.read(path)
    try:
        return records.CERTIFICATE.validate_json(content) if content else None
    except ValidationError:
        return None


def of_device(device: torch.device) -> list[CertificateRecord]:
    """The certificates that are kept for a device with these versions and this code, the newest first."""
    here = _here(device)
    files = [(path.stat().st_mtime, path) for path in (cache_folder() / "certificates").glob("*.json")]
    kept = (_record(path) for _, path in sorted(files, reverse=True))
    return [one for one in kept if one and {**one["made_for"], **here} == one["made_for"]]


def write(made_for: dict[str, Any], results: list[TrialResult]) -> str | None:
    """Keep results; returns why they are not kept, in one clause, where they cannot be."""
    path = _path(made_for)
    record = CertificateRecord(format=1, made_for=made_for, results=results)
    try:
        private.make_folder(path.parent)
        if why := not_private(cache_folder()):
            return why
        private.write(path, records.CERTIFICATE.dump_json(record))
    except OSError as error:
        return cause(error, next(parent for parent in path.parents if parent.exists()))
    return None


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """In the block, no other process of this user runs trials, since simultaneous trials would disturb each other.

    If no lock can be taken, or another process holds it for too long, the block runs anyway.
    """
    try:
        private.make_folder(cache_folder() / "certificates")
        lock = os.open(cache_folder() / "certificates", os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        until = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < until:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:  # some network file systems have no locks
                break
        yield
    finally:
        os.close(lock)


def _path(made_for: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(made_for, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "certificates" / f"{digest[:32]}.json"


def _device(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"type": "cpu", "name": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": device.type,
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")),
        "total_bytes": properties.total_memory,
        "driver": driver.version(),
        "cuda": torch.version.cuda,
        "triton": triton_obstacle() is None,
    }
