"""A GGUF file is a base: its folder holds the file's own bytes, in the order and under the names of transformers."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_in_llama_cpp as bench
import numpy as np
import pytest
import torch
from messages import refusal, reported
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import finetune
from finetune.choices import load_config
from finetune.config import Config, ModelSection, dump
from finetune.data import cache
from finetune.errors import ArtifactError, ConfigError, MachineError
from finetune.export import publish
from finetune.export.gguf import gguf_export
from finetune.extras.doctor import model_check, model_checks
from finetune.forms import packed
from finetune.model import build
from finetune.model.base import load_architecture
from finetune.model.source import gguf_base, gguf_families, identity
from finetune.model.source.locate import locate
from finetune.model.source.tokenizer import load_tokenizer
from finetune.report.terminal import Terminal
from finetune.resolve import resolve
from finetune.storage import weight_files
from tests.jobs import TINY, sampled


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test unpacks into a cache of its own."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


READ = {"mistral", "mixtral", *gguf_base._TYPES.values()}


def write(name: str, folder: Path, kind: str, tokenizer: Any = None, **fields: int) -> Path:
    """A small model with random weights as a GGUF file, beside its folder; `fields` of its config are changed."""
    shape = dataclasses.replace(bench.SHAPES[name], fields=bench.SHAPES[name].fields | fields)
    tokenizer = tokenizer or shape.tokenizer()
    config = bench.architecture(shape, len(tokenizer) + 3)
    model = bench.train(config, tokenizer, steps=0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    bench.write(bench.rounded(model), tokenizer, folder / "model")
    bench.export(folder / "model", tokenizer, file := folder / "model.gguf", kind)
    return file


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def written(models: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function to a test's own copy of such a file, which is made once for all tests."""

    def make(name: str = "llama", kind: str = "q8_0", **fields: int) -> Path:
        made = models / f"{name} {kind} {fields}"
        if not made.exists():
            write(name, made, kind, **fields)
        shutil.copytree(made, tmp_path, dirs_exist_ok=True)
        return tmp_path / "model.gguf"

    return make


def export_again(file: Path, kind: str = "bf16", to: Path | None = None) -> None:
    """Write the model beside `file` once more."""
    folder = file.with_name("model")
    bench.export(folder, AutoTokenizer.from_pretrained(folder), to or file, kind)


_SHAPES = [name for name, shape in bench.SHAPES.items() if shape.fields["model_type"] in READ]


@pytest.mark.parametrize("name", sampled(_SHAPES, "gemma3", "gpt-oss", "llama", "qwen2.5", "qwen3 mixture"))
def test_the_folder_of_a_file_is_the_model_that_it_was_written_from(name: str, written: Any, tmp_path: Path) -> None:
    folder = Path(locate(str(written(name, "bf16"))))
    made, before = (
        AutoModelForCausalLM.from_pretrained(each, dtype="float32") for each in (folder, tmp_path / "model")
    )
    gguf_families.family(before.config).approximate(before)
    ids = torch.arange(20, 60)[None]
    torch.testing.assert_close(made(ids).logits, before(ids).logits, rtol=0, atol=1e-4)
    mine, theirs = (AutoTokenizer.from_pretrained(each) for each in (folder, tmp_path / "model"))
    texts = [*bench.texts(), "  two spaces", *(f"{special}Hi {special}[x]" for special in theirs.all_special_tokens)]
    one, other = (each(texts, add_special_tokens=False)["input_ids"] for each in (mine, theirs))
    assert one == other


def digits_apart() -> Any:
    """As SmolLM's."""
    backend = bench.byte_level(r"\p{N}", bench._CHATML)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return bench.tokenizer(backend, "chatml", eos_token="<|im_end|>")


def whole_words() -> Any:
    """As Llama 3's, with tokens that no merges make."""
    made = bench.llama3()
    rules = json.loads(made.backend_tokenizer.to_str())
    rules["model"]["merges"] = [pair for pair in rules["model"]["merges"] if len("".join(pair)) < 5]
    return bench.tokenizer(Tokenizer.from_str(json.dumps(rules)), "llama3", eos_token="<|end_of_text|>")


