"""`finetune doctor` on a machine with a GPU."""

from __future__ import annotations

import pytest
import torch

from finetune.extras.doctor import machine

pytestmark = pytest.mark.gpu


def test_each_card_and_the_library_for_it_are_reported(cuda: torch.device) -> None:
    found = {one.about: one for one in machine.examine().findings}
    assert torch.version.cuda in found["CUDA"].what
    for index in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_name(index) in found[f"GPU {index}"].what
    assert found["bitsandbytes library"].what == "built for CUDA"
    assert found["optimizer"].what == "paged_adamw_8bit, the default"
