"""Save and restore the state of this process's random generators, also as JSON."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RandomState:
    """The generators of Python, NumPy, torch and the CUDA device in use, as they stood when this was made."""

    def __init__(self) -> None:
        self._python: Any = random.getstate()
        self._numpy: Any = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)

    def as_json(self) -> dict[str, Any]:
        """As JSON values, the states of torch in hexadecimal."""
        name, keys, *rest = self._numpy
        return {
            "python": self._python,
            "numpy": [name, keys.tolist(), *rest],
            "torch": _hex(self._torch),
            "cuda": None if self._cuda is None else _hex(self._cuda),
        }

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> RandomState:
        """What `as_json` wrote; without a CUDA device in use, its generator is left out.

        Raises ValueError, TypeError, LookupError, OverflowError or RuntimeError for what it cannot have written.
        """
        made = cls()
        version, keys, gauss = state["python"]
        made._python = version, tuple(keys), gauss
        name, words, *rest = state["numpy"]
        made._numpy = (name, np.array(words, dtype=np.uint32), *rest)
        made._torch = _from_hex(state["torch"])
        if state["cuda"] and made._cuda is not None:
            made._cuda = _from_hex(state["cuda"])
        # Generators of no other use: what they take, those of the process take.
        random.Random().setstate(made._python)
        np.random.RandomState().set_state(made._numpy)
        torch.Generator().set_state(made._torch)
        return made


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(state: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8)
