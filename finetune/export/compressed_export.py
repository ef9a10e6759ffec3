"""The merged model in a quantized form of safetensors files, which vLLM, SGLang and transformers load.

Packed weights are written byte for byte, one in memory at a time, under the names of the merged model's files: experts
that the model has in one tensor are taken apart by rows.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.config import QuantizationSection
from finetune.errors import ArtifactError, ConfigError
from finetune.export import proof, row_selection
from finetune.export.conversion import Conversion, Exporter, ExportRequest
from finetune.forms import FORMS, packed
from finetune.forms.codec import Layout
from finetune.model.skeleton import weightless_base
from finetune.model.source import identity
from finetune.model.structure import quantizers, streamed
from finetune.storage import weight_files
from finetune.storage.files import write_json

_NOT_COPIED = ("config.json", "merge.json", "README.md")
# vLLM computes these as one matrix, with one factor for all (vllm#41045).
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ACTIVATIONS = "the figures are of the weights alone; vLLM also rounds activations for FP8, which adds to them"


def check(job: ExportRequest) -> None:
    """Raise ConfigError if the model has no such form."""
    if job.config.scorer:
        raise ConfigError(f"{job.run.path} is a {job.config.scorer}, which is served in 16 bit; export `merged`")
    if job.config.model.vision != "none":
        raise ConfigError(f"{job.run.path} was trained on images, and is served in 16 bit; export `merged`")
    model = _bare(job.architecture)
    if why := quantizers.without_place(model, job.kind, identity.stored_names(job.config.model)):
        raise ConfigError(f"this model {why}, for which files in {job.kind} have no place; export `merged` instead")
    if not rounded_names(model, job.kind):
        columns = FORMS[job.kind].codec.blocks.columns
        raise ConfigError(
            f"no weight of this model has a form in {job.kind}, whose blocks have {columns} columns; export `merged` "
            "instead"
        )


def forms(model: Any, kind: str) -> dict[str, str]:
    """The form of each weight of `model` (on the meta device) that is quantized."""
    return dict.fromkeys(rounded_names(model, kind), kind)


def make(job: Conversion, folder: Path) -> dict[str, Any]:
    """Write the model to `folder` and prove it. Returns the facts of export.json."""
    model = job.load_merged(None)
    trained, dtype = proof.logits(model, job.rows, job.compared.shown), model.dtype
    weights = job.packed or RoundedWeights(job.run.merged, model.config, job.kind)
    written = write(job.run.merged, folder, model.config, job.kind, weights)
    differing = 0
    for name, weight in model.named_parameters():
        decoded = written[name].to(weight.device)
        if name in job.packed:
            wrong = int((decoded != packed.exact(job.packed[name]).to(weight.device)).sum())
            if wrong:
                raise ArtifactError(f"{wrong:,} values of `{name}` are not as they were rounded. Nothing was published")
        differing += int((decoded != weight.data).sum())
        weight.data.copy_(decoded)
    logits, base = proof.logits(model, job.rows, job.compared.shown), job.base_logits(dtype)
    result = job.compare(f"model in {job.kind}", model, logits, trained, base, FORMS[job.kind].roundoff)
    return {
        "weights": {"count": sum(weight.numel() for weight in model.parameters()), "differing": differing},
        **asdict(result),
        **job.served(logits, trained, base),
        "compared_with": "the merged model",
        "known_differences": [ACTIVATIONS] if job.kind == "fp8" else [],
        "not_proven": ["vLLM and SGLang were not run"],
    }


class RoundedWeights(Mapping[str, nn.Parameter]):
    """The linear layers and experts of the model in `folder`, rounded to a form when they are asked for."""

    def __init__(self, folder: Path, config: Any, form: str) -> None:
        model = _bare(config)
        self._weights = streamed.Weights(model, sorted(folder.glob("*.safetensors")))
        self._names, self._form = rounded_names(model, form), form
        self._transposed = _transposed(model)
        self._last: tuple[tuple[str, ...], nn.Parameter] | None = None

    def __getitem__(self, name: str) -> nn.Parameter:
        together: tuple[str, ...] = (name,)
        if FORMS[self._form].codec.of_whole:
            together = tuple(each for each in _together_of(name) if each in self._names)
        if self._last is None or self._last[0] != together:
            weight = torch.cat([self._weights[each] for each in together])
            self._last = together, packed.pack(self._form, weight, transposed=name in self._transposed)
        whole = self._last[1]
        if len(together) == 1:
            return whole
        how = packed.known_packing(whole)
        sizes = [len(self._weights[each]) for each in together]
        place = together.index(name)
        codes, scales = (each.split(sizes)[place] for each in (whole.data, how.scales))
        shape = torch.Size((sizes[place], how.shape[-1]))
        return packed.packed(codes, packed.Packing(self._form, scales, shape, how.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _together_of(name: str) -> list[str]:
    """The names of weights that vLLM joins with this one, it among them."""
    for parts in _TOGETHER:
        for part in parts:
            if f".{part}." in name:
                return [name.replace(f".{part}.", f".{each}.") for each in parts]
    return [name]


def rounded_names(model: Any, form: str) -> list[str]:
    """The weights that are quantized in a model on the meta device: linear layers except the head, and experts."""
    codec, weights, transposed = FORMS[form].codec, model.state_dict(), _transposed(model)
    names = set(quantizers.packable(model))
    if transposed:  # gpt-oss, of which programs read experts alone in a form that has a place for them
        names &= transposed if codec.files.of_experts else set()
    each = {name: weights[name].shape[-2 if name in transposed else -1] for name in names}
    return [name for name in weights if name in names and each[name] % codec.blocks.columns == 0]


def _transposed(model: Any) -> set[str]:
    """The experts whose values the model reads transposed."""
    if model.config.get_text_config().model_type != "gpt_oss":
        return set()
    return {name for name in model.state_dict() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}


def _bare(config: Any) -> Any:
    return weightless_base(config, QuantizationSection(kind="none"), attention="eager", dtype=torch.bfloat16)


PackedPart = tuple[str, Layout, torch.Size]
"""Form, layout and shape of the values of a packed tensor of the files, rows first."""


class Written(streamed.Weights):
    """The weights of a written folder, decoded in float32; their names are those of the 16-bit files in `source`."""

    def __init__(self, model: Any, source: Path, folder: Path, parts: Mapping[str, PackedPart]) -> None:
        super().__init__(model, sorted(source.glob("*.safetensors")))
        self._parts, self._found = parts, dict[str, Path]()
        for file in folder.glob("*.safetensors"):
            self._found.update(dict.fromkeys(weight_files.layout_of(file), file))

    def stored(self, source: str) -> torch.Tensor:
        if source not in self._parts:
            return self._tensor(source)
        form, layout, shape = self._parts[source]
        codec = FORMS[form].codec
        codes, *others = (self._tensor(source + ending) for ending in layout.endings)
        values = torch.empty(shape)
        codes, scales = codes.view(torch.uint8).reshape(codec.shapes(shape)[0]), layout.scales(codes, *others)
        packed.decode(form, codes, scales, values)
        return values.mT if layout is codec.files.of_experts else values

    def _tensor(self, name: str) -> torch.Tensor:
        self._file_of[name] = self._found[name]
        return self._read(name)


def write(source: Path, folder: Path, config: Any, form: str, weights: Mapping[str, nn.Parameter]) -> Written:
    """Write the model in `source` (safetensors in 16 bit) to `folder`, with the packed `weights` in place of its own.

    `weights` are of the form, by the model's names, and may be made when they are asked for. Returns
    what was written, for comparison. Raises ConfigError if files do not have a weight's rows whole, or for factors
    that vLLM would not tell apart, OSError if the disk lacks room.
    """
    model = _bare(config)
    files = sorted(source.glob("*.safetensors"))
    read = streamed.Weights(model, files)
    plan = _FilePlan(model, read, form, weights)
    layouts = {}
    for file in files:
        tensors = plan.tensors_of(weight_files.layout_of(file))
        ordered = dict(sorted(tensors.items(), key=lambda one: -one[1][0].itemsize))  # aligned
        layout = weight_files.FileLayout({name: (dtype, shape) for name, (dtype, shape, _) in ordered.items()})
        layouts[file.name] = layout
        if shutil.disk_usage(folder).free < layout.bytes:
            raise OSError(28, f"No space left on device: {layout.bytes:,} bytes are needed")
        weight_files.write(folder / file.name, layout, (load() for _, _, load in ordered.values()))
    if len(layouts) > 1:
        write_json(folder / weight_files.INDEX, weight_files.index(layouts))
    for file in source.iterdir():  # the tokenizer and all else that the merged model's folder has
        if file.is_file() and ".safetensors" not in file.name and file.name not in _NOT_COPIED:
            shutil.copyfile(file, folder / file.name)
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", {**values, "quantization_config": plan.stated()})
    return Written(model, source, folder, plan.parts)


def read(source: Path, folder: Path, config: Any, form: str) -> Written:
    """The weights that were written to `folder` from the model in `source`."""
    model = _bare(config)
    files = sorted(source.glob("*.safetensors"))
    plan = _FilePlan(model, streamed.Weights(model, files), form, RoundedWeights(source, config, form))
    return Written(model, source, folder, plan.parts)


FileTensor = tuple[torch.dtype, torch.Size, Callable[[], torch.Tensor]]


class _FilePlan:
    """The tensors of the files: those of `weights` taken apart by rows, and all others as they are."""

    def __init__(self, model: Any, read: streamed.Weights, form: str, weights: Mapping[str, nn.Parameter]) -> None:
        self._model, self._read, self._form, self._weights = model, read, form, weights
        self._transposed, self._codec = _transposed(model), FORMS[form].codec
        self._shapes = {name: weight.shape for name, weight in model.state_dict().items()}
        self.parts: dict[str, PackedPart] = {}
        self._of: dict[str, tuple[str, torch.Tensor]] = {}
        placed = set()
        self._names = frozenset(weights)
        for group in read.groups:
            for name in self._names.intersection(group.targets):
                placed.add(name)
                self._add(name, group)
        if lost := self._names - placed:
            raise ConfigError(f"`{min(lost)}` is not a weight of the merged model's files; export `merged` instead")
        for name in self._names if self._codec.of_whole and not isinstance(weights, RoundedWeights) else ():
            known = [each for each in _together_of(name) if each in self._names]
            packings = [packed.known_packing(weights[each]) for each in known]
            factors = [how.scales[0, : self._codec.blocks.row_scales] for how in packings]
            if name == known[0] and any(not torch.equal(each, factors[0]) for each in factors):
                listed = ", ".join(f"`{each}`" for each in known)
                raise ConfigError(
                    f"{listed} have different factors of {FORMS[form].published}, of which vLLM takes one for all; "
                    "quantize them with one"
                )

    def _add(self, name: str, group: streamed.ConversionGroup) -> None:
        transposed = name in self._transposed
        files = self._codec.files
        if not (layout := files.of_experts if transposed else files.written):
            raise ConfigError(
                f"`{name}` is transposed, for which files have no place in {self._form}; export `merged` instead"
            )

        def taken_apart(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
            stored = self._read.reverted(group, {name: tensor})
            return {part: each.mT for part, each in stored.items()} if transposed else stored

        shape = self._shapes[name]
        rows = row_selection.chosen(name, shape, taken_apart, "this checkpoint", transposed=transposed)
        columns = shape[-2] if transposed else shape[-1]
        if not transposed and any(each.dim() > 1 for each in rows.values()) and not files.experts_in_one:
            raise ConfigError(
                f"this checkpoint has the experts `{name}` in one tensor, which has no form in {self._form}; export "
                "`fp8` or `merged` instead"
            )
        for part, each in rows.items():
            self.parts[part] = self._form, layout, torch.Size((*each.shape, columns))
            self._of[part] = name, each

    def tensors_of(self, stored: Mapping[str, tuple[torch.dtype, torch.Size]]) -> dict[str, FileTensor]:
        """Type, shape and a function that loads each tensor of the file in whose place this one is."""
        planned: dict[str, FileTensor] = {}
        for source, (dtype, shape) in stored.items():
            if source not in self._of:
                planned[source] = dtype, shape, functools.partial(self._read.stored, source)
                continue
            _, layout, values = self.parts[source]
            empty = packed.empty(self._form, torch.empty(values, device="meta"))
            for ending, tensor in layout.written(*empty, values).items():
                load = functools.partial(self._tensor, source, ending)
                planned[source + ending] = tensor.dtype, tensor.shape, load
        return planned

    def _tensor(self, source: str, ending: str) -> torch.Tensor:
        (name, rows), (_, layout, shape) = self._of[source], self.parts[source]
        weight = self._weights[name]
        how = packed.known_packing(weight)
        if how.form != self._form:
            raise ConfigError(f"`{name}` is held in {how.form}, and these files in {self._form}")
        height = self._codec.blocks.rows
        scales = row_selection.bytes_of(how.scales, rows if height == 1 else _blocks_of_rows(name, how, rows, height))
        return layout.written(row_selection.bytes_of(weight.data, rows), scales, shape)[ending]

    def stated(self) -> dict[str, Any]:
        """The entry `quantization_config`: every linear layer without packed weights is named, as files name it."""
        sources = {group.targets[0]: group.sources[0] for group in self._read.groups if group.targets}
        kept = [
            sources.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")
            for name, module in self._model.named_modules()
            if (isinstance(module, nn.Linear) or name.endswith("router")) and f"{name}.weight" not in self._names
        ]
        files = self._codec.files
        layout = files.of_experts if self._transposed else files.written
        assert layout
        assert layout.stated
        return layout.stated(sorted(kept))


def _blocks_of_rows(name: str, how: packed.Packing, rows: torch.Tensor, height: int) -> torch.Tensor:
    """The numbers of the scales of these rows. Raises ConfigError unless blocks of `height` rows stay whole."""
    count, blocks = how.shape[-2], how.scales.shape[-2]
    first = rows[..., ::height]
    expected = first.repeat_interleave(height, -1)[..., : rows.shape[-1]] + torch.arange(rows.shape[-1]) % height
    if (first % count % height).any() or not torch.equal(expected, rows):
        raise ConfigError(
            f"the parts that `{name}` is stored in cut through its blocks of {FORMS[how.form].published}; export "
            "`merged` instead"
        )
    return first // count * blocks + first % count // height


EXPORTER = Exporter(check, make, forms)
