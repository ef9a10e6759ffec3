"""Rows of ragged lengths give the same gradient as 1x8, 2x4 and 8x1 micro-batches.

Whole runs, and micro-batches by tokens, are in tests/training/test_steps.py:
test_gradient_does_not_depend_on_the_micro_batch.
"""

from __future__ import annotations

import pytest
from steps import assert_gradients_close, gradients, micro_batches, ready


def test_gradients_do_not_depend_on_the_accumulation(quick) -> None:
    loop = ready(
        quick("quantization.kind=none", "training.batch_size=8", "training.micro_batch=8", "data.eval=none",
              "training.eval_every=null")
    )  # fmt: skip
    rows = [0, 6, 3, 12, 1, 9, 5, 7]
    assert len({len(loop.steps.rows[row]["input_ids"]) for row in rows}) > 4, "ragged"
    loss, expected = gradients(loop, micro_batches(loop, rows, 8))
    for size in (4, 1):
        other_loss, found = gradients(loop, micro_batches(loop, rows, size))
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert_gradients_close(found, expected)
