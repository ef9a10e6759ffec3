"""Processes of their own for the tests that inject a fault into the whole of one."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from children import Child, Children, Ended, Fault
from jobs import QUICK, TINY

from finetune.storage.rundir import RunDirectory


@pytest.fixture(scope="session")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    with Children(tmp_path_factory.mktemp("children")) as started:
        yield started


@pytest.fixture
def train_apart(children: Children, rows_file: Path, tmp_path: Path) -> Callable[..., tuple[RunDirectory, Ended]]:
    """A function that trains a job of seconds in a child, with a fault.

    A limit on memory needs that: a process that has run other tests holds freed memory, which needs no new.
    """

    def train(fault: Fault | None, *overrides: str, run: str = "run") -> tuple[RunDirectory, Ended]:
        data = [f"data.train={rows_file}", "data.eval_share=0.2", f"output.dir={tmp_path / run}"]
        return RunDirectory(tmp_path / run), children.run(["train", TINY, *QUICK, *data, *overrides], fault)

    return train


class Together:
    """A job of seconds that several processes train, as torchrun starts them."""

    def __init__(self, children: Children, job: list[str], run: RunDirectory) -> None:
        self.run = run
        self.arguments = ["train", str(TINY), *job, f"output.dir={run.path}"]
        self._children = children

    def start(
        self,
        processes: int,
        faults: dict[int, Fault] | None = None,
        own: dict[int, list[str]] | None = None,
        environment: dict[str, str] | None = None,
    ) -> list[Child]:
        """Start them; `faults` and overrides of its `own` by the number of the process."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        size = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        launched = {**size, **(environment or {}), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [
            self._children.start(
                [*self.arguments, *(own or {}).get(number, [])],
                (faults or {}).get(number),
                {name: str(value) for name, value in {**launched, "RANK": number, "LOCAL_RANK": number}.items()},
            )
            for number in range(processes)
        ]

    def go(
        self, processes: int, faults: dict[int, Fault] | None = None, own: dict[int, list[str]] | None = None
    ) -> list[Ended]:
        """Start them and wait for the end of each."""
        return [child.wait() for child in self.start(processes, faults, own)]
