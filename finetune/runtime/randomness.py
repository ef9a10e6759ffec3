"""Saves and restores the state of this process's random number generators, also as JSON."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RandomState:
    """A snapshot of the generators of Python, NumPy, torch and the current CUDA device."""

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
        """The state as JSON values; torch's in hexadecimal."""
        name, keys, *rest = self._numpy
        return {
            "python": self._python,
            "numpy": [name, keys.tolist(), *rest],
            "torch": _hex(self._torch),
            "cuda": None if self._cuda is None else _hex(self._cuda),
        }

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> RandomState:
        """Read what `as_json` wrote; the CUDA state is ignored unless CUDA is in use.

        Raises ValueError, TypeError, LookupError, OverflowError or RuntimeError for anything else.
        """
        made = cls()
        version, keys, gauss = state["python"]
        made._python = version, tuple(keys), gauss
        name, words, *rest = state["numpy"]
        made._numpy = (name, np.array(words, dtype=np.uint32), *rest)
        made._torch = _from_hex(state["torch"])
        if state["cuda"] and made._cuda is not None:
            made._cuda = _from_hex(state["cuda"])
        # Validate the states on temporary generators.
        random.Random().setstate(made._python)
        np.random.RandomState().set_state(made._numpy)
        torch.Generator().set_state(made._torch)
        return made


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(state: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8)
