"""Our config as TRL's arguments, on machines with more GPUs than one process uses. The GPUs are faked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from finetune.errors import MachineError
from finetune.runtime import ranks
from finetune.storage.rundir import RunDirectory
from finetune.training.arguments import arguments

CARD = torch.device("cuda", 0)
Visible = Callable[[int], list[int]]


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Visible:
    """Makes so many GPUs visible; the list has the devices that were chosen."""

    def make(count: int) -> list[int]:
        chosen: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **named: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1] if chosen else 0)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(getattr(device, "index", device)))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "a card")
        return chosen

    return make


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_process_trains_on_one_gpu_however_many_are_visible(
    visible: Visible, quick, tmp_path: Path, count: int
) -> None:
    visible(count)
    assert SFTConfig(output_dir=str(tmp_path)).n_gpu == count, "transformers counts them all"
    found = arguments(quick(), RunDirectory(tmp_path), evaluates=True, resuming=False, device=CARD)
    assert found.device == CARD
    assert found.n_gpu == 1
    assert found.train_batch_size == found.eval_batch_size == quick().training.batch_size


def test_trl_takes_our_arguments_and_refuses_those_that_transformers_makes(
    visible: Visible, quick, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer(given: SFTConfig) -> SFTTrainer:
        return SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(tiny_base),
            args=given,
            train_dataset=Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]}),
            processing_class=AutoTokenizer.from_pretrained(tiny_base),
        )

    monkeypatch.setattr(SFTTrainer, "_move_model_to_device", lambda *args: None)
    visible(2)
    given = arguments(quick(), RunDirectory(tmp_path), evaluates=False, resuming=False, device=CARD)
    assert trainer(given).args.n_gpu == 1
    given._n_gpu = 2
    with pytest.raises(ValueError, match="DataParallel"):
        trainer(given)


def test_no_gpu_is_counted_on_a_cpu(quick, tmp_path: Path) -> None:
    found = arguments(quick(), RunDirectory(tmp_path), evaluates=False, resuming=False, device=torch.device("cpu"))
    assert found.n_gpu == 0


# -- which GPU ---------------------------------------------------------------------------------------------------------


def test_idle_gpus_are_told_with_the_one_that_is_used_and_the_way_to_use_all(visible: Visible) -> None:
    chosen = visible(2)
    ranks.choose_gpu()
    assert chosen == [0], "transformers takes the first, wherever a notebook was before"
    told = ranks.idle_gpus()
    assert told is not None
    assert "2 GPUs are visible" in told
    assert "GPU 0" in told
    assert "torchrun --nproc-per-node 2 " in told


def test_nothing_is_told_where_no_gpu_is_idle(visible: Visible, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.idle_gpus() is None
    visible(1)
    assert ranks.idle_gpus() is None
    visible(2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ranks.idle_gpus() is None


def test_more_processes_than_gpus_are_refused(visible: Visible, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = visible(2)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        ranks.choose_gpu()
    assert chosen == [0, 1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(MachineError, match="--nproc-per-node 2"):
        ranks.choose_gpu()
