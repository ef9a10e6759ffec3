"""Rows with images that several processes train, or one that is killed: the same as by one that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import seeing
import torch
from children import Children, Fault
from jobs import QUICK, adapter_weights, metric, same_adapter
from together import Together, assert_all

from finetune.storage.rundir import RunDirectory

# Two rows a rank in two micro-batches, and one row for both in the last step of an epoch.
JOB = [*QUICK, "model.vision=frozen", "quantization.kind=none", "training.precision=fp32", "data.max_length=128",
       "training.batch_size=4", "training.micro_batch=1", "training.max_steps=4", "output.save_every=2",
       "training.eval_every=4"]  # fmt: skip
# Plain descent, so that a gradient that is off shows as such.
EXACT = ["adapter.dropout=0", "optimizer.kind=sgd", "training.learning_rate=0.1", "training.warmup=0"]
RANDOM = ["adapter.dropout=0.1", "optimizer.kind=adamw_8bit", "training.learning_rate=0.01"]
SHOWN = {"mixed": {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2, 6: 0, 7: 1, 8: 2}, "one": {5: 2}}
"""How many images each row of a file has; with those of one row, the other rank always has rows of text alone."""

Make = Callable[..., Together]


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


@pytest.fixture
def job(children: Children, folder: Path, tmp_path: Path) -> Make:
    def make(*overrides: str, rows: str = "mixed", run: str = "run") -> Together:
        held_out = next(name for name in SHOWN if name != rows)
        named = [f"model.name={folder / 'base'}", f"data.train={folder / rows}.jsonl"]
        named += [f"data.eval={folder / held_out}.jsonl"]
        return Together(children, [*JOB, *named, *overrides], RunDirectory(tmp_path / run))

    return make


@pytest.fixture(scope="module")
def trained() -> dict[tuple[str, ...], RunDirectory]:
    """What one process trained, by the rows and the quantization, for the ranks of several tests."""
    return {}


@pytest.mark.parametrize(
    ("rows", "way"),
    [
        pytest.param("mixed", [], id="copies", marks=pytest.mark.long),
        pytest.param("one", [], id="copies, one rank without images", marks=pytest.mark.long),
        pytest.param(
            "mixed", ["quantization.kind=nf4", "distributed.kind=fsdp"], id="shards of 4 bit", marks=pytest.mark.long
        ),
        pytest.param("one", ["distributed.kind=fsdp"], id="shards, one rank without images"),
        pytest.param(
            "one",
            ["distributed.kind=deepspeed", "distributed.stage=gradients"],
            id="ZeRO, one rank without images",
            marks=pytest.mark.long,
        ),
    ],
)
def test_ranks_train_what_one_process_trains(
    job: Make, rows: str, way: list[str], trained: dict[tuple[str, ...], RunDirectory]
) -> None:
    if "distributed.kind=deepspeed" in way:
        pytest.importorskip("deepspeed")
    quantized = [key for key in way if key.startswith("quantization")]
    if (rows, *quantized) not in trained:
        one = job(*EXACT, *quantized, rows=rows, run="alone")
        assert_all(one.go(1), 0)
        trained[rows, *quantized] = one.run
    alone, together = trained[rows, *quantized], job(*EXACT, *way, rows=rows)
    assert_all(together.go(2), 0)
    for name in ("loss", "grad_norm", "eval_loss"):
        assert metric(together.run, name) == pytest.approx(metric(alone, name), rel=1e-5)
    torch.testing.assert_close(adapter_weights(together.run), adapter_weights(alone), rtol=0, atol=1e-6)
    assert metric(alone, "loss")[-1] < metric(alone, "loss")[0]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_processes_resume_to_the_same_bits(job: Make, ranks: int) -> None:
    whole, killed = job(*RANDOM, run="whole"), job(*RANDOM)
    assert_all(whole.go(ranks), 0)
    killed.kill(ranks, step=4, saved=2)
    assert not killed.run.adapter.exists()
    assert_all(killed.go(ranks), 0)
    assert [event["step"] for event in killed.run.events() if event["event"] == "resumed"] == [2]
    assert same_adapter(killed.run, whole.run)
    assert metric(killed.run, "loss") == metric(whole.run, "loss")


@pytest.fixture
def picture_of_row_5(folder: Path) -> Iterator[Path]:
    """A file of the one row with images, as it was before once the test is over."""
    file = folder / "5_0.png"
    before = file.read_bytes()
    yield file
    file.write_bytes(before)


def test_a_run_whose_images_changed_does_not_go_on(job: Make, picture_of_row_5: Path) -> None:
    """Though the data file and the sizes of the images are the same."""
    stopped = job(*RANDOM)
    stopped.kill(1, step=4, saved=2)
    seeing.picture(picture_of_row_5.parent, picture_of_row_5.name, (34, 20), seed=9)
    [ended] = stopped.go(1)
    said = " ".join(ended.output.split())
    assert (ended.code, "`data.train`: its rows are not those that" in said) == (3, True), said


def test_an_image_that_changes_meanwhile_ends_all_ranks(job: Make, picture_of_row_5: Path) -> None:
    """The rank with its row names it: the third time that it is read, after the preparation and the warm-up."""
    flips = Fault("read", r"5_0\.png$", nth=3, action="flip")
    together = job(*EXACT, "data.eval=none", "training.eval_every=null", rows="one")
    ended = together.go(2, {0: flips, 1: flips})
    assert sorted(each.code for each in ended) == [3, 4]
    for each in ended:
        said = " ".join(each.output.split())
        assert ("5_0.png: the file has changed since" if each.code == 3 else "cannot continue without it") in said
        assert "Traceback" not in each.output
