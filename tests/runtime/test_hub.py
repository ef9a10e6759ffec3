"""Facts about a hub that cannot be reached: what needs it fails within seconds, and what is cached is used."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

# What asks the hub: config, tokenizer, data set, weights, adapter, a revision. One line of seconds and words for each.
ASKS = """
import time
from finetune.config import ModelSection
from finetune.data import sources
from finetune.model.adapters import starting
from finetune.model.base import load_architecture
from finetune.model.source.locate import weights_directory
from finetune.model.source.tokenizer import load_tokenizer
from finetune.runtime import libraries

libraries.quiet()
for ask in (
    lambda: load_architecture(ModelSection(name="some/model")),
    lambda: load_architecture(ModelSection(name="some/model", revision="v2")),
    lambda: load_tokenizer(ModelSection(name="some/model")),
    lambda: next(sources._hub("some/data")),
    lambda: weights_directory("some/model", None, download=True),
    lambda: starting.folder_of("some/adapter"),
    lambda: print("read", load_architecture(ModelSection(name="some/cached")).model_type),
):
    start = time.monotonic()
    try:
        ask()
    except Exception as error:
        print(f"{time.monotonic() - start:.1f}", type(error).__name__, str(error).replace(chr(10), " "))
"""


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """The port of a server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)
        yield server.getsockname()[1]


@contextlib.contextmanager
def unavailable() -> Iterator[int]:
    """The port of a server that answers every request with status 503."""
    with answering(503) as port:
        yield port


@contextlib.contextmanager
def answering(status: int) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextlib.contextmanager
def closed() -> Iterator[int]:
    """A port where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield port


def asked(port: int, home: Path) -> subprocess.CompletedProcess[str]:
    """The output of ASKS with the hub at a port of this machine."""
    snapshot = home / "hub" / "models--some--cached" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (home / "hub" / "models--some--cached" / "refs").mkdir()
    (home / "hub" / "models--some--cached" / "refs" / "main").write_text("0" * 40)
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_OFFLINE": "0", "HF_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", ASKS], env={**os.environ, **own}, capture_output=True, text=True, check=True, timeout=200
    )


@pytest.mark.parametrize(
    ("hub", "why"), [(closed, "Connection refused"), (silent, "timed out"), (unavailable, "HTTP status 503")]
)
def test_all_that_asks_an_unreachable_hub_fails_within_seconds_in_a_line(hub: object, why: str, tmp_path: Path) -> None:
    with hub() as port:  # type: ignore[operator]
        done = asked(port, tmp_path)
    assert "thrown while requesting" not in done.stderr
    assert "Retrying" not in done.stderr
    *failed, cached = done.stdout.splitlines()
    assert cached == "read llama"
    assert len(failed) == 6
    for line in failed:
        _, kind, text = line.split(" ", 2)
        assert kind == "MachineError"
        assert "the hub cannot be reached (" in text
        assert why in text
        assert "on a machine with a network" in text
    seconds = [float(line.split(" ")[0]) for line in failed]
    assert sum(seconds) < 15  # once for all; 94 s when each request was repeated


def test_a_hub_that_answers_is_asked_as_ever(tmp_path: Path) -> None:
    with answering(404) as port:
        done = asked(port, tmp_path)
    assert "cannot be reached" not in done.stdout
    assert done.stdout.count("Error ") == 6
    assert done.stdout.splitlines()[-1] == "read llama"
