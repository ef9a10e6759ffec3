"""An adapter that is not exactly what was trained is refused wherever it is read, and never with a traceback."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import sampled
from messages import refusal
from safetensors.torch import load_file, save_file

import finetune
from finetune.config import AdapterSection, ModelSection, QuantizationSection
from finetune.errors import ArtifactError
from finetune.extras.doctor import run_check as run_directory
from finetune.model.adapters import adapter, adapter_files
from finetune.model.base import load_architecture, load_base
from finetune.model.distributed.engine import WholeWeights
from finetune.model.skeleton import weightless_base
from finetune.model.source import file_hashes
from finetune.storage.rundir import RunDirectory
from finetune.training import state

Tensors = dict[str, torch.Tensor]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def weightless() -> Any:
    return weightless_base(
        load_architecture(ModelSection()), QuantizationSection(kind="none"), attention="eager", dtype=torch.float32
    )


def real() -> Any:
    section = ModelSection()
    return load_base(
        section, QuantizationSection(kind="nf4"), load_architecture(section), attention="sdpa", dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip


def load_on_a_new_base(folder: Path, section: AdapterSection) -> None:
    """As `load_adapter` does; what the files alone tell is refused before a base is built."""
    adapter_files.check_files(folder, section)
    adapter_files.load_adapter(weightless(), folder, section)


@pytest.fixture
def folder(trained: RunDirectory, tmp_path: Path) -> Path:
    """The adapter of the trained run, to forge, without the hash of its weights, which a forger would replace."""
    return Path(shutil.copytree(trained.adapter, tmp_path / "adapter", ignore=lambda *_: ["fingerprint.json"]))


@pytest.fixture
def section(trained: RunDirectory) -> AdapterSection:
    return trained.config().adapter


def test_what_was_trained_is_accepted_and_is_what_is_loaded(folder: Path, section: AdapterSection) -> None:
    adapter_files.check_files(folder, section)
    adapter_files.weightless_adapter(weightless(), folder, section)
    model = adapter_files.load_adapter(real(), folder, section)
    stored = load_file(folder / WEIGHTS)
    live = adapter_files.weights(model)
    assert stored.keys() == live.keys()
    assert all(torch.equal(tensor, live[name]) for name, tensor in stored.items())
    assert not any(parameter.requires_grad for parameter in model.parameters())


# -- adapter_config.json -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"r": 64}, {"lora_alpha": math.nan}, {"target_modules": ["lm_head"]}, {"use_dora": True}, {"use_rslora": True},
        {"rank_pattern": {"q_proj": 64}}, {"init_lora_weights": "corda"}, {"unknown": 1}, {"revision": []},
        {"peft_type": None}, {"modules_to_save": ["lm_head"]},
    ],
)  # fmt: skip
def test_a_config_that_says_something_else_is_refused(
    values: dict[str, Any], folder: Path, section: AdapterSection
) -> None:
    said = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(said | values))
    with refusal(ArtifactError, "adapter_config"):
        load_on_a_new_base(folder, section)


def test_a_malformed_config_and_one_of_another_job_are_refused(
    folder: Path, section: AdapterSection, subtests: pytest.Subtests
) -> None:
    """The run's config.yaml says what was trained; an adapter that does not fit it is another's."""
    for other in [
        {"rank": 8}, {"alpha": 33}, {"dropout": 0.1}, {"rslora": True}, {"dora": True}, {"extra_modules": ["norm"]},
        {"targets": ["q_proj"]}, {"init": "pissa"},
    ]:  # fmt: skip
        with subtests.test(other=other), pytest.raises(ArtifactError):
            adapter_files.load_adapter(weightless(), folder, section.model_copy(update=other))
    for text in ("", "[]", "{"):
        with subtests.test(text=text), refusal(ArtifactError, "damaged"):
            (folder / CONFIG).write_text(text)
            adapter_files.load_adapter(weightless(), folder, section)


# -- tensors -----------------------------------------------------------------------------------------------------------


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def without_layer(tensors: Tensors, name: str) -> Tensors:
    layer = name.split(".layers.")[1].split(".")[0]
    return {key: tensor for key, tensor in tensors.items() if f".layers.{layer}." not in key}


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, str], Tensors]:
    return lambda tensors, name: {**tensors, name: change(tensors[name]).contiguous()}


def renamed(change: Callable[[str], str]) -> Callable[[Tensors, str], Tensors]:
    return lambda tensors, name: {**without(tensors, name), change(name): tensors[name]}


def added(change: Callable[[str], str]) -> Callable[[Tensors, str], Tensors]:
    return lambda tensors, name: {**tensors, change(name): tensors[name].clone()}


def with_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.clone().index_put_(
        (torch.tensor(0), torch.tensor(tensor.shape[1] - 1)), torch.tensor(value)
    )


FORGERIES: dict[str, Callable[[Tensors, str], Tensors]] = {
    "one missing": without,
    "a layer missing": without_layer,
    "all but one missing": lambda tensors, name: {name: tensors[name]},
    "none at all": lambda tensors, name: {},
    "not a number": changed(with_value(math.nan)),
    "infinite": changed(with_value(math.inf)),
    "minus infinite": changed(with_value(-math.inf)),
    "turned": changed(lambda tensor: tensor.T),
    "flat": changed(torch.flatten),
    "a row more": changed(lambda tensor: torch.cat([tensor, tensor[:1]])),
    "a row less": changed(lambda tensor: tensor[1:]),
    "of type float16": changed(lambda tensor: tensor.half()),
    "of type int8": changed(lambda tensor: tensor.to(torch.int8)),
    "renamed": renamed(lambda name: name + "x"),
    "of another layer": renamed(lambda name: name.replace(".layers.", ".layers.9")),
    "of another adapter": renamed(lambda name: name.replace(".lora_", ".lora_X")),
    "with PEFT's own name": renamed(lambda name: name.replace(".weight", ".default.weight")),
    "without its beginning": renamed(lambda name: name.removeprefix("base_model.model.")),
    "an unknown one": added(lambda name: "unknown"),
    "a weight of the base": added(lambda name: "base_model.model.model.norm.weight"),
    "the head of the base": added(lambda name: "base_model.model.lm_head.weight"),
    "a magnitude": added(lambda name: name.rsplit(".lora_", 1)[0] + ".lora_magnitude_vector"),
    "a bias": added(lambda name: name.replace(".weight", ".bias")),
}  # fmt: skip


@pytest.mark.slow
def test_forged_tensors_are_refused(folder: Path, section: AdapterSection) -> None:
    tensors = load_file(folder / WEIGHTS)
    chosen = random.Random(11).sample(sorted(tensors), len(FORGERIES))
    for (what, forge), name in zip(FORGERIES.items(), chosen, strict=True):
        save_file(forge(tensors, name), folder / WEIGHTS, {"format": "pt"})
        try:
            load_on_a_new_base(folder, section)
        except ArtifactError as error:
            message = str(error)
        else:
            pytest.fail(f"{what} is accepted: {name}")
        assert message.isprintable()


# -- wherever it is read -----------------------------------------------------------------------------------------------


def forge(file: Path, what: str) -> None:
    tensors = load_file(file)
    save_file(FORGERIES[what](tensors, sorted(tensors)[3]), file, {"format": "pt"})
    if (kept := file.with_name("fingerprint.json")).exists():
        kept.write_text(json.dumps({**json.loads(kept.read_text()), "weights": file_hashes.sha256(file)}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", sampled(["one missing", "an unknown one", "not a number"], "one missing", "not a number")
)
def test_generate_eval_merge_and_doctor_refuse_it(what: str, run: RunDirectory) -> None:
    forge(run.adapter / WEIGHTS, what)
    for use in (lambda run: finetune.generate(run, "x", max_new_tokens=2), finetune.evaluate, finetune.merge):
        with pytest.raises(ArtifactError, match=WEIGHTS):
            use(run)
    assert not run.merged.exists()
    wrong = [found.about for found in run_directory.examine(run.path).findings if found.status != "ok"]
    assert wrong == ["adapter"]


@pytest.mark.parametrize("values", [{"use_dora": True}, {"lora_alpha": math.nan}, {"target_modules": ["q_proj"]}])
def test_doctor_and_generate_read_the_config_alike(values: dict[str, Any], run: RunDirectory) -> None:
    file = run.adapter / CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    with pytest.raises(ArtifactError, match=next(iter(values))):
        finetune.generate(run, "x", max_new_tokens=2)
    [wrong] = [found for found in run_directory.examine(run.path).findings if found.status != "ok"]
    assert (wrong.about, wrong.status) == ("adapter", "error")


def test_doctor_says_what_it_cannot_compare_without_the_base(run: RunDirectory) -> None:
    run.config_file.write_text(run.config_file.read_text().replace("builtin:tiny-llama", "someone/nothing"))
    found = [found for found in run_directory.examine(run.path).findings if found.about == "adapter"]
    assert [one.status for one in found] == ["warning", "ok"]
    forge(run.adapter / WEIGHTS, "not a number")
    found = [found for found in run_directory.examine(run.path).findings if found.about == "adapter"]
    assert [one.status for one in found] == ["warning", "error"]


def test_a_resume_refuses_such_a_checkpoint(
    run: RunDirectory, section: AdapterSection, subtests: pytest.Subtests
) -> None:
    """Its manifest made anew, as whoever forges it would; values that are not finite are found with the hashes."""
    folder = run.complete_checkpoints()[-1]
    content = (folder / WEIGHTS).read_bytes()
    model = adapter.attach(real(), section, "builtin:tiny-llama", seed=1)
    state.restore_weights(WholeWeights(model), folder)
    for what in FORGERIES.keys() - {"not a number", "infinite", "minus infinite"}:
        with subtests.test(what=what):
            (folder / WEIGHTS).write_bytes(content)
            forge(folder / WEIGHTS, what)
            with pytest.raises(ArtifactError):
                state.restore_weights(WholeWeights(model), folder)


def test_doctor_goes_on_after_targets_that_the_base_lacks(run: RunDirectory) -> None:
    run.config_file.write_text(re.sub(r"targets: .*", "targets: [foo_proj]", run.config_file.read_text()))
    file = run.adapter / CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), "target_modules": ["foo_proj"]}))
    found = {one.about: one.status for one in run_directory.examine(run.path).findings}
    assert found["adapter"] == "error"
    assert "tokenizer" in found
