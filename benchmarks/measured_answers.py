"""The memory of real answers on the CPU, from the profiler's account of every allocation, as in measured_step.py."""

from __future__ import annotations

from typing import Any

import torch
from measured_step import _BUILT, _events, _mark
from torch.profiler import ProfilerActivity, profile

from finetune.config import Config
from finetune.model import build
from finetune.model.adapters.adapter import attach
from finetune.model.attention import caches
from finetune.runtime import libraries


def measure(config: Config, architecture: Any, *, rows: int, context: int, cache: str) -> dict[str, int]:
    """Bytes of the complete KV cache, and of all live tensors at the peak, of `rows` prompts that are answered at once.

    Random weights; prompts fill the context but for one token, and the last of several is shorter. The last token that
    is generated never enters the cache, so two are.
    """
    libraries.return_freed_memory()  # else what an earlier model still holds is freed, and counted, in between
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        base = build.blueprint(config, architecture, "sdpa").load(torch.device("cpu"))
        model = attach(base, config.adapter, config.model.name, config.training.seed).eval()
        ids = torch.randint(5, architecture.get_text_config().vocab_size, (rows, context - 1))
        mask = torch.ones_like(ids)
        if rows > 1:
            mask[-1, : context // 4] = 0
        _mark(_BUILT)
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids, attention_mask=mask, past_key_values=caches.make(cache, model.config, context),
                min_new_tokens=2, max_new_tokens=2, do_sample=False, use_cache=True, disable_compile=True,
                return_dict_in_generate=True, pad_token_id=0,
            )  # fmt: skip
    live = peak = 0
    built = False
    for event in _events(profiler):
        live += event.size_bytes
        built |= event.phase == _BUILT
        peak = max(peak, live) if built else 0
    return {"cache_bytes": caches.size_bytes(found.past_key_values), "peak_bytes": peak}
