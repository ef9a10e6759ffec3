"""The names and values of a sweep's members."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import TINY
from messages import refusal

import finetune
from finetune.config import strict_yaml
from finetune.errors import ConfigError
from finetune.extras.sweeps import grid, running
from finetune.recipe.provenance import MAY_CHANGE
from finetune.report.terminal import Terminal


@pytest.mark.parametrize(
    "values", [["a|b", "a/b"], ["[q_proj, v_proj]", "'.*proj'"], [f"[{', '.join(['q_proj'] * 60)}]", "é" * 200]]
)
def test_each_member_has_a_directory_that_every_file_system_takes(values: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "a: b #c"
    made = grid.members(TINY, [f"output.dir='{folder}'"], {"adapter.targets": values})
    paths = [Path(str(each.config.output.dir)) for each in made]
    assert len({*paths}) == len(values)
    for path, each in zip(paths, made, strict=True):
        assert path == folder / each.name
        assert len(each.name.encode()) < 200
        path.mkdir(parents=True)


def test_one_entry_of_a_mapping_is_swept(tmp_path: Path) -> None:
    made = grid.members(TINY, [f"output.dir={tmp_path}"], {"adapter.ranks.q_proj": ["8", "16"]})
    assert [each.config.adapter.ranks for each in made] == [{"q_proj": 8}, {"q_proj": 16}]
    assert [(each.name, each.values) for each in made] == [
        ("q_proj=8", {"adapter.ranks.q_proj": 8}), ("q_proj=16", {"adapter.ranks.q_proj": 16}),
    ]  # fmt: skip


def test_a_value_of_python_or_numpy_is_read_back_and_others_are_refused() -> None:
    for value in ("auto", "null", "3", "1e-3", 1e-4, None, True, ["a", "b"], {"a": 1}, "a b, 'c'"):
        assert strict_yaml.parse(f"key: {grid.as_text(value)}").values == {"key": value}
    assert [grid.as_text(each) for each in (np.float64(1e-4), np.int64(3), np.bool_(True))] == ["0.0001", "3", "true"]
    with refusal(ConfigError, "cannot be a value of a config"):
        grid.as_text(object())


def test_values_of_python_are_a_list_of_each_whole_key() -> None:
    rates: Any
    for rates in ("1e-4,2e-4", 1e-4):
        with refusal(ConfigError, "give a list of values"):
            finetune.sweep({}, {"training.learning_rate": rates})
    keys: Any
    for keys in (None, ["training.learning_rate=1e-3,3e-3"], {3: [1, 2]}, {"training": {"seed": [1]}}):
        with refusal(ConfigError, "training.learning_rate"):
            finetune.sweep({}, keys)


def test_what_may_change_in_a_run_makes_no_settings() -> None:
    for key in MAY_CHANGE:
        with refusal(ConfigError, "cannot be swept"):
            grid.members(TINY, [], {f"{key}any" if key.endswith(".") else key: ["1", "2"]})


def of_two(folder: Path, *overrides: str) -> running._Sweep:
    """A sweep of two rates, without its rows."""
    members = grid.members(TINY, [f"output.dir={folder}", *overrides], {"training.learning_rate": ["1e-4", "2e-4"]})
    sweep = running._Sweep(folder, members, True, Terminal(quiet=True))
    sweep.__dict__["_rows"] = {}
    return sweep


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", b"text"])
def test_a_damaged_score_is_made_again(damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = of_two(tmp_path)
    member, rows = sweep.members[0], np.full((3, 2), 2.0)
    file = sweep._score_file(member, 1.0)
    file.parent.mkdir()
    file.write_bytes(damage)
    monkeypatch.setattr(sweep, "_trained", lambda member, share: rows)
    assert sweep._scored(member, 1.0).tolist() == rows.tolist()
    monkeypatch.delattr(sweep, "_trained")
    assert sweep._scored(member, 1.0).tolist() == rows.tolist()


def test_a_score_is_of_one_form_that_is_served(tmp_path: Path) -> None:
    def made_of(*serve: str) -> str:
        sweep = of_two(tmp_path, "output.merge=false", *serve)
        return sweep._made_of[sweep.members[0].name]

    assert len({made_of(), made_of("output.serve=q4_k_m"), made_of("output.serve=q8_0")}) == 3


def test_members_whose_bases_would_be_held_in_different_forms_are_refused(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 4, "vocab_size": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "norm_topk_prob": True, **sizes}))
    job = [f"model.name={tmp_path}", "output.serve=q4_0", "output.merge=false", f"output.dir={tmp_path / 'sweep'}"]
    members = grid.members(TINY, job, {"adapter.expert_rank": ["0", "8"]})
    with refusal(ConfigError, "`rounded`"):
        running._check(members)
    running._check(grid.members(TINY, [*job, "output.way=rounded"], {"adapter.expert_rank": ["0", "8"]}))


def test_a_kind_that_follows_from_what_is_served_is_that_of_all_members(tmp_path: Path) -> None:
    job = ["quantization.kind=auto", "output.merge=false", f"output.dir={tmp_path / 'sweep'}"]
    keys = {"training.learning_rate": ["1e-3", "3e-3"]}
    running._check(grid.members(TINY, [*job, "output.serve=q8_0"], keys))
    for rounded in ([], ["output.serve=q8_0", "output.runtime=ollama"]):
        with refusal(ConfigError, "quantization.kind"):
            running._check(grid.members(TINY, [*job, *rounded], keys))
