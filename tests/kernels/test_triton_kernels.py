"""The Triton kernels without a GPU: their values in the interpreter, and what compilers make of them for each card."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from finetune.forms import FORMS, packed
from finetune.kernels import decoding_kernels, triton_kernels

WITH_TILES = [name for name, form in FORMS.items() if form.module and form.codec.blocks.tile]
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@pytest.mark.parametrize("chosen", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_the_kernels_compute_what_the_operators_do_on_a_cpu(chosen: str) -> None:
    """In float16 with the long tests."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--noconftest", "-m", chosen,
         Path(__file__).with_name("interpreted.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert re.search(r"\d{2,} passed", done.stdout)


# -- compiled for a card -----------------------------------------------------------------------------------------------


# The kernels that multiply tiles by factors of up to rank 256 (with rank 16, in 16 bit, 100 and 16 KiB).
_LIMITS = dict.fromkeys(("_gated_low", "_gated_backward"), (255, 48 * 1024))


def launch_all(dtype: torch.dtype, *, sizes: bool) -> None:
    """Each kernel as a layer of a large model starts it, with tensors that have no memory; `sizes`: of each size."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    single = torch.float32
    for width in (128, 4096, 16384) if sizes else (4096,):  # heads, Llama 7B, Llama 405B
        x, weight = empty(4, 2048, width), empty(width)
        _, rstd = triton_kernels.rms_norm(x, weight, 1e-5, room=16)
        triton_kernels.rms_norm_backward(x, x, weight, rstd, onto=x, room=16)
    for heads, others, size in ((32, 32, 128), (28, 4, 128), (16, 8, 256)) if sizes else ((28, 4, 128),):
        joint = empty(4, 2048, heads + 2 * others, size)
        triton_kernels.rope_(
            joint[:, :, :heads], joint[:, :, heads:-others], empty(1, 2048, size), empty(1, 2048, size)
        )
    all_ranks = {"silu": (16, 64, 256), "gelu": (16,), "gelu_tanh": (16,)} if sizes else {"silu": (16,)}
    for activation, ranks in all_ranks.items():
        gate, up = empty(4, 2048, 2 * 11008).chunk(2, -1)
        triton_kernels.gated(gate, up, activation, room=16)
        for rank in ranks:
            triton_kernels.gated(gate, up, activation, rank, empty(rank, 11008))
            triton_kernels.gated_backward_(
                gate, up, empty(4, 2048, 11008), activation, empty(8192, rank),
                *empty(8192, 2 * rank).split(rank, 1), single,
            )  # fmt: skip
    logits, labels, sums = empty(4096, 32768), empty(4096, dtype=torch.int64), empty(3, 4096, dtype=single)
    for softcap in (None, 30.0) if sizes else (30.0,):
        triton_kernels.fold_logits_(sums, logits, labels, 32768, 0.5, softcap, 1.0)
        triton_kernels.unfold_logits_(logits, labels, *sums[:2], 32768, 0.5, softcap, 1.0)
    out = empty(11008, 4096 + 16)[:, :4096]
    packed, scales = empty(11008 * 4096 // 2, 1, dtype=torch.uint8), empty(11008 * 64, dtype=single)
    nested = empty(256, dtype=single), empty(2752, dtype=single), empty(dtype=single)
    beside = empty(11008, 4096 + 48), packed, scales, 64, "nf4"
    triton_kernels.decode_4bit_(out, packed, scales.to(torch.uint8), 64, "nf4", *nested)
    triton_kernels.decode_4bit_(*beside, inputs=4096, beside=empty(11008, 16, dtype=single), at=16)
    if sizes:
        triton_kernels.decode_4bit_(out, packed, scales, 64, "nf4")
    triton_kernels.decode_int8_(out, empty(11008, 4096, dtype=torch.int8), empty(11008, dtype=single))
    decode_packed(out, "q4_k")


def decode_packed(out: Tensor, form: str) -> None:
    weight = packed.pack(form, torch.empty(out.shape, dtype=out.dtype, device="meta"))
    how = packed.packing_of(weight)
    assert how is not None
    decoding_kernels.decode_packed_(out, weight.data, how.scales, form)


@pytest.fixture
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, Any]]:
    """Takes the launches of kernels, of which it compiles each for the card of this compute capability."""
    kernels: list[tuple[str, Any]] = []

    def launch(kernel: Any, grid: Any) -> Any:
        def compile_only(*args: Any, **options: Any) -> None:
            kernels.append((kernel.fn.__name__, kernel.warmup(*args, grid=grid, **options)))

        return compile_only

    capability = request.param
    card = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(JITFunction, "__getitem__", launch)
    monkeypatch.setattr(triton_kernels, "_code", lambda kind, device: torch.empty(16, device="meta"))
    monkeypatch.setattr(decoding_kernels, "_table", lambda device: torch.empty(16, device="meta"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", card)
    return kernels


def resources(cubin: bytes, file: Path) -> dict[str, int]:
    """Registers a thread (REG), and how often it moves a value that has no register to or from its stack (SPILLS).

    Not what it reserves as stack, of which ptxas sometimes takes a few bytes that no instruction uses.
    """
    file.write_bytes(cubin)
    command = [CUOBJDUMP, "-res-usage", "-sass", file]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"REG": int(re.findall(r"REG:(\d+)", found)[0]), "SPILLS": len(re.findall(r"\b(?:STL|LDL)\b", found))}


@pytest.mark.parametrize(
    ("compiled", "dtype", "sizes"),
    [
        (90, torch.bfloat16, False),
        # The oldest and the newest, and those between; 86 is as 80 and 89.
        *(
            pytest.param(card, dtype, True, marks=pytest.mark.long)
            for card, dtype in [
                (75, torch.float16), (80, torch.float16), (80, torch.float32), (89, torch.bfloat16),
                (90, torch.bfloat16), (100, torch.bfloat16), (120, torch.bfloat16),
            ]
        ),
    ],
    indirect=["compiled"],
)  # fmt: skip
def test_they_compile_without_spills_and_move_rows_in_large_pieces(compiled, dtype, sizes, tmp_path, subtests) -> None:
    launch_all(dtype, sizes=sizes)
    assert len({name for name, _ in compiled}) == 11
    for place, (name, kernel) in enumerate(compiled):
        with subtests.test(name, launch=place):
            used = resources(kernel.asm["cubin"], tmp_path / "cubin")
            assert used["SPILLS"] == 0
            registers, shared = _LIMITS.get(name, (96, 8 * 1024))
            assert used["REG"] <= registers  # of 65,536; with 96 a third of the threads that a multiprocessor holds
            assert kernel.metadata.shared <= shared
            moved = re.findall(r"\b(ld|st)\.global(?:\.\w+)*\.b16\b", kernel.asm["ptx"])
            assert len(moved) <= 2, (
                "rows in pieces of 16 bytes; a vector that many rows share may come in single values"
            )
            assert "st" not in moved


@pytest.mark.long
@pytest.mark.parametrize("compiled", [80, 89, 120], indirect=True)
def test_each_form_of_packed_weights_compiles_without_spills(compiled, tmp_path, subtests) -> None:
    for form in WITH_TILES:
        decode_packed(torch.empty(11008, 4096 + 16, dtype=torch.bfloat16, device="meta")[:, :4096], form)
    for form, (_, kernel) in zip(WITH_TILES, compiled, strict=True):
        with subtests.test(form):
            used = resources(kernel.asm["cubin"], tmp_path / "cubin")
            assert used["SPILLS"] == 0
            assert used["REG"] <= 96
            assert not re.search(r"\bst\.global(?:\.\w+)*\.b16\b", kernel.asm["ptx"])
