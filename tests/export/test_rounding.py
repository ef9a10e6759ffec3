"""Rounding with the training rows: columns make up for errors, layer by layer, and a kill costs one layer."""

from __future__ import annotations

import copy
import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refusal
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import finetune
from finetune.config import ModelSection
from finetune.config.sections import RopeScaling
from finetune.errors import ArtifactError, ConfigError, MachineError
from finetune.export.conversion import ExportRequest
from finetune.export.finished_run import FinishedRun
from finetune.export.gguf import gguf_export
from finetune.export.rounding import calibration, memory, rounded_run
from finetune.export.rounding.compensated import DAMPING, compensated
from finetune.export.rounding.inputs import InputSums
from finetune.export.rounding.layers import LayerRounding
from finetune.export.rounding.matrices import rounded
from finetune.forms import FORMS, packed
from finetune.model.base import load_architecture
from finetune.model.skeleton import make_buffers
from finetune.model.structure import quantizers
from finetune.runtime.live_tensors import TensorCount
from finetune.storage import weight_files
from finetune.storage.rundir import RunDirectory

CPU = torch.device("cpu")


def inputs_of(columns: int, count: int, seed: int = 0) -> torch.Tensor:
    """Inputs (count, columns) whose columns have much in common, and different sizes."""
    draw = torch.Generator().manual_seed(7)
    mixed = torch.randn(columns, columns, generator=draw) * torch.logspace(0.5, -1.5, columns) / columns**0.5
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)) @ mixed.T


def weight_of(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 0.02


def error(weight: torch.Tensor, found: torch.Tensor, x: torch.Tensor) -> float:
    return float(((found - weight) @ x.T).square().mean())


def plain(form: str, weight: torch.Tensor) -> torch.Tensor:
    return packed.values(packed.pack(form, weight))


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.module])
def test_products_with_other_rows_are_nearer_than_after_plain_rounding(name: str) -> None:
    form, weight, x = FORMS[name].codec, weight_of(32, 512), inputs_of(512, 1024)
    codes, fields = compensated(form, weight, x.T @ x)
    other = inputs_of(512, 1024, seed=1)
    found = form.values(codes, form.grid(fields))
    assert error(weight, found, other) < 0.6 * error(weight, plain(name, weight), other)
    stored, scales = form.pack(codes, fields)
    assert torch.equal(packed.Packing(name, scales, weight.shape, weight.dtype).decoded(stored), found)


