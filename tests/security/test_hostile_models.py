"""A base or an adapter that would run code, read a pickle or reach out of its folder. Nothing of it happens."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile import TINY, Trap, change, refused

from finetune.config import ModelSection
from finetune.errors import ConfigError
from finetune.model.source.locate import pinned_code
from finetune.storage.rundir import RunDirectory

# -- a base ------------------------------------------------------------------------------------------------------------


def _pickle_alone(base: Path, trap: Trap) -> None:
    (base / "model.safetensors").unlink()
    trap.pickled(base / "pytorch_model.bin")


def _pickle_in_the_index(base: Path, trap: Trap) -> None:
    (base / "model.safetensors").unlink()
    trap.pickled(base / "model-1.bin")
    _index(base, "model-1.bin")


def _pickle_in_the_config(base: Path, trap: Trap) -> None:
    trap.pickled(base / "adapter_model.bin")
    change(base / "config.json", transformers_weights="adapter_model.bin")


def _weights_outside(absolute: bool) -> Callable[[Path, Trap], None]:
    def move(base: Path, trap: Trap) -> None:
        outside = shutil.move(base / "model.safetensors", base.parent / "outside.safetensors")
        _index(base, str(outside) if absolute else "../outside.safetensors")

    return move


def _index(base: Path, file: str) -> None:
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": file, "model.norm.weight": file}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))


def _adapter_beside(base: Path, trap: Trap) -> None:
    trap.pickled(base / "adapter_model.bin")
    config = {"peft_type": "LORA", "base_model_name_or_path": "someone/else", "r": 1, "target_modules": ["q_proj"]}
    (base / "adapter_config.json").write_text(json.dumps(config))


def _code(base: Path, trap: Trap) -> None:
    for name in ("modeling_evil", "configuration_evil", "tokenization_evil"):
        (base / f"{name}.py").write_text(trap.python)


def _code_for_the_config(base: Path, trap: Trap) -> None:
    _code(base, trap)
    change(base / "config.json", model_type="evil", auto_map={"AutoConfig": "configuration_evil.Config"})


def _code_elsewhere_for_the_config(base: Path, trap: Trap) -> None:
    change(base / "config.json", model_type="evil", auto_map={"AutoConfig": "someone/else--configuration_evil.Config"})


def _code_for_the_tokenizer(base: Path, trap: Trap) -> None:
    _code(base, trap)
    auto_map = {"AutoTokenizer": ["tokenization_evil.Tokenizer", None]}
    change(base / "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=auto_map)


def _huge_tokenizer(base: Path, trap: Trap) -> None:
    os.truncate(base / "tokenizer.json", 2**40)  # a hole: it takes no room


def _tokenizer_with_broken_ids(base: Path, trap: Trap) -> None:
    rules = json.loads((base / "tokenizer.json").read_text())
    rules["model"]["vocab"] = {word: 10**18 + index for word, index in rules["model"]["vocab"].items()}
    (base / "tokenizer.json").write_text(json.dumps(rules))


def _says_of_the_base(**values: Any) -> Callable[[Path, Trap], None]:
    return lambda base, trap: change(base / "config.json", **values)


def _packed(name: str) -> Callable[[Path, Trap], None]:
    return _says_of_the_base(quantization_config={"quant_method": "gguf", "modules_to_convert": {name: "q4_k"}})


def _template(text: str) -> Callable[[Path, Trap], None]:
    def write(base: Path, trap: Trap) -> None:
        (base / "chat_template.jinja").write_text(text.replace("TRACE", str(trap.trace)))

    return write


_OUT = "{{ ''.__class__.__base__.__subclasses__()[-1].__init__.__globals__['os'].system('touch TRACE') }}"

BASES: dict[str, tuple[Callable[[Path, Trap], None], str]] = {
    "a pickle alone": (_pickle_alone, "model.safetensors"),
    "a pickle by another name": (lambda base, trap: trap.pickled(base / "model.safetensors"), "model.safetensors"),
    "a pickle in the index": (_pickle_in_the_index, "model-1.bin: only .safetensors files are supported"),
    "a pickle in the config": (_pickle_in_the_config, "adapter_model.bin: only .safetensors files are supported"),
    "weights outside": (_weights_outside(absolute=False), "outside.safetensors, outside its folder"),
    "weights at an absolute place": (_weights_outside(absolute=True), "outside.safetensors, outside its folder"),
    "an adapter beside the model": (_adapter_beside, "adapter_config.json: an adapter next to the base"),
    "code for the config": (_code_for_the_config, "base"),
    "code elsewhere for the config": (_code_elsewhere_for_the_config, "base"),
    "code for the tokenizer": (_code_for_the_tokenizer, "base"),
    "a huge tokenizer": (_huge_tokenizer, "tokenizer.json: 1099511627776 bytes"),
    "a tokenizer with broken ids": (_tokenizer_with_broken_ids, "expected u32"),
    "a config nested without end": (lambda base, trap: (base / "config.json").write_text("[" * 100_000), "base"),
    "packed weights that are not there": (_packed("model.evil.weight"), "'model.evil.weight' is in q4_k"),
    "packed rows that blocks do not divide": (_packed("model.embed_tokens.weight"), "is in q4_k"),
    "a kernel from the hub": (_says_of_the_base(experts_implementation="someone/kernel"), "someone/kernel"),
    "an attention kernel from the hub": (
        _says_of_the_base(attn_implementation="kernels-community/flash-attn"),
        "asks for the kernel 'kernels-community/flash-attn'",
    ),
    "no attention heads": (_says_of_the_base(num_attention_heads=0), "base"),
    "a template that reaches out": (_template(_OUT), "violates its sandbox"),
    "a template nested without end": (
        _template("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
        "nested too deeply",
    ),
}


@pytest.mark.slow
def test_a_hostile_base_is_refused_and_nothing_runs(
    foreign: Path, shallow_base: Path, trap: Trap, training: list[str], call_each, subtests: pytest.Subtests
) -> None:
    commands = []
    for number, (spoil, _) in enumerate(BASES.values()):
        spoil(base := Path(shutil.copytree(shallow_base, foreign / str(number) / "base")), trap)
        commands.append(("train", TINY, *training, f"model.name={base}"))
    for (name, (_, words)), ended in zip(BASES.items(), call_each(*commands), strict=True):
        with subtests.test(name=name):
            refused(ended, words)


@pytest.mark.slow
def test_code_beside_a_known_architecture_is_left_alone(
    base: Path, trap: Trap, training: list[str], tmp_path: Path, call_each
) -> None:
    """Many models ship code that transformers has long had of its own: that is what runs."""
    _code(base, trap)
    for name in ("sitecustomize.py", "torch.py", "custom_generate/generate.py"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(trap.python)
    auto_map = {"AutoConfig": "configuration_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    change(base / "config.json", auto_map=auto_map)
    change(base / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_evil.Tokenizer"]})
    own = [
        (f"model.name={base}", f"model.weights={weights}", f"output.dir={tmp_path / 'out' / weights}")
        for weights in ("pretrained", "random")
    ]
    for ended in call_each(*(("train", TINY, *training, *each) for each in own)):
        assert ended.code == 0, ended.err


def test_foreign_code_needs_a_full_commit_hash(training: list[str], call_each) -> None:
    asked = ("train", TINY, *training, "model.name=someone/model", "model.trust_remote_code=true")
    for ended in call_each(*((*asked, f"model.revision={revision}") for revision in ("null", "main", "abc123"))):
        refused(ended, "needs `revision` to be a full 40-digit commit", code=2)


def test_the_code_of_a_directory_is_pinned_by_nothing_and_never_runs(base: Path, trap: Trap, train) -> None:
    _code_for_the_config(base, trap)
    commit = "abcdef0123" * 4
    ended = train(f"model.name={base}", "model.trust_remote_code=true", f"model.revision={commit}")
    refused(ended, "is a directory, whose code is not pinned to a commit", code=2)


def test_the_commit_holds_for_code_in_another_repository_and_not_for_another_tokenizer() -> None:
    commit = "abcdef0123" * 4
    section = ModelSection(name="someone/model", trust_remote_code=True, revision=commit)
    assert pinned_code(section) == {"trust_remote_code": True, "code_revision": commit}
    assert pinned_code(ModelSection(name="someone/model", revision=commit)) == {"trust_remote_code": False}
    with pytest.raises(ConfigError):
        pinned_code(ModelSection(trust_remote_code=True, revision=commit))


# -- an adapter --------------------------------------------------------------------------------------------------------


def _says(**values: Any) -> Callable[[RunDirectory, Trap], None]:
    return lambda run, trap: change(run.adapter / "adapter_config.json", **values)


def _pickled_adapter(run: RunDirectory, trap: Trap) -> None:
    (run.adapter / "adapter_model.safetensors").unlink()
    trap.pickled(run.adapter / "adapter_model.bin")


def _pickled_covariance(run: RunDirectory, trap: Trap) -> None:
    trap.pickled(run.adapter / "cache.pt")
    change(run.adapter / "adapter_config.json", init_lora_weights="corda",
           corda_config={"cache_file": str(run.adapter / "cache.pt"), "corda_method": "kpm"})  # fmt: skip


ADAPTERS: dict[str, tuple[Callable[[RunDirectory, Trap], None], str]] = {
    "a pickle": (_pickled_adapter, "adapter_model.safetensors"),
    "a pickled cache": (_pickled_covariance, "corda_config"),
    "an import": (_says(megatron_config={"a": 1}, megatron_core="megatron.core.this"), "megatron_c"),
    "another import": (_says(auto_mapping={"base_model_class": "s", "parent_library": "this"}), "auto_mapping"),
    "another method": (_says(peft_type="XLORA", adapters={"a": "someone/else"}), "peft_type"),
    "no method": (_says(peft_type={"a": 1}), "peft_type"),
    "layers without number": (_says(layer_replication=[[0, 4]] * 1000), "layer_replication"),
    "a huge rank": (_says(r=10**9), "`r` is 1000000000"),
    "a regular expression without end": (_says(target_modules="(a+)+$"), "target_modules"),
    "ranks by regular expression": (_says(rank_pattern={"(a+)+$": 8}), "rank_pattern"),
    "another start": (_says(init_lora_weights="eva"), "init_lora_weights"),
}


@pytest.mark.slow
def test_a_hostile_adapter_is_refused_and_nothing_runs(
    foreign: Path, trained: RunDirectory, trap: Trap, call_each, subtests: pytest.Subtests
) -> None:
    runs = [RunDirectory(foreign / str(number)) for number in range(len(ADAPTERS))]
    for run, (spoil, _) in zip(runs, ADAPTERS.values(), strict=True):
        shutil.copytree(trained.path, run.path)
        spoil(run, trap)
    every = call_each(*(("generate", run.path, "--prompt", "x") for run in runs))
    for (name, (_, words)), run, ended in zip(ADAPTERS.items(), runs, every, strict=True):
        with subtests.test(name=name):
            refused(ended, run.adapter, words)


def test_the_base_that_an_adapter_names_is_not_fetched(run: RunDirectory, call) -> None:
    _says(base_model_name_or_path="someone/else", revision="main")(run, None)  # type: ignore[arg-type]
    assert call("generate", run.path, "--prompt", "x", "--max-new-tokens", 2).code == 0


# -- a merged model ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hostile_merged_model_is_refused_without_asking(run: RunDirectory, base: Path, trap: Trap, call) -> None:
    """transformers asks on the terminal whether code may run, where nobody has said so."""
    _code_for_the_config(base, trap)
    base.rename(run.merged)
    refused(call("generate", run.path, "--prompt", "x", "--model", "merged"), run.merged)
    change(run.merged / "config.json", model_type="llama", auto_map={}, attn_implementation="kernels-community/a")
    refused(call("generate", run.path, "--prompt", "x", "--model", "merged"), "the kernel 'kernels-community/a'")
    shutil.rmtree(run.merged)
    run.merged.mkdir()
    (run.merged / "config.json").write_text('{"model_type": "llama"}')
    trap.pickled(run.merged / "pytorch_model.bin")
    refused(call("generate", run.path, "--prompt", "x", "--model", "merged"), run.merged)
