"""Processes that run the command line and are killed, signalled or starved at a chosen moment.

Importing torch and trl takes eight seconds, so one process imports all of it, trains a step, and then forks for each
start. The product knows nothing of this: a child watches its own system calls through Python's audit events, and acts
at the n-th that matches.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from finetune.storage import private

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "tiny_cpu.yaml"
_FORKED_RANK = Path(__file__).with_name("forked_rank.py")
IMPATIENT = "FINETUNE_TESTS_IMPATIENT"
"""In the environment of a rank: from its first step on it waits some seconds for a rank that is silent, not half a
minute. Before that each rank takes its own time, and rank 0 has work that the others wait for."""
PUBLISHING = "finetune.training.publishing:publish"
"""A call at which a limit of the training's memory ends: the proof of adapter/ reads another copy of the base."""
ROOM = "FINETUNE_TESTS_ROOM"
"""In the environment of a rank, a number: of more positions than this it runs out of memory, in each start."""


@dataclass(frozen=True)
class Fault:
    """Do `action` at the `nth` event that matches: send signals by name (`hang` waits a second between them, or for
    good as the last), raise an errno, run out of `memory`, `fail` otherwise, `fill` the disk, or `flip` a bit.

    `event`: open (for writing), read, rename, mkdir, remove (of a file or a folder), fsync, or module:function for a
    call. `path`: a regular expression that the path must contain; of a call it is `backward` in a backward pass, else
    empty. `after`: a call before which nothing is counted. `once`: a file or folder that the action waits for, such as
    a checkpoint, which is written beside the steps. `memory_bytes`: instead of an action, let the child map no more
    than so much beyond what it has then, until the call `until`. `file_bytes`: the largest file the child may write,
    beyond which it is killed in the middle of the write (`dies`) or gets EFBIG.
    """

    event: str = ""
    path: str = ""
    nth: int = 1
    action: str | int = "SIGKILL"
    after: str = ""
    once: str = ""
    memory_bytes: int | None = None
    until: str = ""
    file_bytes: int | None = None
    dies: bool = False


@dataclass(frozen=True)
class Ended:
    """A child's end: its exit code (negative for a signal), and all it printed."""

    code: int
    output: str

    @property
    def in_one_line(self) -> str:
        return " ".join(self.output.split())


class Child:
    """A child under way."""

    def __init__(self, children: Children, pid: int, log: Path) -> None:
        self._children, self.pid, self._log = children, pid, log

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> Ended:
        """Its end."""
        status = self._children.ask({"wait": self.pid})["status"]
        return Ended(os.waitstatus_to_exitcode(status), self._log.read_text(errors="replace"))

    @property
    def ended(self) -> bool:
        """Whether it is at its end, which `wait` tells."""
        return " Z " in Path(f"/proc/{self.pid}/stat").read_text()

    def wait_until_stopped(self) -> None:
        """Until a SIGSTOP that it was to send itself came."""
        until = time.monotonic() + 600
        while " T " not in Path(f"/proc/{self.pid}/stat").read_text():
            assert time.monotonic() < until, self._log.read_text(errors="replace")
            assert not self.ended, self._log.read_text(errors="replace")
            time.sleep(0.01)


