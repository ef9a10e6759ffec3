"""Merges and exports of runs that were trained on images: read by transformers and PEFT from their folders alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seeing
import torch
from peft import PeftModel
from safetensors.torch import load_file
from seeing_jobs import SeeingRun, plain_inputs
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import finetune
from finetune.config import dump
from finetune.data.prepare import HELD_OUT
from finetune.export import server_names
from finetune.model.adapters import adapter_files
from finetune.report.terminal import Terminal
from finetune.storage import weight_files
from finetune.storage.rundir import RunDirectory

pytestmark = pytest.mark.slow

QUIET = Terminal(quiet=True)


@pytest.fixture(scope="module")
def merged(seeing_run: SeeingRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, dict[str, Any]]:
    """A copy of the run with its merged model, and the proof."""
    run = seeing_run.copied(tmp_path_factory.mktemp("merged"))
    return run, finetune.merge(run, terminal=QUIET)


def is_of_language(name: str) -> bool:
    return "language_model" in name or "text_model" in name or name.startswith("lm_head")


@torch.inference_mode()
def losses(model: Any, seen: SeeingRun) -> list[float]:
    """The loss of each held-out row, made by transformers' own processor."""
    processor = seen.processor
    return [float(model.eval()(**plain_inputs(seen.folder, processor, row)).loss) for row in seen.rows()]


def test_a_merge_is_proven_on_rows_with_images_and_without(merged: tuple[RunDirectory, dict[str, Any]]) -> None:
    _, found = merged
    assert (found["rows"], found["rows_of"]) == (6, HELD_OUT)
    assert found["error"] <= found["bound"] < found["effect"]
    assert found["kept"] == pytest.approx(1, abs=0.1)


def test_the_model_of_images_keeps_its_bytes_and_the_language_layers_change(
    seeing_run: SeeingRun, merged: tuple[RunDirectory, dict[str, Any]]
) -> None:
    before = load_file(seeing_run.folder / "base" / "model.safetensors")
    after = load_file(merged[0].merged / "model.safetensors")
    assert before.keys() == after.keys()
    kept = [name for name in before if not is_of_language(name)]
    assert len(kept) > 20
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in kept)
    changed = [name for name in before if not torch.equal(before[name].to(after[name].dtype), after[name])]
    assert len(changed) == 3 * 7  # linear layers, of three decoder layers


def test_transformers_loads_the_merged_folder_alone(
    seeing_run: SeeingRun, merged: tuple[RunDirectory, dict[str, Any]]
) -> None:
    run, _ = merged
    base = AutoModelForImageTextToText.from_pretrained(seeing_run.folder / "base", dtype=torch.float32)
    published = PeftModel.from_pretrained(base, str(run.adapter))
    trained = losses(published, seeing_run)
    with published.disable_adapter():
        untrained = losses(published, seeing_run)
    found = losses(AutoModelForImageTextToText.from_pretrained(run.merged, dtype=torch.float32), seeing_run)
    assert found == pytest.approx(trained, rel=0.05)
    assert all(abs(one - other) > 0.2 * one for one, other in zip(untrained, trained, strict=True))
    if seeing_run.family == "qwen3_vl":  # its processor also makes films, by torchvision
        processor = AutoImageProcessor.from_pretrained(run.merged)
        tokenizer = AutoTokenizer.from_pretrained(run.merged)
        assert processor.to_dict() == seeing_run.processor.image_processor.to_dict()
    else:
        processor = AutoProcessor.from_pretrained(run.merged)
        tokenizer = processor.tokenizer
        for row in seeing_run.rows():
            made = plain_inputs(seeing_run.folder, processor, row)
            for name, value in plain_inputs(seeing_run.folder, seeing_run.processor, row).items():
                assert torch.equal(made[name], value)
    assert tokenizer.chat_template == seeing_run.processor.tokenizer.chat_template or seeing_run.processor.chat_template


