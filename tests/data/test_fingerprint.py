"""A tokenizer has one fingerprint, any other another, and weights are used with the one they were trained with."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import refusal
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import finetune
from finetune.config import ModelSection, dump
from finetune.data import fingerprint
from finetune.errors import ArtifactError
from finetune.model.source.tokenizer import load_tokenizer
from finetune.storage.rundir import RunDirectory

Make = Callable[..., Any]


def test_a_full_disk_is_an_error_of_the_system_whichever_library_writes(
    word_tokenizer: Make, chatml: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        fingerprint.save_tokenizer(word_tokenizer(chatml), None, tmp_path)
    assert raised.value.errno == errno.ENOSPC


def test_template_special_tokens_and_vocabulary_each_change_it_and_use_does_not(
    word_tokenizer: Make, byte_tokenizer: Make, chatml: str
) -> None:
    larger = word_tokenizer(chatml)
    larger.add_tokens(["new"])
    tokenizers = [
        word_tokenizer(chatml), word_tokenizer(chatml + " "), word_tokenizer(chatml, bos_token="<|im_start|>"),
        word_tokenizer(chatml, pad_token="<unk>"), byte_tokenizer(chatml), larger,
    ]  # fmt: skip
    found = [fingerprint.of(tokenizer) for tokenizer in tokenizers]
    assert len(set(found)) == 6
    assert len(bytes.fromhex(found[0])) == 32
    tokenizers[0](["Hi", "Hi there one two"], padding=True, truncation=True, max_length=3)
    assert found[0] == fingerprint.of(tokenizers[0]) == fingerprint.of(word_tokenizer(chatml))


def test_a_tokenizer_without_fast_rules_is_known_by_its_vocabulary(tmp_path: Path) -> None:
    from transformers import PythonBackend

    class Letters(PythonBackend):
        def __init__(self, letters: str, **tokens: Any) -> None:
            self.letters = letters
            super().__init__(eos_token="$", **tokens)

        vocab_size = 3

        def get_vocab(self) -> dict[str, int]:
            return {letter: number for number, letter in enumerate(self.letters)}

        def _convert_token_to_id(self, token: str) -> int:
            return self.letters.find(token)

    assert fingerprint.of(Letters("$ab")) == fingerprint.of(Letters("$ab"))
    assert fingerprint.of(Letters("$ab")) != fingerprint.of(Letters("$ba"))


def test_the_tokenizer_saved_with_the_weights_has_the_recorded_fingerprint(trained: RunDirectory) -> None:
    kept = json.loads((trained.adapter / "fingerprint.json").read_text())["tokenizer"]
    assert kept == fingerprint.of(AutoTokenizer.from_pretrained(trained.adapter))
    assert kept == fingerprint.of(load_tokenizer(trained.config().model))


def test_a_folder_without_a_fingerprint_passes_and_a_damaged_one_does_not(
    word_tokenizer: Make, chatml: str, tmp_path: Path
) -> None:
    tokenizer = word_tokenizer(chatml)
    fingerprint.check(tokenizer, tmp_path)
    for damaged in ('{"tokenizer"', "[]", "{}"):
        (tmp_path / "fingerprint.json").write_text(damaged)
        with refusal(ArtifactError, "fingerprint.json:"):
            fingerprint.check(tokenizer, tmp_path)


@pytest.mark.slow
def test_weights_that_were_changed_since_are_not_merged_but_published_again(quick) -> None:
    config = quick()
    run = finetune.train(config).run
    file = run.adapter / "adapter_model.safetensors"
    before = file.read_bytes()
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    with refusal(ArtifactError, "adapter_model.safetensors:"):
        finetune.merge(run)
    finetune.train(config)
    assert file.read_bytes() == before


@pytest.fixture
def other_tokenizer(run: RunDirectory, tiny_base: Path, tmp_path: Path) -> tuple[RunDirectory, str]:
    """A copy of the trained run whose tokenizer was changed since, and the new fingerprint."""
    changed = Path(shutil.copytree(tiny_base, tmp_path / "changed"))
    rules = json.loads((changed / "tokenizer.json").read_text())
    (changed / "tokenizer.json").write_text(json.dumps(rules | {"normalizer": {"type": "Lowercase"}}))
    config = run.config().changed({"model.tokenizer": str(changed)})
    run.config_file.write_text(dump(config))
    return run, fingerprint.of(load_tokenizer(config.model))


def test_weights_are_not_used_with_another_tokenizer(other_tokenizer: tuple[RunDirectory, str]) -> None:
    run, now = other_tokenizer
    then = fingerprint.of(load_tokenizer(ModelSection()))
    uses: list[Callable[[RunDirectory], object]] = [
        lambda run: finetune.generate(run, "What is `abc`?", max_new_tokens=2), finetune.merge, finetune.evaluate
    ]  # fmt: skip
    for use in uses:
        with refusal(
            ArtifactError, f"{run.adapter} was trained with another tokenizer or chat template",
            f"fingerprint {then[:16]} then, {now[:16]} now", "copy them back", "set `model.tokenizer` to it",
        ):  # fmt: skip
            use(run)
    assert not run.merged.exists()
    run.config_file.write_text(dump(run.config().changed({"model.tokenizer": str(run.adapter)})))
    config = run.config()
    fingerprint.check(load_tokenizer(config.model, config.data), run.adapter)


def test_a_merged_model_is_bound_to_its_tokenizer_too_and_the_base_is_not(
    other_tokenizer: tuple[RunDirectory, str],
) -> None:
    run, _ = other_tokenizer
    assert isinstance(finetune.generate(run, "What is `abc`?", which="base", max_new_tokens=2), str)
    fingerprint.save_tokenizer(load_tokenizer(ModelSection()), None, run.merged)
    with refusal(ArtifactError, "another tokenizer or chat template"):
        finetune.generate(run, "What is `abc`?", which="merged", max_new_tokens=2)
