"""Prepare the data of a chat file as `finetune train` does, timed. One side of benchmarks/preparation.py."""

from __future__ import annotations

import argparse
import json
import resource
import time

from finetune.config import DataSection, ModelSection
from finetune.data.prepare import prepare
from finetune.model.source.tokenizer import load_tokenizer
from finetune.runtime import libraries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--max-length", type=int, default=1024)
    options = parser.parse_args()

    import datasets  # noqa: F401  # its import belongs to neither side's preparation

    libraries.quiet()
    tokenizer = load_tokenizer(ModelSection(name=options.model))
    section = DataSection(train=options.data, eval="none", max_length=options.max_length)
    started, cpu_before = time.perf_counter(), time.process_time()
    counts = prepare(section, tokenizer).train_counts
    seconds = time.perf_counter() - started
    print(
        json.dumps(
            {
                "rows": counts.rows,
                "seconds": seconds,
                "cpu_seconds": time.process_time() - cpu_before,
                "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "tokens": counts.tokens,
                "trained_tokens": counts.trained_tokens,
                "truncated": counts.as_dict()["truncated"],
            }
        )
    )


if __name__ == "__main__":
    main()
