"""An unreachable hub: requests fail at once, and cached files are used."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections import Counter

import pytest

# What asks the hub: config, tokenizer, data set, weights, adapter, a revision. One line of the error for each.
# For each line of input, the seconds to wait for an answer, all is asked in a fork, which knows no earlier answer.
ASKS = """
import os, sys
from finetune.runtime import hub, libraries
with libraries.importing():
    from finetune.config import ModelSection
    from finetune.data import sources
    from finetune.model.adapters import starting
    from finetune.model.base import load_architecture
    from finetune.model.source.locate import weights_directory
    from finetune.model.source.tokenizer import load_tokenizer

libraries.quiet()
import datasets, peft
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
for line in sys.stdin:
    if child := os.fork():
        os.waitpid(child, 0)
        print("asked", flush=True)
        continue
    hub._SECONDS = float(line)
    for ask in (
        lambda: load_architecture(ModelSection(name="some/model")),
        lambda: load_architecture(ModelSection(name="some/model", revision="v2")),
        lambda: load_tokenizer(ModelSection(name="some/model")),
        lambda: next(sources.rows("some/data")),
        lambda: weights_directory("some/model", None, download=True),
        lambda: starting.folder_of("some/adapter"),
        lambda: print("read", load_architecture(ModelSection(name="some/cached")).model_type),
    ):
        try:
            ask()
        except Exception as error:
            print(type(error).__name__, str(error).replace(chr(10), " "))
    sys.stdout.flush()
    os._exit(0)
"""
ANSWERS = {"unavailable": "503 Service Unavailable", "answering": "404 Not Found\r\nX-Error-Code: RepoNotFound"}


class Hub:
    """A port of this machine that refuses connections (`closed`), never answers (`silent`), or gives an answer."""

    def __init__(self) -> None:
        self.kind, self.connections = "closed", Counter[str]()
        self._server = socket.socket()
        self._server.bind(("127.0.0.1", 0))  # without `listen`, connections to it are refused
        self.port = self._server.getsockname()[1]
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def become(self, kind: str) -> None:
        if self.kind == "closed" != kind:
            self._server.listen(50)
            self._thread.start()
        self.kind = kind

    def _serve(self) -> None:
        while True:
            connection, _ = self._server.accept()
            self._held.append(connection)
            if not self.kind:
                break
            self.connections[self.kind] += 1
            if self.kind in ANSWERS:
                connection.recv(65536)
                connection.sendall(f"HTTP/1.1 {ANSWERS[self.kind]}\r\nContent-Length: 0\r\n".encode())
                connection.sendall(b"Connection: close\r\n\r\n")
                with contextlib.suppress(OSError):  # who asked may be gone
                    connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.kind = ""
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join()
        for each in [*self._held, self._server]:
            each.close()


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], Counter[str], str]:
    """For each kind of hub, what ASKS prints, the connections made, and what it writes to stderr."""
    home = tmp_path_factory.mktemp("home")
    snapshot = home / "hub" / "models--some--cached" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (home / "hub" / "models--some--cached" / "refs").mkdir()
    (home / "hub" / "models--some--cached" / "refs" / "main").write_text("0" * 40)
    hub, printed = Hub(), {}
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.port}", "HF_HUB_OFFLINE": "0", "HF_HOME": str(home)}
    errors = home / "stderr"
    with (
        open(errors, "w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", ASKS], env={**os.environ, **own}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=stderr, text=True,
        ) as asking,
    ):  # fmt: skip
        assert asking.stdin
        assert asking.stdout
        for kind in ("closed", "silent", "unavailable", "answering"):
            hub.become(kind)
            asking.stdin.write("1\n" if kind == "silent" else "600\n")
            asking.stdin.flush()
            printed[kind] = list(iter(lambda: asking.stdout.readline().rstrip("\n"), "asked"))
    hub.close()
    return printed, hub.connections, errors.read_text()


@pytest.mark.parametrize(
    ("hub", "why"), [("closed", "Connection refused"), ("silent", "timed out"), ("unavailable", "HTTP status 503")]
)
def test_requests_to_an_unreachable_hub_fail_in_one_line_after_one_attempt(
    asked: tuple[dict[str, list[str]], Counter[str], str], hub: str, why: str
) -> None:
    printed, connections, stderr = asked
    assert "thrown while requesting" not in stderr
    assert "Retrying" not in stderr
    *failed, cached = printed[hub]
    assert cached == "read llama"
    assert len(failed) == 6
    for line in failed:
        assert line.startswith("MachineError ")
        assert "the hub cannot be reached (" in line
        assert why in line
        assert "on a machine with a network" in line
    assert connections[hub] == (hub != "closed")  # 94 s when each request was repeated


def test_a_reachable_hub_is_used_as_usual(asked: tuple[dict[str, list[str]], Counter[str], str]) -> None:
    printed, connections, _ = asked
    assert "cannot be reached" not in " ".join(printed["answering"])
    assert sum("Error " in line for line in printed["answering"]) == 6
    assert printed["answering"][-1] == "read llama"
    assert connections["answering"] > 6
