"""How a mixture of experts is stored, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """The form in which a mixture of experts is stored.

    `experts`: number per layer, the maximum if layers differ; a token visits `active` of them. `kind`: the quantization
    of its linear layers. `quantized_experts`: the share of expert parameters quantized to that kind. `unquantized`: how
    many of the model's `parameters` are not.
    """

    experts: int
    active: int
    kind: str
    quantized_experts: float
    unquantized: int
    parameters: int
