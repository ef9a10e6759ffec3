"""`finetune train` with the rows of a step cut into micro-batches in the order in which they come.

    python benchmarks/scripts/train_in_order.py CONFIG [section.key=value ...]

The rows are not sorted by length before they are cut; nothing else of the command is touched.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import harness

from finetune.cli import main
from finetune.training import collator

if __name__ == "__main__":
    collator.micro_batches = harness.in_order
    sys.argv[1:1] = ["train"]
    main()
