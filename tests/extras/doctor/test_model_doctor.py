"""`finetune doctor MODEL`: a small copy of any architecture is tried, and each failure is a line of its own."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import every_architecture
import pytest
from children import Children, Fault
from jobs import sampled
from messages import refusal
from transformers import CONFIG_MAPPING

from finetune.errors import ConfigError
from finetune.extras.doctor import model_check, model_checks
from finetune.extras.doctor.findings import Examination, Finding
from finetune.extras.doctor.model_checks import CHECKS, Check, Copy
from finetune.model import build, small_copy
from finetune.model.source.locate import locate

_CHEAP = ("structure", "weights", "16 bit", "loss", "recomputed")
# Attention, windows, mixtures, recurrent layers, latent attention, learnt positions, layers of several kinds.
_TRIED = (
    "afmoe", "apertus", "arcee", "bamba", "bitnet", "bloom", "codegen", "cohere2", "deepseek_v3", "doge", "ernie4_5",
    "exaone4", "gemma2", "gemma3_text", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama", "mamba",
    "ministral", "mixtral", "olmo3", "opt", "phi3", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
)  # fmt: skip


def a_copy(model_type: str, folder: Path) -> Copy:
    (folder / "whole").mkdir()
    every_architecture.config(model_type).save_pretrained(folder / "whole")
    return Copy(str(folder / "whole"), folder)


@pytest.mark.parametrize(
    "model_type",
    sampled(_TRIED, "deepseek_v3", "gemma2", "llama", "mamba"),  # of each kind
)
def test_thirty_architectures_load_and_step_as_in_transformers(model_type: str, tmp_path: Path) -> None:
    copy = a_copy(model_type, tmp_path)
    failed = {name: what for name in _CHEAP for status, what, _ in [model_checks.attempt(name, copy)] if status != "ok"}
    assert failed == {}


def test_a_name_is_that_of_a_model_or_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, file in (("model", "config.json"), ("runs/one", "config.yaml"), ("empty", "notes.txt")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / file).touch()
    models = ("model", "model/config.json", "builtin:tiny-llama", "someone/something")
    assert all(map(model_check.is_model, models))
    assert not any(map(model_check.is_model, ("runs/one", "runs/missing", "empty", "missing", "./model2", "/a/b")))


def test_a_small_copy_has_what_the_config_says_but_for_sizes() -> None:
    whole = CONFIG_MAPPING["llama"](attention_bias=True, hidden_act="gelu", num_hidden_layers=40, rms_norm_eps=1e-3)
    small = small_copy.config_of(whole)
    assert (small.attention_bias, small.hidden_act, small.rms_norm_eps) == (True, "gelu", 1e-3)
    assert (small.num_hidden_layers, small.hidden_size) == (2, 32)


def test_a_model_that_sees_later_tokens_is_refused_as_a_whole(tmp_path: Path) -> None:
    every_architecture.config("xlm").save_pretrained(tmp_path)
    status, what, code = model_checks.attempt("structure", Copy(str(tmp_path), tmp_path))
    assert (status, code) == ("refused", 7)
    assert "it sees the token it predicts" in what
    assert Examination([Finding("structure", status, what)], code, refused=True).exit_code == 7


def test_layers_between_the_decoder_and_its_head_are_refused_without_weights(tmp_path: Path) -> None:
    copy = a_copy("bert", tmp_path)
    with refusal(ConfigError, "BertLMHeadModel", "`cls.predictions.transform.dense`"):
        build.blueprint(copy.job(), copy.whole, "eager").check(copy.job().adapter)
    status, _, code = model_checks.attempt("structure", copy)
    assert (status, code) == ("refused", 2)


def test_what_a_check_raises_is_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(copy: Copy) -> str:
        raise KeyError("no such layer")

    monkeypatch.setitem(CHECKS, "broken", Check("a check", broken))
    assert model_checks.attempt("broken", Copy("x", tmp_path)) == ("error", "KeyError: 'no such layer'", 0)


def test_a_crash_costs_one_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that end by a signal: the next one goes on with what is left."""
    started: list[dict[str, str]] = []

    class Child:
        exitcode = -11

        def join(self) -> None: ...

        def kill(self) -> None: ...

    def start(name: str, folder: Path, statuses: dict[str, str]) -> Any:
        started.append(statuses)
        here, there = model_check.multiprocessing.Pipe(duplex=False)
        there.send(["first", "second", "third"])
        if not statuses:
            there.send(("first", "trying"))
        else:
            there.send(("second", "ok", "seen", 0))
            there.send(("third", "skipped", "needs `first`", 0))
        there.close()
        return Child(), here

    monkeypatch.setattr(model_check, "_start", start)
    found = model_check.examine("x")
    assert [(one.about, one.status) for one in found.findings] == [
        ("first", "error"), ("second", "ok"), ("third", "skipped")
    ]  # fmt: skip
    assert found.findings[0].what == "its process ended (signal 11)"
    assert started == [{}, {"first": "error"}]
    assert found.exit_code == 7


def test_a_limit_of_the_address_space_is_not_blamed_on_the_model(children: Children) -> None:
    """In which the libraries were imported but not every check may run."""
    little = Fault("finetune.extras.doctor.model_check:examine", memory_bytes=2**30)
    ended = children.run(["doctor", "builtin:tiny-llama"], little)
    assert ended.code == 4, ended.output
    assert re.search(r"^error: the address space of a process is limited to .*`ulimit -v unlimited`", ended.in_one_line)


@pytest.mark.slow
def test_the_built_in_base_does_everything(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_check.examine.__kwdefaults__, "limit_seconds", 1200.0)  # beside other tests
    code, out, _ = call("doctor", os.path.join(locate("builtin:tiny-llama"), "config.json"), "--json")
    said = {one["about"]: one["status"] for one in json.loads(out)["findings"]}
    assert (code, said) == (0, dict.fromkeys(CHECKS, "ok"))
