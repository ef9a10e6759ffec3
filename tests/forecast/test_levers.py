"""The levers: what is left to try, first those that change no result, and none that is pulled already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.choices import load_config
from finetune.config import Config, dump
from finetune.forecast.levers import levers


def names(**changes: Any) -> list[str]:
    changes = {"memory__checkpointing": "all", **changes}
    return [str(lever) for lever in levers(job(**changes))]


def job(**changes: Any) -> Config:
    return Config().changed({key.replace("__", "."): value for key, value in changes.items()})


def test_the_default_jobs_levers_come_in_the_order_in_which_to_try_them() -> None:
    assert names() == [
        "memory.loss_tokens=512",
        "training.micro_batch=2",
        "memory.checkpointing=all memory.offload=checkpoints",
        "adapter.rank=8",
        "data.max_length=512",
    ]


def test_levers_that_keep_the_result_come_first_and_4_bits_before_a_smaller_job() -> None:
    found = names(memory__checkpointing="none", quantization__kind="none")
    assert found[:3] == ["memory.loss_tokens=512", "training.micro_batch=2", "memory.checkpointing=all"]
    assert found.index("quantization.kind=nf4") < found.index("adapter.rank=8")


def test_without_an_adapter_one_is_offered_with_a_quantized_base() -> None:
    found = names(adapter__kind="none", quantization__kind="none")
    assert "adapter.kind=lora quantization.kind=nf4" in found
    assert not any("rank" in lever for lever in found)
    assert "quantization.kind=nf4" not in found


def test_where_a_lever_is_pulled_it_is_not_offered() -> None:
    pulled = {"training__micro_batch": 1, "memory__loss_tokens": 512, "memory__offload": "checkpoints"}
    assert names(**pulled, adapter__rank=8, data__max_length=64) == []
    assert "training.micro_batch" not in "".join(names(training__micro_batch="auto"))
    # Micro-batches by tokens shrink to the longest row and no further.
    for tokens, less in ((4096, 2048), (1536, 1024), (1024, None)):
        found = names(training__micro_batch_tokens=tokens, data__max_length=1024)
        expected = [f"training.micro_batch_tokens={less}"] if less else []
        assert [lever for lever in found if "micro_batch" in lever] == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memory__checkpointing": "none", "quantization__kind": "int8", "training__micro_batch": 16},
        {"adapter__kind": "none", "quantization__kind": "none", "training__batch_size": 3, "training__micro_batch": 3},
        {"training__batch_size": 12, "training__micro_batch": 6},
        {"training__batch_size": 15, "training__micro_batch": 5},
    ],
)
def test_every_lever_leads_to_a_config_that_is_valid_and_another(changes: dict[str, Any], tmp_path: Path) -> None:
    before = job(output__dir="a run", **changes)
    for number, lever in enumerate(levers(before)):
        after = before.changed(lever.changes)
        file = tmp_path / f"{number}.yaml"
        file.write_text(dump(after))
        assert load_config(file) == after != before
        assert lever.cost
