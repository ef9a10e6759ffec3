"""What an operator reads and writes, by its schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.forecast import operators

ROWS, WIDTH = 6, 50
TABLE, ROW = 4 * ROWS * WIDTH, 4 * WIDTH  # bytes
table, other, indices = torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH), torch.tensor([0, 3])
repeated, row, half = torch.ones(WIDTH).expand(ROWS, WIDTH), torch.ones(WIDTH), torch.ones(ROWS // 2, WIDTH)


class Moved(TorchDispatchMode):
    """The bytes that each operator moves that launches a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not operators.launches_nothing(func):
            self.bytes.append(operators.moved_bytes(func, args, kwargs or {}, out))
        return out


@pytest.mark.parametrize(
    ("moved", "compute"),
    [
        pytest.param([3 * TABLE], lambda: table + other, id="reads two and writes one"),
        pytest.param([3 * TABLE], lambda: table.add_(other), id="in place"),
        pytest.param([2 * TABLE], lambda: table.copy_(other), id="a copy does not read its target"),
        pytest.param([TABLE], lambda: table.zero_(), id="nor does zero_"),
        pytest.param([TABLE + ROW], lambda: torch.sum(table, 0, out=row), id="nor what is written to `out`"),
        pytest.param([TABLE], lambda: torch.zeros_like(table), id="a shape is not read"),
        pytest.param([], lambda: torch.empty_like(table), id="an allocation is no kernel"),
        pytest.param([2 * TABLE + ROW], lambda: table * repeated, id="a repeated row is read once"),
        pytest.param([2 * 2 * ROW + 2 * 8], lambda: table[indices], id="two rows of a table"),
        pytest.param([3 * TABLE], lambda: torch.cat([table, half]), id="a list"),
        pytest.param([4 * TABLE], lambda: torch._foreach_mul_([table, other], 2.0), id="a list in place"),
        pytest.param([TABLE + ROWS * (4 + 8)], lambda: table.max(dim=1), id="two results"),
    ],
)
def test_an_operator_moves_what_it_reads_and_what_it_writes(moved: list[int], compute: Callable[[], Any]) -> None:
    with Moved() as found:
        compute()
    assert found.bytes == moved