def no_space_before() -> Any:
    return bench.tokenizer(
        bench.sentencepiece(["<unk>", "<s>", "</s>"]), "llama2", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize("made", [digits_apart, whole_words, no_space_before])
def test_text_is_split_as_llama_cpp_splits_it(made: Callable[[], Any], tmp_path: Path) -> None:
    tokenizer = made()
    read = AutoTokenizer.from_pretrained(locate(str(write("llama2", tmp_path, "bf16", tokenizer))))
    for text in bench.strings(300):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert read(text, add_special_tokens=False)["input_ids"] == ids
        assert read.decode(ids) == tokenizer.decode(ids)


def test_a_file_that_splits_text_in_another_way_needs_a_named_tokenizer(written: Any, tmp_path: Path) -> None:
    file = written("qwen2.5", "bf16")
    key = b"tokenizer.ggml.pre" + struct.pack("<IQ", 8, 5)
    file.write_bytes(file.read_bytes().replace(key + b"qwen2", key + b"other"))
    with refusal(ArtifactError, "`model.tokenizer`"):
        load_tokenizer(ModelSection(name=str(file)))
    assert load_tokenizer(ModelSection(name=str(file), tokenizer=str(tmp_path / "model"))).vocab_size


def test_packed_weights_are_the_bytes_of_the_file_with_rows_in_order(written: Any, tmp_path: Path) -> None:
    file = written()
    folder = gguf_base.unpacked(file)
    stored = load_file(folder / "model.safetensors")
    forms = json.loads((folder / "config.json").read_text())["quantization_config"]["modules_to_convert"]
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert set(forms.values()) == {"q8_0"}
    for name in forms:
        values = gguf.dequantize(stored[f"{name}_q8_0"].numpy(), gguf.GGMLQuantizationType.Q8_0)
        again = gguf.dequantize(
            gguf.quantize(before[name].float().numpy(), gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
        )
        np.testing.assert_array_equal(values, again)


@pytest.mark.parametrize(
    ("name", "kind"),
    sampled(
        [(name, kind) for name in ("qwen3 mixture", "mixtral", "gpt-oss") for kind in ("q8_0", "mxfp4", "q4_k_m")],
        ("qwen3 mixture", "q4_k_m"), ("mixtral", "q8_0"), ("gpt-oss", "mxfp4"),
    ),
)  # fmt: skip
def test_experts_are_packed_in_the_bytes_of_the_file(name: str, kind: str, written: Any) -> None:
    """Also in blocks of 256, of which the projection back has another type."""
    widths = ("hidden_size", "moe_intermediate_size" if name == "qwen3 mixture" else "intermediate_size")
    file = written(name, kind, **dict.fromkeys(widths if kind == "q4_k_m" else (), 256))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    values = {
        part: torch.from_numpy(np.array(gguf.dequantize(one.data, one.tensor_type))) for part, one in tensors.items()
    }
    architecture = load_architecture(ModelSection(name=str(file)))
    forms = architecture.quantization_config["modules_to_convert"]
    layer = "model.layers.1.mlp.experts"
    assert forms[f"{layer}.gate_up_proj"] == {"q8_0": "q8_0", "mxfp4": "gguf_mxfp4", "q4_k_m": "q4_k"}[kind]
    for quantization in ("published", "none"):
        job = load_config(TINY, [f"model.name={file}", f"quantization.kind={quantization}", "training.precision=fp32"])
        resolved = resolve(job, until="form")
        assert ("set 0 to serve the file itself" in str(resolved.notes)) == (quantization == "published")
        model = build.load(resolved.config, architecture, torch.device("cpu"))
        for part, names in {"down_proj": ["down"], "gate_up_proj": ["gate", "up"]}.items():
            held = model.get_parameter(f"{layer}.{part}")
            held = packed.exact(held) if packed.packing_of(held) else held
            stored = [values[f"blk.1.ffn_{each}_exps.weight"] for each in names]
            if name == "gpt-oss":  # experts transposed, gate and up in turn
                stored = [torch.stack(stored, dim=2).flatten(1, 2).mT]
            torch.testing.assert_close(held.float(), torch.cat(stored, dim=1), rtol=0, atol=0)


def test_doctor_tries_the_model_of_a_file_without_unpacking_it(written: Any, tmp_path: Path) -> None:
    file = written("gpt-oss", "mxfp4")
    assert model_check.is_model(str(file))
    copy = model_checks.Copy(str(file), tmp_path / "doctor")
    assert [model_checks.attempt(check, copy)[0] for check in ("structure", "weights", "16 bit")] == ["ok"] * 3
    assert not list(tmp_path.rglob("*unpacked*"))


def test_llama_3s_scaling_is_read_from_its_factors(written: Any) -> None:
    folder = (file := written()).with_name("model")
    values = json.loads((folder / "config.json").read_text())
    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    values["rope_parameters"] = scaling
    (folder / "config.json").write_text(json.dumps(values))
    export_again(file)
    found = load_architecture(ModelSection(name=str(file))).rope_parameters
    assert {key: found[key] for key in scaling} == scaling


def test_a_file_that_changed_is_unpacked_again_as_another_base(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written()
    first, before = gguf_base.unpacked(file), identity.of_base(ModelSection(name=str(file)))
    stamp = (first / "gguf.json").read_bytes()
    assert gguf_base.unpacked(file) == first
    assert (first / "gguf.json").read_bytes() == stamp
    export_again(file)
    config = json.loads((gguf_base.unpacked(file) / "config.json").read_text())
    assert "quantization_config" not in config
    other = identity.of_base(ModelSection(name=str(file)))
    assert None not in (before, other)
    assert other != before
    monkeypatch.setenv("HF_DATASETS_CACHE", str(file.with_name("another")))
    moved = file.rename(file.with_name("moved.gguf"))
    assert identity.of_base(ModelSection(name=str(moved))) == other, "wherever it is unpacked"


def test_a_folder_with_other_weights_or_of_an_older_version_is_written_again(written: Any) -> None:
    file = written()
    folder = gguf_base.unpacked(file)
    own = (weights := folder / "model.safetensors").read_bytes()
    weights.write_bytes(own[:-1] + bytes([own[-1] ^ 1]))
    assert (gguf_base.unpacked(file) / "model.safetensors").read_bytes() == own
    stamp = folder / "gguf.json"
    stamp.write_text(json.dumps({name: one for name, one in json.loads(stamp.read_text()).items() if "as" not in name}))
    (folder / "config.json").unlink()
    assert (gguf_base.unpacked(file) / "config.json").is_file()


def test_a_cache_that_cannot_be_written_serves_what_is_there(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written()
    (folder := gguf_base.unpacked(file)).joinpath("model.safetensors").chmod(0o400)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # to whoever runs this as root, none is read-only
    assert gguf_base.unpacked(file) == folder
    (folder / "gguf.json").write_text("{}")
    with refusal(MachineError, "gguf, but it cannot be written"):
        gguf_base.unpacked(file)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(file / "below a file"))
    with refusal(MachineError, "could not be written to"):
        gguf_base.unpacked(file)


def test_a_cache_that_others_can_write_is_not_trusted(written: Any) -> None:
    file = written()
    gguf_base.unpacked(file)
    gguf_base.cache().chmod(0o777)
    with refusal(MachineError, "other users can write to it"):
        gguf_base.unpacked(file)


def test_a_plan_leaves_the_folder_of_a_file_as_it_was(call: Any, rows_file: Path, written: Any, tmp_path: Path) -> None:
    (folder := tmp_path / "bases").mkdir()
    file = written().rename(folder / "model.gguf")
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}
    folder.chmod(0o500)
    code, _, error = call("plan", TINY, f"model.name={file}", f"data.train={rows_file}", "data.eval=none")
    folder.chmod(0o700)
    assert code == 0, error
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))} == before


