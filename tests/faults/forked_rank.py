"""A rank as a launcher starts it, in a fork of the process that has imported everything (children.py).

Importing the libraries in each rank, at each start, would take most of the time of a test with a launcher. The fork
ends with this process.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

address, logs, *arguments = sys.argv[1:]
log = Path(logs, f"{os.getpid()}.log")
log.touch()

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(address)
    stream = connection.makefile("rw")

    def ask(request: dict[str, Any]) -> Any:
        stream.write(json.dumps(request) + "\n")
        stream.flush()
        return json.loads(stream.readline())

    request = {"arguments": arguments, "log": str(log), "fault": None}
    pid = ask({**request, "environment": dict(os.environ), "folder": str(Path.cwd())})["pid"]
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(pid, number))
    code = os.waitstatus_to_exitcode(ask({"wait": pid})["status"])

sys.stdout.write(log.read_text(errors="replace"))
sys.exit(code if code >= 0 else 128 - code)
