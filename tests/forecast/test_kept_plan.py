"""A kept plan is the one that would be made again, as long as all that it depends on is the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import lacks

from finetune.choices import load_config
from finetune.config import Config
from finetune.forecast import kept_plan
from finetune.forecast.plan import Plan
from finetune.model.source.locate import BUILTIN_BASE, locate
from finetune.report.forecast_view import PlanView
from finetune.resolve import planning
from finetune.storage import private

TINY = Path(__file__).parents[2] / "configs" / "tiny_cpu.yaml"
NAMED = "model.name=meta-llama/Llama-2-7b-hf"
CARD = "RTX 4090"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The built-in base as a folder, whose files may be changed."""
    shutil.copytree(locate(BUILTIN_BASE), tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {number} " * (3 + number)}) + "\n" for number in range(20)))
    return file


def key(overrides: list[str], gpu: str | None = CARD) -> str | None:
    """The key of a plan; None for one that is not kept."""
    return kept_plan._key(load_config(TINY, ["output.merge=false", *overrides]), gpu, 1)


class Counted:
    """Asks for a plan, and counts how often one had to be made."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, config: Config, gpu: str | None = CARD, gpus: int = 1) -> Plan:
        def make() -> Plan:
            self.made += 1
            return planning.plan(config, gpu, gpus)

        return kept_plan.get(config, gpu, gpus, make)


@pytest.fixture
def asked() -> Iterator[Counted]:
    return Counted()


@pytest.mark.parametrize(
    ("file", "overrides", "gpu", "gpus"),
    [
        (TINY, ["training.micro_batch=auto", "memory.checkpointing=auto"], CARD, 1),
        (TINY, ["memory.budget=600MiB", "quantization.kind=auto", "training.learning_rate=auto"], "24GiB", 1),
        pytest.param(TINY, ["distributed.kind=fsdp"], CARD, 2, marks=lacks(reason="torch 2.11 shards no such base")),
        (TINY.parent / "tiny_dpo.yaml", [], CARD, 1),
    ],
)
def test_a_kept_plan_shows_what_was_planned(
    file: Path, overrides: list[str], gpu: str, gpus: int, asked: Counted
) -> None:
    config = load_config(file, overrides)
    first, again = asked(config, gpu, gpus), asked(config, gpu, gpus)
    assert asked.made == 1
    one, other = PlanView(first), PlanView(again)
    assert str(one) == str(other)
    assert json.dumps(one.as_dict()) == json.dumps(other.as_dict())
    assert one.page() == other.page()
    assert again.config == first.config
    if first.fitted:
        assert again.fitted
        assert again.fitted.as_dict() == first.fitted.as_dict()
        assert asked.made == 2, "the fastest setting with everything recomputed is found anew"


CHANGES: dict[str, Callable[[Path, Path, pytest.MonkeyPatch], Any]] = {
    "rows": lambda base, rows, patch: rows.write_text(rows.read_text().replace("row 3", "row three")),
    "config": lambda base, rows, patch: (base / "config.json").write_text(
        (base / "config.json").read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
    ),
    "template": lambda base, rows, patch: (base / "chat_template.jinja").write_text("{{ messages[0]['content'] }}"),
    "tokenizer": lambda base, rows, patch: (base / "tokenizer_config.json").write_text(
        (base / "tokenizer_config.json").read_text().replace("1024", "2048")
    ),
    "allocator": lambda base, rows, patch: patch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False"),
    "version": lambda base, rows, patch: patch.setattr(kept_plan.environment, "packages", dict),
    "code": lambda base, rows, patch: patch.setattr(kept_plan.environment, "code_hash", str),
    "damage": lambda base, rows, patch: [
        file.write_bytes(file.read_bytes()[:-9]) for file in (private.cache_folder() / "plans").iterdir()
    ],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_made_again_when_something_changed(
    change: str, base: Path, rows: Path, asked: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(TINY, [f"model.name={base}", f"data.train={rows}"])
    asked(config)
    asked(config)
    assert asked.made == 1
    CHANGES[change](base, rows, monkeypatch)
    asked(config)
    assert asked.made == 2


def test_another_job_or_card_has_a_plan_of_its_own(asked: Counted) -> None:
    config = load_config(TINY, [])
    for each, gpu in [(config, CARD), (config, "24GiB"), (config.changed({"adapter.rank": 8}), CARD)]:
        asked(each, gpu)
        asked(each, gpu)
    assert asked.made == 3


@pytest.mark.parametrize(
    ("overrides", "gpu"),
    [
        ([], "cpu"),
        ([], None),
        ([], "auto"),
        ([], ""),
        (["output.serve=q4_k_m"], CARD),
        (["kernels.compile=layers"], CARD),
    ],
)
def test_a_plan_that_depends_on_more_is_not_kept(overrides: list[str], gpu: str | None) -> None:
    assert key([]) is not None
    assert key(overrides, gpu) is None


def test_a_base_in_the_hubs_cache_is_kept_where_it_cannot_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    in_catalog = key([NAMED])
    snapshot = tmp_path / "models--meta-llama--Llama-2-7b-hf" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert key([NAMED]) is None
    pinned = f"model.revision={'a' * 40}"
    assert key([NAMED, pinned]) is not None
    other, theirs = "model.name=Qwen/Qwen3-8B", NAMED.replace("name", "tokenizer")
    assert key([other, pinned]) is not None
    assert key([other, theirs, pinned]) is None, "a revision is the base's"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert key([NAMED]) not in (None, in_catalog)
    assert key(["model.name=nobody/nothing"]) is None