class Children:
    """Starts children. Close it, or use it as a context manager.

    `config`: the file that the jobs of tests change keys of. Processes that name the same folder as `shared` have one
    process fork for all of them: the first that comes starts it, and it ends with the last.
    """

    def __init__(
        self, folder: Path, *, preload: str = "finetune", config: Path = TINY, shared: Path | None = None
    ) -> None:
        self._folder, self._count, self.config = folder, 0, config
        folder.mkdir(parents=True, exist_ok=True)
        self.address = address = (shared or folder) / "forks"
        self._server: subprocess.Popen[str] | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        with open(address.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._connection.connect(str(address))
            except OSError:
                self._server = _started(preload, config, address)
                self._connection.connect(str(address))
        self._stream = self._connection.makefile("rw")

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()
        self._connection.close()
        if self._server:
            self._server.wait()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        _say(self._stream, request)
        answer = self._stream.readline()
        assert answer, "the process that forks is gone"
        return json.loads(answer)

    def start(
        self, arguments: Sequence[object], fault: Fault | None = None, environment: dict[str, str] | None = None
    ) -> Child:
        """Start the command with `arguments`, and what is added to its environment."""
        self._count += 1
        log = self._folder / f"{self._count:04d}.log"
        log.touch()  # a child may be killed before it comes to that
        request = {
            "arguments": [str(item) for item in arguments], "log": str(log), "fault": fault and fault.__dict__,
            # The process that forks it may be another worker's, whose cache is not the one of this test.
            "environment": {"HF_DATASETS_CACHE": str(private.data_cache()), **(environment or {})},
        }  # fmt: skip
        return Child(self, self.ask(request)["pid"], log)

    def run(self, arguments: Sequence[object], fault: Fault | None = None) -> Ended:
        """Start it and wait for its end."""
        return self.start(arguments, fault).wait()

    def in_place_of_modules(self, folder: Path) -> None:
        """Let `python -m finetune` in `folder` run in a fork of the process that has imported it."""
        (folder / "finetune").mkdir()
        (folder / "finetune" / "__init__.py").touch()
        (folder / "finetune" / "__main__.py").write_text(
            f"import runpy, sys\n"
            f"sys.argv[1:1] = {[str(self.address), str(folder)]!r}\n"
            f"runpy.run_path({str(_FORKED_RANK)!r}, run_name='__main__')\n"
        )

    def call(self, function: Callable[..., Any], *arguments: object, ranks: int = 1) -> list[Any]:
        """What a function of a test's module returns in each of `ranks` children; arguments and result as in JSON."""
        outputs = [self._folder / f"{self._count}-{rank}.json" for rank in range(ranks)]
        where = [sys.path, function.__module__, function.__name__]
        started = [
            self.start(
                ["call", json.dumps([str(output), *where, *arguments])],
                environment=_as_rank(rank, ranks) if ranks > 1 else {},
            )
            for rank, output in enumerate(outputs)
        ]
        for ended in [child.wait() for child in started]:
            assert ended.code == 0, ended.output
        return [json.loads(output.read_text()) for output in outputs]


def _started(preload: str, config: Path, address: Path) -> subprocess.Popen[str]:
    """The process that forks, ready to be asked."""
    address.unlink(missing_ok=True)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive", "MALLOC_ARENA_MAX": "1",
    }  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, __file__, preload, str(config), str(address)], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert server.stdout
    with server.stdout as ready:
        assert ready.readline() == "ready\n"
    return server


def _say(stream: TextIO, values: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever asked may have been killed meanwhile
        stream.write(json.dumps(values) + "\n")
        stream.flush()


def _as_rank(rank: int, ranks: int) -> dict[str, str]:
    size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return {**size, "RANK": str(rank), "LOCAL_RANK": str(rank)}


# -- in the process that forks, and in its children ------------------------------------------------------------------


def _serve(preload: str, config: str, address: str) -> None:
    """Fork and wait as those that connect to `address` ask, until the last of them is gone."""
    main = _finetune(config) if preload == "finetune" else _plain()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # as in conftest.py
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as selector:
        listening.bind(address)
        listening.listen()
        selector.register(listening, selectors.EVENT_READ)
        print("ready", flush=True)  # noqa: T201 -- `_started` reads it
        asking: dict[socket.socket, TextIO] = {}
        while True:
            for key, _ in selector.select():
                if key.fileobj is listening:
                    connection, _ = listening.accept()
                    asking[connection] = connection.makefile("rw")
                    selector.register(connection, selectors.EVENT_READ)
                elif key.data:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    connection, pid = key.data
                    status = os.waitpid(pid, 0)[1]
                    if connection in asking:
                        _say(asking[connection], {"status": status})
                elif line := asking[key.fileobj].readline():
                    _answer(json.loads(line), key.fileobj, main, asking, selector)
                else:
                    for waited in [each.data for each in selector.get_map().values() if each.data]:
                        if waited[0] is key.fileobj:  # who waits was killed, and with it is what it waits for
                            os.kill(waited[1], signal.SIGKILL)
                    selector.unregister(key.fileobj)
                    asking.pop(key.fileobj).close()
                    key.fileobj.close()
                    if not asking:
                        return


def _answer(
    request: dict[str, Any], connection: socket.socket, main: Any, asking: dict[socket.socket, TextIO],
    selector: selectors.BaseSelector,
) -> None:  # fmt: skip
    """Fork, or answer once the process that the request names has ended."""
    if "wait" in request:
        pid = request["wait"]
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (connection, pid))
        return
    pid = os.fork()
    if not pid:
        for each in list(selector.get_map().values()):  # nobody is to wait for a child to answer
            os.close(each.fd)
        _child(main, **request)
    _say(asking[connection], {"pid": pid})