def test_files_of_one_name_have_folders_of_their_own_that_none_replaces(written: Any, tmp_path: Path) -> None:
    """Earlier versions wrote one beside a file; in a foreign folder, it may hold anything."""
    first = written()
    (second := tmp_path / "second" / first.name).parent.mkdir()
    export_again(first, to=second)
    (link := tmp_path / "link" / "named.gguf").parent.mkdir()
    link.symlink_to(second)
    shutil.copytree(gguf_base.unpacked(second), first.with_name(first.name + ".unpacked"))
    folders = [gguf_base.unpacked(file) for file in (first, second)]
    assert [gguf_base.unpacked(file) for file in (first, second)] == folders
    configs = [json.loads((folder / "config.json").read_text()) for folder in (*folders, gguf_base.unpacked(link))]
    assert ["quantization_config" in config for config in configs] == [True, False, False]


def test_folders_are_kept_until_their_files_are_gone_and_a_month_passed(written: Any, tmp_path: Path) -> None:
    first = written()
    files = [first, *(Path(shutil.copy(first, tmp_path / f"{name}.gguf")) for name in ("gone", "just gone"))]
    kept, unused, recent = folders = [gguf_base.unpacked(file) for file in files]
    for folder in (kept, unused):
        os.utime(folder, (0, 0))
    os.utime(gguf_base.cache(), (0, 0))
    for file in files[1:]:
        file.unlink()
    killed = unused.with_name("killed.unpacked.incomplete")
    killed.mkdir()
    cache.entry(lambda: "rows", lambda made: None)  # which removes other unused entries
    assert all(folder.is_dir() for folder in folders)
    gguf_base.unpacked(Path(shutil.copy(first, tmp_path / "new.gguf")))
    assert [folder.is_dir() for folder in (kept, unused, recent, killed)] == [True, False, True, False]