def test_the_merged_model_is_evaluated_and_answers(
    seeing_run: SeeingRun, merged: tuple[RunDirectory, dict[str, Any]]
) -> None:
    run, _ = merged
    measures = finetune.evaluate(run, models=["adapter", "merged"]).as_dict()["measures"]
    [loss] = [one["models"] for one in measures if one["name"] == "loss"]
    near = 0.2 if run.config().quantization.kind == "nf4" else 0.03  # it is merged into the base as published
    assert loss["merged"]["value"] == pytest.approx(loss["adapter"]["value"], rel=near)
    picture = seeing_run.folder / seeing.picture(seeing_run.folder, "asked.png", (40, 40), 3)
    asked = {"images": [picture], "max_new_tokens": 1}
    assert isinstance(finetune.generate(run, "What is it?", which="merged", **asked), str)


@torch.inference_mode()
def test_an_exported_adapter_has_the_names_of_the_base_and_peft_reads_it(seeing_run: SeeingRun, tmp_path: Path) -> None:
    run = seeing_run.copied(tmp_path)
    made = finetune.export_model(run, "adapter", terminal=QUIET)
    assert made["error"] <= made["bound"]
    folder, base = Path(made["path"]), seeing_run.folder / "base"
    layers = {
        name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        for name in weight_files.shapes(folder / adapter_files.WEIGHTS)
    }
    in_files = weight_files.shapes(base / "model.safetensors")
    assert len(layers) == made["layers"] == 3 * 7
    assert all(map(is_of_language, layers))
    assert server_names.served(layers, in_files, seeing_run.family) == made["layers_served"] == len(layers)
    assert {"vLLM", "SGLang"} <= made["serve"].keys()

    def with_adapter(adapter: Path) -> list[float]:
        model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
        return losses(PeftModel.from_pretrained(model, str(adapter)), seeing_run)

    assert with_adapter(folder) == pytest.approx(with_adapter(run.adapter), rel=1e-4)


@pytest.mark.parametrize("seeing_run", ["qwen3_vl"], indirect=True)
def test_a_processor_that_was_changed_since_training_is_refused(
    seeing_run: SeeingRun, tmp_path: Path, call: Callable[..., Any]
) -> None:
    run, base = seeing_run.copied(tmp_path), tmp_path / "base"
    file = shutil.copytree(seeing_run.folder / "base", base) / "preprocessor_config.json"
    run.config_file.write_text(dump(run.config().changed({"model.name": str(base)})))
    before = file.read_text(encoding="utf-8")
    file.write_text(json.dumps({**json.loads(before), "image_mean": [0.1, 0.2, 0.3]}), encoding="utf-8")
    for code, output, error in (call(command, run.path) for command in ("merge", "eval", "doctor")):
        assert code == 7
        assert "config, weights or image processor of" in " ".join((output + error).split())


def test_a_model_card_says_that_the_model_sees(merged: tuple[RunDirectory, dict[str, Any]]) -> None:
    card = (merged[0].merged / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: image-text-to-text" in card
    assert "| model of images | frozen |" in card


@pytest.mark.parametrize("seeing_run", ["qwen3_vl"], indirect=True)
@pytest.mark.parametrize("form", ["gguf", "ollama"])
def test_no_gguf_file_is_begun(form: str, seeing_run: SeeingRun, tmp_path: Path, call: Callable[..., Any]) -> None:
    run = seeing_run.copied(tmp_path)
    code, _, error = call("export", run.path, "--to", form)
    assert (code, "needs the projector in a file of its own" in " ".join(error.split())) == (2, True)
    assert not any(folder.exists() for folder in (run.merged, run.path / form))


@pytest.mark.parametrize("seeing_run", ["qwen3_vl"], indirect=True)
def test_the_bound_on_pixels_goes_with_the_merged_model(seeing_run: SeeingRun, tmp_path: Path) -> None:
    run = seeing_run.copied(tmp_path)
    run.config_file.write_text(dump(run.config().changed({"data.image_pixels": 512})))
    finetune.merge(run, terminal=QUIET)
    assert AutoImageProcessor.from_pretrained(run.merged).size["longest_edge"] == 512
    assert AutoImageProcessor.from_pretrained(seeing_run.folder / "base").size["longest_edge"] == 64 * 64
