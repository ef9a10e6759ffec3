"""Values for fake tensors where a program reads them: the worst batch's answers, and values that are known.

A model that sees reads how many patches an image has and which tokens stand for it. So token ids, masks and grids of
patches are known, and what follows from known values by small tensors alone is computed beside the trace, on real
tensors that the recorder does not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from finetune.forecast import operators

_aten = torch.ops.aten
# How transformers asks whether nothing is padded, or whether rows are not packed: `mask.all()`, or `mask.sum() ==
# mask.numel()` (transformers 5.24, masking_utils).
_ALL = ("aten::all", "aten::eq.Scalar")
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


@dataclass
class Routing:
    """How routers spread the tokens of a trace: all to the same expert, or `evenly`.

    `matters` becomes true when a program asks, as its memory then depends on the routing.
    """

    evenly: bool = False
    matters: bool = False


class Answers:
    """The worst batch's answers where a program reads data.

    `uneven`: whether attention needs a mask, for padding or packed rows. `trained_tokens`: the number of positions with
    a label. `tokens`: the number of positions; 0 where all experts get equally many in grouped products. `known`: the
    values of a batch with images, from which other answers follow. `asked` counts the answers.
    """

    def __init__(
        self, uneven: bool, trained_tokens: int, tokens: int = 0, routing: Routing | None = None,
        known: KnownValues | None = None,
    ) -> None:  # fmt: skip
        self.known = known
        self.uneven = uneven
        self.trained_tokens = trained_tokens
        self.tokens = tokens
        self._routing = routing or Routing()
        self._experts = 1
        self.asked = 0
        self.shapes = {
            "aten::index.Tensor": self._index,
            "aten::nonzero": self._nonzero,
        }

    def scalar(self, tensor: torch.Tensor, source: Any) -> Any:
        """The value of a tensor of one element: 1 for an integer, one half for a float, true for a truth value.

        Whether all of a mask are alike depends on the batch. A float is one half because an optimizer may divide by a
        number that it reads, or by one minus it (NAdam's `mu_product`).
        """
        self.asked += 1
        if tensor.dtype is torch.bool:
            return not self.uneven if source in _ALL else True
        return 0.5 if tensor.dtype.is_floating_point else 1

    def busiest(self, rows: int, experts: int) -> int:
        """The most of `rows` (a token, once for each of its experts) that go to one expert, which gets all tokens."""
        self.asked += 1
        self._routing.matters = True
        return max(0 if self._routing.evenly else min(rows, self.tokens), -(-rows // experts))

    def _index(self, func: Any, args: Any) -> tuple[Any, Any]:
        """Selecting by a mask takes as many rows as there are trained tokens."""
        source, indices = args
        if len(indices) == 1 and indices[0] is not None and indices[0].dtype is torch.bool:
            self.asked += 1
            mask = indices[0]
            flat = source.reshape(-1, *source.shape[mask.dim() :])
            known = self.known and self.known.number(mask)
            rows = min(self.trained_tokens, mask.numel()) if known is None else known
            return func, (flat, [mask.new_zeros(rows, dtype=torch.long)])
        return func, args

    def _nonzero(self, func: Any, args: Any) -> tuple[Any, Any]:
        """Loops over experts: every token goes to one expert, or each expert gets its share."""
        mask, evenly = args[0], self._routing.evenly
        self.asked += 1
        self._routing.matters = True
        if mask.dim() == 1:
            self._experts = mask.numel() if evenly else 1
            return _aten.full.default, ([self._experts, 1], 0)
        return _aten.full.default, ([-(-mask.numel() // self._experts), mask.dim()], 0)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
