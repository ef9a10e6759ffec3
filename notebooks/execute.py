"""Executes notebooks: for the tests, and for the committed outputs (`python notebooks/execute.py [NAME ...]`)."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

HERE = Path(__file__).parent
_SECONDS = 300
# Of ports that are free when they are chosen, another process may have one before the kernel does.
_BY_FILES = Config({"KernelManager": {"transport": "ipc"}})

# Names and values of one notebook must not reach the next.
_CLEAN = "import os\nos.chdir({folder!r})\n%reset -f"
# What tells where a notebook was executed.
PATH = re.compile(r"/(?:tmp|home|root|work|Users)/\w+")


class Kernel:
    """One kernel for several notebooks: importing the libraries takes longer than most of them."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._first: NotebookClient | None = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first and self._first.km:
            self._first.kc.stop_channels()
            self._loop.run_until_complete(self._first.km.shutdown_kernel(now=True))
        self._loop.close()

    def run(self, notebook: Any, folder: Path) -> None:
        """Execute all cells in `folder`, with this checkout's package. Raises CellExecutionError."""
        started = self._first
        clean = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(_CLEAN.format(folder=str(folder)))])
        for each in (clean, notebook):
            km = started.km if started else None
            client = NotebookClient(each, timeout=_SECONDS, startup_timeout=_SECONDS, km=km, config=_BY_FILES)
            if started:
                client.kc = started.kc
            path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
            # Where it is not told its device, DeepSpeed prints which one it found.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
            self._loop.run_until_complete(client.async_execute(cleanup_kc=False, env=environment))
            started = self._first = started or client


def _tidy(notebook: Any) -> None:
    """Remove times and what libraries write to stderr, and join what was printed in pieces."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        joined: list[Any] = []
        for output in cell.get("outputs", []):
            last = joined[-1] if joined else None
            if output.output_type != "stream":
                joined.append(output)
            elif last and last.output_type == "stream" and output.name == "stdout":
                last.text += output.text
            elif output.name == "stdout":
                joined.append(output)
        if "outputs" in cell:
            cell.outputs = joined


def main(names: list[str]) -> None:
    files = [HERE / f"{name}.ipynb" for name in names] or sorted(HERE.glob("*.ipynb"))
    with Kernel() as kernel:
        for file in files:
            started = time.perf_counter()
            notebook = nbformat.read(file, as_version=4)
            with tempfile.TemporaryDirectory(dir=HERE) as folder:
                kernel.run(notebook, Path(folder))
            _tidy(notebook)
            if found := PATH.search(nbformat.writes(notebook)):
                raise SystemExit(f"{file}: shows a path of this machine, {found[0]}")
            nbformat.write(notebook, file)
            print(f"{file.name}: {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