_LAYERS, _WEIGHT = b"llama.block_count\x04\0\0\0", b"blk.1.ffn_up.weight"
_SHAPE = _WEIGHT + struct.pack("<IQQ", 2, 64, 128)
_DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda data: data[:-5000], "is cut off: it has .* bytes, of .* or more that it should have; download it"),
    "cut in its keys": (lambda data: data[:1000], "is cut off: it has 1,000 bytes, of .* or more"),
    "emptied": (lambda data: b"", "is empty; download it again"),
    "another magic": (lambda data: b"GGML" + data[4:], "cannot be read"),
    "a first version": (lambda data: b"GGUF\1\0\0\0" + data[8:], "version 1 .*or another file of the model"),
    "an unknown type": (
        lambda data: data.replace(_SHAPE + struct.pack("<I", 8), _SHAPE + struct.pack("<I", 99)),
        "99.* is not a valid .*or another file of the model",
    ),
    "a weight renamed": (lambda data: data.replace(_WEIGHT, b"blk.1.ffn_xx.weight"), r"no tensor `blk\.1\.ffn_up"),
    "countless layers": (
        lambda data: data.replace(_LAYERS + b"\x02\0\0\0", _LAYERS + b"\xff\xff\xff\x7f"),
        "fewer tensors than layers",
    ),
}


def test_a_damaged_file_is_refused_and_leaves_nothing(written: Any, tmp_path: Path, subtests: pytest.Subtests) -> None:
    whole = written().read_bytes()
    for what, (damage, says) in _DAMAGE.items():
        with subtests.test(what=what):
            (file := tmp_path / f"{what}.gguf").write_bytes(damaged := damage(whole))
            assert damaged != whole
            with pytest.raises(ArtifactError, match=says):
                gguf_base.unpacked(file)
            assert not list(tmp_path.rglob("*unpacked*"))


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def small(file: Path, arch: str = "llama", kind: str = "F32", keys: dict[str, Any] | None = None, **named: Any) -> Path:
    """A file of one tensor that says of itself what a model needs."""
    writer = gguf.GGUFWriter(file, arch, **named)
    needed = {"embedding_length": 256, "block_count": 1, "attention.head_count": 4}
    given: dict[str, Any] = {f"{arch}.{key}": value for key, value in needed.items()}
    given |= {"tokenizer.ggml.model": "gpt2", f"{arch}.attention.layer_norm_rms_epsilon": 1e-5, **(keys or {})}
    for key, value in given.items():
        write = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}.get(type(value))
        if write is not None:
            write(key, value)
    form = gguf.GGMLQuantizationType[kind]
    data = np.zeros((4, gguf.quant_shape_to_byte_shape((256,), form)[0]), dtype=np.uint8)
    writer.add_tensor("token_embd.weight", data, raw_dtype=form)
    finish(writer)
    return file


