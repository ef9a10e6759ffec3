"""Rows with images: where they are named, what is refused before a pixel is decoded, and how many tokens they take."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import seeing
import transformers
from jobs import BF16
from messages import refusal
from PIL import Image
from seeing import encoded

from finetune.config import DataSection, ModelSection
from finetune.data import formats, images, in_memory, vision
from finetune.data.counts import TOO_LONG
from finetune.data.encoded import RowImage
from finetune.data.examples import Chat, RowError
from finetune.data.prepare import Prepared, prepare
from finetune.data.vision import Vision, of
from finetune.errors import ConfigError, DataError, MachineError
from finetune.model.base import load_architecture
from finetune.model.source.tokenizer import load_tokenizer

SIZES = 60


@pytest.fixture(scope="module", params=seeing.FAMILIES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Vision]:
    """A family's processor, and what is made of a base's files."""
    folder = seeing.base(tmp_path_factory.mktemp(request.param), request.param)
    return seeing.FAMILIES[request.param]()[1], of_base(folder)


def sizes(count: int) -> list[tuple[int, int]]:
    """Heights and widths from 8 to 300 pixels, the first of them extreme."""
    made = random.Random(0)
    return [(8, 300), (300, 8), (31, 33), *((made.randint(8, 300), made.randint(8, 300)) for _ in range(count - 3))]


def test_tokens_from_a_size_are_those_that_the_processor_makes(seen: tuple[Any, Vision]) -> None:
    processor, of_size = seen
    for height, width in sizes(SIZES):
        made = processor(text=[processor.image_token], images=[[Image.new("RGB", (width, height))]])
        own = processor.tokenizer(of_size.text(height, width))["input_ids"]
        assert own == list(made["input_ids"][0]), (height, width)
        assert of_size.image_tokens[0] in own


def test_a_bound_on_pixels_is_kept_by_tokens_and_pixels_alike_or_refused(tmp_path: Path) -> None:
    for family, pixels in (("qwen3_vl", 24 * 24), ("idefics3", 40 * 40), ("internvl", 2 * 32 * 32)):
        folder = seeing.base(tmp_path / family, family)
        bounded, free = (of_base(folder, **{"data.image_pixels": bound}) for bound in (pixels, None))
        assert 0 < len(bounded.text(240, 80)) < len(free.text(240, 80))
        made = bounded.pixels([Image.new("RGB", (80, 240), "red")])["pixel_values"]
        # Each of Qwen's patches is of two frames; Idefics and InternVL have the whole image beside the tiles.
        assert made.numel() <= 3 * 2 * pixels
    with refusal(ConfigError, "makes the same pixels of any image"):
        of_base(seeing.base(tmp_path / "gemma3", "gemma3"), **{"data.image_pixels": 100})


def of_base(folder: Path, **changes: Any) -> Vision:
    config = BF16.changed({"model.name": str(folder), "model.vision": "frozen", **changes})
    found = of(
        config.model,
        config.data.image_pixels,
        load_architecture(config.model),
        load_tokenizer(config.model, config.data),
    )
    assert found is not None
    return found


# -- where rows name them --------------------------------------------------------------------------------------------


def read(row: dict[str, Any]) -> Chat:
    content, unused = formats.read(row, "auto", {})
    assert isinstance(content, Chat)
    assert unused == []
    return content


def chat(asked: Any, answer: Any = "red", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], **more}


TWO = [RowImage(path="a.png"), RowImage(path="b.png")]
PARTS = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]


NAMED = [
    chat([{"type": "image", "path": "a.png"}, PARTS[1], {"type": "image", "image": "b.png"}]),
    chat([{"type": "image_url", "image_url": {"url": "a.png"}}, PARTS[1], {"type": "image", "url": "b.png"}]),
    chat(PARTS, images=["a.png", {"path": "b.png", "bytes": None}]),
    chat("<image>and<image>", images=["a.png", "b.png"]),
    {
        "conversations": [{"from": "human", "value": "<image>and<image>"}, {"from": "gpt", "value": "red"}],
        "images": ["a.png", "b.png"],
    },
    {"instruction": "<image>and<image>", "output": "red", "images": ["a.png", "b.png"]},
    {
        "prompt": [{"role": "user", "content": PARTS}], "completion": [{"role": "assistant", "content": "red"}],
        "images": ["a.png", "b.png"],
    },
]  # fmt: skip


def test_each_way_of_naming_images_is_read_alike() -> None:
    for row in NAMED:
        content = read(row)
        assert list(content.images) == TWO
        assert content.messages[0]["content"] == PARTS
        assert content.messages[1]["content"] == "red"
    # Images without a place come before the first question, and a mark in a row without images is text.
    content = read(chat("which?", image="a.png"))
    assert content.images == (TWO[0],)
    assert content.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "which?"}]
    assert read(chat("<image>")).messages[0]["content"] == "<image>"


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.base(tmp_path_factory.mktemp("qwen"), "qwen3_vl")


def prepared(base: Path, folder: Path, rows: list[dict[str, Any]], **section: Any) -> Prepared:
    section = {"max_length": 256, **section}
    data = DataSection(train=str(seeing.rows(folder, rows)), eval="none", **section)
    return prepare(data, load_tokenizer(ModelSection(name=str(base), vision="frozen"), data), of_base(base))


def test_rows_have_their_images_and_as_many_tokens_as_these_take(base: Path, tmp_path: Path) -> None:
    name = seeing.picture(tmp_path, "a.png", (32, 24))
    url = "data:image/png;base64," + base64.b64encode((tmp_path / name).read_bytes()).decode()
    rows = [chat(PARTS, images=[name, url]), chat("none"), chat(PARTS[:1], images=[name]), chat(PARTS[:1], image=url)]
    data = prepared(base, tmp_path, rows, duplicates="drop")
    assert [[(one["height"], one["width"]) for one in row["images"]] for row in data.train] == [
        [(24, 32), (24, 32)], [], [(24, 32)],
    ]  # fmt: skip
    assert [one["path"] for one in data.train[0]["images"]] == [str(tmp_path / name), ""]
    assert len({one["digest"] for row in data.train for one in row["images"]}) == 1
    tokens = seeing.qwen3_vl()[1].image_token_id
    assert [row["input_ids"].count(tokens) for row in data.train] == [2 * 12, 0, 12]  # 8 x 8 pixels each
    assert all(
        row["labels"][at] == -100 for row in data.train for at, id in enumerate(row["input_ids"]) if id == tokens
    )


def test_a_text_that_spells_the_token_of_an_image_shows_none(base: Path, tmp_path: Path) -> None:
    name = seeing.picture(tmp_path, "a.png", (16, 16))
    data = prepared(
        base, tmp_path, [chat([{"type": "text", "text": "<|image_pad|>"}, {"type": "image", "path": name}])]
    )
    assert data.train[0]["input_ids"].count(seeing.qwen3_vl()[1].image_token_id) == 4


def test_a_package_that_transformers_needs_for_images_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it needs torchvision for those of `mistral3`."""

    def lacking(*_: Any, **__: Any) -> None:
        raise ImportError("AutoImageProcessor requires the Torchvision library but it was not found")

    monkeypatch.setattr(transformers, "AutoImageProcessor", SimpleNamespace(from_pretrained=lacking))
    with refusal(MachineError, "install torchvision"):
        vision._image_processor(ModelSection())


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_tokens_of_images_that_a_row_does_not_have_are_errors(family: str, tmp_path: Path) -> None:
    folder = seeing.base(tmp_path / "base", family)
    seen, name = of_base(folder), seeing.picture(tmp_path, "a.png", (16, 16))
    for row in (chat(seen.token), chat(PARTS[:1], seen.token, image=name)):
        train = str(seeing.rows(tmp_path, [row]))
        data = DataSection(train=train, eval="none", max_length=256, control_tokens="parse")
        tokenizer = load_tokenizer(ModelSection(name=str(folder), vision="frozen"), data)
        with refusal(DataError, "rows.jsonl:1:"):
            prepare(data, tokenizer, seen)


