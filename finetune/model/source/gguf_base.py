"""A GGUF file as a base: its bytes under transformers' names and in its order, in a folder beside this user's cache.

What a GGUF file stores of a quantized weight stays as it is, so that a job trains on the very values that llama.cpp
computes with; rows return to transformers' order, which blocks along columns allow. The folder is what other bases
are that are published in a packed form (`forms.packed`): nothing else has to know about GGUF files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from finetune.config.field_types import shown
from finetune.errors import ArtifactError, FinetuneError, MachineError, first_line
from finetune.forms import FORMS
from finetune.model.source import file_hashes, gguf_families, gguf_names
from finetune.runtime.stages import stage
from finetune.storage import files, locks, private, weight_files

METHOD = "gguf"
"""The `quant_method` of the folder's config.json, whose `modules_to_convert` has the form of each packed weight."""

TYPES = {name.removeprefix("gguf_"): name for name, form in FORMS.items() if form.is_of_gguf}
"""The form of packed weights that a matrix of a type in a file becomes."""

_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")
"""Byte-level tokenizers that split off each digit before they split text as GPT-2 does (src/llama-vocab.cpp)."""
_WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken",
)  # fmt: skip
"""Those that take a word that is a token before they merge (`ignore_merges`, there)."""

# Parts of tokenizer.json.
_DIGITS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_NO_SPACE_FIRST = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "never", "split": False}
_SPACE_FIRST = {  # also after each special token
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": _SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    ],
}
_SPACES = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}

_STAMP = "gguf.json"
_WEIGHTS = "model" + weight_files.SUFFIX
_PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

_FIELDS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}
"""Fields of every config, and the keys of a file that hold them."""

_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "gpt-oss": "gpt_oss", "phi3": "phi3",
}  # fmt: skip
"""llama.cpp's architectures that are read, and transformers' types of their models."""
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_EPS = "attention.layer_norm_rms_epsilon"

_OTHERS = {
    "adapter": "an adapter, which is trained further only from the run that wrote it: name its base",
    "mmproj": "the part of a model that sees or hears: name the file of its language model",
    "imatrix": "statistics of a model's inputs: name the file of the model",
    "vocab": "a tokenizer without a model: name the file of the model",
}
"""What a file of another `general.type` than `model` is, and the cure."""

_KINDS: dict[type, tuple[str, ...]] = {
    str: (
        "general.type", "general.architecture", "{arch}.rope.scaling.type",
        "tokenizer.ggml.model", "tokenizer.ggml.pre",
    ),
    int: (
        "split.count", *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "padding")),
        *(f"{{arch}}.{key}" for key in (
            *_FIELDS.values(), "pooling_type", "attention.sliding_window", "rope.dimension_count",
            "rope.scaling.original_context_length", "expert_count", "expert_used_count", "expert_feed_forward_length",
        )),
    ),
    float: tuple(f"{{arch}}.{key}" for key in (
        _EPS, "rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor", "attn_logit_softcapping",
        "final_logit_softcapping",
    )),
    bool: ("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_bos_token"),
    np.ndarray: ("{arch}.attention.sliding_window_pattern",),
}  # fmt: skip
"""The type of each key that is read here."""
_WORDS = {str: "text", int: "an integer", float: "a finite number", bool: "a truth value", np.ndarray: "an array"}

_MOST_ENTRIES, _MOST_ELEMENTS = 50_000, 2**23
"""Keys, and tensors, that a header may have, and elements of all its arrays. A model has dozens of keys, hundreds of
tensors (one for each expert, in old files) and 1.3 million elements, Gemma's tokens and merges.
"""

_WRITTEN_AS = 2
"""To be raised when a file's contents are written otherwise, so that older folders are written again. Those of 1 had a
SentencePiece tokenizer that split text after special tokens otherwise than llama.cpp.
"""


# The folder of a file that is gone is removed once it has not been used for this long.
_KEPT_SECONDS = 30 * 24 * 3600


def cache() -> Path:
    """The folder of the unpacked files, beside this user's cache: they are kept as long as the GGUF files."""
    return private.folder_beside("gguf")


