"""What people get wrong in images, in rows that show them and in configs: each ends the job with place and cure.

The job is the real one, up to the point where it would load weights.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import random
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import seeing
from jobs import BF16
from PIL import Image, ImageFile
from seeing import encoded

import finetune
from finetune.choices import load_config
from finetune.config import Config
from finetune.data import images, vision
from finetune.data.encoded import RowImage
from finetune.data.examples import Chat, RowError
from finetune.data.problems import LIMIT, BadRows
from finetune.errors import ConfigError, DataError
from finetune.model.base import load_architecture
from finetune.model.source.tokenizer import load_tokenizer

GREY, NOISE = Image.new("L", (20, 20)), Image.effect_noise((64, 64), 50)
JPEG = encoded(NOISE, "JPEG")
FRAMES = {"save_all": True, "append_images": [Image.new("L", (20, 20), 9)]}
REPLACE, COPY, SMALL = "replace it, or remove the row", "copy it again", "decompression bomb"


def with_preview(cut: int) -> bytes:
    """A photograph cut off after so many of its bytes, with a whole one in its header."""
    header = b"Exif\0\0" + encoded(GREY, "JPEG")
    return JPEG[:2] + b"\xff\xe1" + struct.pack(">H", len(header) + 2) + header + JPEG[2:cut]


def patched(content: bytes, at: int, form: str, *values: int) -> bytes:
    """`content` with these values at a byte, as `struct` writes them."""
    made = struct.pack(form, *values)
    return content[:at] + made + content[at + len(made) :]


def enormous(kind: str, side: int = 30_000) -> bytes:
    """A file of hundreds of bytes whose header says that the image has so many pixels to a side."""
    content = encoded(GREY, kind)
    if kind == "PNG":
        return seeing.bomb(side)
    if kind == "JPEG":
        return patched(content, content.index(b"\xff\xc0") + 5, ">HH", side, side)
    if kind == "TIFF":
        for tag in (256, 257):  # width and height
            content = patched(content, content.index(struct.pack("<H", tag), 8) + 2, "<HII", 4, 1, side)
        return content
    at, form = {"GIF": (6, "<HH"), "BMP": (18, "<II")}[kind]
    return patched(content, at, form, side, side)


FILES: list[tuple[str, bytes, str, str]] = [
    # (what is wrong, the image's file, what is said of it, the cure)
    ("no bytes", b"", "an empty file", "replace it"),
    ("text", b"not an image", "of no format that is read", REPLACE),
    ("a pointer of Git LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "of no format", REPLACE),
    ("another format", encoded(GREY, "PPM"), "JPEG, PNG, WEBP, GIF, BMP, TIFF", REPLACE),
    ("PNG's magic number alone", encoded(GREY)[:8], "cannot be read as an image", REPLACE),
    ("a JPEG cut off in the middle", JPEG[:-500], "cut off", COPY),
    ("a JPEG with a preview, cut off", with_preview(-500), "cut off", COPY),
    ("a PNG cut off in its header", encoded(NOISE)[:25], "cannot be read as an image", REPLACE),
    ("a PNG cut off in the middle", encoded(NOISE)[:2000], "cut off", COPY),
    ("a PNG with a changed byte", patched(encoded(NOISE), 2000, "B", 1), "cannot be read as an image", REPLACE),
    *((f"a {kind} cut off", encoded(NOISE, kind)[:-40], "cannot be read as an image", REPLACE)
      for kind in ("WEBP", "GIF", "BMP", "TIFF")),
    *((f"a {kind} that moves", encoded(GREY, kind, **FRAMES), "several frames", "save one of them")
      for kind in ("GIF", "PNG", "WEBP", "TIFF")),
    ("a large one", enormous("PNG", 10_000), SMALL, REPLACE),
    ("16 bits", encoded(Image.new("I;16", (20, 20))), "of the kind I;16", "convert it to 8 bits"),
    ("real numbers", encoded(Image.new("F", (20, 20)), "TIFF"), "of the kind F", "convert it to 8 bits"),
    ("Lab colours", encoded(Image.new("LAB", (20, 20)), "TIFF"), "of the kind LAB", "convert it to 8 bits"),
    ("a line of pixels", encoded(Image.new("L", (1, 999))), "aspect ratio", REPLACE),
]  # fmt: skip

SHOWN, TEXT = {"type": "image"}, {"type": "text", "text": "What is it?"}
GOOD = "good.png"


def row(*asked: Any, answer: Any = "red", **columns: Any) -> dict[str, Any]:
    """A question of these parts, or one text, with its answer, and the row's other columns."""
    content = asked[0] if isinstance(asked[0], str) else list(asked)
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **columns}


