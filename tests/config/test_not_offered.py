"""Facts about values that other tools offer and this one does not: each is said to be missing, with what to use."""

from __future__ import annotations

import pytest
from messages import refusal

from finetune.choices import CHOICES, load_config
from finetune.config import other_names
from finetune.config.sections import Config
from finetune.errors import ConfigError


def refused(key: str, value: object) -> str:
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError) as error:
        load_config({section: {name: value}})
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("training.objective", "ppo", "TRL"), ("training.objective", "bco", "TRL"),
        ("training.objective", "grpo", "TRL"), ("training.objective", "pt", "`data.format: text`"),
        ("quantization.kind", "aqlm", "`nf4`"), ("quantization.kind", "gptq", "`nf4`"),
        ("quantization.kind", "awq", "`nf4`"), ("quantization.kind", "bf16", "`none`"),
        ("adapter.kind", "full", "`none`"), ("adapter.kind", "dora", "`dora: true`"),
        ("adapter.kind", "qlora", "`lora`"), ("adapter.kind", "ia3", "PEFT"), ("adapter.init", "olora", "`pissa`"),
        ("optimizer.kind", "muon", "`adamw_torch_fused`"), ("optimizer.kind", "galore_adamw", "`paged_adamw_8bit`"),
        ("optimizer.kind", "adam", "`sgd`"), ("training.schedule", "cosine_with_min_lr", "`cosine_to_tenth`"),
        ("training.schedule", "wsd", "`linear`"), ("training.precision", "fp8", "`bf16`"),
        ("model.attention", "xformers", "`auto`"), ("distributed.kind", "zero3", "`deepspeed`"),
        ("data.format", "chatml", "`messages`"), ("data.encoding", "latin-1", "`cp1252`"),
        ("data.encoding", "UTF-16", "iconv"), ("data.encoding", "utf-8-sig", "leave it out"),
        ("data.chat_template", "qwen3", "`auto`"), ("tracking.to", "comet_ml", "`wandb`"),
        ("tracking.to", ["wandb", "swanlab"], "`mlflow`"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_offered_is_refused_with_an_alternative(key: str, value: object, instead: str) -> None:
    said = refused(key, value)
    assert f"`{value[-1] if isinstance(value, list) else value}` is not offered: " in said
    assert instead in said
    assert "did you mean" not in said
    assert len(said) <= 350


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("stage=ppo", "write `training.objective`; `ppo` is not offered: "),
        ("rl=grpo", "write `training.objective`; `grpo` is not offered: "),
        ("optim=muon", "write `optimizer.kind`; `muon` is not offered: "),
    ],
)
def test_the_key_of_another_tool_is_answered_by_its_value(line: str, instead: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({}, [line])
    assert instead in str(error.value)
    key, _, value = line.partition("=")
    with pytest.raises(ConfigError) as error:
        load_config({key: value})
    assert instead in str(error.value)
    assert "supervised`" not in str(error.value)


def test_another_tools_name_for_an_offered_value_is_translated() -> None:
    for key, value, here in (
        ("training.objective", "sft", "supervised"),
        ("quantization.kind", "4bit", "nf4"),
        ("model.attention", "flex_attention", "flex"),
        ("training.precision", "bfloat16", "bf16"),
    ):
        assert f"write `{here}`" in refused(key, value)
    with refusal(ConfigError, "`quantization.kind`", "`gptq`"):
        load_config({"quantization": "gptq"})


def test_nothing_that_is_offered_is_in_the_table() -> None:
    defaults = Config().model_dump()
    for key in other_names._NOT_OFFERED:
        section, _, name = key.partition(".")
        assert name in defaults[section]
        for offered in CHOICES.get(key, {}):
            assert other_names.not_offered(key, offered) is None, f"take {offered} out of config/not_offered.json"