WRONG = {
    "an embedding model of another kind": ({"arch": "bert"}, "type `bert` is not read .*name the folder"),
    "an embedding model": ({"arch": "qwen3", "keys": {"qwen3.pooling_type": 3}}, "predicts no text; name another"),
    "a family without a config here": ({"arch": "deepseek2"}, "type `deepseek2` is not read .*only of llama, "),
    "an adapter": ({"keys": {"general.type": "adapter"}}, "holds an adapter, .*: name its base"),
    "a projector": ({"arch": "clip", "keys": {"general.type": "mmproj"}}, "name the file of its language model"),
    "an importance matrix": ({"keys": {"general.type": "imatrix"}}, "name the file of the model"),
    "a tokenizer": ({"keys": {"general.type": "vocab"}}, "name the file of the model"),
    "a part": ({"keys": {"split.count": 3}}, "one of 3 parts; join them with `llama-gguf-split --merge`"),
    "big-endian": ({"endianess": gguf.GGUFEndian.BIG}, "big-endian; convert it with"),
    "without a tokenizer": ({"keys": {"tokenizer.ggml.model": None}}, "`tokenizer.ggml.model` is missing; download"),
    "without a width": ({"keys": {"llama.embedding_length": None}}, "`llama.embedding_length` is missing; download"),
    "without layers": ({}, r"no tensor `blk\.0\.attn_q\.weight`; download"),
    **{
        kind: ({"kind": kind}, f"`token_embd.weight` is in {kind.lower()}, which no job keeps; .* Q4_K_M or Q8_0")
        for kind in ("Q2_K", "IQ1_S", "Q4_1", "NVFP4")
    },
}


def array(key: str, kind: gguf.GGUFValueType, count: int, data: bytes) -> bytes:
    """The bytes of a key of a header that is an array."""
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IIQ", 9, kind, count) + data


def with_key(file: Path, entry: bytes, *, tensors: int | None = None) -> Path:
    """Put a key before those of a header, and another number of tensors into it."""
    head, rest = file.read_bytes()[:24], file.read_bytes()[24:]
    magic, version, counted, keys = struct.unpack("<IIQQ", head)
    counted = counted if tensors is None else tensors
    file.write_bytes(struct.pack("<IIQQ", magic, version, counted, keys + bool(entry)) + entry + rest)
    return file


