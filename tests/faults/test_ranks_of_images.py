"""Rows with images that several processes train, or one that is killed: the same as by one that is not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import seeing
from children import Fault
from jobs import metric
from rank_jobs import EXACT, FSDP, PLAIN, UNEVALUATED, ZERO, Jobs, assert_close, resumed_at, same_weights
from together import assert_all

# Two rows a rank in two micro-batches, and one row for both in the last step of an epoch.
JOB = ["model.vision=frozen", PLAIN, "training.precision=fp32", "data.max_length=128", "training.batch_size=4",
       "training.micro_batch=1", "training.max_steps=3", "output.save_every=2", "training.eval_every=3"]  # fmt: skip
RANDOM = ["adapter.dropout=0.1", "optimizer.kind=adamw_8bit", "training.learning_rate=0.01"]
SHOWN = {"mixed": {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2, 6: 0, 7: 1, 8: 2}, "one": {5: 2}, "none": {}}
"""How many images each row of a file has; with those of one row, the other rank always has rows of text alone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and the files of rows."""
    folder = tmp_path_factory.mktemp("seeing")
    seeing.base(folder / "base", "qwen3_vl")
    for name, shown in SHOWN.items():
        seeing.rows(folder, [row(folder, number, shown.get(number, 0)) for number in range(9)], f"{name}.jsonl")
    return folder


def row(folder: Path, number: int, images: int) -> dict[str, Any]:
    names = [seeing.picture(folder, f"{number}_{at}.png", (34 + 13 * at, 20 + 19 * at), number) for at in range(images)]
    asked = [{"type": "text", "text": f"Row {number}?"}, *({"type": "image", "path": name} for name in names)]
    answer = {"role": "assistant", "content": "a blue circle " * (1 + number % 3)}
    return {"messages": [{"role": "user", "content": asked}, answer]}


def data(folder: Path, rows: str) -> list[str]:
    """Rows of one kind to train on, and of another kind that are held out."""
    held_out = next(name for name in SHOWN if name != rows)
    named = [
        f"model.name={folder / 'base'}",
        f"data.train={folder / rows}.jsonl",
        f"data.eval={folder}/{held_out}.jsonl",
    ]
    return [*JOB, *named]


@pytest.mark.parametrize(
    ("rows", "way"),
    [
        pytest.param("mixed", [], id="copies", marks=pytest.mark.long),
        pytest.param("one", [], id="copies, one rank without images", marks=pytest.mark.long),
        pytest.param("mixed", ["quantization.kind=nf4", FSDP], id="shards of 4 bit", marks=pytest.mark.long),
        pytest.param("one", [FSDP], id="shards, one rank without images"),
        pytest.param(
            "one", [ZERO, "distributed.stage=gradients"], id="ZeRO, one rank without images", marks=pytest.mark.long
        ),
    ],
)
def test_ranks_train_what_one_process_trains(jobs: Jobs, folder: Path, rows: str, way: list[str]) -> None:
    if ZERO in way:
        pytest.importorskip("deepspeed")
    quantized = [key for key in way if key.startswith("quantization")]
    alone = jobs.alone(*data(folder, rows), *EXACT, *quantized)
    together = jobs(*data(folder, rows), *EXACT, *way)
    assert_all(together.go(2), 0)
    assert_close(together.run, alone)
    assert metric(alone, "loss")[-1] < metric(alone, "loss")[0]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_processes_resume_to_the_same_bits(jobs: Jobs, folder: Path, ranks: int) -> None:
    whole, killed = (jobs(*data(folder, "mixed"), *RANDOM) for _ in range(2))
    assert_all(whole.go(ranks), 0)
    killed.kill(ranks, step=3, saved=2)
    assert not killed.run.adapter.exists()
    assert_all(killed.go(ranks), 0)
    assert resumed_at(killed.run) == [2]
    assert same_weights(killed.run, whole.run)
    assert metric(killed.run, "loss") == metric(whole.run, "loss")


@pytest.fixture
def picture_of_row_5(folder: Path) -> Iterator[Path]:
    """A file of the one row with images, as it was before once the test is over."""
    file = folder / "5_0.png"
    before = file.read_bytes()
    yield file
    file.write_bytes(before)


def replace_by_another(file: Path, size: tuple[int, int]) -> None:
    seeing.picture(file.parent, file.name, size, seed=9)


def flipped(nth: int) -> Fault:
    """A changed byte in an image of row 5 the n-th time that it is read."""
    return Fault("read", r"5_0\.png$", nth=nth, action="flip")


TRAINED = [*UNEVALUATED, "training.max_steps=6", "output.save_every=10"]
"""Row 5 is read in the preparation, in the warm-up, and in each epoch of three steps."""
EVALUATED = ["training.eval_every=2", "training.max_steps=4", "output.save_every=10"]
"""It is read in the preparation, in the warm-up, and in each evaluation: of step 0, 2 and 4."""


@pytest.mark.long
def test_ranks_that_share_weights_save_where_an_image_breaks_in_an_evaluation(
    jobs: Jobs, folder: Path, picture_of_row_5: Path
) -> None:
    """Within a pass they wait for each other's weights, so none may begin one that another cannot."""
    broken = jobs(*data(folder, "none"), *RANDOM, *EVALUATED, FSDP, f"data.eval={folder / 'one.jsonl'}")
    ended = broken.go(2, {1: flipped(4)})
    assert_all(ended, 3)
    assert broken.run.saved_steps == [2]
    assert any("Step 2 is saved" in one.in_one_line for one in ended)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "own"), [pytest.param("one", TRAINED, id="trained"), pytest.param("none", EVALUATED, id="evaluated")]
)
def test_a_run_whose_image_breaks_saves_and_goes_on_once_it_is_put_back(
    jobs: Jobs, folder: Path, picture_of_row_5: Path, rows: str, own: list[str]
) -> None:
    """To the bits of a run that was not disturbed; or with another of the same size, and says which."""
    file, evaluated = ("data.eval", [f"data.eval={folder / 'one.jsonl'}"]) if rows == "none" else ("data.train", [])
    job = [*data(folder, rows), *RANDOM, *own, *evaluated]
    whole, broken, other = jobs.alone(*job), jobs(*job), jobs(*job)
    before = picture_of_row_5.read_bytes()
    [ended] = broken.go(1, {0: flipped(4)})
    [saved] = broken.run.saved_steps
    assert ended.code == 3, ended.output
    assert f"Step {saved} is saved" in ended.in_one_line
    shutil.copytree(broken.run.path, other.run.path)
    [ended] = broken.go(1)  # as it is; its rows are prepared again, and this is the only one that is refused
    assert (ended.code, ended.in_one_line.count("5_0.png: ")) == (3, 1), ended.output
    assert "another of its size in its place" in ended.in_one_line
    picture_of_row_5.write_bytes(before)
    assert_all(broken.go(1), 0)
    assert resumed_at(broken.run) == [saved]
    assert not any(event["event"] == "changed" for event in broken.run.events())
    assert same_weights(broken.run, whole)
    for name in ("loss", "eval_loss"):
        assert metric(broken.run, name) == metric(whole, name)

    replace_by_another(picture_of_row_5, (60, 58))
    [ended] = other.go(1)
    assert (ended.code, f"`{file}`: its rows are not those that" in ended.in_one_line) == (3, True), ended.output
    replace_by_another(picture_of_row_5, (34, 20))
    [ended] = other.go(1)
    assert ended.code == 0, ended.output
    assert f"with the new ones: {picture_of_row_5}" in ended.in_one_line
    [changed] = [event for event in other.run.events() if event["event"] == "changed"]
    assert changed["images"] == [str(picture_of_row_5)]


def test_an_image_that_breaks_meanwhile_ends_all_ranks_with_a_checkpoint(
    jobs: Jobs, folder: Path, picture_of_row_5: Path
) -> None:
    together = jobs(*data(folder, "one"), *EXACT, *TRAINED)
    ended = together.go(2, {0: flipped(4), 1: flipped(4)})
    assert_all(ended, 3)
    [saved] = together.run.saved_steps
    said = ended[0].in_one_line
    assert "5_0.png: the file has changed since" in said
    assert f"Step {saved} is saved" in said
