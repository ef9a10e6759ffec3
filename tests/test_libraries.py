"""What is asked of libraries for the whole process."""

import os
import subprocess
import sys

FORKED = """
import os, signal
import finetune
from finetune.libraries import tokenizing_in_parallel
from tokenizers import Tokenizer, models

tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))

def tokenize():
    with tokenizing_in_parallel():
        assert len(tokenizer.encode_batch(["a"] * 64)) == 64

tokenize()
if (child := os.fork()) == 0:
    signal.alarm(20)
    tokenize()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_of_a_process_that_has_tokenized_in_parallel_tokenizes_too() -> None:
    """It has none of the threads, which tokenizers would wait for without an end."""
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    ended = subprocess.run([sys.executable, "-c", FORKED], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
