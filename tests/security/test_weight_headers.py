"""A safetensors file with a broken header is refused with exit 7."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hostile import refused
from messages import refusal

from finetune.errors import ArtifactError
from finetune.storage import weight_files


def file_of(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(start: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


BROKEN = {
    "empty": b"",
    "a length beyond the file": file_of(b"{}", length=1000),
    "no JSON": file_of(b"\x80\x04cos\nsystem\n"),
    "cut in the header": file_of({"a": tensor(0, 8)})[:30],
    "cut in the data": file_of({"a": tensor(0, 8)}, b"\0" * 7),
    "more data than tensors": file_of({"a": tensor(0, 8)}, b"\0" * 9),
    "overlapping": file_of({"a": tensor(0, 8), "b": tensor(4, 12)}, b"\0" * 12),
    "a hole": file_of({"a": tensor(0, 4), "b": tensor(8, 12)}, b"\0" * 12),
}


def test_a_broken_header_is_refused_naming_the_file(tmp_path: Path, subtests: pytest.Subtests) -> None:
    file = tmp_path / "model.safetensors"
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5\n".encode()
    for name, content in {**BROKEN, "a pointer of git LFS": pointer}.items():
        with subtests.test(name=name):
            file.write_bytes(content)
            with refusal(ArtifactError, "model.safetensors", *["`git lfs pull`"] * (content is pointer)):
                weight_files.check(file)


def test_a_whole_file_passes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(file_of({"__metadata__": {"format": "pt"}, "a": tensor(0, 8), "b": tensor(8, 12)}, b"\0" * 12))
    weight_files.check(file)
    assert weight_files.shapes(file) == {"a": [2], "b": [1]}


def test_training_on_such_a_base_exits_7(base: Path, train) -> None:
    (base / "model.safetensors").write_bytes(BROKEN["no JSON"])
    refused(train(f"model.name={base}"), base / "model.safetensors")


def test_an_answer_from_such_an_adapter_exits_7(run, call) -> None:
    file = run.adapter / "adapter_model.safetensors"
    file.write_bytes(BROKEN["a hole"])
    refused(call("generate", run.path, "--prompt", "x"), file)
