"""torch's operators by the names of their schemas, such as `aten::mm` and `aten::sum.dim_IntList`."""

from __future__ import annotations

from typing import Any

import torch


def find(name: str) -> Any:
    """The operator of this name, with the overload `default` where it says none."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def schema(operator: Any) -> Any:
    """An operator's schema: its `arguments`, and whether it `is_mutable`."""
    return operator._schema  # noqa: SLF001 -- torch 2.13 tells neither by a public name
