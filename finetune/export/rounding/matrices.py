"""The bytes of weights that were rounded together, with the errors made up for where enough tokens were seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
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
    made: dict[Key, BytesAndScales] = {}
    corrected = set[Key]()
    for (source, form, _), keys in _together(forms, weights, inputs).items():
        assert inputs is not None
        matrices = {key: _matrix(weights, key) for key in keys}
        columns = matrices[keys[0]].shape[-1]
        seen = min(inputs.tokens[key] for key in keys)
        codec, joined = FORMS[form].codec, torch.cat([*matrices.values()])
        if seen >= TOKENS_PER_COLUMN * columns and columns % codec.blocks.columns == 0:
            hessian = inputs.sum(source)
            if not hessian.diagonal().isfinite().all():
                raise ArtifactError(f"the inputs of `{keys[0][0]}` are not finite in the training rows; train again")
            made |= _apart(matrices, codec.pack(*compensated(codec, joined.float(), hessian)))
            corrected.update(keys)
        else:
            made |= _apart(matrices, _by_itself(form, joined))
    return {name: _collected(name, forms[name], weight, made, corrected) for name, weight in weights.items()}


def _together(
    forms: Mapping[str, str], weights: Mapping[str, torch.Tensor], inputs: InputSums | None
) -> dict[tuple[Key, str, str], list[Key]]:
    """The matrices by inputs and form: those with both in common are rounded as one, unless a block of several rows
    would reach from one into another.
    """
    groups: dict[tuple[Key, str, str], list[Key]] = {}
    for name, weight in weights.items():
        form, rows = forms[name], weight.shape[-2]
        if inputs is None:
            continue
        for key in _keys(name, weight):
            if source := inputs.source(key):
                groups.setdefault((source, form, name if rows % FORMS[form].codec.blocks.rows else ""), []).append(key)
    return groups


def _apart(matrices: Mapping[Key, torch.Tensor], stored: BytesAndScales) -> dict[Key, BytesAndScales]:
    """The bytes and scales of each of the `matrices` that were rounded as one."""
    sizes = [len(matrix) for matrix in matrices.values()]
    parts = (part.cpu().split([size * len(part) // sum(sizes) for size in sizes]) for part in stored)
    return dict(zip(matrices, zip(*parts, strict=True), strict=True))


def _collected(
    name: str, form: str, weight: torch.Tensor, made: Mapping[Key, BytesAndScales], corrected: Set[Key]
) -> RoundedWeight:
    keys = list(_keys(name, weight))
    parts = [made[key] if key in made else _by_itself(form, _matrix({name: weight}, key)) for key in keys]
    codes, scales = (torch.stack(each) for each in zip(*parts, strict=True))
    if weight.dim() == 2:
        codes, scales = codes[0], scales[0]
    return RoundedWeight(codes, scales, torch.tensor([key in corrected for key in keys]))


def _by_itself(form: str, matrix: torch.Tensor) -> BytesAndScales:
    plain = packed.pack(form, matrix)
    return plain.data.cpu(), packed.known_packing(plain).scales.cpu()


def _keys(name: str, weight: torch.Tensor) -> Iterator[Key]:
    yield from ((name, number) for number in range(len(weight) if weight.dim() == 3 else 1))


def _matrix(weights: Mapping[str, torch.Tensor], key: Key) -> torch.Tensor:
    weight = weights[key[0]]
    return weight[key[1]] if weight.dim() == 3 else weight