def _finetune(config: str) -> Any:
    from finetune.runtime import libraries

    with libraries.importing():  # as the command line does
        import torch

        import finetune.recipe  # noqa: F401 -- with all that it imports
        from finetune import cli
        from finetune.extras.zero import engine as zero
        from finetune.report import plots
        from finetune.storage.files import write_bytes
        from finetune.training import reference_scores, sample_answers

    if importlib.util.find_spec("deepspeed"):
        zero._imported(torch.device("cpu"))  # which else each rank of its tests imports
    torch.set_num_threads(1)
    # Several whole answers and the plot would take half the time of a run of seconds.
    sample_answers.TOKENS = sample_answers.QUESTIONS = 1
    reference_scores._KEPT_EVERY_SECONDS = 0.2  # a pass of seconds is kept in parts as well
    plots.training = lambda run: write_bytes(run.plot_file, b"")
    os.fsync = lambda descriptor: None  # as in conftest.py
    _train_a_step(config)

    def main(arguments: list[str]) -> None:
        if arguments[0] == "call":
            _call(*json.loads(arguments[1]))
        elif arguments[0] == "save":
            with cli.errors_reported():
                _save(*arguments[1:])
        else:
            sys.argv = ["finetune", *arguments]
            cli.main()

    return main


def _train_a_step(config: str) -> None:
    """Fill the caches of the libraries, and import what a run imports only as it comes to it."""
    from finetune import recipe
    from finetune.choices import load_config
    from finetune.report.terminal import Terminal

    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        rows.write_text("".join(f'{{"prompt": "Say {row}", "completion": "{row}"}}\n' for row in range(8)))
        job = [f"data.train={rows}", "data.eval_share=0.5", "training.max_steps=1", "training.eval_every=1",
               "training.batch_size=2", "training.micro_batch=2", "output.merge=false", "memory.check=off"]  # fmt: skip
        for kind in ("nf4", "none"):
            own = [f"quantization.kind={kind}", f"output.dir={folder}/{kind}"]
            recipe.train(load_config(config, [*job, *own]), terminal=Terminal(quiet=True))


def _call(output: str, path: list[str], module: str, function: str, *arguments: Any) -> None:
    sys.path[:] = path
    returned = getattr(importlib.import_module(module), function)(*arguments)
    Path(output).write_text(json.dumps(returned))


def connect(store: str) -> None:
    """Join the other ranks of `Children.call` by a file."""
    from torch import distributed

    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def contents(step: int) -> Any:
    """A small checkpoint's contents; each step's differ."""
    import torch

    from finetune.storage.checkpoint import Contents

    tensors = {name: {"weight": torch.full((1024,), float(step))} for name in ("adapter.safetensors", "b.safetensors")}
    return Contents(step=step, tensors=tensors, values={"state.json": {"step": step}}, provenance={})


def _save(folder: str, step: str) -> None:
    """Save a small checkpoint as a training does, and prune."""
    from finetune.storage import checkpoint
    from finetune.storage.rundir import RunDirectory

    run = RunDirectory(folder)
    checkpoint.write(run, contents(int(step)))
    checkpoint.prune(run, 2, None, set())


def _plain() -> Any:
    import torch

    sys.path.insert(0, str(ROOT / "benchmarks" / "scripts"))
    import plain_trainer

    torch.set_num_threads(1)
    return plain_trainer.main


def _child(
    main: Any, arguments: list[str], log: str, fault: dict[str, Any] | None, environment: dict[str, str],
    folder: str = "",
) -> None:  # fmt: skip
    import torch

    code = 70
    os.environ |= environment
    if folder:
        os.chdir(folder)
    from finetune.runtime import rank_watch

    rank_watch.BEAT_SECONDS = 0.2  # a lost rank is noticed at the next beat
    try:
        # torch makes its pool anew at the first use in a fork, and fails where several threads come to that at once.
        torch.set_num_threads(1)
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if fault:
            _inject(Fault(**fault))
        if ROOM in environment:
            leave_room(int(environment[ROOM]))
        if IMPATIENT in environment:
            _watch_calls("finetune.training.step:Step.clip", lambda *_: _lose_patience())
        main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def leave_room(positions: int) -> None:
    """Run out of memory in each larger micro-batch."""
    import torch

    from finetune.training.step import Step

    micro_step = Step.micro_step

    def limited(self: Any, micro_batch: Any, *others: Any) -> Any:
        if micro_batch["input_ids"].numel() > positions:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        return micro_step(self, micro_batch, *others)

    Step.micro_step = limited


