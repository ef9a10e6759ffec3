"""A process that is replaced by its own command."""

import os
import subprocess
import sys

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
    restart.now()
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
