"""Settings of libraries that apply to the whole process."""

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes import functional
from transformers import GPT2Config, GPT2LMHeadModel

from finetune.runtime import libraries

FORKED = """
import os, signal
import finetune
from finetune.runtime.libraries import tokenizing_in_parallel
from tokenizers import Tokenizer, models

tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))

def tokenize():
    with tokenizing_in_parallel():
        assert len(tokenizer.encode_batch(["a"] * 64)) == 64

tokenize()
if (child := os.fork()) == 0:
    signal.alarm(600)
    tokenize()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_can_tokenize_after_parallel_tokenization() -> None:
    """A fork lacks the threads of tokenizers, which would otherwise wait for them forever."""
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    ended = subprocess.run([sys.executable, "-c", FORKED], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""


def test_a_model_is_saved_without_importing_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing DeepSpeed takes a second, and warns of a missing accelerator."""
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16, n_positions=8))
    libraries.save_model(model, tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert "deepspeed" not in sys.modules


# -- 4-bit weights on a CPU --------------------------------------------------------------------------------------------


@torch.compiler.set_stance("force_eager")  # bitsandbytes compiles its code for odd rows, for each shape anew
def test_4_bit_weights_are_dequantized_by_the_scale_of_their_own_block(subtests: pytest.Subtests) -> None:
    """Blocks of 64 weights continue across rows."""
    libraries.correct_dequantization()
    for dtype, kind in [(torch.float32, "nf4"), (torch.bfloat16, "fp4")]:
        for shape in [(8, 64), (8, 128), (8, 96), (7, 96), (64, 32), (7, 33), (3, 5), (4, 6, 32), (160,)]:
            with subtests.test(dtype=dtype, kind=kind, shape=shape):
                weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
                packed, state = functional.quantize_4bit(weight, quant_type=kind, blocksize=64)
                found = functional.dequantize_4bit(packed, state)
                codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten()
                values = codes[: weight.numel()]
                scales = state.absmax.repeat_interleave(64)[: weight.numel()]
                assert torch.equal(found, (state.code[values.long()] * scales).to(dtype).view(shape))
                assert (found - weight).float().norm() < 0.15 * weight.float().norm()


def test_a_4_bit_layer_computes_with_its_dequantized_weight_in_both_passes() -> None:
    libraries.correct_dequantization()
    for inputs in (96, 128):
        layer = bnb.nn.Linear4bit(inputs, 48, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
        weight = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        x = torch.randn(5, inputs, requires_grad=True)
        found = layer(x)
        found.sum().backward()
        assert torch.equal(found, x @ weight.T)
        assert torch.equal(x.grad, torch.ones(5, 48) @ weight)


def test_kernels_compiled_on_import_are_compiled_once_at_their_first_call() -> None:
    compiled: list[tuple[str, bool]] = []

    def compiling(function: Callable[[int], int], *, dynamic: bool) -> Callable[[int], int]:
        compiled.append((function.__name__, dynamic))
        return function

    def double(value: int) -> int:
        return 2 * value

    called = libraries._compiling_later(compiling)(double, dynamic=False)
    assert compiled == []
    assert [called(1), called(2)] == [2, 4]
    assert compiled == [("double", False)]


@pytest.mark.parametrize("imports_excluded", [False, True])
def test_excluded_objects_are_collected_again_unless_imports_were_excluded(
    imports_excluded: bool,
) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    gc.unfreeze()
    if imports_excluded:
        gc.freeze()
    try:
        with libraries.collecting_as_before():
            cycle = weakref.ref(made := Cycle())
            libraries.exclude_from_collections()
            del made
            later = weakref.ref(Cycle())
            gc.collect()
            assert (cycle() is None, later() is None) == (False, True)
        gc.collect()
        assert (cycle() is None) != imports_excluded
    finally:
        gc.unfreeze()
