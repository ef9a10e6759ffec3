"""The arithmetic of the CPU benchmarks, and what all benchmarks share."""

from __future__ import annotations

import ast
import graphlib
import importlib
import json
from pathlib import Path

import harness
import memory_cpu
import overhead
import pytest


def test_benchmarks_import_one_another_one_way() -> None:
    files = {path.stem: path for path in (harness.ROOT / "benchmarks").glob("*.py")}
    imported = {name: _imported(path) & files.keys() for name, path in files.items()}
    order = list(graphlib.TopologicalSorter(imported).static_order())
    assert order.index("gpu_sides") < order.index("gpu_slices") < order.index("gpu_check")


def _imported(path: Path) -> set[str]:
    """The modules that a file imports, at its top and in its functions."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return named | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_the_overhead_is_the_median_of_the_pairs_ratios() -> None:
    def pair(plain: float, ours: float) -> dict[str, dict[str, float]]:
        return {"plain": dict.fromkeys(overhead.MEASURES, plain), "finetune": dict.fromkeys(overhead.MEASURES, ours)}

    found = overhead.summary([pair(10, 11), pair(20, 20), pair(40, 42)])
    assert found["ratios"]["loop_seconds"] == {"median": 1.05, "least": 1.0, "largest": 1.1}
    assert found["medians"]["plain"]["loop_seconds"] == 20


def test_the_memory_benchmarks_arithmetic_counts_the_real_model() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = memory_cpu.MODEL
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.config()))
    linear = [
        module for name, module in built.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    assert model.linear_parameters == sum(module.weight.numel() for module in linear)
    assert model.linear_rows == sum(module.out_features for module in linear)
    assert model.linear_parameters + model.kept_parameters == built.num_parameters() > 100_000_000
    bits = 8 * (memory_cpu.WEIGHTS[-1].weight_bytes(model) - 2 * model.kept_parameters) / model.linear_parameters
    assert bits == pytest.approx(4.127, abs=5e-4)


def test_rows_are_longer_than_the_cut(tmp_path: Path) -> None:
    from finetune.config import ModelSection
    from finetune.model.source.tokenizer import load_tokenizer

    harness.write_long_rows(tmp_path / "rows.jsonl", rows=3, tokens=2048)
    texts = [line["text"] for line in harness.read_lines(tmp_path / "rows.jsonl")]
    assert len(set(texts)) == 3
    tokenizer = load_tokenizer(ModelSection())
    assert min(len(tokenizer(text)["input_ids"]) for text in texts) > 2048
    # A tokenizer with a large vocabulary takes a word for one token at best.
    assert min(len(text.split()) for text in texts) > 2048


def test_results_keep_no_absolute_path() -> None:
    text = "wrote /home/someone/runs/x/adapter, read configs/a.yaml and https://pytorch.org/memory_viz, 3 / 4"
    expected = "wrote adapter, read configs/a.yaml and https://pytorch.org/memory_viz, 3 / 4"
    assert harness.without_paths(text) == expected


def test_the_mutation_campaign_knows_the_functions_and_tests_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "")  # which importing it sets
    mutations = importlib.import_module("mutations")
    accepted = json.loads(mutations.ACCEPTED.read_text(encoding="utf-8"))
    names = set()
    for functions, files in mutations.AREAS.values():
        assert all((harness.ROOT / "tests" / file).is_file() for file in files)
        for module, listed in functions.items():
            names |= set(listed.split())
            tree = ast.parse(Path(str(importlib.import_module(module).__file__)).read_text(encoding="utf-8"))
            for name in listed.split():
                assert mutations._found(tree, name).name == name.split(".")[-1]
    assert set(accepted) <= names
