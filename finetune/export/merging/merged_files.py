"""Writes a merged model shard by shard, in the layout of its base's files."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from finetune.data.media import Media
from finetune.errors import MachineError
from finetune.export.merging.bases import Bases, Merging
from finetune.model.source import chat_template
from finetune.model.source.locate import IMAGE_PROCESSORS
from finetune.model.structure import sequence_head, streamed
from finetune.storage import weight_files
from finetune.storage.files import amount, write_json

PROCESSORS = (*IMAGE_PROCESSORS, "video_preprocessor_config.json")
"""The files of what makes a base's images and films, beside its tokenizer."""


def layouts(bases: Bases) -> dict[str, weight_files.FileLayout]:
    """The weight files of a merged model by file name: one for each file of the base, with the same tensors.

    Those of a classifier lack what the base has and it does not: the head of a language model.
    """
    unused = {source for group in bases.weights.groups if not group.targets for source in group.sources}
    left_out = unused if bases.weights.new else set()
    kept = {source for group in bases.weights.groups if bases.keeps(*group.targets) for source in group.sources}
    order = {source: number for number, group in enumerate(bases.weights.groups) for source in group.sources}
    planned, count = {}, len(bases.files)
    for number, file in enumerate(bases.files, start=1):
        tensors = {
            name: (bases.dtype if dtype.is_floating_point and name not in kept else dtype, shape)
            for name, (dtype, shape) in bases.weights.layout_of(file).items()
            if name not in left_out
        }
        if number == count:
            # The files lack weights that are tied to another there, and a classifier's head.
            known = {target for group in bases.weights.groups for target in group.targets}
            added = [name for name in (*bases.untied, *bases.weights.new) if name not in known]
            names = bases.bare.state_dict()
            tensors |= {name: (bases.dtype, names[name].shape) for name in added}
        # Large types first, so that each tensor is aligned; then what is converted together.
        ordered = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, order.get(name, len(order))))
        name = f"model-{number:05d}-of-{count:05d}" if count > 1 else "model"
        planned[name + weight_files.SUFFIX] = weight_files.FileLayout({each: tensors[each] for each in ordered})
    return planned


def write_weights(merging: Merging, folder: Path) -> None:
    """Write the missing shards and their index."""
    planned = layouts(merging.bases)
    left = {name: layout for name, layout in planned.items() if not weight_files.is_written(folder / name, layout)}
    needed, free = sum(layout.bytes for layout in left.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise MachineError(
            f"{folder.parent}: the merged weights need {amount(needed)} of disk, and {amount(free)} are "
            "free; free some space, and run the same command again"
        )
    of = {source: group for group in merging.bases.weights.groups for source in group.sources}
    for name, layout in left.items():
        weight_files.write(folder / name, layout, _tensors(merging, of, list(layout.tensors)))
    if len(planned) > 1:
        write_json(folder / weight_files.INDEX, weight_files.index(planned))


def _tensors(merging: Merging, of: dict[str, streamed.ConversionGroup], names: list[str]) -> Iterator[torch.Tensor]:
    for group, together in itertools.groupby(names, key=of.get):
        if group is None:
            for name in together:
                added = merging.merged(name)
                assert added is not None
                yield added
            continue
        tensors = merging.tensors(group)
        for name in together:
            yield tensors.pop(name)


def write_settings(bases: Bases, base: Path, tokenizer: Any, folder: Path, rows: list[list[int]], media: Media) -> None:
    """Write config.json and generation_config.json; generation stops at the end of a turn as it was trained.

    A classifier has no generation_config.json, and the padding token that `rows` (token ids) allow. The base's
    processors are copied, with the run's bound on pixels.
    """
    for name in PROCESSORS:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
            if media and bases.config.data.image_pixels:
                values = json.loads((folder / name).read_text(encoding="utf-8"))
                of_images = values.get("image_processor", values)
                if "image_processor_type" in of_images:
                    of_images |= {key: value for key, value in media.settings().items() if key in of_images}
                    write_json(folder / name, values)
    classifies = sequence_head.is_classifier(bases.bare)
    if classifies:
        padding = sequence_head.padding_for(tokenizer, rows)
        bases.merged_architecture.get_text_config().pad_token_id = padding
        if padding not in (None, tokenizer.pad_token_id):
            padded = copy.deepcopy(tokenizer)
            padded.pad_token = tokenizer.convert_ids_to_tokens(padding)
            padded.save_pretrained(str(folder))
    bases.merged_architecture.save_pretrained(str(folder))
    if classifies:
        return
    settings = bases.bare.generation_config
    if (base / "generation_config.json").is_file():
        settings = GenerationConfig.from_pretrained(str(base))
    chat_template.write_generation_config(settings, tokenizer, folder)
