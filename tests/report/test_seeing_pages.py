"""Images of rows in the look at the data and in the report of a run: small, few, with their sizes and tokens."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seeing
from messages import refusal
from PIL import Image
from seeing_jobs import SeeingRun, config, example, plain_inputs

from finetune.config import dump
from finetune.errors import ArtifactError
from finetune.extras.pages import report as page
from finetune.storage.rundir import RunDirectory

pytestmark = pytest.mark.slow

_JPEG = re.compile(r'src="data:image/jpeg;base64,([^"]*)"')


def thumbnails(markup: str) -> list[Image.Image]:
    return [Image.open(io.BytesIO(base64.b64decode(found))) for found in _JPEG.findall(markup)]


def test_the_look_at_the_data_shows_a_few_small_images_with_their_tokens(
    seeing_run: SeeingRun, tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    rows = [example(tmp_path, 1), example(tmp_path, 0)]
    names = [seeing.picture(tmp_path, f"many_{number}.png", (500, 250), number) for number in range(10)]
    shown = [{"type": "image", "path": name} for name in names]
    rows[1]["messages"][0]["content"] += shown
    job = tmp_path / "job.yaml"
    changes = {"model.name": str(seeing_run.folder / "base"), "data.max_length": 512 * 16}
    seeing.rows(tmp_path, rows)
    job.write_text(dump(config(tmp_path, **changes)), encoding="utf-8")
    code, out, err = call("data", job, "--html", tmp_path / "data.html")
    assert code == 0, err
    inputs = plain_inputs(tmp_path, seeing_run.processor, rows[0])["input_ids"]
    token = seeing_run.processor.tokenizer.convert_tokens_to_ids(_token(seeing_run))
    counted = int((inputs == token).sum())
    markup = (tmp_path / "data.html").read_text(encoding="utf-8")
    for text, between in ((out, ": "), (markup, "<br>")):
        assert f"1_0.png{between}34 x 20 pixels, {counted} tokens" in text
        assert f"many_7.png{between}500 x 250 pixels" in text
        assert "and 2 more images" in text
        assert "many_8.png" not in text
        assert f" x {counted}" in text or seeing_run.family == "idefics3"  # whose image is several runs of tokens
    sizes = [one.size for one in thumbnails(markup)]
    assert sizes == [(34, 20), *[(160, 80)] * 8]
    assert len(markup) < 200_000
    json_code, out, _ = call("data", job, "--json")
    assert json_code == 0
    assert "thumbnail" not in out
    assert json.loads(out)["samples"][0]["images"][0]["tokens"] == counted


def _token(seen: SeeingRun) -> str:
    return str(getattr(seen.processor.tokenizer, "image_token", None) or seen.processor.image_token)


@pytest.mark.parametrize("seeing_run", ["qwen3_vl"], indirect=True)
def test_a_report_keeps_its_images_when_the_files_are_gone(seeing_run: SeeingRun, tmp_path: Path) -> None:
    run = seeing_run.copied(tmp_path)
    page.write(run)
    markup = run.report_file.read_text(encoding="utf-8")
    assert [one.size for one in thumbnails(markup)] == [(34, 20), (34, 20), (47, 39)]  # of rows of 0, 1 and 2 images
    assert "2_1.png<br>47 x 39 pixels" in markup
    assert "[6_0.png]" not in markup
    assert re.search(r"\[7_0\.png\] Row 7", markup)  # a question of the evaluation set


@pytest.mark.parametrize("seeing_run", ["qwen3_vl"], indirect=True)
def test_a_forged_image_is_refused(seeing_run: SeeingRun, tmp_path: Path) -> None:
    run = seeing_run.copied(tmp_path)
    facts: Any = json.loads(run.facts_file.read_text())
    facts["samples"][1]["images"][0]["thumbnail"] = 'AA"><img src=//example.org/x>'
    run.facts_file.write_text(json.dumps(facts))
    with refusal(ArtifactError, "thumbnail"):
        page.write(RunDirectory(run.path))