def test_a_row_is_never_cut_within_its_images(base: Path, tmp_path: Path) -> None:
    name = seeing.picture(tmp_path, "a.png", (48, 48))
    rows = [chat([{"type": "image", "path": name}]), chat("which?")]
    for policy in ("truncate", "split", "drop"):
        data = prepared(base, tmp_path, rows, max_length=48, too_long=policy)
        assert data.train_counts.dropped_why == {TOO_LONG: 1}, policy
    with refusal(DataError, "rows.jsonl:1"):
        prepared(base, tmp_path, rows, max_length=48, too_long="error")


def test_a_photograph_is_upright(base: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    names = [f"a.{ending}" for ending in ("jpg", "png", "webp", "tiff")]
    for name in names:
        Image.new("RGB", (32, 16)).save(tmp_path / name, exif=exif)
    for row in prepared(base, tmp_path, [chat(PARTS[:1], image=name) for name in names]).train:
        [image] = row["images"]
        assert (image["height"], image["width"]) == (32, 16)
        assert images.decoded(image).size == (16, 32)


# -- from Python -----------------------------------------------------------------------------------------------------


PICTURE = Image.effect_noise((24, 16), 90).convert("RGB")


def test_images_and_arrays_from_python_are_the_files_that_they_would_be(base: Path) -> None:
    shapes = [
        PICTURE, np.array(PICTURE), PICTURE.convert("RGBA"), {"bytes": encoded(PICTURE), "path": None},
        Image.open(io.BytesIO(encoded(PICTURE))),
    ]  # fmt: skip
    rows = [
        row
        for given in shapes
        for row in (
            chat([{"type": "image", "image": given}]), chat(PARTS[:1], images=[given]), chat("which?", image=given)
        )
    ]  # fmt: skip
    data = DataSection(train=in_memory.given(rows, "train"), eval="none", max_length=256)
    tokenizer = load_tokenizer(ModelSection(name=str(base), vision="frozen"), data)
    train = prepare(data, tokenizer, of_base(base)).train
    assert len(train) == len(rows)
    for row in train:
        [image] = row["images"]
        assert images.decoded(image).tobytes() == PICTURE.tobytes()


def test_a_data_set_gives_the_files_of_its_images_as_they_are(base: Path, tmp_path: Path) -> None:
    file = encoded(PICTURE, "JPEG")
    features = datasets.Features({"text": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    rows = datasets.Dataset.from_dict({"text": ["one"], "images": [[{"bytes": file, "path": None}]]}, features=features)
    [(_, row)] = in_memory.records(in_memory.given(rows, "train"), "train")
    assert row["images"] == [{"bytes": file}]


def test_rows_of_different_images_from_python_have_different_names() -> None:
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    given = [red, blue, np.array(red), np.array(blue), red.copy()]
    *different, again = (in_memory.given([{"image": one}], "train") for one in given)
    assert len(set(different)) == len(different)
    assert again == different[0]


def test_arrays_that_are_no_images_are_refused() -> None:
    for given in (np.zeros((4, 4), "uint16"), np.zeros((4, 4, 3), "float32"), np.zeros(4, "uint8")):
        with pytest.raises(RowError, match=r"`image`.*(8 bits a channel|of uint8)"):
            read(chat("which?", image=given))
