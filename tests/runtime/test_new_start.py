"""A process that is replaced by its own command."""

import os
import signal
import subprocess
import sys

import pytest

REPLACED_ONCE = """
import os, sys
began = dict(os.environ)
import finetune
from finetune.runtime import restart
kept, left = int(sys.argv[1]), 199
still_open = [os.path.exists(f"/dev/fd/{descriptor}") for descriptor in (kept, left)]
variables = [began.get(name) for name in ("LOCAL_RANK", "TOKENIZERS_PARALLELISM", "STAYS")]
print(sys.argv[2:], variables, os.getpid(), still_open)
if "--fresh" in sys.argv:
    os.dup2(1, left)
    os.environ["LOCAL_RANK"] = "0"
    with restart.permitted():
        restart.now()
"""

# Python's handlers do not run in the main thread while that computes in C, or waits in a collective.
SIGNALLED = """
import hashlib, os, signal, sys, threading, time
import finetune
from finetune.runtime import restart
from finetune.runtime.signals import Signals

def start_again():
    time.sleep(0.1)
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0.1)
    restart.now()

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
if "--fresh" in sys.argv:
    with restart.permitted(), Signals() as signals, signals.waiting():
        threading.Thread(target=start_again).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
print("started again")
"""


def test_a_new_start_has_the_command_environment_and_files_of_the_first_except_fresh(tmp_path):
    """What libraries set for themselves would be taken for the user's or a launcher's, such as LOCAL_RANK; a lock that
    a wrapper script holds stays held, and what libraries opened is closed.
    """
    hidden = ("LOCAL_RANK", "TOKENIZERS_PARALLELISM")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    with open(tmp_path / "lock", "w") as lock:
        command = [sys.executable, "-c", REPLACED_ONCE, str(lock.fileno()), "train", "--fresh", "--json"]
        done = subprocess.run(
            command, env={**environment, "STAYS": "yes"}, pass_fds=[lock.fileno()], capture_output=True, text=True,
            check=True,
        )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first.startswith("['train', '--fresh', '--json'] [None, None, 'yes'] ")
    assert first.endswith(" [True, False]")
    assert second == first.replace("'--fresh', ", "")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 0)]
)
def test_a_signal_that_could_not_be_acted_on_before_a_new_start_ends_it(number: signal.Signals, code: int) -> None:
    """Such as a scheduler's, which kills the job otherwise when its time is over. SIGUSR1 ends nothing."""
    command = [sys.executable, "-c", SIGNALLED, str(int(number)), "--fresh"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert done.stdout == ("" if code else "started again\n")
    assert ("Run the same command again to resume" in done.stderr) == bool(code)
