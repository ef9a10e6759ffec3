"""The head that scores labels gives what TRL's own gives, and leaves the model's other passes alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from finetune.objectives import fused_head

_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Each family that does something else with its logits, and mixtures that count their experts by another name.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "cohere": {"logit_scale": 0.5},
    "granite": {"logits_scaling": 4.0},
    "gemma2": {"final_logit_softcapping": 5.0, "head_dim": 8},
    "hyperclovax": {"logits_scaling": 3.0},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
        "output_router_logits": True,
    },
}  # fmt: skip
_IDS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(0))
_LABELS = _IDS.masked_fill(torch.arange(12) % 3 == 0, -100)


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **_SIZES, **_FAMILIES[family]))


def scores(model: Any, **labels: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """The head's result, and the gradient of all weights."""
    found = model(input_ids=_IDS, attention_mask=torch.ones_like(_IDS), fused_lm_head=True, **labels)
    total = found.log_probs.sum() + (0 if found.aux_loss is None else found.aux_loss)
    return found, list(torch.autograd.grad(total, list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("family", _FAMILIES)
def test_labels_are_scored_as_by_trl(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: True)  # so that it scores labelled tokens alone
    ours = model_of(family)
    theirs = copy.deepcopy(ours)
    fused_head.add(ours)
    add_fused_lm_head(theirs)
    shifted = torch.nn.functional.pad(_LABELS[:, 1:], (0, 1), value=-100)
    for labels in ({"labels": _LABELS}, {"shift_labels": shifted}, {"labels": torch.full_like(_LABELS, -100)}):
        (found, gradients), (expected, as_expected) = scores(ours, **labels), scores(theirs, **labels)
        for name in ("loss", "log_probs", "label_mask", "aux_loss"):
            one, other = getattr(found, name), getattr(expected, name)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other), name
        assert all(map(equal, gradients, as_expected))


def equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


def test_other_passes_stay_the_models_own() -> None:
    plain = model_of("llama").eval()
    model = copy.deepcopy(plain)
    fused_head.add(model)
    asked = {"input_ids": _IDS, "labels": _LABELS}
    assert torch.equal(model(**asked).logits, plain(**asked).logits)
    assert torch.equal(model(**asked).loss, plain(**asked).loss)
    asked = {"input_ids": _IDS, "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(**asked), plain.generate(**asked))
