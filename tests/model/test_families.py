"""This year's architectures compute the loss and the gradients of plain transformers and PEFT, or refuse to."""

from __future__ import annotations

import families
import pytest
from jobs import sampled
from messages import refusal

from finetune.errors import MachineError
from finetune.model.attention import backends

_UNPACKED = {  # what carries a state from row to row, or makes masks without the positions that tell rows apart
    "qwen3_5", "qwen3_5_moe", "glm_moe_dsa", "deepseek_v4", "gpt_oss", "granitemoehybrid", "nemotron", "nemotron_h",
    "minimax",
}  # fmt: skip


def _error(found: families.Gradients, expected: families.Gradients) -> float:
    assert found.keys() == expected.keys()
    squares = sum(float((found[name] - gradient).square().sum()) for name, gradient in expected.items())
    return (squares / sum(float(gradient.square().sum()) for gradient in expected.values())) ** 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*falling back to its reference")
@pytest.mark.parametrize(
    "model_type",
    sampled(
        families.FAMILIES.values(), "deepseek_v4", "gemma4", "gpt_oss", "qwen3_5_moe",
    ),
)  # fmt: skip
def test_a_step_is_that_of_plain_transformers_and_peft(model_type: str) -> None:
    """Rows padded and packed, layers recomputed and not, beside each row by itself."""
    config = families.architecture(model_type)
    model = families.adapted(config, packed=False, recomputed=False)
    loss, gradients = families.plain_step(config, model)
    assert gradients
    for packed in (False, True):
        if packed and model_type in _UNPACKED:
            with refusal(MachineError, "`data.packing`", "data.packing"):
                families.adapted(config, packed=True, recomputed=False)
            continue
        for recomputed in (False, True):
            if packed or recomputed:
                model = families.adapted(config, packed=packed, recomputed=recomputed)
            own_loss, own_gradients = families.step(model, packed=packed)
            assert own_loss == pytest.approx(loss, rel=1e-5)
            assert _error(own_gradients, gradients) < 1e-5


def test_gated_linear_attention_without_its_kernels_is_reported_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "1.7 times" in (backends.without_fla(families.architecture("qwen3_5"), "cuda") or "")
    assert backends.without_fla(families.architecture("qwen3_5"), "cpu") is None
    assert backends.without_fla(families.architecture("gemma3"), "cuda") is None
