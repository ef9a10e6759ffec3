"""`data.new_tokens`: their rows alone are trained, from training to merged files, and PEFT alone reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import QUICK, TINY, adapter_weights, same_adapter
from messages import refusal
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune
from finetune.choices import load_config
from finetune.config import ModelSection
from finetune.errors import ConfigError
from finetune.model import bounds, build
from finetune.model.adapters import new_rows
from finetune.model.base import load_architecture
from finetune.model.source.tokenizer import load_tokenizer
from finetune.storage.rundir import RunDirectory

_TOKENS = ["<tool>", "quuxify"]
_NAMES = ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.fixture(params=["tied", "untied"])
def job(request: Any, tmp_path: Path, shallow_base: Path, hurried: None, unwarmed: None) -> Callable[..., Any]:
    """A function from steps and a folder to a job with new tokens, on a base whose head is its embedding, or not."""
    base = Path(shutil.copytree(shallow_base, tmp_path / "base"))
    if request.param == "untied":
        values = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": False}))
        tensors = load_file(base / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 0.5
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
    rows = [{"prompt": f"call <tool> {number}", "completion": f" quuxify {number}"} for number in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def make(steps: int, run: str, *overrides: str) -> Any:
        given = [f"model.name={base}", f"data.train={tmp_path / 'rows.jsonl'}", "data.eval=none"]
        given += [f"data.new_tokens={json.dumps(_TOKENS)}", f"training.max_steps={steps}", "training.precision=fp32"]
        return load_config(TINY, [*QUICK, *given, f"output.dir={tmp_path / run}", *overrides])

    return make


def _logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits.float()


@pytest.mark.slow
def test_their_rows_alone_are_trained_resumed_merged_and_read_by_peft(job) -> None:
    settings = ["quantization.kind=none", "training.schedule=constant", "training.learning_rate=2e-4"]
    run = finetune.train(job(2, "whole", *settings, "output.merge=true")).run
    finetune.train(job(1, "parts", *settings))
    parts = finetune.train(job(2, "parts", *settings)).run
    assert same_adapter(run, parts)

    config, tokenizer = run.config(), AutoTokenizer.from_pretrained(run.merged)
    base, merged = load_file(Path(config.model.name) / "model.safetensors"), load_file(run.merged / "model.safetensors")
    known = len(base[_NAMES[0]])
    assert [row[0] for row in config.adapter.new_rows] == tokenizer.convert_tokens_to_ids(_TOKENS)
    assert [row[0] for row in config.adapter.new_rows] == [known, known + 1]
    plain = load_tokenizer(config.model)
    trained = [value for name, value in adapter_weights(run).items() if "trainable_tokens_delta" in name]
    tables = [name for name in _NAMES if name in base]
    assert len(trained) == len(tables)
    for name in tables:
        assert torch.equal(merged[name][:known], base[name])
        for (row, *pieces), token in zip(config.adapter.new_rows, _TOKENS, strict=True):
            assert plain.decode(pieces) == token
            start = base[name][pieces].mean(0)
            assert 0 < (merged[name][row] - start).norm() < 0.2 * start.norm()

    loaded = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32)
    loaded.resize_token_embeddings(known + len(_TOKENS), mean_resizing=False)
    ids = tokenizer("call <tool> 3 quuxify 3").input_ids
    assert {known, known + 1} <= set(ids)
    by_peft = _logits(PeftModel.from_pretrained(loaded, run.adapter), ids)
    of_files = _logits(AutoModelForCausalLM.from_pretrained(run.merged, dtype=torch.float32), ids)
    assert (by_peft - of_files).norm() < 0.01 * of_files.norm()  # what rounding to 16 bit makes of it


def test_a_run_that_trains_every_weight_gets_them_too(job) -> None:
    config = job(1, "every", "adapter.kind=none", "quantization.kind=none")
    run: RunDirectory = finetune.train(config).run
    merged = load_file(run.merged / "model.safetensors")
    assert len(merged[_NAMES[0]]) == len(AutoTokenizer.from_pretrained(run.merged)) == 2050


def test_bases_that_cannot_have_more_tokens_are_refused() -> None:
    config = load_config(TINY, ["data.new_tokens=<a>"])
    architecture = load_architecture(config.model)
    architecture.vocab_size_per_layer_input = 2048
    with refusal(ConfigError, "`data.new_tokens`", "a second embedding for each layer"):
        bounds.new_tokens(config.model, config.data, architecture)
    base = build.weightless(ModelSection())
    base.lm_head.register_parameter("bias", torch.nn.Parameter(torch.zeros(2048, device="meta")))
    with refusal(ConfigError, "LlamaForCausalLM"):
        new_rows.by_module(base, [[5, 6]])