def _lose_patience() -> None:
    from finetune.runtime import rank_watch

    rank_watch.SILENCE_SECONDS, rank_watch.GRACE_SECONDS = 4.0, 0.5
    rank_watch.BEHIND_SECONDS = rank_watch.MAIN_BEHIND_SECONDS = 4.0


def _fill(path: Path) -> None:
    """Leave no room on the file system of `path`."""
    while not path.is_dir() or not path.is_mount():
        path = path.parent
    with contextlib.suppress(OSError), open(path / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))


def _give_back_what_is_freed() -> None:
    """So that a limit on memory refuses the same on every machine.

    Otherwise a block may come from what an earlier and larger one left to the heap. (A thread's arena, which a child
    would inherit, has 64 MiB mapped ahead: MALLOC_ARENA_MAX.)
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h; once set, it no longer grows by itself
    ctypes.CDLL(None).mallopt(mmap_threshold, 64 * 2**10)


def _limit_memory(extra_bytes: int) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + extra_bytes, resource.RLIM_INFINITY))


def _wait_for(path: str) -> None:
    until = time.monotonic() + 600
    while path and not os.path.exists(path):
        assert time.monotonic() < until, f"{path} does not come"
        time.sleep(0.01)


def _flip(path: Path) -> None:
    """One bit of a file, as a failing disk does."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# With the place of the folder's descriptor among the arguments, to which `shutil.rmtree` gives bare names.
_AUDITED = {"os.rename": ("rename", 2), "os.mkdir": ("mkdir", 2), "os.remove": ("remove", 1), "os.rmdir": ("remove", 1)}


def _inject(fault: Fault) -> None:
    import torch

    if fault.memory_bytes is not None:
        _give_back_what_is_freed()
    if fault.file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.file_bytes, resource.RLIM_INFINITY))
        if fault.dies:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    seen, counts = 0, not fault.after

    def happened(event: str, path: str) -> None:
        nonlocal seen, counts
        counts |= event == fault.after
        if event == fault.until:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if not counts or event != fault.event or not re.search(fault.path, path):
            return
        seen += 1
        if seen != fault.nth:
            return
        _wait_for(fault.once)
        if fault.memory_bytes is not None:
            _limit_memory(fault.memory_bytes)
            return
        if fault.action in ("fill", "flip"):
            {"fill": _fill, "flip": _flip}[fault.action](Path(path))
            return
        if isinstance(fault.action, int):
            raise OSError(fault.action, os.strerror(fault.action), path)
        if fault.action == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        if fault.action == "fail":
            raise RuntimeError("no matter of memory")
        actions = fault.action.split()
        for place, name in enumerate(actions, start=1):
            if name == "hang":
                time.sleep(1 if place < len(actions) else 3600)
            else:
                os.kill(os.getpid(), getattr(signal, name))

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open" and not isinstance(arguments[0], int):
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            happened("open" if writes else "read", os.fsdecode(arguments[0]))
        elif name in _AUDITED:
            event, folder = _AUDITED[name]
            path = os.fsdecode(arguments[0])
            if arguments[folder] not in (-1, None):
                path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[folder]}"), path)
            happened(event, path)

    sys.addaudithook(hook)
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        happened("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    os.fsync = counted
    for call in (fault.event, fault.after, fault.until):
        if ":" in call:
            _watch_calls(call, happened)


def _watch_calls(event: str, happened: Any) -> None:
    module_name, _, function = event.partition(":")
    module: Any = __import__("importlib").import_module(module_name)
    *owners, name = function.split(".")
    for owner in owners:
        module = getattr(module, owner)
    real = getattr(module, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        import torch

        happened(event, "backward" if torch._C._current_graph_task_id() != -1 else "")
        return real(*arguments, **named)

    setattr(module, name, watched)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
