"""A model whose weights stay in its files: read one by one, and put on the device one layer at a time.

transformers renames weights while it loads them, and fuses some, such as the experts of a mixture. `Weights` applies
transformers' own conversions to single weights, and can reverse them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from finetune.errors import ArtifactError
from finetune.forms import packed
from finetune.model.structure import sequence_head
from finetune.storage import weight_files

_SCALES = ("_scale", "_scale_inv")
"""Endings of the names of scales beside a weight, which are in files whose config.json should state a quantization."""


@dataclass(frozen=True)
class ConversionGroup:
    """Tensors of the files (`sources`) that together become weights of the model (`targets`; none if they are unused).

    `converter` is transformers' conversion; None if one source is one target, under another name or the same.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    converter: Any = None
    patterns: tuple[str, ...] = ()


class Weights(Mapping[str, torch.Tensor]):
    """The weights of `model` (on the meta device), by their names in it, read from safetensors files when asked for.

    A tensor is a view of its mapped file, in the type it is stored in; or the values, in `dtype`, of the tensors that
    a packed weight is published as. Tied weights are those they are tied to; a classifier's head that the files lack is
    `new`, and zero. An embedding and a head of fewer rows than the model's (`model.vocabulary`) end in zeros.
    """

    def __init__(self, model: Any, files: list[Path], dtype: torch.dtype = torch.bfloat16) -> None:
        self._model, self._dtype = model, dtype
        self._alias: dict[str, str] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as stored:
                self._file_of.update(dict.fromkeys(stored.keys(), file))
        self._packed = packed.published(self._file_of)
        self.groups = self._conversion_groups()
        self._of = {target: group for group in self.groups for target in group.targets}
        tables = [model.get_input_embeddings(), model.get_output_embeddings()]
        self._rows = {
            self._of[f"{path}.weight"].sources[0]: len(module.weight)
            for path, module in model.named_modules()
            if any(module is table for table in tables) and f"{path}.weight" in self._of
        }
        tied = model.all_tied_weights_keys
        # Files may hold either of two tied weights.
        for name, other in [*tied.items(), *((other, name) for name, other in tied.items())]:
            if name not in self._of and other in self._of:
                self._of[name] = self._of[other]
                self._alias[name] = other
        shapes = sequence_head.new_weights(model)
        self.new = {name: shape for name, shape in shapes.items() if name not in self._of}
        if missing := sorted(dict(model.named_parameters()).keys() - self._of.keys() - self.new.keys()):
            raise ArtifactError(
                f"{files[0].parent}: {len(missing)} weights are not in its files, such as `{missing[0]}`; the download "
                "is incomplete, or the files belong to another architecture"
            )

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.new:
            return torch.zeros(self.new[name])
        return self.converted(self._of[name])[self._alias.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self._of, self.new)

    def __len__(self) -> int:
        return len(self._of) + len(self.new)

    def stored(self, source: str) -> torch.Tensor:
        """A tensor as the files hold it, or the values of a packed one."""
        if one := self._packed.get(source):
            codes, *parts = map(self._read, one.names)
            transposed = self._is_transposed(source)
            try:
                scales = one.scales(codes, *parts)
                shape = packed.published_shape(one.form, codes.shape, scales.shape, transposed=transposed)
                made = packed.from_published(one.form, codes, scales, shape, self._dtype, transposed=transposed)
            except ValueError as error:
                where = self._file_of[one.names[-1]]
                raise ArtifactError(f"{where}: `{source}`: {error}; download the base again, or use another") from None
            values = packed.values(made).contiguous()
        else:
            values = self._read(source)
        if source in self._rows:
            return nn.functional.pad(values, (0, 0, 0, max(self._rows[source] - len(values), 0)))
        return values

    def _is_transposed(self, source: str) -> bool:
        """Whether the model has experts as (experts, inputs, outputs); packed tensors of files have outputs first."""
        return getattr(dict(self._model.named_modules()).get(source.rpartition(".")[0]), "is_transposed", False)

    def check_tensors(self) -> None:
        """Raise ArtifactError for a tensor of the files that has not the shape in the model's config, or is quantized,
        by its type or by scales beside it: transformers would convert it without them.
        """
        weights = dict(self._model.named_parameters())
        stored_as = {
            name: tensor
            for file in {*self._file_of.values()}
            for name, tensor in weight_files.layout_of(file).items()
            if self._file_of[name] == file
        }
        for name, group in self._of.items():
            source = group.sources[0]
            if group.converter is not None or name not in weights or source not in stored_as:
                continue
            if len(group.sources) > 1:
                raise ArtifactError(
                    f"{self._file_of[source]}: `{source}` and `{group.sources[1]}` are both the weight `{name}` of the "
                    "model; the files are of several models: download it again"
                )
            dtype, shape = stored_as[source]
            is_scaled = dtype.itemsize == 1 and not stored_as.keys().isdisjoint(source + end for end in _SCALES)
            if weights[name].is_floating_point() and (is_scaled or not dtype.is_floating_point):
                raise ArtifactError(
                    f"{self._file_of[source]}: `{source}` is of type {str(dtype).removeprefix('torch.')}, and "
                    "config.json states no quantization; the files belong to another model: download it again"
                )
            stored, made = list(shape), list(weights[name].shape)
            if source in self._rows:  # the model's may have more rows
                stored, made = stored[1:], made[1:]
            if stored != made:
                raise ArtifactError(
                    f"{self._file_of[source]}: `{source}` has the shape {list(shape)}, and by config.json "
                    f"{list(weights[name].shape)}; the files belong to another model: download it again"
                )

    def layout_of(self, file: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """(dtype, shape) of the tensors of a file as `stored` returns them, by name. Raises ArtifactError."""
        layout = weight_files.layout_of(file)
        for name, one in self._packed.items():
            codes, *others = one.names
            if self._file_of[codes] == file:
                of_scales = [weight_files.layout_of(self._file_of[scales])[scales][1] for scales in others[:1]]
                transposed = self._is_transposed(name)
                shape = packed.published_shape(one.form, layout[codes][1], *of_scales, transposed=transposed)
                layout[name] = self._dtype, shape
        for name in layout.keys() & self._rows.keys():
            dtype, (rows, *others) = layout[name]
            layout[name] = dtype, torch.Size([max(rows, self._rows[name]), *others])
        hidden = packed.hidden(self._packed)
        # Of a tensor in two files, that of the last counts.
        elsewhere = {name for name, own in self._file_of.items() if own != file}
        return {name: one for name, one in layout.items() if name not in hidden | elsewhere}

    def _read(self, name: str) -> torch.Tensor:
        # Opened each time: a file that stays open keeps what was read of it in memory.
        with safe_open(self._file_of[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    def converted(self, group: ConversionGroup) -> dict[str, torch.Tensor]:
        """The weights of the model that a group becomes."""
        if group.converter is None:
            return {group.targets[0]: self.stored(group.sources[0])}
        converter = deepcopy(group.converter)
        for source, pattern in zip(group.sources, group.patterns, strict=True):
            converter.add_tensor(group.targets[0], source, pattern, self.stored(source))
        return _single(converter.convert(group.targets[0], model=self._model, config=self._model.config))

    def reverted(self, group: ConversionGroup, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the files that a group's weights are made of. Raises ArtifactError."""
        if group.converter is None:
            return {group.sources[0]: tensors[group.targets[0]]}
        from transformers.core_model_loading import revert_weight_conversion

        # `from_pretrained` leaves this on a model that it has loaded, for `save_pretrained`.
        self._model._weight_conversions = [one for one in self._conversions if one.was_used()]  # noqa: SLF001
        reverted, reason = dict[str, torch.Tensor](), ""
        try:
            reverted = _single(revert_weight_conversion(self._model, tensors))
        except Exception as error:  # a conversion without a reverse may raise anything
            reason = f" ({error})"
        shapes = {source: list(self.stored(source).shape) for source in group.sources}
        if {name: list(tensor.shape) for name, tensor in reverted.items()} != shapes:
            raise ArtifactError(
                f"`{group.targets[0]}`: transformers makes it of {len(group.sources)} tensors of the base's files, and "
                f"cannot take it apart again{reason}; use the adapter with its base instead"
            )
        return reverted

    def _conversion_groups(self) -> list[ConversionGroup]:
        """Group the tensors of the files by the conversion that takes them, in the order of the model's names.

        The loop repeats that of transformers' loader (5.24, `convert_and_load_state_dict_in_model`): a source is
        renamed and matched to a pattern; all sources that get the same name are one group.
        """
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._conversions = get_model_conversion_mapping(self._model)
        renamings = [one for one in self._conversions if isinstance(one, loading.WeightRenaming)]
        converters = [one for one in self._conversions if isinstance(one, loading.WeightConverter)]
        converter_of = {pattern: one for one in converters for pattern in one.source_patterns}
        names, prefix = self._model.state_dict(), self._model.base_model_prefix
        by_name: dict[str, list[tuple[str, str | None]]] = {}
        hidden = packed.hidden(self._packed)
        for source in sorted((self._file_of.keys() | self._packed) - hidden, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(source, renamings, converters, prefix, names)
            if name not in names and source in names:
                name, pattern = loading.rename_source_key(source, [], [], prefix, names)
            by_name.setdefault(name, []).append((source, pattern))
        groups = []
        for name, parts in sorted(by_name.items(), key=lambda item: loading.dot_natural_key(item[0])):
            sources, patterns = tuple(source for source, _ in parts), tuple(str(pattern) for _, pattern in parts)
            converter = converter_of.get(patterns[0])
            if name not in names:
                groups += [ConversionGroup((source,), ()) for source in sources]
            elif converter is None:
                groups.append(ConversionGroup(sources, (name,)))
            else:
                others = (name.replace(converter.target_patterns[0], each) for each in converter.target_patterns)
                groups.append(ConversionGroup(sources, tuple(others), converter, patterns))
        return groups


def _single(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """`tensors` without the lists of one in which some of transformers' conversions return a tensor."""
    return {name: each[0] if isinstance(each, list) else each for name, each in tensors.items()}


@contextlib.contextmanager
def running(model: Any, fetch: Callable[[str], torch.Tensor | None], device: torch.device) -> Iterator[None]:
    """In the block, `model` (on the meta device, but for its buffers) computes with the weights that `fetch` returns.

    A weight is on `device` from the time its layer computes until the next layer does: Gemma 4's code reads a row of
    its embeddings after it has looked up the tokens. Before and after that, weights outside the layers are placeholders
    on `device` without memory: Llama 4's code moves the tokens to the device of its embeddings. A buffer for which
    `fetch` returns None is left alone.
    """
    hooks, computed, meta = [], list[tuple[nn.Module, str, torch.Tensor]](), list[tuple[nn.Module, str, nn.Parameter]]()
    for path, part, names in _parts(model):
        meta += [(part, name, weight) for name, weight in part.named_parameters(recurse=False) if weight.is_meta]
        visit = _Visit(part, path, names, fetch, device, computed)
        hooks += [
            part.register_forward_pre_hook(visit.enter),
            part.register_forward_hook(visit.leave, always_call=True),
        ]
    for part, name, weight in meta:
        empty = torch.zeros((), dtype=weight.dtype, device=device).expand(weight.shape)
        setattr(part, name, nn.Parameter(empty, requires_grad=False))
    try:
        yield
    finally:
        _take_back(computed)
        for part, name, weight in meta:
            setattr(part, name, weight)
        for hook in hooks:
            hook.remove()


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """(name, module, names of weights in it) of each decoder layer, as a whole, and of each module beside the layers.

    A layer is one part because its code may read a weight directly, without calling the module that holds it.
    """
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside:
            continue
        if isinstance(module, nn.ModuleList):
            for name, layer in module.named_children():
                inside.update(layer.modules())
                yield f"{path}.{name}", layer, list(layer.state_dict())
        elif hasattr(module, "token_adapter"):  # PEFT's wrapper of an embedding computes with all weights inside it
            inside.update(module.modules())
            yield path, module, list(module.state_dict())
        elif own := [name for name in module.state_dict() if "." not in name]:
            yield path, module, own


@dataclass
class _Visit:
    """Forward hooks that give one part its weights while it computes."""

    part: nn.Module
    path: str
    names: list[str]
    fetch: Callable[[str], torch.Tensor | None]
    device: torch.device
    computed: list[tuple[nn.Module, str, torch.Tensor]]
    """What weights still in place replaced (module, name, placeholder), of all parts that have computed."""

    def enter(self, *arguments: Any) -> None:
        _take_back(self.computed)
        self._before: list[tuple[nn.Module, str, torch.Tensor]] = []
        for name in self.names:
            owner, _, last = name.rpartition(".")
            module = self.part.get_submodule(owner)
            before: torch.Tensor = getattr(module, last)
            if (value := self.fetch(f"{self.path}.{name}".lstrip("."))) is None:
                continue
            self._before.append((module, last, before))
            tensor = value.to(self.device, before.dtype)
            setattr(module, last, nn.Parameter(tensor, False) if isinstance(before, nn.Parameter) else tensor)

    def leave(self, *arguments: Any) -> None:
        self.computed += self._before


def _take_back(computed: list[tuple[nn.Module, str, torch.Tensor]]) -> None:
    while computed:
        module, name, before = computed.pop()
        setattr(module, name, before)
