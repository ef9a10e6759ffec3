"""Commands run in a forked child under an audit hook: what it opened, imported, connected to and started.

An audit hook (PEP 578) hears Python's own operations before they happen and cannot be taken off, so the child that has
one is a fork and ends with its commands. What libraries do in C or Rust (safetensors writes its own files) it does not
hear; for that the tests look at the folders before and after.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

import finetune
from finetune import cli
from finetune.data import cache

_ROOT = Path(finetune.__file__).resolve().parents[1]

_NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo")
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn")
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz")
# Asked for the commit that the program runs from; see finetune.runtime.environment.
_GIT = ["git", "-C", str(_ROOT), "rev-parse", "HEAD"]


@dataclass
class Ended:
    """What a command printed and did: the exit code, and one line for each thing that no command may do."""

    code: int
    out: str
    err: str
    heard: list[str] = field(default_factory=list)
    grown_bytes: int = 0  # from the process's size at its start to its largest


class Watch:
    """The audit hook: notes what none of our commands may do with a foreign file."""

    def __init__(self, writable: Iterable[Path], foreign: Iterable[Path]) -> None:
        self.heard: list[str] = []
        self._writable = tuple(os.path.realpath(path) for path in writable)
        self._foreign = tuple(os.path.realpath(path) for path in foreign)
        self._busy = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            if said := self._wrong(event, arguments):
                self.heard.append(f"{event}: {said}")
        finally:
            self._busy = False

    def _wrong(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        if event in _NETWORK:
            return repr(arguments[1:])
        if event in _PROCESSES:
            return None if event == "subprocess.Popen" and [*arguments[1]] == _GIT else repr(arguments)
        if event == "pickle.find_class":
            return repr(arguments[1:])
        if event == "import":
            name, file = arguments[:2]
            return repr(name) if file and self._is_foreign(file) else None
        if event in ("exec", "compile"):
            file = arguments[0].co_filename if event == "exec" else arguments[1]
            return repr(file) if isinstance(file, str) and self._is_foreign(file) else None
        if event == "open":
            return self._wrong_open(*arguments)
        if event in _CHANGES:
            places = arguments[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]
            folder = next((found for found in arguments[len(places) :] if isinstance(found, int) and found >= 0), None)
            wrong = [place for place in places if not self._may_write(place, folder if event != "os.mkdir" else None)]
            return repr(wrong) if wrong else None
        return None

    def _wrong_open(self, path: Any, mode: str | None, flags: int) -> str | None:
        if isinstance(path, int) or path is None:
            return None
        if self._is_foreign(path) and os.fsdecode(path).endswith(_PICKLES):
            return f"reads {path!r}"
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        return f"writes {path!r}" if writes and not self._may_write(path) else None

    def _is_foreign(self, path: Any) -> bool:
        return os.path.realpath(os.fsdecode(path)).startswith(self._foreign)

    def _may_write(self, path: Any, folder: int | None = None) -> bool:
        if isinstance(path, int):
            return True
        text = os.fsdecode(path)
        if folder is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        real = os.path.realpath(text)
        return (
            real in ("/dev/null", "/dev/tty")
            or real.endswith("/clear_refs")
            or real.startswith(self._writable)
            or "__pycache__" in real
        )


def watched(
    *commands: Sequence[object], writable: Iterable[Path], foreign: Iterable[Path], folder: Path
) -> list[Ended]:
    """Run `finetune ARGUMENTS` for each of `commands`, one after the other in a fork. They may write below `writable`
    and keep prepared rows in their cache, and run nothing from `foreign`.

    `folder` takes what they print.
    """
    printed = [(folder / f"ended{number}.out", folder / f"ended{number}.err") for number in range(len(commands))]
    report = folder / "ended.json"
    child = os.fork()
    if child == 0:
        scratch = folder / "scratch"
        scratch.mkdir()
        tempfile.tempdir = str(scratch)
        size = psutil.Process().memory_info().rss
        watch = Watch([*writable, scratch, cache.folder()], foreign)
        # torch makes its pool anew at the first use in a fork, and fails where several threads come to that at once.
        torch.set_num_threads(1)
        found = []
        try:
            opened = [[os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for file in files] for files in printed]
            sys.stdin = open(os.devnull)  # noqa: SIM115 -- a prompt gets no answer
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            sys.addaudithook(watch)
            for arguments, (out, err) in zip(commands, opened, strict=True):
                os.dup2(out, 1)
                os.dup2(err, 2)
                code = _run(arguments)
                grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - size
                sys.stdout.flush()
                sys.stderr.flush()
                found.append([code, watch.heard, grown])
                watch.heard = []
        finally:
            report.write_text(json.dumps(found))
            os._exit(0)
    _, status = os.waitpid(child, 0)
    said = [(out.read_text(), err.read_text()) for out, err in printed]
    assert os.WIFEXITED(status), f"killed by signal {os.WTERMSIG(status)}: {said}"
    found = json.loads(report.read_text())
    assert len(found) == len(commands), said
    for file in (report, *(file for files in printed for file in files)):
        file.unlink()
    shutil.rmtree(folder / "scratch")
    return [Ended(code, out, err, *rest) for (code, *rest), (out, err) in zip(found, said, strict=True)]


def _run(arguments: Sequence[object]) -> int:
    sys.argv = ["finetune", *map(str, arguments)]
    try:
        cli.main()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