def named(value: Any, key: str = "path") -> dict[str, Any]:
    return row({"type": "image", key: value}, TEXT)


FETCHED = "nothing is fetched; download the image"
ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    # (what is wrong, the row, what is said of it, the cure)
    ("no such file", named("missing.png"), "no such file", "in a data file are relative to its folder"),
    ("a folder", named("folder"), "not a regular one", "in a data file are relative to its folder"),
    ("a file of the system", named("/proc/self/mounts"), "an empty file", "replace it"),
    ("a device", named("/dev/zero"), "not a regular one", "in a data file are relative to its folder"),
    ("a path with a zero", named("good\0.png"), "no such file", "in a data file are relative to its folder"),
    ("a path that is too long", named("x" * 5000), "cannot be read: File name too long", "correct the path"),
    ("a web address", named("https://example.com/a.png", "url"), "`messages[0].content[0].url`", FETCHED),
    ("a web address in OpenAI's format", row({"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}),
     "http://example.com/a.png", FETCHED),
    ("a web address in the column", row("What?", images=["https://example.com/a.png"]), "`images[0]`", FETCHED),
    ("an address in a bucket", row("What?", images=["s3://bucket/a.png"]), "`images[0]`", FETCHED),
    ("an address of a file", named("file:///tmp/a.png"), "file:///tmp/a.png", FETCHED),
    ("a data URL that is not base64", named("data:image/png;base64,!", "url"), "not base64", "write the path"),
    ("a data URL of text", named("data:text/plain;base64,aGk=", "url"), "data:text/plain", "begins with"),
    ("a data URL without base64", named("data:image/svg+xml,<svg/>", "url"), "data:image/svg+xml", "begins with"),
    ("a data URL cut off", named("data:image/png;base64," + base64.b64encode(encoded(NOISE)[:999]).decode(), "url"),
     "an image: the file is cut off", COPY),
    ("an enormous data URL", named("data:image/png;base64," + base64.b64encode(enormous("PNG")).decode(), "url"),
     SMALL, REPLACE),
    ("an empty path", named(""), "not empty text", "must be the path of an image"),
    ("a number", named(3, "image"), "not a number", "must be the path of an image"),
    ("a list", named([GOOD], "image"), "not a list", "must be the path of an image"),
    ("an object without an image", named({}, "image"), "`messages[0].content[0].image`", "must be the path"),
    ("nothing in the column", row("What?", images=[None]), "`images[0]`", "must be the path of an image"),
    ("two names", row({**SHOWN, "path": GOOD, "url": GOOD}), "names its image twice", "keep one of them"),
    ("two columns", row("What?", images=[GOOD], image=GOOD), "`images` and `image`", "keep one of them"),
    ("no address", row({"type": "image_url", "image_url": {}}), "has no `url`", "write the path of the image there"),
    ("too few marks", row("<image>What?", images=[GOOD, GOOD]), "have 1 places", "write as many"),
    ("too many marks", row("<image><image>What?", images=[GOOD]), "have 2 places", "write as many"),
    ("too few parts", row(SHOWN, TEXT, images=[GOOD, GOOD]), "have 1 places", "write as many"),
    ("a part without an image", row(SHOWN, TEXT), "`images` has 0", "write as many"),
    ("a column beside named parts", row({**SHOWN, "path": GOOD}, images=[GOOD]), "have 0 places", "write as many"),
    ("an image in the answer", row("What?", answer=[{**SHOWN, "path": GOOD}]), "`assistant`", "move them to"),
    ("an image in the instructions", {"messages": [{"role": "system", "content": [{**SHOWN, "path": GOOD}]},
     *row("What?")["messages"]]}, "`system`", "move them to"),
    ("a film", row({"type": "video", "path": "a.mp4"}), "'video'", "remove the row"),
    ("a column of films", row("What?", videos=["a.mp4"]), "`videos`", "remove the row"),
    ("no conversation", {"prompt": "What?", "completion": "Red.", "images": [GOOD]}, "conversations alone", "write"),
]  # fmt: skip

CONFIGS: list[tuple[list[str], int, str, str]] = [
    (["data.image_pixels=0"], 2, "`data.image_pixels`", "greater than 0"),
    (["data.image_pixels=-4"], 2, "`data.image_pixels`", "greater than 0"),
    (["data.image_pixels=1.5"], 2, "`data.image_pixels`", "whole number"),
    (["data.image_pixels=large"], 2, "`data.image_pixels`", "whole number"),
    (["data.image_pixel=100"], 2, "`data.image_pixel`", "did you mean `image_pixels`?"),
    (["model.vision=none", "data.image_pixels=100"], 2, "`data.image_pixels`", "set `model.vision: frozen`"),
    (["model.vision=none"], 3, "rows.jsonl:1", "set `model.vision: frozen`"),
    (["model.vision=trained"], 2, "`model.vision`", "'none'"),
    (["model.name=builtin:tiny-llama"], 2, "`model.vision`", "set `none`"),
    (["data.images=folder"], 2, "`data.images`", "did you mean `image_pixels`?"),
    (["data.max_length=20"], 3, "1 over data.max_length", "data.max_length"),
    (["data.max_length=20", "data.too_long=error"], 3, "rows.jsonl:1", "smaller ones (`data.image_pixels`), or set"),
    (["data.chat_template=text.jinja"], 3, "rows.jsonl:1", "set `data.chat_template`"),
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.base(tmp_path_factory.mktemp("qwen"), "qwen3_vl")


@pytest.fixture
def job(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """The config of a job on rows in a new folder; loading weights fails the test."""

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("finetune.model.build.load_base", loaded)
    monkeypatch.chdir(tmp_path)
    seeing.picture(tmp_path, GOOD, (48, 48))
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.jinja").write_text("{% for message in messages %}{{ message.role }}{% endfor %}")

    def make(rows: list[Any], *overrides: str) -> Config:
        values = {
            "model": {"name": str(base), "vision": "frozen"},
            "data": {"train": str(seeing.rows(tmp_path, rows)), "eval": "none", "max_length": 128},
            "memory": {"check": "off"},
            "output": {"dir": "run", "merge": False},
        }
        return load_config(values, overrides)

    return make


def refused(config: Config) -> list[str]:
    """The problems that training ends with."""
    with pytest.raises(BadRows) as caught:
        finetune.train(config)
    assert not Path("run").exists()
    return caught.value.problems


def check(said: str, *parts: str) -> None:
    assert [part for part in parts if part not in said] == [], said


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The formats of the files whose pixels Pillow has begun to decode."""
    formats: list[str | None] = []
    load = ImageFile.ImageFile.load

    def noted(file: ImageFile.ImageFile) -> Any:
        formats.append(file.format)
        return load(file)

    monkeypatch.setattr(ImageFile.ImageFile, "load", noted)
    return formats


@pytest.fixture
def asked_of_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a name was looked up for, or a socket connected to."""
    asked: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: asked.append(address) or [])
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: asked.append(address))
    return asked


PAGE = LIMIT - 1


@pytest.mark.slow
def test_wrong_files_are_refused_with_row_file_and_cure(job: Any) -> None:
    for cases in (FILES[:PAGE], FILES[PAGE:]):
        for number, (_, content, *_) in enumerate(cases, 2):
            Path(f"{number}.png").write_bytes(content)
        rows = [named(f"{number}.png") for number in range(2, len(cases) + 2)]
        problems = refused(job([named(GOOD), *rows]))
        for number, (said, (_, _, why, cure)) in enumerate(zip(problems, cases, strict=True), 2):
            check(said, f"rows.jsonl:{number}: ", f"{Path.cwd()}/{number}.png: ", why, cure)


@pytest.mark.slow
def test_wrong_rows_are_refused_with_line_field_and_cure(job: Any, asked_of_network: list[object]) -> None:
    *conversations, other = ROWS
    for cases in (conversations[:PAGE], conversations[PAGE:], [other]):
        first = named(GOOD) if cases != [other] else {**other[1], "images": None}
        problems = refused(job([first, *(wrong for _, wrong, _, _ in cases)]))
        for number, (said, (_, _, why, cure)) in enumerate(zip(problems, cases, strict=True), 2):
            check(said, f"rows.jsonl:{number}: ", why, cure)
    assert asked_of_network == []


@pytest.mark.slow
def test_wrong_configs_for_images_are_refused_with_key_and_cure(job: Any) -> None:
    for overrides, exit_code, where, cure in CONFIGS:
        with pytest.raises((ConfigError, DataError)) as caught:
            finetune.train(job([named(GOOD)], *overrides))
        assert caught.value.exit_code == exit_code, overrides
        check(str(caught.value), where, cure)
    assert not Path("run").exists()


@pytest.mark.slow
def test_a_bomb_is_refused_before_it_is_decoded(job: Any, decoded: list[str | None]) -> None:
    kinds = ["PNG", "JPEG", "GIF", "BMP", "TIFF"]
    for kind in kinds:
        Path(f"{kind}.png").write_bytes(enormous(kind))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    problems = refused(job([named(f"{kind}.png") for kind in kinds]))
    for kind, said in zip(kinds, problems, strict=True):
        check(said, f"{kind}.png", SMALL, "900000000 pixels")
    assert decoded == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB; its pixels take 900 MB
    Image.open(GOOD).load()
    assert decoded == ["PNG"]


@pytest.fixture
def seen(base: Path) -> vision.Vision:
    config = BF16.changed({"model.name": str(base), "model.vision": "frozen"})
    found = vision.of(
        config.model,
        config.data.image_pixels,
        load_architecture(config.model),
        load_tokenizer(config.model, config.data),
    )
    assert found is not None
    return found


@pytest.fixture
def somebody_else() -> Iterator[None]:
    """In the test, root is a user without rights."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


def test_a_file_that_may_not_be_read_is_named(seen: vision.Vision, tmp_path: Path, request: Any) -> None:
    name = seeing.picture(tmp_path, "secret.png", (16, 16))
    (tmp_path / name).chmod(0)
    request.getfixturevalue("somebody_else")
    with pytest.raises(RowError, match=r"secret\.png: cannot be read: Permission denied; correct the path"):
        seen.measured(Chat([], images=(RowImage(path=name),)), tmp_path)


def test_an_image_of_8_bits_a_channel_is_trained_in_rgb(seen: vision.Vision, tmp_path: Path) -> None:
    for kind in ("CMYK", "L", "1", "P", "LA", "RGBA", "YCbCr"):
        form = {"CMYK": "JPEG", "YCbCr": "JPEG"}.get(kind, "PNG")
        Image.new(kind, (20, 16), 1).save(tmp_path / "a", form)
        [image] = seen.measured(Chat([], images=(RowImage(path="a"),)), tmp_path).images
        pixels = images.decoded(image.__dict__)
        assert (pixels.mode, pixels.size) == ("RGB", (20, 16)), kind


def test_a_damaged_file_is_refused_unless_a_batch_can_decode_it(seen: vision.Vision) -> None:
    for kind, options in (
        ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {"lossless": True}), ("GIF", {}), ("TIFF", {})
    ):  # fmt: skip
        draw, refused = random.Random(0), 0
        for _ in range(60):
            content = bytearray(encoded(NOISE, kind, **options))
            for _ in range(4):
                content[draw.randrange(len(content))] = draw.randrange(256)
            try:
                [image] = seen.measured(Chat([], images=(RowImage(data=bytes(content)),)), None).images
            except RowError:
                refused += 1
            else:
                assert images.decoded(vars(image)).size == (image.width, image.height)
        assert 0 < refused < 60, kind


VIDEO = random.Random(1).randbytes(2**18).replace(b"\xff\xd9", b"").replace(b"IEND", b"")
FOLLOWED = {
    "a phone's photo with its video": JPEG + VIDEO,
    "several photos": encoded(NOISE, "MPO", save_all=True, append_images=[Image.effect_noise((512, 512), 90)]),
    "a photo with its depth": encoded(NOISE, "MPO", save_all=True, append_images=[GREY]) + VIDEO,
    "a progressive photo with a preview": with_preview(len(JPEG)) + VIDEO,
    "a PNG": encoded(NOISE) + VIDEO,
}


def test_anything_may_follow_an_image_in_its_file(seen: vision.Vision) -> None:
    for what, file in FOLLOWED.items():
        [image] = seen.measured(Chat([], images=(RowImage(data=file),)), None).images
        pixels = Image.open(io.BytesIO(file)).convert("RGB")
        assert images.decoded(vars(image)).tobytes() == pixels.tobytes(), what
        assert pixels.size == NOISE.size


ENDED = ["JPEG", "progressive", "with restarts", "PNG"]  # what comes after the cut cannot take the end's place
CUT_OFF = [
    *((kind, "nothing") for kind in (*ENDED, "WEBP", "lossless", "GIF")),
    *((kind, rest) for kind in ENDED for rest in ("zeros", "a video")),
]


@pytest.mark.parametrize(("kind", "rest"), CUT_OFF)
def test_a_file_cut_off_anywhere_is_refused_unless_all_pixels_are_there(
    kind: str, rest: str, seen: vision.Vision
) -> None:
    form, options = {
        "progressive": ("JPEG", {"progressive": True}), "with restarts": ("JPEG", {"restart_marker_rows": 1}),
        "lossless": ("WEBP", {"lossless": True}),
    }.get(kind, (kind, {}))  # fmt: skip
    whole = encoded(NOISE, form, **options)
    pixels, read = Image.open(io.BytesIO(whole)).convert("RGB").tobytes(), 0
    for kept in [*range(0, len(whole) - 40, 67), *range(len(whole) - 40, len(whole))]:
        after = {"nothing": b"", "zeros": bytes(len(whole) - kept), "a video": VIDEO}[rest]
        with contextlib.suppress(RowError):
            [image] = seen.measured(Chat([], images=(RowImage(data=whole[:kept] + after),)), None).images
            assert images.decoded(vars(image)).tobytes() == pixels
            read += 1
    assert read < 40


def test_paths_may_be_absolute_and_lead_out_of_the_folder(seen: vision.Vision, tmp_path: Path) -> None:
    """They are the user's own, as the data file is."""
    name = seeing.picture(tmp_path, "a.png", (16, 16))
    (tmp_path / "rows").mkdir()
    for path in (str(tmp_path / name), f"../{name}"):
        [image] = seen.measured(Chat([], images=(RowImage(path=path),)), tmp_path / "rows").images
        assert os.path.samefile(image.path, tmp_path / name)


@pytest.mark.slow
def test_a_file_that_changes_after_preparation_ends_the_run(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.model import base as loading
    from finetune.model import build

    def load(*arguments: Any, **named: Any) -> Any:
        seeing.picture(Path(), GOOD, (48, 48), seed=1)
        return loading.load_base(*arguments, **named)

    monkeypatch.setattr(build, "load_base", load)
    with pytest.raises(DataError) as caught:
        finetune.train(job([named(GOOD)] * 2, "quantization.kind=none", "training.max_steps=1"))
    check(str(caught.value), f"{Path.cwd()}/{GOOD}: ", "has changed since the rows were prepared")


def test_a_file_that_is_lost_after_preparation_is_named(seen: vision.Vision, tmp_path: Path) -> None:
    name = seeing.picture(tmp_path, "lost.png", (16, 16))
    [image] = seen.measured(Chat([], images=(RowImage(path=name),)), tmp_path).images
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=r"lost\.png: no such file"):
        images.decoded(vars(image))
