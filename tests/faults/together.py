"""A job that several processes train, as a launcher starts them."""

from __future__ import annotations

import signal
import socket

from children import Child, Children, Ended, Fault

from finetune.storage.rundir import RunDirectory

_HELD: list[socket.socket] = []


def held_port() -> int:
    """A port on which a server of a test may listen, and which the system gives to nobody else before that."""
    _HELD.append(held := socket.socket())
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return int(held.getsockname()[1])


class Together:
    """A job of seconds that several processes train, as torchrun starts them."""

    def __init__(self, children: Children, job: list[str], run: RunDirectory) -> None:
        self.run = run
        self.arguments = ["train", str(children.config), *job, f"output.dir={run.path}"]
        self._children = children

    def start(
        self,
        processes: int,
        faults: dict[int, Fault] | None = None,
        own: dict[int, list[str]] | None = None,
        environment: dict[str, str] | None = None,
    ) -> list[Child]:
        """Start them; `faults` and overrides of its `own` by the number of the process."""
        size = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        launched = {**size, **(environment or {}), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": held_port()}
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

    def kill(self, processes: int, *, step: int, saved: int) -> None:
        """Start them and kill all in their n-th `step`, once the checkpoint `saved` is complete."""
        fault = Fault("finetune.training.step:Step.clip", nth=step, once=str(self.run.checkpoint(saved)))
        assert_all(self.go(processes, dict.fromkeys(range(processes), fault)), -signal.SIGKILL)


def assert_all(ended: list[Ended], code: int) -> None:
    for each in ended:
        assert each.code == code, each.output


def assert_refused(ended: list[Ended], code: int, *said: str) -> None:
    """All end with this code, and the first alone says why."""
    assert_all(ended, code)
    first, *others = ended
    assert first.output.count("error:") == 1
    assert all(text in first.in_one_line for text in said), first.output
    assert not any(each.output for each in others)
