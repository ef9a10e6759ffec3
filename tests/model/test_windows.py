"""Rows longer than a sliding window: attention in blocks gives what a mask of the whole row gives, without the mask."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from finetune.model.attention import packing, windows
from tests.model.test_packing import ARCHITECTURES, SHARED, Watch, in_torch_2_13, model_of, packed

ROWS, TOKENS = 2, 60
EACH, VARLEN, EAGER = (name.replace("packed", "windowed") for name in (packing.EACH, packing.VARLEN, packing.EAGER))
PLAIN = {EACH: "sdpa", EAGER: "eager"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "BLOCK", 8)


def trained(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of the real tokens, of which the last row has fewer, and the gradients of a loss over them."""
    model.zero_grad()
    real = torch.ones_like(ids, dtype=torch.bool)
    real[-1, TOKENS - 11 :] = False
    logits = model(input_ids=ids, use_cache=False).logits[real]
    logits.logsumexp(-1).sum().backward()
    return logits.detach(), [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize(
    ("architecture", "attention", "window"),
    [
        ("mistral", EACH, 5),
        ("mistral", EACH, 8),
        ("gemma3_text", EACH, 20),
        ("gemma2", EAGER, 20),
        ("mistral", EAGER, 5),
    ],
)
def test_blocks_give_what_a_mask_of_the_whole_row_gives(
    architecture: str, attention: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES[architecture], "sliding_window", window)
    ids = torch.randint(3, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    ids[-1, TOKENS - 11 :] = 0
    model = model_of(architecture, attention)
    with Watch() as watch:
        logits, gradients = trained(model, ids)
    if architecture == "mistral":  # the others have layers without a window
        assert (TOKENS, TOKENS) not in watch.made
    model.set_attn_implementation(PLAIN[attention])
    with Watch() as watch:
        expected = trained(model, ids)
    assert (TOKENS, TOKENS) in watch.made
    torch.testing.assert_close(logits, expected[0], rtol=1e-5, atol=1e-5)
    for gradient, plain in zip(gradients, expected[1], strict=True):
        torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("attention", [packing.EACH, packing.EAGER])
def test_packed_rows_longer_than_a_block_see_their_window(attention: str) -> None:
    rows = [[3 + (7 * at + number) % 60 for at in range(length)] for number, length in enumerate([30, 4, 21])]
    inputs = packed(rows)
    del inputs["labels"]
    model = model_of("mistral", attention)
    with Watch() as watch:
        together = model(**inputs, use_cache=False).logits[0]
    assert not watch.made & {(length, length) for length in (30, 21, 55)}
    model.set_attn_implementation("sdpa")
    alone = torch.cat([model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_variable_length_kernel_takes_rows_of_one_length_as_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    def varlen_attn(*tensors: Any, window_size: tuple[int, int], enable_gqa: bool, **options: Any) -> Any:
        calls.append(window_size)
        return in_torch_2_13(*tensors, window_size=window_size, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    ids = torch.randint(3, 64, (3, 7), generator=torch.Generator().manual_seed(1))
    model = model_of("gemma3_text", VARLEN).bfloat16()  # the kernel computes in 16 bit
    found = model(input_ids=ids, use_cache=False).logits.float()
    assert calls == [(4, 0)], "the layer with a window of 5; SDPA has a kernel for the other"
    model.set_attn_implementation("sdpa")
    expected = model(input_ids=ids, use_cache=False).logits.float()
    assert float((found - expected).norm() / expected.norm()) < 4 * 2.0**-7


@torch.no_grad()
def test_a_prompt_is_answered_as_with_plain_attention(subtests: pytest.Subtests) -> None:
    for attention in PLAIN:
        with subtests.test(attention=attention):
            model = model_of("mistral", attention)
            asked = {"input_ids": torch.arange(3, 43)[None], "attention_mask": torch.ones(1, 40).long()}
            ours = model.generate(**asked, max_new_tokens=8, do_sample=False)
            model.set_attn_implementation(PLAIN[attention])
            assert torch.equal(ours, model.generate(**asked, max_new_tokens=8, do_sample=False))


def test_only_rows_that_exceed_a_window_are_taken_apart(subtests: pytest.Subtests) -> None:
    for architecture, given, device, longest, found in [
        ("mistral", "sdpa", "cuda", 6, VARLEN),
        ("mistral", "sdpa", "cuda", 5, "sdpa"),
        ("mistral", "sdpa", "cpu", 13, "sdpa"),
        ("mistral", "sdpa", "cpu", 14, EACH),
        ("gemma2", "eager", "cuda", 14, EAGER),
        ("mistral", "flash_attention_2", "cuda", 100, "flash_attention_2"),
        ("llama", "sdpa", "cuda", 100, "sdpa"),
        ("qwen2", "sdpa", "cuda", 100, "sdpa"),
    ]:
        with subtests.test(architecture=architecture, given=given, device=device, longest=longest):
            config = AutoConfig.for_model(architecture, **{**SHARED, **ARCHITECTURES[architecture]})
            assert packing.windowed(given, config, longest, varlen=device == "cuda") == found


@pytest.mark.parametrize(
    ("name", "eager"), [("sdpa", "eager"), ("packed_sdpa_varlen", packing.EAGER), (EACH, EAGER), (VARLEN, EAGER)]
)
def test_a_forecast_without_flash_attention_keeps_blocks(name: str, eager: str) -> None:
    assert packing.eager_like(name) == eager