@pytest.mark.parametrize("kind", [gguf.GGUFValueType.UINT8, gguf.GGUFValueType.STRING])
def test_an_array_of_a_header_costs_no_object_for_each_element(kind: gguf.GGUFValueType, tmp_path: Path) -> None:
    count = 100_000
    entry = array("x.unread", kind, count, b"\1" * count if kind == 0 else (struct.pack("<Q", 1) + b"a") * count)
    file = with_key(small(tmp_path / "small.gguf"), entry)
    tracemalloc.start()
    reader = gguf_base._BoundedReader(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    field = reader.fields["x.unread"]
    assert field.parts[-1].tobytes() == entry[-field.parts[-1].nbytes :]
    assert "llama.block_count" in reader.fields  # which comes after it


MOST = {
    "elements": (array("x", gguf.GGUFValueType.UINT8, 2**23 + 1, b"\1" * (2**23 + 1)), None, "elements of arrays"),
    "elements that are not there": (array("x", gguf.GGUFValueType.UINT64, 10**6, b""), None, "is cut off"),
    "strings that are not there": (array("x", gguf.GGUFValueType.STRING, 10**6, b""), None, "is cut off"),
    "a string without an end": (
        array("x", gguf.GGUFValueType.STRING, 2, struct.pack("<Q", 2**63)), None, "is cut off",
    ),
    "arrays in an array": (array("x", gguf.GGUFValueType.ARRAY, 1, array("", 0, 0, b"")[8:]), None, "array of arrays"),
    "tensors": (b"", 50_001, "its header has 50,001 tensors, and no model more"),
}  # fmt: skip


def test_a_header_that_claims_more_than_a_model_has_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for claim, (entry, tensors, says) in MOST.items():
        with subtests.test(claim=claim):
            file = with_key(small(tmp_path / f"{claim}.gguf"), entry, tensors=tensors)
            with pytest.raises(ArtifactError, match=says):
                gguf_base.unpacked(file)


VALUES: dict[str, Any] = {
    "text": "no", "an integer": 7, "a number": 0.5, "not finite": float("nan"), "a truth value": True, "array": [1, 2],
}  # fmt: skip


def test_a_key_of_another_type_is_refused_by_its_name(tmp_path: Path, subtests: pytest.Subtests) -> None:
    keys = [(kind, key.format(arch="gemma3")) for kind, keys in gguf_base._KINDS.items() for key in keys]
    assert len(keys) > 20
    for kind, key in keys:
        for value in VALUES.values():
            is_array = isinstance(value, list)
            fits = kind is (np.ndarray if is_array else type(value)) or (kind is float and value == 7)
            if fits and value == value:
                continue
            with subtests.test(key=key, value=value):
                writer = gguf.GGUFWriter(file := tmp_path / "small.gguf", "gemma3")
                if key == "general.architecture":
                    writer.kv_data[0].clear()
                of = gguf.GGUFValueType.ARRAY if is_array else gguf.GGUFValueType.get_type(value)
                writer.add_key_value(key, value, of)
                writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
                finish(writer)
                with refusal(ArtifactError, f"`{key}`"):
                    gguf_base.architecture(file)


def test_a_file_of_something_else_is_refused_with_the_cure(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for wrong, (given, says) in WRONG.items():
        file = small(tmp_path / f"{wrong}.gguf", **given)
        for read in (gguf_base.unpacked, gguf_base.architecture):
            with subtests.test(wrong=wrong, read=read), pytest.raises(ArtifactError, match=says):
                read(file)


def test_a_full_disk_is_reported_and_leaves_nothing(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written()

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weight_files, "write", full)
    with refusal(MachineError, "could not be written to"):
        gguf_base.unpacked(file)
    assert not list(tmp_path.rglob("*unpacked*"))


@pytest.mark.slow
def test_a_run_on_a_file_computes_with_its_values_and_is_merged(
    shallow_base: Path, tmp_path: Path, quick: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    """The packed embedding is also the head, and rows of the built-in base are in Q5_0 and Q8_0 beside Q4_K."""
    file = tmp_path / "tiny.gguf"
    bench.export(shallow_base, AutoTokenizer.from_pretrained(shallow_base), tmp_path / "blob", "q4_k_m")
    file.symlink_to(tmp_path / "blob")  # as in the hub's cache
    job = quick(f"model.name={file}", "training.precision=fp32", "output.merge=true", "training.max_steps=1")
    run = finetune.train(job, terminal=Terminal(quiet=True)).run
    assert run.config().quantization.kind == "gguf"
    config = load_architecture(run.config().model)
    trained = build.load(run.config(), config, torch.device("cpu"))
    read = gguf_export.load(file, AutoConfig.from_pretrained(shallow_base), torch.float32, torch.device("cpu"))
    ids = torch.arange(20, 60)[None]
    torch.testing.assert_close(trained(ids).logits, read(ids).logits, rtol=0, atol=1e-4)
    assert run.merged.is_dir()
    publish.export_model(run, "gguf", type="q8_0", terminal=Terminal(quiet=True))
    reported(capsys.readouterr().err, "q8_0")
    record = publish.export_model(run, "adapter", terminal=Terminal(quiet=True))
    assert record["held_base"]["file"] == str(file)
    assert record["held_base"]["weights_differing"] == 0
    assert record["held_base"]["kl"] <= 1e-6
    assert record["serve"]["llama.cpp"].startswith(f"llama-server -m {file} --lora ")
    file.unlink()
    with refusal(ArtifactError, "no such file; download the GGUF file"):
        finetune.train(job.changed({"training.max_steps": 2, "quantization.kind": "published"}))


def test_a_file_is_served_itself_and_in_no_other_form(written: Any, tmp_path: Path) -> None:
    file = written()

    def resolved(*serve: str) -> tuple[Any, str]:
        job = resolve(load_config(TINY, [f"model.name={file}", "output.merge=false", *serve]), until="form")
        return job.config, job.notes["output.serve"]

    config, note = resolved("output.serve=q4_k_m")
    assert (config.quantization.kind, config.output.way) == ("gguf", "adapter")
    assert note.endswith("quantization.kind: gguf, the file is what is served")
    (saved := tmp_path / "saved.yaml").write_text(dump(config))
    assert load_config(saved) == config  # as later commands read it of a run
    with refusal(ConfigError, "`rounded`", "output.serve", "q4_k_m"):
        resolved("output.serve=nvfp4", "output.way=adapter")
    config, note = resolved("output.serve=nvfp4")
    assert (config.quantization.kind, config.output.way) == ("gguf", "rounded")


@pytest.mark.parametrize("name", ["builtin:tiny-llama", "missing.gguf"])
def test_that_kind_needs_a_file(name: str, call: Any, tmp_path: Path) -> None:
    given = f"model.name={name}", "quantization.kind=gguf", f"output.dir={tmp_path / 'run'}"
    code, _, error = call("train", str(TINY), *given)
    assert (code, "is not a GGUF file" in error or "no such file" in error) in ((2, True), (7, True))
