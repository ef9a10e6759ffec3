"""A process that is replaced by its own command."""

import os
import subprocess
import sys

REPLACED_ONCE = """
import os, sys
began = dict(os.environ)
import finetune
from finetune.runtime import restart
print(sys.argv[1:], began.get("LOCAL_RANK"), began.get("TOKENIZERS_PARALLELISM"), began["STAYS"], os.getpid())
if "--fresh" in sys.argv:
    os.environ["LOCAL_RANK"] = "0"
    restart.now()
"""


def test_a_new_start_has_the_command_and_the_environment_of_the_first_except_fresh():
    """What libraries set for themselves would be taken for the user's or a launcher's, such as LOCAL_RANK."""
    hidden = ("LOCAL_RANK", "TOKENIZERS_PARALLELISM")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-c", REPLACED_ONCE, "train", "--fresh", "--json"]
    done = subprocess.run(command, env={**environment, "STAYS": "yes"}, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("['train', '--fresh', '--json'] None None yes ")
    assert second == first.replace("'--fresh', ", "")