def unpacked(file: Path) -> Path:
    """The folder of a GGUF file's contents in `cache`, written if it is missing or the file has changed since.

    Its name has a hash of the file's path, so that another file of the same name has another folder. Raises
    ArtifactError for a file that is damaged, or whose model or types are not supported, MachineError where the folder
    cannot be written or other users could write it.
    """
    digest = hashlib.sha256(os.fsencode(os.path.realpath(file))).hexdigest()
    folder = cache() / f"{file.stem[:40]}-{digest[:16]}.unpacked"
    with _explained(file, folder):
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    why = private.not_private(folder.parent)
    if not (why or _is_of(file, folder) or os.access(folder.parent, os.W_OK | os.X_OK)):
        why = "it cannot be written"
    if why:
        raise MachineError(
            f"{file}: its contents are unpacked once into {folder.parent}, but {why}; mend that, or point "
            "HF_DATASETS_CACHE to a folder of your own"
        )
    while not _is_of(file, folder):
        with locks.locked(cache() / "lock", str(cache()), "or point HF_DATASETS_CACHE elsewhere", wait=True):
            if not _is_of(file, folder):
                _unpack(file, folder)
    with contextlib.suppress(OSError):
        os.utime(folder)
    return folder


def _remove_unused() -> None:
    """Remove what killed processes left, and the folders of files that are gone; while the cache is locked."""
    files.remove_leftovers(cache())
    for stamp in cache().glob(f"*/{_STAMP}"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            unused_seconds = time.time() - stamp.parent.stat().st_mtime
            # A file may also be on another machine, which shares the cache.
            if unused_seconds > _KEPT_SECONDS and not os.path.exists(json.loads(stamp.read_bytes())["file"]):
                files.dispose(stamp.parent)


def _is_of(file: Path, folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        stamp = json.loads((folder / _STAMP).read_bytes())
        return bool(stamp == _stamp(file) | {"sha256": file_hashes.sha256(folder / _WEIGHTS)})
    return False


def _stamp(file: Path) -> dict[str, int | str]:
    status = file.stat()
    return {
        "file": os.path.realpath(file), "bytes": status.st_size, "modified_ns": status.st_mtime_ns,
        "written_as": _WRITTEN_AS,
    }  # fmt: skip


def architecture(file: Path) -> Any:
    """The transformers config of a GGUF file's model, as unquantized; reads no weights. Raises as `unpacked`."""
    with _explained(file, file):
        base = _File(file)
        list(base.weights())
        return base.config


def _unpack(file: Path, folder: Path) -> None:
    stamp = _stamp(file)
    with _explained(file, folder):
        _remove_unused()
        base = _File(file)
        weights = {name: weight for name, *weight in base.weights()}
        layout = weight_files.FileLayout({name: (dtype, shape) for name, (dtype, shape, _) in weights.items()})
        stage(f"writing the {layout.bytes / 2**30:.1f} GiB of {file.name} to {folder}, once")
        with files.staged(folder) as partial:
            base.save_settings(partial)
            tensors = (load() for _, _, load in weights.values())
            weight_files.write(partial / _WEIGHTS, layout, tensors)
            files.write_json(partial / _STAMP, stamp | {"sha256": file_hashes.sha256(partial / _WEIGHTS)})


@contextlib.contextmanager
def _explained(file: Path, folder: Path) -> Iterator[None]:
    """In the block, raise errors of reading `file` and of writing to `folder` as those of this program."""
    try:
        yield
    except FinetuneError:
        raise
    except OSError as error:
        there = next(parent for parent in folder.absolute().parents if parent.exists())
        raise MachineError(
            f"{file}: its contents could not be written to {folder}: {files.cause(error, there)}. They take as much "
            f"room as the file: {files.remedy(error)}, or point HF_DATASETS_CACHE elsewhere"
        ) from None
    except Exception as error:  # untrusted files may cause anything
        raise ArtifactError(
            f"{file}: it cannot be read as a GGUF file ({type(error).__name__}: {first_line(error)}); download it "
            "again, or another file of the model"
        ) from None


class _BoundedReader(gguf.GGUFReader):
    """The package's reader, with bounds on what a header may claim, and errors of our own where a file ends too early.

    An array is one view of its numbers, or of the bytes of all its strings. The package's own reader (0.19) makes one
    or two views for each element: 27 us and 1.2 KiB, 21 s for the 450,000 elements of Qwen2.5's vocabulary.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._bytes, self._elements = file, file.stat().st_size, 0
        if not self._bytes:
            raise ArtifactError(f"{file}: it is empty; download it again")
        super().__init__(file)

    def _get(self, offset: int, dtype: Any, count: Any = 1, *order: Any, **ordered: Any) -> Any:
        if (end := int(offset) + int(count) * np.dtype(dtype).itemsize) > self._bytes:
            raise ArtifactError(
                f"{self._file}: it is cut off: it has {self._bytes:,} bytes, of {end:,} or more that it should have; "
                "download it again"
            )
        return super()._get(offset, dtype, count, *order, **ordered)

    def _build_fields(self, offs: int, count: int) -> int:
        if self.endianess is not gguf.GGUFEndian.LITTLE:
            raise ArtifactError(
                f"{self._file}: its numbers are big-endian; convert it with `gguf-convert-endian FILE little`"
            )
        self._refuse_more("keys", int(count), _MOST_ENTRIES)
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: int) -> Any:
        self._refuse_more("tensors", int(count), _MOST_ENTRIES)
        return super()._build_tensor_info(offs, count)

    def _refuse_more(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise ArtifactError(
                f"{self._file}: its header has {count:,} {what}, and no model more than {most:,}; download it again"
            )

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        start, count, types = orig_offs + 12, int(length[0]), [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind[0])]
        self._elements += count
        self._refuse_more("elements of arrays", self._elements, _MOST_ELEMENTS)
        if types[1] == gguf.GGUFValueType.STRING:
            end, view, read = start, memoryview(self.data.data), struct.Struct("<Q").unpack_from
            for _ in range(count):
                if end + 8 > self._bytes:
                    break
                end += 8 + read(view, end)[0]
            else:
                count = 0
            whole = self._get(start, np.uint8, end + 8 * count - start)
        elif (numbers := self.gguf_scalar_to_np.get(types[1])) is not None:
            whole = self._get(start, numbers, count)
        else:
            raise ArtifactError(f"{self._file}: it has an array of arrays, which no model has; download it again")
        return 12 + whole.nbytes, [kind, length, whole], [2], types


class _File:
    """A GGUF file, and the transformers model that it holds."""

    def __init__(self, file: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._file = file
        try:
            reader = _BoundedReader(file)
        except OSError as error:
            raise MachineError(f"{file}: cannot be read: {error.strerror}") from None
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._keys: dict[str, Any] = {
            name: np.asarray(field.parts[-1]) if field.types[0] == gguf.GGUFValueType.ARRAY else field.contents()
            for name, field in reader.fields.items()
        }
        self._check_kinds()
        self._check()
        self.config = AutoConfig.for_model(self._type, **self._fields())
        if self.config.model_type.startswith("gemma"):
            wide = 46 if self.config.model_type == "gemma2" else 62
            self.config.update(
                {
                    "query_pre_attn_scalar": gguf_families.gemma_scale(self.config, wide),
                    "attn_logit_softcapping": self._key("attn_logit_softcapping"),
                    "final_logit_softcapping": self._key("final_logit_softcapping"),
                }
            )
        if self.config.model_type == "gemma3_text":
            theta, local = self._key("rope.freq_base"), self._key("rope.freq_base_swa")
            self.config.rope_parameters["full_attention"]["rope_theta"] = theta
            self.config.rope_parameters["sliding_attention"]["rope_theta"] = local or 10_000.0
        self._scale(gguf_families.own_rope(self.config))
        self._family = gguf_families.family(self.config)
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(self.config)
        self._forms: dict[str, str] = {}

    def _check_kinds(self) -> None:
        """Raise ArtifactError for a key of another type than the one that it is read as."""
        arch = self._keys.get("general.architecture")
        for kind, names in _KINDS.items():
            for name in (each.format(arch=arch) for each in names):
                value = self._keys.get(name)
                if value is None or (type(value) is kind and kind is not float):
                    continue
                if kind is float and type(value) in (int, float) and math.isfinite(value):
                    continue
                given = "an array" if isinstance(value, np.ndarray) else shown(value)
                raise ArtifactError(
                    f"{self._file}: its key `{ascii(name)[1:-1]}` is {given} instead of {_WORDS[kind]}; "
                    "download it again"
                )

    def _check(self) -> None:
        """Raise ArtifactError for a file that does not hold a whole language model of a known architecture."""
        if other := _OTHERS.get(self._keys.get("general.type", "model")):
            raise ArtifactError(f"{self._file}: it holds {other}")
        if self._keys.get("split.count", 1) > 1:
            raise ArtifactError(
                f"{self._file}: it is one of {self._keys['split.count']} parts; join them with `llama-gguf-split "
                "--merge`"
            )
        arch = self._keys.get("general.architecture")
        if arch and arch not in _TYPES:
            raise ArtifactError(
                f"{self._file}: a model of llama.cpp's type `{arch}` is not read from a GGUF file, only of "
                f"{', '.join(_TYPES)}; name the folder or the hub's name of the model it was made from"
            )
        needed = [f"{arch}.{key}" for field, key in _FIELDS.items() if field in _NEEDED]
        for key in ("general.architecture", "tokenizer.ggml.model", *needed, f"{arch}.{_EPS}"):
            if key not in self._keys:
                raise ArtifactError(f"{self._file}: its key `{key}` is missing; download it again")
        if self._key("pooling_type"):
            raise ArtifactError(f"{self._file}: it holds an embedding model, which predicts no text; name another base")
        if self._key("block_count") > len(self._tensors):
            raise ArtifactError(f"{self._file}: it has fewer tensors than layers; download it again")

    def _key(self, name: str) -> Any:
        return self._keys.get(f"{self._keys['general.architecture']}.{name}")

    @property
    def _type(self) -> str:
        """transformers' type of the model."""
        kind = _TYPES[self._keys["general.architecture"]]
        return "mixtral" if kind == "llama" and self._key("expert_count") else kind

    def _fields(self) -> dict[str, Any]:
        """The fields of the config, besides those of Gemma and of a scaling of the rotary embedding."""
        fields = {field: value for field, key in _FIELDS.items() if (value := self._key(key)) is not None}
        fields = {
            "head_dim": fields["hidden_size"] // fields["num_attention_heads"],
            "num_key_value_heads": fields["num_attention_heads"],
            **fields,
            "dtype": torch.bfloat16,
            "rms_norm_eps": float(str(np.float32(self._key(_EPS)))),
            "vocab_size": int(self._tensor("token_embd.weight").shape[-1]),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            **{
                f"{role}_token_id": self._keys.get(f"tokenizer.ggml.{name}_token_id")
                for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
            },
        }
        if self._type != "gemma3_text":
            theta = self._key("rope.freq_base") or 10_000.0
            fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
            if (rotated := self._key("rope.dimension_count") or fields["head_dim"]) != fields["head_dim"]:
                fields["rope_parameters"]["partial_rotary_factor"] = rotated / fields["head_dim"]
        if self._type.startswith(("gemma", "gpt_oss")):
            fields["sliding_window"] = self._key("attention.sliding_window")
        if (pattern := self._key("attention.sliding_window_pattern")) is not None:
            fields["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        if experts := self._key("expert_count"):
            inside = self._key("expert_feed_forward_length") or fields["intermediate_size"]
            fields |= {
                "num_experts" if self._type == "qwen3_moe" else "num_local_experts": experts,
                "num_experts_per_tok": self._key("expert_used_count"),
                "moe_intermediate_size" if self._type == "qwen3_moe" else "intermediate_size": inside,
                "norm_topk_prob": True,  # llama.cpp always does
            }
        return fields

    def _scale(self, rope: dict[str, Any]) -> None:
        """Set the scaling of the rotary embedding, which transformers' reader leaves out."""
        kind = self._key("rope.scaling.type")
        if kind in ("linear", "yarn"):
            rope.update(rope_type=kind, factor=self._key("rope.scaling.factor"))
        if kind == "yarn":
            rope["original_max_position_embeddings"] = self._key("rope.scaling.original_context_length")
        if "rope_freqs.weight" in self._tensors:
            factors = torch.from_numpy(np.array(self._tensors["rope_freqs.weight"].data))
            rope.update(self._llama3(factors.double(), rope["rope_theta"]))

    def _llama3(self, factors: torch.Tensor, theta: float) -> dict[str, Any]:
        """Llama 3's scaling with these `factors` of wavelengths (head size / 2,).

        Between 1 and the largest, 1 / factor is linear in the frequency (`_compute_llama3_parameters`), and
        `low_freq_factor` is 1 in all releases.
        """
        largest = float(factors.max())
        turns = theta ** (-torch.arange(len(factors), dtype=torch.float64) / len(factors)) / (2 * torch.pi)
        between = (factors > 1.0001) & (factors < 0.9999 * largest)
        share = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
        context, high = 8192, 4.0  # the values of all releases
        if len(share) > 1:
            slope, start = np.polyfit(turns[between].numpy(), share.numpy(), 1)
            context, high = round(-slope / start), round(1 - 1 / start, 3)
        elif len(share):
            context = round(float((share * (high - 1) + 1) / turns[between]))
        scaling = {
            "rope_type": "llama3", "factor": round(largest, 4), "low_freq_factor": 1.0, "high_freq_factor": high,
            "original_max_position_embeddings": context,
        }  # fmt: skip
        self.config.rope_parameters.update(scaling)
        made = gguf_names.frequency_factors(self.config)
        if made is None or not torch.allclose(made.double(), factors, rtol=1e-3):
            raise ArtifactError(f"{self._file}: its rotary frequencies are scaled otherwise than Llama 3's")
        return scaling

    def save_settings(self, folder: Path) -> None:
        """Write config.json and the tokenizer's files."""
        if self._forms:
            self.config.update({"quantization_config": {"quant_method": METHOD, "modules_to_convert": self._forms}})
        self.config.save_pretrained(folder)
        self._save_tokenizer(folder)

    def _save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files; none if transformers would split text otherwise, so that `model.tokenizer` has
        to name one.
        """
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

        of_bytes = self._keys.get("tokenizer.ggml.model") == "gpt2"
        splits = self._keys.get("tokenizer.ggml.pre")
        if of_bytes and splits not in (*GGUF_PRE_TOKENIZER_SPLITS, *_DIGITS_APART, "gpt-2"):
            return
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self._file.parent, gguf_file=self._file.name)
        with files.as_os_errors(folder):
            tokenizer.save_pretrained(folder)
        file = folder / "tokenizer.json"
        stored = json.loads(file.read_bytes())
        if of_bytes:
            stored["model"]["ignore_merges"] = splits in _WHOLE_WORDS
        if of_bytes and splits in _DIGITS_APART:
            stored["pre_tokenizer"] = _DIGITS
        is_spaced = self._keys.get("tokenizer.ggml.add_space_prefix", True)
        if (stored["pre_tokenizer"] or {}).get("type") == "Metaspace":
            spaced = {"normalizer": _SPACE_FIRST, "pre_tokenizer": None}
            stored |= spaced if is_spaced else {"pre_tokenizer": _NO_SPACE_FIRST, "decoder": _SPACES}
        if not self._keys.get("tokenizer.ggml.add_bos_token", True):
            stored["post_processor"] = None  # transformers' own always adds a BOS token
        files.write_json(file, stored)

    def weights(self) -> Iterator[tuple[str, torch.dtype, torch.Size, Callable[[], torch.Tensor]]]:
        """Name in the folder's file, type and shape there, and a function that loads it, of each weight."""
        names, unused = gguf_names.mapped(self.config, self._family), self._tensors.keys() - {"rope_freqs.weight"}
        tied = self._model.all_tied_weights_keys
        for name, weight in self._model.state_dict().items():
            if name in tied:
                continue
            parts = self._rows(name, weight.shape)
            of_file = {part: gguf_names.name_of(names, part, self._family) for part in parts}
            unused -= set(of_file.values())
            tensors = [self._tensor(of_file[part]) for part in parts]
            yield self._weight(name, weight.shape, tensors, list(parts.values()))
        self._forms |= {name: self._forms[other] for name, other in tied.items() if other in self._forms}
        if unused:
            raise ArtifactError(f"{self._file}: transformers has no weight for its tensor `{sorted(unused)[0]}`")

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise ArtifactError(f"{self._file}: it has no tensor `{name}`; download it again")
        return self._tensors[name]

    def _weight(
        self, name: str, shape: torch.Size, tensors: list[Any], rows: list[torch.Tensor]
    ) -> tuple[str, torch.dtype, torch.Size, Callable[[], torch.Tensor]]:
        kinds = sorted({tensor.tensor_type.name.lower() for tensor in tensors})
        if len(kinds) > 1 or kinds[0] not in (*_PLAIN, *TYPES):
            raise ArtifactError(
                f"{self._file}: `{tensors[0].name}` is in {' and '.join(kinds)}, which no job keeps; use the model's "
                "file in Q4_K_M or Q8_0, or its original in 16 bit"
            )
        [kind] = kinds
        if kind in _PLAIN:
            return name, _PLAIN[kind], shape, lambda: self._plain(name, shape, tensors, rows, _PLAIN[kind])
        form = self._forms[name] = TYPES[kind]
        stored = torch.Size((*self._as_stored(name, shape)[:-1], tensors[0].data.shape[-1]))
        return f"{name}_{form}", torch.uint8, stored, lambda: _in_order(tensors, rows, stored, torch.uint8)

    def _plain(
        self, name: str, shape: torch.Size, tensors: list[Any], rows: list[torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        if len(shape) > 1:
            dimension = -1 if _is_vector(name, shape) else -2
            values = _in_order(tensors, rows, self._as_stored(name, shape), dtype, dimension)
            return values.mT.contiguous() if self._is_transposed(name, shape) else values
        values = _in_order(tensors, rows, shape, dtype, -1)
        # A vector may be stored with an addend or a factor (Gemma's norms).
        addend, both = (
            next(iter(gguf_names.stored(name, torch.full(shape, float(end)), self.config, self._family).values()))
            for end in (0, 1)
        )
        return ((values.double() - addend) / (both - addend)).to(dtype)

    def _rows(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        """For each tensor of a file that a weight is stored as, which of the weight's rows it holds, in its order."""
        if len(shape) == 1 and not self._family.permuted:  # an addend would change the row numbers
            nothing = torch.empty(shape, device="meta")
            parts = gguf_names.stored(name, nothing, self.config, self._family)
            return {part: torch.arange(shape[0]) for part in parts}
        stored = torch.Size((*shape, 1)) if _is_vector(name, shape) else self._as_stored(name, shape)
        numbers = torch.arange(stored[-2]).unsqueeze(-1).expand(*stored[:-1], 1)
        if self._is_transposed(name, shape):
            numbers = numbers.mT
        parts = gguf_names.stored(name, numbers, self.config, self._family)
        return {part: rows[(0,) * (rows.dim() - 2)].squeeze(-1) for part, rows in parts.items()}

    def _is_transposed(self, name: str, shape: torch.Size) -> bool:
        """Whether the model has the weight as (experts, inputs, outputs), and the file outputs first."""
        return len(shape) == 3 and getattr(self._model.get_submodule(name.rpartition(".")[0]), "is_transposed", False)

    def _as_stored(self, name: str, shape: torch.Size) -> torch.Size:
        return torch.Size((shape[0], shape[2], shape[1])) if self._is_transposed(name, shape) else shape


def _is_vector(name: str, shape: torch.Size) -> bool:
    """Whether a weight is a vector, or the biases of experts (experts, outputs)."""
    return len(shape) == 1 or name.endswith("_bias")


def _in_order(
    tensors: list[Any], rows: list[torch.Tensor], shape: torch.Size, dtype: torch.dtype, dimension: int = -2
) -> torch.Tensor:
    """The rows of a weight, which are its `dimension`, in transformers' order, of the tensors of a file."""
    values = torch.empty(shape, dtype=dtype)
    for tensor, numbers in zip(tensors, rows, strict=True):
        part, expected = torch.from_numpy(np.array(tensor.data)).view(dtype), list(shape)
        expected[dimension] = len(numbers)
        if list(part.shape) != expected:
            raise ArtifactError(f"tensor `{tensor.name}` has the shape {list(part.shape)} instead of {expected}")
        values.index_copy_(dimension, numbers, part)
    return values
