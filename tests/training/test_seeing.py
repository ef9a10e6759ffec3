"""Training on rows with images, beside plain transformers and PEFT: each family's own processor, model and adapter."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import seeing
import torch
from bitsandbytes.nn import Params4bit
from jobs import metric, same_adapter, sampled
from messages import refusal
from peft import LoraConfig, get_peft_model
from seeing_jobs import ANSWERS, config, dialogue, example, plain_inputs
from steps import assert_gradients_close, gradients, micro_batches, ready
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForImageTextToText

import finetune
from finetune.config import dump
from finetune.data import vision as base_vision
from finetune.data.encoded import MEDIA
from finetune.data.vision import PIXELS
from finetune.errors import ArtifactError
from finetune.model.base import load_architecture
from finetune.model.probes import seeing as seeing_probe
from finetune.model.source.tokenizer import load_tokenizer
from finetune.objectives import MODEL_INPUTS
from finetune.storage.rundir import RunDirectory
from finetune.training.batches import one_ahead
from finetune.training.collator import Inputs, for_model, halved
from finetune.training.loop import Loop

pytestmark = pytest.mark.slow

EACH_KIND = ["qwen3_vl", "gemma3", "idefics3", "internvl"]
"""Families whose images are of each form: any area, one size, tiles of a row, and tiles alone (long)."""
OFTEN = EACH_KIND[:3]

of_each_kind = pytest.mark.parametrize("job", sampled(EACH_KIND, *OFTEN), indirect=True)
of_one_and_long_of_each_kind = pytest.mark.parametrize("job", sampled(EACH_KIND, "qwen3_vl"), indirect=True)
of_one = pytest.mark.parametrize("job", ["qwen3_vl"], indirect=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a family to a folder with its base and rows with images and without."""

    @functools.cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        seeing.base(folder / "base", family)
        seeing.rows(folder, [example(folder, number) for number in range(6)])
        return folder

    return make


