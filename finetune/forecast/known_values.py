"""Values of fake tensors, where a program's sizes follow from them: of token ids, masks and grids of patches.

A model that sees reads how many patches an image has and which tokens stand for it. What follows from known values by
small tensors alone is computed beside the trace, on real tensors that the recorder does not see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from finetune.forecast import operators

# Elements of a tensor: no program reads a larger one, such as a mask (rows, 1, tokens, tokens).
_MOST = 2**20


class KnownValues:
    """The values of some fake tensors, for as long as these live."""

    def __init__(self) -> None:
        self._values = WeakTensorKeyDictionary()

    def know(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Record the value that a fake tensor would hold."""
        self._values[tensor] = value

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor; None if it is not known."""
        return self._values.get(tensor) if isinstance(tensor, FakeTensor) else tensor

    def number(self, tensor: torch.Tensor) -> Any:
        """The number in a tensor of one, or how many of a mask are set; None if that is not known."""
        if (value := self.of(tensor)) is None:
            return None
        with no_dispatch():
            return value.item() if value.dim() == 0 else int(value.sum())

    def listed(self, tensor: torch.Tensor) -> Any:
        """The values as nested lists; None if they are not known."""
        if (value := self.of(tensor)) is None:
            return None
        with no_dispatch():
            return value.tolist()

    def know_all(self, values: Any) -> bool:
        """Whether the values of all tensors in `values` are known."""
        return all(self.of(tensor) is not None for tensor in _tensors(values))

    def computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator on real tensors, whose values are all known."""
        args, kwargs = tree_map_only(torch.Tensor, self.of, (args, kwargs))
        with no_dispatch():
            return func(*args, **kwargs)

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the values of `out`, a result on fake tensors, if those of all inputs are known."""
        outputs = _tensors(out)
        if func.name() == "aten::eq.Scalar" and args[0].is_floating_point() and self.of(args[0]) is None:
            with no_dispatch():  # such as pixels compared with black: a number that is not known equals no other
                self.know(outputs[0], torch.zeros((), dtype=torch.bool).expand(outputs[0].shape))
            return
        small = all(output.numel() <= _MOST for output in outputs)
        random = torch.Tag.nondeterministic_seeded in func.tags
        if small and not random and self.know_all([args, kwargs]):
            for output, value in zip(outputs, _tensors(self.computed(func, args, kwargs)), strict=True):
                self.know(output, value)
        elif operators.schema(func).is_mutable:  # forget the values of the outputs, and of all views of them
            for output in outputs:
                if (value := self.of(output)) is None:
                    continue
                storage = value.untyped_storage().data_ptr()
                for other in [one for one, its in self._values.items() if its.untyped_storage().data_ptr() == storage]:
                    del self._values[other]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
