"""A simulated GPU."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def l4(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports an L4 with 16 GiB, all free."""
    properties = SimpleNamespace(name="NVIDIA L4", total_memory=2**34, multi_processor_count=58, major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**34, 2**34))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
