"""The arithmetic of the CPU benchmarks, and what all benchmarks share."""

from __future__ import annotations

import ast
import contextlib
import graphlib
import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import harness
import overhead
import pytest


def test_benchmarks_import_one_another_one_way() -> None:
    files = {path.stem: path for path in (harness.ROOT / "benchmarks").glob("*.py")}
    imported = {name: _imported(path) & files.keys() for name, path in files.items()}
    order = list(graphlib.TopologicalSorter(imported).static_order())
    assert order.index("gpu_sides") < order.index("gpu_slices") < order.index("gpu_check")


def test_what_benchmarks_import_of_the_product_exists() -> None:
    """Also in the code that they hand to other processes, which no test runs."""
    lacking = []
    for path in sorted((harness.ROOT / "benchmarks").rglob("*.py")):
        for tree in _with_embedded_code(ast.parse(path.read_text(encoding="utf-8"))):
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "finetune":
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                    lacking += [f"{path.name}: {name}" for name in names if not _exists(name)]
    assert lacking == []


def _with_embedded_code(tree: ast.Module) -> Iterator[ast.Module]:
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "from finetune" in node.value:
            with contextlib.suppress(SyntaxError):  # prose
                yield ast.parse(node.value)


def _exists(name: str) -> bool:
    """True if a module has an attribute of this name, or a package a module."""
    module, _, last = name.rpartition(".")
    found = importlib.import_module(module)
    return hasattr(found, last) or bool(getattr(found, "__path__", None) and importlib.util.find_spec(name))


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