def one_by_one(weight: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Q4_0 by the formulas of Optimal Brain Quantization in float64 (arXiv 2210.17323, equations 2 and 3): after each
    column, the inverse Hessian of those that are left, and the same correction to all of them at once.
    """
    form = FORMS["q4_0"].codec
    weight, diagonal = weight.double().clone(), hessian.double().diagonal()
    damped = hessian.double() + DAMPING * diagonal.mean() * torch.eye(len(hessian))
    inverse = torch.linalg.inv(damped)
    found = torch.zeros_like(weight)
    for column in range(weight.shape[1]):
        if column % 32 == 0:
            block = weight[:, column : column + 32].float()
            grid = form.grid(form.search(block, damped.diagonal()[column : column + 32].float()))
        single = grid.scales[:, 0].double()
        found[:, column] = (weight[:, column] / single).round().clamp(-8, 7) * single
        missed = (weight[:, column] - found[:, column]) / inverse[column, column]
        weight -= missed[:, None] * inverse[column]
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return found


def test_blocks_of_columns_give_what_one_column_after_the_other_gives() -> None:
    weight, x = weight_of(16, 256), inputs_of(256, 1024)
    form = FORMS["q4_0"].codec
    codes, fields = compensated(form, weight, x.T @ x)
    found, expected = form.values(codes, form.grid(fields)), one_by_one(weight, x.T @ x)
    # A value in the middle of two levels may fall to either, and what follows in its row with it.
    assert (found.double() - expected).abs().amax(dim=1).lt(1e-6).float().mean() > 0.8
    assert error(weight, found, x) == pytest.approx(error(weight, expected.float(), x), rel=0.02)


def test_a_column_that_no_input_has_is_rounded_by_itself() -> None:
    x, weight, form = inputs_of(64, 256), weight_of(8, 64), FORMS["q4_0"].codec
    x[:, 5] = x[:, 40:] = 0
    codes, fields = compensated(form, weight, x.T @ x)
    alone = form.nearest(weight, form.grid(fields))
    assert torch.equal(codes[:, 40:], alone[:, 40:])
    assert torch.equal(codes[:, 5], alone[:, 5])
    assert not torch.equal(codes, alone)
    nothing, fields = compensated(form, weight, torch.zeros(64, 64))
    assert torch.equal(nothing, form.nearest(weight, form.grid(fields)))


def test_fewer_rows_than_columns_are_rounded_with() -> None:
    x, weight, form = inputs_of(256, 64), weight_of(8, 256), FORMS["q4_k"].codec
    codes, fields = compensated(form, weight, x.T @ x)
    found = form.values(codes, form.grid(fields))
    assert error(weight, found, x) < 0.5 * error(weight, plain("q4_k", weight), x)


def test_inputs_that_are_not_finite_are_refused() -> None:
    x = inputs_of(64, 64)
    x[3, 4] = torch.nan
    inputs = InputSums({})
    inputs.add(("down_proj", 0), x)
    with refusal(ArtifactError, "`down_proj`"):
        rounded({"down_proj": "q4_0"}, {"down_proj": weight_of(8, 64)}, inputs)


def test_a_matrix_with_few_tokens_is_rounded_by_itself() -> None:
    weights = torch.stack([weight_of(8, 64), -weight_of(8, 64)])
    inputs = InputSums({})
    inputs.add(("experts", 0), inputs_of(64, 64))
    inputs.add(("experts", 1), inputs_of(64, 7))
    one = rounded({"experts": "q4_0"}, {"experts": weights}, inputs)["experts"]
    expected = packed.pack("q4_0", weights)
    assert one.compensated.tolist() == [True, False]
    assert torch.equal(one.codes[1], expected[1])
    assert not torch.equal(one.codes[0], expected[0])


@pytest.mark.parametrize("tokens", [7, 64])
def test_what_is_joined_in_a_product_has_one_factor_of_nvfp4(tokens: int) -> None:
    weights = {"q_proj": weight_of(8, 64), "k_proj": 2 * weight_of(4, 64)}
    inputs, x = InputSums({}), inputs_of(64, tokens)
    for name in weights:
        inputs.add((name, 0), x)
    found = rounded(dict.fromkeys(weights, "nvfp4"), weights, inputs)
    factors = torch.cat([one.scales[:, : FORMS["nvfp4"].codec.blocks.row_scales] for one in found.values()])
    assert (factors == factors[0]).all()
    assert {bool(one.compensated) for one in found.values()} == {tokens > 7}


def test_inputs_are_summed_where_a_weight_is_multiplied() -> None:
    layer, experts = nn.Linear(8, 4, bias=False), torch.randn(2, 8, 6)
    x, y = torch.randn(3, 5, 8), torch.randn(7, 8)
    with (
        torch.no_grad(),
        InputSums({"one": layer.weight.data, "two": layer.weight.data[:2], "experts": experts}) as found,
    ):
        layer(x)
        y @ experts[1]
        layer(x[:1])
    whole = torch.cat([x.flatten(0, 1), x[0]])
    source = found.source(("two", 0))  # the same place in memory: the last name counts
    assert source is not None
    assert found.source(("experts", 0)) is None
    assert torch.allclose(found.sums[source], whole.T @ whole, atol=1e-5)
    assert torch.allclose(found.sums["experts", 1], y.T @ y, atol=1e-5)
    assert found.tokens == {("two", 0): 20, ("experts", 1): 7}


# -- layer by layer ----------------------------------------------------------------------------------------------------

_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


@dataclass(frozen=True)
class Small:
    """A small model in memory, and how it is rounded."""

    model: Any
    forms: dict[str, str]
    ids: torch.Tensor

    def rounding(self, folder: Path) -> LayerRounding:
        with torch.device("meta"):
            bare = AutoModelForCausalLM.from_config(copy.deepcopy(self.model.config), dtype=torch.float32).eval()
        return LayerRounding(make_buffers(bare, CPU), self.model.state_dict(), self.forms, self.ids, folder, CPU)


def small(name: str, **sizes: int) -> Small:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**_SIZES, **KINDS[name], **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.1)
    return Small(model, quantizers.recipe_of(model, "q4_0"), torch.randint(1, 250, (12, 24)))


def by_hand(one: Small) -> dict[str, torch.Tensor]:
    """The values after rounding, with whole models in memory: the rows pass through all of it for each layer."""
    model, names = one.model, dict(one.model.named_parameters())
    with torch.no_grad():
        for name, form in one.forms.items():
            if ".layers." not in name and "lm_head" not in name:
                names[name].data = packed.values(packed.pack(form, names[name].data))
        groups = [f".layers.{number}." for number in range(model.config.num_hidden_layers)]
        for group in [*groups, "lm_head"]:
            inside = {name: names[name].data for name in one.forms if group in name and name in names}
            sums = {name: torch.zeros(one.shape[-1], one.shape[-1]) for name, one in inside.items()}
            hooks = [
                model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(_adding(total))
                for name, total in sums.items()
            ]
            model(one.ids)
            for hook in hooks:
                hook.remove()
            for name, weight in inside.items():
                form = FORMS[one.forms[name]].codec
                codes, fields = compensated(form, weight, sums[name])
                names[name].data = form.values(codes, form.grid(fields))
    return {name: weight.data for name, weight in names.items()}


def _adding(total: torch.Tensor) -> Callable[[Any, Any], None]:
    def add(module: Any, given: Any) -> None:
        x = given[0].flatten(0, -2)
        total.add_(x.T @ x)

    return add


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_streamed_model_is_rounded_as_one_in_memory(name: str, tmp_path: Path) -> None:
    one = small(name)
    rounding = one.rounding(tmp_path)
    rounding.complete()
    found, expected = rounding.packed(), by_hand(one)
    assert len(found) >= 15
    assert rounding.plain() == {}
    same = [(packed.values(weight) == expected[own]).float().mean() for own, weight in found.items()]
    assert min(same) > 0.97  # sums in another order move a few values to the next level


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_each_expert_is_rounded_with_the_tokens_that_visit_it(name: str, tmp_path: Path) -> None:
    one = small(name)
    rounding = one.rounding(tmp_path)
    rounding.complete()
    fused = {own: weight for own, weight in rounding.packed().items() if weight.dim() == 3}
    assert len(fused) == 4
    assert rounding.plain() == {}
    state = one.model.state_dict()
    for own, weight in fused.items():
        by_itself = packed.pack(one.forms[own], state[own], transposed=name == "gpt_oss")
        assert all(not torch.equal(each, plain) for each, plain in zip(weight.data, by_itself.data, strict=True))
        found = packed.values(weight)
        assert found.shape == state[own].shape
        assert (found - state[own]).square().mean() < 0.05 * state[own].square().mean()


class Killed(BaseException):
    """Ends a process as a signal would."""


def test_a_rounding_that_is_killed_goes_on_with_the_next_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = small("llama")
    whole = one.rounding(_folder(tmp_path / "whole"))
    whole.complete()
    expected = {file.name: file.read_bytes() for file in sorted((tmp_path / "whole").iterdir())}
    assert len(expected) == 4
    for moment, name in enumerate(["beside", "layer-00000", "layer-00001", "head"]):
        folder, started = _folder(tmp_path / name), list[str]()

        def stop(part: Any, name: str = name) -> None:
            if part.file == name:
                raise Killed

        with pytest.raises(Killed):
            one.rounding(folder).complete(stop)
        (folder / f"{name}.safetensors.part").write_bytes(b"cut off")
        assert len([file for file in folder.iterdir() if file.suffix == ".safetensors"]) == moment
        one.rounding(folder).complete(lambda part, started=started: started.append(part.file))
        assert started == ["beside", "layer-00000", "layer-00001", "head"][moment:]
        assert {file.name: file.read_bytes() for file in sorted(folder.iterdir())} == expected


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.slow
def test_the_forecast_is_the_memory_that_is_taken(tmp_path: Path) -> None:
    one = small("llama", hidden_size=384, intermediate_size=1152, num_attention_heads=6, num_hidden_layers=1)
    one.model.to(torch.bfloat16)  # as in files, so that each layer is copied to the compute type
    rounding, count = one.rounding(tmp_path), TensorCount()
    before = sum(weight.nbytes for weight in one.model.parameters())
    with count.counting():
        count.enter("rounding")
        rounding.complete()
        count.enter("")
    forecast = memory.peak_bytes(rounding.model, rounding.parts, one.ids.shape, torch.float32)
    assert count.peaks["rounding"] - before == pytest.approx(forecast, rel=0.05)


# -- of a run ----------------------------------------------------------------------------------------------------------


def test_rows_are_training_rows_of_one_length(trained: RunDirectory) -> None:
    config = trained.config()
    tokenizer = FinishedRun(trained, config).tokenizer()
    ids = calibration.rows(config.data, tokenizer, 0, lambda text: None)
    assert ids.shape[1] <= config.data.max_length
    assert len(ids) != ids.shape[1]
    assert torch.equal(ids, calibration.rows(config.data, tokenizer, 0, lambda text: None))
    assert not torch.equal(ids, calibration.rows(config.data, tokenizer, 1, lambda text: None))


def test_enough_rows_have_the_shape_that_is_planned_with() -> None:
    table: Any = [{"input_ids": [3] * 1000}] * 100
    for max_length in (256, 300, 4096):
        ids = calibration.ids_of(table, max_length, 0)
        assert ids.shape == calibration.shape(max_length, calibration.TOKENS)
        assert ids.shape[0] != ids.shape[1]


@pytest.mark.slow
def test_an_export_is_rounded_with_the_rows(merged_run: RunDirectory) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    record = finetune.export_model(merged_run, "gguf", type="q4_0", rounded=True)
    assert record["rounded"]["by_themselves"] == {}
    assert record["rounded"]["tokens"] >= 512
    assert record["weights"]["differing"] > 0
    assert len(load_file(merged_run.path / "rounded-q4_0" / "layer-00000.safetensors")) == 3 * 7


@pytest.fixture
def job_of(run: RunDirectory, shallow_base: Path) -> Callable[[str], ExportRequest]:
    """A function from a kind to the conversion of a run whose merged model is the base itself."""
    config = run.config().changed({"model.name": str(shallow_base)})
    shutil.copytree(shallow_base, run.merged)
    tokenizer = FinishedRun(run, config).tokenizer()

    def make(kind: str) -> ExportRequest:
        return ExportRequest(run, config, tokenizer, CPU, kind)

    return make


@pytest.mark.slow
def test_a_full_disk_is_reported_with_the_folder_and_what_was_kept_is_used_again(
    job_of: Callable[[str], ExportRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "TOKENS", 512)  # as many as the run has rows for
    job, written, said = job_of("q4_0"), weight_files.write, list[str]()
    folder = job.run.path / "rounded-q4_0"

    def fail(path: Path, *rest: Any) -> None:
        if path.name == "layer-00001.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(weight_files, "write", fail)
        with refusal(MachineError, "q4_0"):
            rounded_run.rounded(job, gguf_export.forms, said.append)
    assert not list(job.run.path.glob("rounded-*"))
    whole, facts = rounded_run.rounded(job, gguf_export.forms, said.append)
    assert facts["by_themselves"] == {}
    # As the plan of a training that is served so says.
    served = job.config.changed({"output.serve": "q4_0", "output.way": "rounded"})
    assert facts["forecast_bytes"] == rounded_run.planned_bytes(served, "cpu")
    assert rounded_run.planned_bytes(job.config, "cpu") is None
    for lost in (None, "layer-00000.safetensors"):
        said.clear()
        if lost:
            (folder / lost).unlink()
        again, _ = rounded_run.rounded(job, gguf_export.forms, said.append)
        assert bool(said) == bool(lost), "rounded anew if a part was lost"
        assert all(torch.equal(again[name].data, one.data) for name, one in whole.items())


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_a_gguf_file_of_4_bit_floats_is_rounded_in_all_layers(
    kind: str, job_of: Callable[[str], ExportRequest]
) -> None:
    found, _ = rounded_run.rounded(job_of(kind), gguf_export.forms, lambda text: None)
    how = {name: packed.packing_of(weight) for name, weight in found.items()}
    assert {one.form for name, one in how.items() if one and ".layers." in name} == {kind}
    assert {one.form for name, one in how.items() if one and ".layers." not in name} == {"q8_0"}


def test_a_merged_model_with_rotary_scaling_is_rounded(job_of: Callable[[str], ExportRequest]) -> None:
    job = job_of("q8_0")
    section = ModelSection(name=job.config.model.name, rope_scaling=RopeScaling(rope_type="yarn", factor=2.0))
    load_architecture(section).save_pretrained(job.run.merged)
    job = replace(job, config=job.config.model_copy(update={"model": section}))
    found, _ = rounded_run.rounded(job, gguf_export.forms, lambda text: None)
    assert found


def test_nothing_is_rounded_in_16_bit(run: RunDirectory) -> None:
    for format in ("adapter", "merged", "gguf"):
        with refusal(ConfigError, "`--rounded`"):
            finetune.export_model(run, format, rounded=True)
    assert not run.merged.exists()
