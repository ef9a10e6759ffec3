"""TRL's own preparation of a chat file, timed. The other side of benchmarks/preparation.py.

It knows nothing of finetune, and can be read and run alone:

    python benchmarks/scripts/plain_trl_preparation.py --model data/tiny-llama --data messages.jsonl

`SFTTrainer.__init__` calls `_prepare_dataset` once for each split. It is called here by itself, so that no model is
built, no batch made and nothing but the preparation timed.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from types import SimpleNamespace

from datasets import disable_progress_bars, load_dataset
from transformers import AutoTokenizer
from transformers import logging as transformers_logging
from trl import SFTConfig, SFTTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="JSON lines with `messages`")
    parser.add_argument("--max-length", type=int, default=1024)
    options = parser.parse_args()

    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    arguments = SFTConfig(
        output_dir="unused",
        use_cpu=True,
        bf16=False,
        max_length=options.max_length,
        assistant_only_loss=True,
        report_to="none",
    )
    # What the method reads of its trainer (TRL 1.16): the tokenizer, and that no other template and mask are wanted.
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=False)

    started, cpu_before = time.perf_counter(), time.process_time()
    rows = load_dataset("json", data_files=options.data, split="train")
    loaded = time.perf_counter()
    prepared = SFTTrainer._prepare_dataset(trainer, rows, tokenizer, arguments, False, None, "train")
    ended = time.perf_counter()
    print(
        json.dumps(
            {
                "rows": len(prepared),
                "seconds": ended - started,
                "loading_seconds": loaded - started,
                "cpu_seconds": time.process_time() - cpu_before,
                "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
