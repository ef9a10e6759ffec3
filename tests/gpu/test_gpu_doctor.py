"""`finetune doctor` on a machine with a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch

from finetune.extras.doctor import machine

pytestmark = pytest.mark.gpu

OnCard = AbstractContextManager[None]


def test_each_card_and_the_library_for_it_are_reported(cuda: torch.device, on_card: OnCard) -> None:
    found = {one.about: one for one in machine.examine().findings}
    with on_card:
        assert torch.version.cuda in found["CUDA"].what
    for index in range(torch.cuda.device_count()):
        with on_card:
            assert torch.cuda.get_device_name(index) in found[f"GPU {index}"].what
    with on_card:
        assert found["bitsandbytes library"].what == "built for CUDA"
    with on_card:
        assert found["optimizer"].what == "paged_adamw_8bit, the default"