@pytest.fixture(params=sampled(seeing.FAMILIES, *OFTEN))
def job(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> tuple[str, Path]:
    return request.param, folders(request.param)


@pytest.fixture(scope="module")
def loops() -> Callable[[Path], Loop]:
    return functools.cache(lambda folder: ready(config(folder)))


@pytest.fixture
def loop(job: tuple[str, Path], loops: Callable[[Path], Loop]) -> Loop:
    """The loop of a family's job before its first step. Do not train it."""
    return loops(job[1])


def of_plain_peft(
    folder: Path, family: str, loop: Loop, file: str = "rows.jsonl"
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of all rows, one by one, of transformers' model with the adapter of `loop`, by PEFT alone."""
    _, processor = seeing.FAMILIES[family]()
    base = AutoModelForImageTextToText.from_pretrained(folder / "base")
    adapter = loop.step.model.peft_config["default"]
    wanted = LoraConfig(
        r=adapter.r, lora_alpha=adapter.lora_alpha, target_modules=set(adapter.target_modules),
        modules_to_save=adapter.modules_to_save,
    )  # fmt: skip
    model = get_peft_model(base, wanted).train()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    given = {name: weight for name, weight in loop.step.model.named_parameters() if weight.requires_grad}
    assert trained.keys() == given.keys()
    with torch.no_grad():
        for name, weight in given.items():
            trained[name].copy_(weight)
    rows = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    total, count = torch.zeros(()), 0
    for row in rows:
        inputs = plain_inputs(folder, processor, row)
        labels = inputs.pop("labels")[0, 1:]
        logits = model(**inputs).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        count += int((labels != -100).sum())
    (total / count).backward()
    return float(total.detach()) / count, {name: weight.grad for name, weight in trained.items()}


@pytest.mark.parametrize(
    ("job", "vision"),
    sampled(
        itertools.product(seeing.FAMILIES, ("frozen", "adapter")),
        ("qwen3_vl", "adapter"), *((family, "frozen") for family in OFTEN),
    ),
    indirect=["job"],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_plain_transformers_and_peft(
    vision: str, job: tuple[str, Path], loop: Loop
) -> None:
    """Also of halves of the micro-batches, each of which has its own images."""
    family, folder = job
    if vision == "adapter":
        loop = ready(config(folder, **{"model.vision": vision}))
    expected_loss, expected = of_plain_peft(folder, family, loop)
    whole = micro_batches(loop, range(6), 6)
    halves = [half for part in whole for half in halved(part) or (part,)]
    assert len(halves) > len(whole)
    for parts in (whole, halves):
        loss, found = gradients(loop, parts)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert_gradients_close(found, expected, within=1e-5)
    seen = [name for name in found if "vision" in name or "visual" in name]
    assert bool(seen) == (vision == "adapter")
    assert all(found[name].any() for name in seen)


@of_one_and_long_of_each_kind
def test_images_in_several_turns_are_each_in_their_place(job: tuple[str, Path]) -> None:
    """None, one or two images in each of up to three turns, in batches of several rows and of one."""
    family, folder = job
    file = seeing.rows(folder, [dialogue(folder, number) for number in range(6)], "dialogues.jsonl")
    changes = {"data.train": str(file), "data.max_length": 1024}
    loop = ready(config(folder, **changes))
    _, processor = seeing.FAMILIES[family]()
    for number in range(6):
        plain, row = plain_inputs(folder, processor, dialogue(folder, number)), loop.steps.rows[number]
        assert list(row["input_ids"]) == plain["input_ids"][0].tolist()
        assert list(row["labels"]) == plain["labels"][0].tolist()
    expected_loss, expected = of_plain_peft(folder, family, loop, file.name)
    by_tokens = copy.copy(loop.steps.collate)
    by_tokens.way = replace(by_tokens.way, rows=1, tokens=1024)
    rows = [loop.steps.rows[number] for number in range(6)]
    for parts in (micro_batches(loop, range(6), 1), by_tokens(rows)):
        loss, found = gradients(loop, parts)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert_gradients_close(found, expected, within=1e-5)


@pytest.mark.parametrize(
    ("family", "projector"),
    sampled([("qwen3_vl", "merger"), ("smolvlm", "connector"), ("gemma4", "embed_vision")], ("qwen3_vl", "merger")),
)
def test_a_projector_is_trained_whole_by_name(family: str, projector: str, folders: Callable[[str], Path]) -> None:
    folder = folders(family)
    file = seeing.rows(folder, [example(folder, number) for number in range(3)], "three.jsonl")
    changes = {"data.train": str(file), "training.batch_size": 3, "training.micro_batch": 3}
    loop = ready(config(folder, **changes, **{"adapter.extra_modules": [projector]}))
    loss, found = gradients(loop, micro_batches(loop, range(3), 3))
    expected_loss, expected = of_plain_peft(folder, family, loop, file.name)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_gradients_close(found, expected, within=1e-5)
    assert all(found[name].any() for name in found if projector in name)
    assert any(projector in name for name in found)


@pytest.mark.parametrize(
    ("family", "file", "changes"),
    [
        pytest.param("qwen3_vl", "preprocessor_config.json", {"patch_size": 8}, marks=pytest.mark.long),
        ("gemma3", "processor_config.json", {"image_seq_length": 5}),
    ],
)
def test_files_of_another_processor_are_refused_in_a_sentence(
    family: str, file: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    settings = seeing.base(tmp_path / "base", family) / file
    settings.write_text(json.dumps(json.loads(settings.read_text()) | changes))
    seeing.rows(tmp_path, [example(tmp_path, number) for number in range(3)])
    with refusal(ArtifactError, "the files of its processor are not of this model"):
        finetune.train(config(tmp_path, **{"training.batch_size": 3, "training.micro_batch": 3}))


def test_objectives_pass_on_all_that_a_model_takes_of_images() -> None:
    assert set(PIXELS) <= MODEL_INPUTS


@of_one
def test_the_pass_at_the_start_keeps_what_a_step_does_and_draws_no_random_numbers(job: tuple[str, Path]) -> None:
    settings = config(job[1], **{"memory.checkpointing": "all", "adapter.dropout": 0.1})
    model = ready(settings).step.model
    tokenizer = load_tokenizer(settings.model, settings.data)
    seen = base_vision.of(settings.model, settings.data.image_pixels, load_architecture(settings.model), tokenizer)
    assert seen is not None
    sample = seen.sample()

    def kept(run: Callable[[], Any]) -> int:
        sizes: list[int] = []
        with saved_tensors_hooks(lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda tensor: tensor):
            run()
        return sum(sizes)

    before = torch.get_rng_state()
    tried = kept(lambda: seeing_probe.prove(model, sample))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert tried == kept(lambda: model(**sample, use_cache=False))
    assert tried < 0.5 * kept(lambda: model.eval()(**sample, use_cache=False))


@of_each_kind
def test_a_loss_follows_from_the_pixels_and_no_graph_from_the_tower(loop: Loop) -> None:
    [part] = micro_batches(loop, [2], 3)
    graphs = []
    for name, module in loop.step.model.named_modules():
        if name.endswith(("visual", "vision_tower", "vision_model")):
            hook = module.register_forward_hook(lambda module, args, output: graphs.append(output[0].requires_grad))
    loss, _ = gradients(loop, [part])
    hook.remove()
    assert graphs == [False]
    part[MEDIA] = [{**row, "pixel_values": row["pixel_values"].flip(-1)} for row in part[MEDIA]]
    assert abs(gradients(loop, [part])[0] - loss) > 1e-4


def test_a_blank_image_changes_its_own_row_alone_and_a_removed_one_its_tokens(loop: Loop) -> None:
    def scores(part: Inputs) -> torch.Tensor:
        with torch.no_grad():
            return loop.step.model(**for_model(part, masked=True), fused_lm_head=True).log_probs

    [part] = micro_batches(loop, [1, 2], 2)
    before, [one, other] = scores(part), part[MEDIA]
    part[MEDIA] = [one, {**other, "pixel_values": torch.full_like(other["pixel_values"], 0.5)}]
    after = scores(part)
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=1e-6)
    assert (after[1] - before[1]).abs().max() > 1e-4
    [shown], [text] = (micro_batches(loop, [row], 1) for row in (1, 0))
    assert MEDIA in shown
    assert MEDIA not in text
    assert not torch.isin(text["input_ids"], loop.steps.collate.media.image_tokens[0]).any()


@pytest.mark.long
@pytest.mark.parametrize("job", sampled(seeing.FAMILIES, "gemma4"), indirect=True)
def test_rows_of_text_train_as_on_the_language_layers_alone(job: tuple[str, Path], tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": [{"type": "text", "text": f"Row {number}?"}]},
                          {"role": "assistant", "content": ANSWERS[number]}]} for number in range(3)]  # fmt: skip
    changes = {
        "data.train": str(seeing.rows(tmp_path, rows)), "training.batch_size": 3, "training.micro_batch": 3,
        "model.attention": "sdpa", "training.learning_rate": 0.01,
    }  # fmt: skip
    found = []
    for vision in ("none", "frozen"):
        loop = ready(config(job[1], **{"model.vision": vision, **changes}))
        loss, gradients_ = gradients(loop, micro_batches(loop, range(3), 3))
        found.append((loss, {name.partition("layers.")[2]: value for name, value in gradients_.items()}))
    (alone, expected), (whole, given) = found
    assert whole == pytest.approx(alone, rel=1e-6)
    assert_gradients_close(given, expected, within=1e-6)


@pytest.mark.parametrize("job", sampled(EACH_KIND, "idefics3"), indirect=True)
def test_neither_quantization_nor_an_adapter_touches_the_model_of_images(job: tuple[str, Path]) -> None:
    model = ready(config(job[1], **{"quantization.kind": "nf4", "adapter.targets": ["q_proj", "down_proj"]})).step.model
    for kind in (Params4bit, torch.nn.Parameter):
        named = [name for name, weight in model.named_parameters() if isinstance(weight, kind) and weight.requires_grad]
        named += [name for name, weight in model.named_parameters() if isinstance(weight, Params4bit)]
        assert named
        assert all("language_model" in name or "text_model" in name for name in named), named


@of_each_kind
def test_steps_that_a_thread_prepares_ahead_are_those_prepared_in_turn(loop: Loop) -> None:
    """Beside a card; a run that goes on then has the same images, as none of them depends on when it was decoded."""
    steps = replace(loop.steps, batch_size=2)
    in_turn, ahead = list(steps.epoch(0, 0)), list(one_ahead(steps.epoch(0, 0)))
    assert len(ahead) == 3
    assert any(MEDIA in part for step in ahead for part in step)
    for part, expected in zip(itertools.chain(*ahead), itertools.chain(*in_turn), strict=True):
        found, wanted = (for_model(each, masked=True) for each in (part, expected))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.usefixtures("hurried", "unwarmed")
@of_one_and_long_of_each_kind
def test_a_run_of_images_alone_goes_on_to_the_same_bits_and_measures_its_evaluation_set(
    job: tuple[str, Path], tmp_path: Path
) -> None:
    _, folder = job
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    # Of two images each, since a forecast takes all micro-batches of a step to be as the largest.
    shown = [row for row in rows if len(row["messages"][0]["content"]) == 3]
    changes = {
        "data.train": str(seeing.rows(folder, shown, "shown.jsonl")), "training.batch_size": 2,
        "training.micro_batch": 1, "training.schedule": "constant", "adapter.targets": ["q_proj", "down_proj"],
    }  # fmt: skip
    one, other = RunDirectory(tmp_path / "one"), RunDirectory(tmp_path / "other")
    evaluated = {"memory.check": "refuse", "data.eval": str(folder / "rows.jsonl")}
    for run, steps, own in ((one, 1, {}), (one, 2, {}), (other, 2, evaluated)):
        finetune.train(config(folder, **changes, **own, **{"training.max_steps": steps, "output.dir": str(run.path)}))
    assert same_adapter(one, other)
    assert all(0 < loss < 20 for loss in metric(other, "eval_loss"))
    compared = json.loads((other.path / "forecast.json").read_text())["differences"]
    assert {each["phase"] for each in compared} >= {"forward", "backward", "optimizer", "evaluation"}
    assert all(abs(each["relative"]) < 0.02 for each in compared), compared


@of_one
def test_what_is_not_trained_is_refused_in_a_sentence(
    job: tuple[str, Path], tmp_path: Path, call: Callable[..., Any]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(dump(config(job[1], **{"output.dir": str(tmp_path / "run")})), encoding="utf-8")
    for changes, exit_code, said in (
        (["data.packing=true"], 2, "rows are not packed with images yet"),
        (["model.attention=flash_attention_2"], 2, "no other attention is used with images yet"),
        (["training.objective=dpo"], 2, "only `supervised` is trained with images yet"),
        (["distributed.kind=deepspeed"], 2, "would not gather the model of images with the others; set `gradients`"),
        (["model.name=builtin:tiny-llama"], 2, "that sees"),
        (["model.vision=none"], 3, "set `model.vision: frozen`"),
        (["model.vision=none", "data.image_pixels=100"], 2, "only a base that sees has images"),
    ):
        code, _, error = call("train", file, *changes)
        assert (code, said in " ".join(error.split())) == (exit_code, True), error
