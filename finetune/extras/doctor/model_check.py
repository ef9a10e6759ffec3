"""Tries a model, given by its config.json alone: `model_checks` in a process that may crash, hang or exit."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from finetune.errors import ArtifactError, ConfigError, MachineError
from finetune.extras.doctor.findings import Examination, Finding
from finetune.model.source import catalog

_LIMIT_SECONDS = 120.0
"""For all checks of a model, which take 15 to 20 s of a core (2026-11)."""
# Address space that checks may take beyond what the libraries map; a small copy takes a few hundred MB.
_MOST_BYTES = 16 * 2**30


def is_model(name: str) -> bool:
    """Whether `finetune doctor NAME` is about a model: a folder with config.json, a built-in base or a hub's name.

    A path that does not exist, in a folder that does, is a run directory that is missing.
    """
    path = Path(name)
    if path.exists():
        return not path.is_dir() or ((path / "config.json").is_file() and not (path / "config.yaml").is_file())
    if name.startswith("builtin:") or catalog.find(name):
        return True
    return name.count("/") == 1 and not name.startswith((".", "~", "/")) and not path.parent.exists()


def examine(
    name: str, began: Callable[[str], object] = lambda tries: None, *, limit_seconds: float = _LIMIT_SECONDS
) -> Examination:
    """Try the model on this machine's CPU; calls `began` with what is tried next.

    `name` is that of a model, its folder, its config.json, or its GGUF file. The exit code is that of the refusal if
    the model is refused, and that of a bad artifact if a check fails.
    """
    file = Path(name)
    if file.is_file() and file.suffix.lower() != ".gguf":
        if file.name != "config.json":
            raise ConfigError(f"{name}: give a model's folder, its config.json or GGUF file, or a run directory")
        name = str(file.parent)
    allowed_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    if allowed_bytes != resource.RLIM_INFINITY and allowed_bytes < _MOST_BYTES + psutil.Process().memory_info().vms:
        raise MachineError(
            f"the address space of a process is limited to {allowed_bytes / 2**30:.1f} GiB, and trying a model may "
            f"take {_MOST_BYTES / 2**30:.0f} GiB of it; raise the limit (`ulimit -v unlimited`)"
        )
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as folder:
        findings, refused_with = _tried(name, Path(folder), began, time.monotonic() + limit_seconds)
    return Examination(findings, refused_with or ArtifactError.exit_code, refused=bool(refused_with))


def _tried(name: str, folder: Path, began: Callable[[str], object], until: float) -> tuple[list[Finding], int]:
    """The findings, and the exit code of a model that is refused as a whole."""
    findings: dict[str, Finding] = {}
    refused_with = 0
    checks = ["structure"]  # until a process has imported the others
    while any(check not in findings for check in checks):
        trying, before = "", len(findings)
        child, results = _start(name, folder, {check: finding.status for check, finding in findings.items()})
        try:
            while results.poll(max(until - time.monotonic(), 0)):
                match results.recv():
                    case list() as checks:
                        pass
                    case (trying, tries):
                        began(tries)
                    case (check, status, what, code):
                        if check == "structure" and status == "refused":
                            refused_with = code
                        findings[check], trying = Finding(check, status, what), ""
            ended = "there was no time left for it"
        except EOFError:
            child.join()
            code = child.exitcode
            ended = f"its process ended ({f'signal {-code}' if code and code < 0 else f'exit code {code}'})"
        finally:
            results.close()
            child.kill()
            child.join()
        over = time.monotonic() >= until or (len(findings) == before and not trying)
        lost = [check for check in checks if check not in findings] if over else [trying] if trying else []
        findings |= {check: Finding(check, "error", ended) for check in lost}
    return [findings[check] for check in checks], refused_with


def _start(name: str, folder: Path, statuses: dict[str, str]) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["finetune.extras.doctor.preloaded"])  # imported once for all child processes
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_try, args=(there, name, folder, statuses), daemon=True)
    child.start()
    there.close()
    return child, here


def _try(results: Connection, name: str, folder: Path, statuses: dict[str, str]) -> None:
    """Run the checks that have no status yet in this process. Sends their names; what each tries; and its result."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from finetune.extras.doctor.model_checks import CHECKS, Copy, attempt
    from finetune.runtime import libraries

    results.send(list(CHECKS))
    mapped_bytes = psutil.Process().memory_info().vms
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (soft, hard, mapped_bytes + _MOST_BYTES) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    with open(folder / "printed", "a") as printed:  # takes what the libraries print
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        libraries.quiet()
        gc.freeze()  # memory is freed after each small step, and the collector would go through all of the libraries
        copy = Copy(name, folder)
        for check in [check for check in CHECKS if check not in statuses]:
            lacking = [needed for needed in CHECKS[check].needs if statuses[needed] != "ok"]
            if lacking:
                statuses[check] = "skipped"
                results.send((check, "skipped", f"needs `{lacking[0]}`", 0))
                continue
            results.send((check, CHECKS[check].tries))
            statuses[check], what, code = attempt(check, copy)
            results.send((check, statuses[check], what, code))
