"""The bytes of weights that were rounded together, with the errors made up for where enough tokens were seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from finetune.errors import ArtifactError
from finetune.export.rounding.compensated import compensated
from finetune.export.rounding.inputs import InputSums, Key
from finetune.forms import FORMS, packed
from finetune.forms.codec import BytesAndScales

TOKENS_PER_COLUMN = 1 / 8
"""Tokens for each column from which on errors are made up for.

With fewer, the products of other rows are as far off as with plain rounding (512 columns, every format, 2026-11).
"""


@dataclass(frozen=True)
class RoundedWeight:
    """Bytes and scales of a weight, and for each of its matrices (bool) whether errors were made up for."""

    codes: torch.Tensor
    scales: torch.Tensor
    compensated: torch.Tensor


def rounded(
    forms: Mapping[str, str], weights: Mapping[str, torch.Tensor], inputs: InputSums | None = None
) -> dict[str, RoundedWeight]:
    """Round `weights` (rows, columns) or (experts, rows, columns) to `forms`, by name.

    A matrix that `inputs` saw too few tokens of, or of a form without a grid, is rounded by itself. Raises
    ArtifactError for inputs that are not finite.
    """
    # Matrices with both inputs and form in common are rounded as one, unless a block of several rows would reach from
    # one into another.
    inputs = InputSums({}) if inputs is None else inputs
    together: dict[tuple[Key, str, str], list[Key]] = {}
    for name, weight in weights.items():
        apart = name if weight.shape[-2] % FORMS[forms[name]].codec.blocks.rows else ""
        for key in _keys(name, weight):
            if source := inputs.source(key):
                together.setdefault((source, forms[name], apart), []).append(key)

    made: dict[Key, BytesAndScales] = {}
    corrected = set[Key]()
    for (source, form, _), keys in together.items():
        matrices = {key: _matrix(weights, key) for key in keys}
        columns = matrices[keys[0]].shape[-1]
        seen = min(inputs.tokens[key] for key in keys)
        codec, joined = FORMS[form].codec, torch.cat([*matrices.values()])
        if seen >= TOKENS_PER_COLUMN * columns and columns % codec.blocks.columns == 0:
            hessian = inputs.sums[source]
            if not hessian.diagonal().isfinite().all():
                raise ArtifactError(f"the inputs of `{keys[0][0]}` are not finite in the training rows; train again")
            stored = codec.pack(*compensated(codec, joined.float(), hessian))
            corrected.update(keys)
        else:
            stored = _by_itself(form, joined)
        # Each of the matrices gets its rows of the bytes and scales.
        sizes = [len(matrix) for matrix in matrices.values()]
        parts = (part.cpu().split([size * len(part) // sum(sizes) for size in sizes]) for part in stored)
        made |= dict(zip(matrices, zip(*parts, strict=True), strict=True))

    found = {}
    for name, weight in weights.items():
        keys = list(_keys(name, weight))
        of_each = [made[key] if key in made else _by_itself(forms[name], _matrix(weights, key)) for key in keys]
        codes, scales = (torch.stack(each) for each in zip(*of_each, strict=True))
        if weight.dim() == 2:
            codes, scales = codes[0], scales[0]
        found[name] = RoundedWeight(codes, scales, torch.tensor([key in corrected for key in keys]))
    return found


def _by_itself(form: str, matrix: torch.Tensor) -> BytesAndScales:
    plain = packed.pack(form, matrix)
    return plain.data.cpu(), packed.known_packing(plain).scales.cpu()


def _keys(name: str, weight: torch.Tensor) -> Iterator[Key]:
    yield from ((name, number) for number in range(len(weight) if weight.dim() == 3 else 1))


def _matrix(weights: Mapping[str, torch.Tensor], key: Key) -> torch.Tensor:
    weight = weights[key[0]]
    return weight[key[1]] if weight.dim() == 3 else weight
