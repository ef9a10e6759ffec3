"""The one place for everything that a trace of operators misses: memory within an operator, memory outside the
allocator, and the operations of kernels that torch's table does not know.

Some operators are implemented in Python; those are decomposed, so that their parts are traced. Others allocate scratch
memory in a compiled kernel; each such term cites its source. Nothing is fitted to measurements.

A trace runs on fake CPU tensors, whatever device it is for: fake CUDA tensors do not work where torch was built
without CUDA. So `cuda` also says where CUDA's operators differ from those of a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from finetune.forecast import autocast, operators
from finetune.forms import packed
from finetune.kernels import ops as fused
from finetune.runtime import patches
from finetune.runtime.live_tensors import is_profiling

# A CPU's attention, by which a trace also knows that of CUDA, and attention over packed rows.
_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
_VARLEN = "torch_attn::_varlen_attn"

# Multiples that FlashAttention-2 rounds lengths and head sizes up to (torch 2.13,
# aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`).
_FLASH_LENGTH, _FLASH_HEAD = 128, 32
_MASK_ROW = 8
# A sum of booleans, such as a mask of black pixels, first copies them as integers on both devices, and a CPU's norm of
# 16-bit values in float32 copies them as well (torch 2.13, aten/src/ATen/native/ReduceOpsUtils.h `make_reduction`).
_SUM, _NORM = "aten::sum.dim_IntList", "aten::linalg_vector_norm"


@dataclass(frozen=True)
class DeviceOperators:
    """The kernels of one device, by the names of their operators.

    `python`: operators to run as the Python program they are there. `scratch`: for an operator, its arguments and the
    named ones, the sizes in bytes of what its kernel allocates and frees within. `flops`: the operations of operators
    that torch's table (torch.utils.flop_counter) does not know. `launches`: the kernels of operators that launch more
    than one. `as_there`: a context in which the libraries take the paths that they take on that device.
    """

    python: Mapping[str, Callable[..., Any]]
    scratch: Callable[[Any, Any, Any], list[int]]
    flops: Mapping[str, Callable[..., int]]
    launches: Mapping[str, int] = field(default_factory=dict)
    as_there: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def cpu() -> DeviceOperators:
    """The CPU: bitsandbytes' operators are Python programs (bitsandbytes 0.50, `backends/default`, `backends/cpu`)."""
    from bitsandbytes.backends.cpu import ops

    # The two programs of these names have no others.
    updates = ("optimizer_update_32bit", "optimizer_update_8bit_blockwise")
    return DeviceOperators(
        python={
            **fused.ON_CPU,
            "aten::_grouped_mm": _grouped_product_on_cpu,
            "bitsandbytes::gemm_4bit": _gemm_4bit_on_cpu,
            "bitsandbytes::quantize_4bit": _quantize_4bit,
            "bitsandbytes::int8_vectorwise_quant": _quantize_int8,
            "bitsandbytes::int8_vectorwise_dequant": _dequantize_int8,
            **{f"bitsandbytes::{name}": getattr(ops, f"_{name}_cpu") for name in updates},
        },
        scratch=_scratch_on_cpu,
        flops=_FLOPS,
    )


def cuda(*, triton: bool = True) -> DeviceOperators:
    """A CUDA card, from compute capability 7.5 to 12.0: bitsandbytes' optimizers are single kernels there.

    Without `triton` the loss is computed by torch's operators, as on a CPU.
    """
    return DeviceOperators(
        python={
            **({} if triton else fused.WITHOUT_TRITON),
            "aten::_grouped_mm": _grouped_product,
            "aten::slice_backward": _slice_backward,
            "bitsandbytes::gemm_4bit": _gemm_4bit,
            "bitsandbytes::int8_vectorwise_dequant": _dequantize_int8,
        },
        scratch=_scratch_on_cuda,
        flops=_flops_on_cuda(),
        # Row sums, the gradients, and those of the queries from float32 (torch 2.13, flash_bwd_launch_template.h).
        launches=dict.fromkeys((f"{_FLASH}_backward", f"{_VARLEN}_backward"), 3),
        as_there=_on_cuda,
    )


def workspace_bytes(capability: tuple[int, int], setting: str = "") -> int:
    """cuBLAS's workspace, one for the thread of the forward pass and one for autograd's.

    `setting` is that of `CUBLAS_WORKSPACE_CONFIG`, pairs of KiB and number of buffers such as `:4096:8`. It comes from
    the caching allocator, belongs to a (handle, stream) pair and stays; a handle belongs to a thread. cuBLASLt shares
    it. (torch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`, `getNewWorkspace`,
    `setWorkspaceForHandle`: 4096 KiB x 2 + 16 KiB x 8, and 32 MiB on 9.x, 10.x and 12.x.)
    """
    if pairs := re.findall(r":(\d+):(\d+)", setting):
        return 2 * 1024 * sum(int(size) * int(count) for size, count in pairs)
    return 2 * (32 * 2**20 if capability[0] in (9, 10, 12) else (4096 * 2 + 16 * 8) * 1024)


def context_bytes(multiprocessors: int) -> int:
    """The CUDA context with the kernels that torch loads, outside the caching allocator: a bound.

    Read from out-of-memory messages (memory in use by the process, less what the allocator reserved) with CUDA 12 and
    13: 104 to 135 MiB on a T4 (40 multiprocessors), 236 on an L4 (58), 307 to 325 on an RTX 3090 (82), 420 to 504 on
    an A100 (108), 450 to 503 on an RTX 4090 (128), 525 on an H200 (132), 429 on an RTX 6000 Ada (142), 712 on a B200
    (148), 499 on an RTX 5090 (170). None is above 5 MiB a multiprocessor. A slice of a card (MIG) loads the same
    kernels, so it counts as no smaller than the smallest card read.
    """
    return 5 * 2**20 * max(multiprocessors, 40)


def communicator_bytes(ranks: int) -> int:
    """Estimated memory of NCCL on a GPU, outside the caching allocator, for one communicator of `ranks`.

    Until it is measured here: 544 MiB for two A100s and 688 for more (NVIDIA/nccl#964, NVLink, all-reduce of 4 MB). The
    buffers grow with the number of channels, so with less bandwidth between the GPUs they are smaller (#986).
    """
    return (544 if ranks == 2 else 688) * 2**20


def exchange_bytes(ranks: int) -> int:
    """Estimated memory that NCCL adds on a GPU for an all-to-all of `ranks` over NVLink.

    Its buffers are those of each pair of GPUs: with 8 H100s, 3.28 GB (NVIDIA/nccl#1685).
    """
    return int(3.28e9) * (ranks - 1) // 7


def gradient_buckets(sizes: Sequence[int]) -> list[int]:
    """The flat copies of the gradients that DistributedDataParallel keeps, from the trained weights' sizes in bytes.

    Gradients are not views of them (`gradient_as_bucket_view` is false), so they come on top. A bucket ends with the
    weight that fills it, the first one earlier; in the first step all are in one. (torch 2.13,
    nn/parallel/distributed.py `_BucketCapacityConfig`, torch/csrc/distributed/c10d/reducer.cpp `initialize_buckets`,
    `compute_bucket_assignment_by_size`.)
    """
    return _filled(sizes[::-1], (2**20, 25 * 2**20))  # the last weights have their gradients first


def broadcast_buckets(sizes: Sequence[int]) -> list[int]:
    """Flat copies, at most two at once, with which DistributedDataParallel broadcasts the weights of rank 0.

    (torch 2.13, nn/parallel/distributed.py `_sync_module_states`; torch/csrc/distributed/c10d/comm.cpp
    `broadcast_coalesced`.)
    """
    return _filled(sizes, (250 * 2**20,))


def _filled(sizes: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Buckets filled to at least their limit; the last of `limits` applies to all further buckets."""
    buckets = [0]
    for size in sizes:
        if buckets[-1] >= limits[min(len(buckets), len(limits)) - 1]:
            buckets.append(0)
        buckets[-1] += size
    return buckets


def _gemm_4bit(
    A: Any, B: Any, shapeB: Any, absmax: Any, blocksize: int, quant_type: str, bias: Any = None,
    absmax_8bit: Any = None, absmax_code: Any = None, absmax_offset: Any = None,
) -> Any:  # fmt: skip
    """The whole weight in 16 bit, then a product (bitsandbytes 0.50, backends/cuda/ops.py `_dequant_linear_fallback`).

    Taken above 1,536 rows; below, a fused kernel that needs none of it may be, by architecture and shape. For batches
    of up to a few hundred tokens this is therefore a bound.
    """
    bnb = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        dequantized = bnb.dequantize_blockwise(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = dequantized + absmax_offset  # `dequantized` is held to the end, as there
    weight = bnb.dequantize_4bit(B, absmax, blocksize, quant_type, shapeB, A.dtype)
    return torch.nn.functional.linear(A, weight, bias)


def _slice_backward(gradient: Any, sizes: Any, dim: int, start: int, end: int, step: int) -> Any:
    """Zeros, and the gradient copied into its place (torch 2.13, FunctionsManual.cpp `slice_backward`)."""
    whole = gradient.new_zeros(sizes)
    index = [slice(None)] * len(sizes)
    index[dim] = slice(start, min(end, sizes[dim]), step)
    whole[tuple(index)].copy_(gradient)
    return whole


def _gemm_4bit_on_cpu(
    A: Any, B: Any, shapeB: Any, absmax: Any, blocksize: int, quant_type: str, bias: Any = None,
    absmax_8bit: Any = None, absmax_code: Any = None, absmax_offset: Any = None,
) -> Any:  # fmt: skip
    """The same by operators that read the packed weight (bitsandbytes 0.50, backends/default, `gemm_4bit`)."""
    bnb = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        absmax = bnb.dequantize_blockwise(absmax_8bit, absmax, absmax_code, 256, torch.float32) + absmax_offset
    return torch.nn.functional.linear(A, bnb.dequantize_4bit(B, absmax, blocksize, quant_type, shapeB, A.dtype), bias)


def _grouped_product(
    a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None, busiest: Callable[[], int] = int
) -> Any:
    """Products of experts in any type; torch's own shape function knows bfloat16 alone (torch 2.13)."""
    if b.dim() == 3:
        return torch.mm(a, b[0])  # the same number of operations: each row meets one expert
    return torch.empty(offs.numel(), a.shape[0], b.shape[1], dtype=a.dtype)


def _grouped_product_on_cpu(
    a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None, busiest: Callable[[], int] = int
) -> Any:
    """The same, one expert after the other (torch 2.13, native/GroupedMMUtils.h).

    The first is the `busiest`, whose product has the largest scratch memory; the others share the other rows.
    """
    if b.dim() != 3:
        return _grouped_product(a, b, offs)
    out = torch.empty(a.shape[0], b.shape[2], dtype=a.dtype)
    most = busiest()
    others = a.shape[0] - most
    sizes = [most, *(others // max(b.shape[0] - 1, 1) for _ in range(b.shape[0] - 2))]
    sizes += [a.shape[0] - sum(sizes)] if b.shape[0] > 1 else []
    for rows, expert, part in zip(a.split(sizes), b, out.split(sizes), strict=True):
        torch.mm(rows, expert, out=part)
    return out


def _quantize_int8(A: Any, threshold: float = 0.0) -> Any:
    """Scales and integers by torch's operators (bitsandbytes 0.50, backends/default `int8_vectorwise_quant`)."""
    scales = torch.max(A.abs(), dim=1).values.float()
    return torch.round(A * (127.0 / scales.unsqueeze(-1))).to(torch.int8), scales, None


def _dequantize_int8(A: Any, stats: Any) -> Any:
    """Two products in float32, on every device (bitsandbytes 0.50, `_ops.py`); here for the norms of DoRA alone."""
    return A * stats.view(-1, 1) * (1 / 127)


def _quantize_4bit(A: Any, blocksize: int, quant_type: str, quant_storage: Any) -> Any:
    """Quantization by torch's operators, several float32 copies of the weight (bitsandbytes 0.50, backends/default)."""
    flat = A.reshape(-1).float()
    blocks = flat[: flat.numel() // blocksize * blocksize].reshape(-1, blocksize)
    absmax = blocks.abs().max(dim=-1)[0]
    scaled = torch.clamp(blocks * (1.0 / absmax.view(-1, 1)), -1, 1).reshape(-1)
    indices = torch.bucketize(scaled, torch.empty(15), out_int32=True)
    if quant_type == "fp4":
        indices = torch.empty(16, dtype=torch.int64)[indices.long()]  # looked up in 64 bit
    codes = indices.to(torch.uint8)
    return ((codes[::2] << 4) | codes[1::2]).unsqueeze(1), absmax


def _scratch_on_cpu(func: Any, args: Any, named: Any) -> list[int]:
    """Copies of operands in a wider type, sums of 16-bit products in float32, and the tiles of attention."""
    name = func.name()
    if name in _PRODUCTS:
        return _product_scratch(name, args)
    if name in _IN_PARTS:
        return _parts_scratch(name, args, "cpu")
    if name in ("aten::scatter.src", "aten::scatter_.src") and args[0].dtype.itemsize < 4:
        return [4 * args[0].numel()]  # 16-bit values in float32 (native/cpu/ScatterGatherKernel.cpp)
    if name == _FLASH:
        return [*_flash_tiles(*args[:2], tiles=1), *_flash_packed(args[0], args[1], _is_causal(name, args, named))]
    if name == f"{_FLASH}_backward":
        return _flash_backward_tiles(*args[:3])
    if name == _SUM and args[0].dtype is torch.bool:
        return [8 * args[0].numel()]
    if name == _NORM and (dtype := named.get("dtype")) not in (None, args[0].dtype):
        return [dtype.itemsize * args[0].numel()]
    if name == "aten::_safe_softmax":
        return [args[0].numel()]  # whether a row is masked throughout (torch 2.13, native/transformers/attention.cpp)
    if torch.Tag.pointwise in func.tags and not name.startswith(_NOT_PROMOTED):
        written = next((named[name] for name in ("out", "grad_input") if name in named), args[0])
        return _casts(func, [value for value in args if isinstance(value, torch.Tensor) and value.dim()], written)
    return []


_IN_PARTS: dict[str, Callable[..., None]] = {
    "finetune::pack_": packed.encode_in_parts,
    "finetune::unpack_": packed.decode_in_parts,
}
"""The operators on weights in blocks: programs of torch's operators, which take some rows at a time."""


def _parts_scratch(name: str, args: Sequence[Any], on: str) -> list[int]:
    """The most bytes that such a program holds at once on a type of device, beside its arguments."""
    weight = args[2 if name == "finetune::pack_" else 0]
    return [_held_by_a_part(name, packed.part_shape(weight.shape), weight.dtype, args[-1], on)]


@functools.cache
def _held_by_a_part(name: str, shape: torch.Size, dtype: torch.dtype, form: str, on: str) -> int:
    # Tensors on the meta device take the paths of a GPU; what a CPU's search holds is smaller (`scale_search`).
    mode = FakeTensorMode() if on == "cpu" else contextlib.nullcontext()
    with unset_fake_temporarily(), mode:
        weight = torch.empty(shape, dtype=dtype, device="cpu" if on == "cpu" else "meta")
        stored = packed.empty(form, weight)
        tensors = (*stored, weight) if name == "finetune::pack_" else (weight, *stored)
        with _Held(tensors) as held:
            _IN_PARTS[name](*tensors, form)
    return held.most


class _Held(TorchDispatchMode):
    """Counts the bytes of the tensors made in the block, and the `most` that are alive at a time."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.most = self._now = 0
        self._living: dict[int, Any] = {id(tensor.untyped_storage()): None for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        for tensor in tree_leaves(made):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = id(storage), storage.nbytes()  # one object for as long as the storage lives
            if key in self._living:
                continue

            def died(_: Any, key: int = key, size: int = size) -> None:
                self._now -= size
                del self._living[key]

            self._living[key] = weakref.ref(storage, died)
            self._now += size
            self.most = max(self.most, self._now)
        return made


# A mask beside other operands keeps its type (aten/src/ATen/native/TensorAdvancedIndexing.cpp, TensorCompare.cpp).
_NOT_PROMOTED = ("aten::masked_fill", "aten::where")


def _casts(func: Any, operands: list[Any], written: Any) -> list[int]:
    """Temporary copies of operands in their common type, and of a result before it is `written` in place.

    (torch 2.13, aten/src/ATen/TensorIterator.cpp `compute_types`: on a CPU by temporaries, on CUDA within the kernel.)
    """
    if len({operand.dtype for operand in operands}) < 2:
        return []
    common = operands[0].dtype
    for operand in operands[1:]:
        common = torch.promote_types(common, operand.dtype)
    cast = [operand.numel() * common.itemsize for operand in operands if operand.dtype != common]
    if operators.schema(func).is_mutable and written.dtype != common:
        cast.append(written.numel() * common.itemsize)
    return cast


def _product_scratch(name: str, args: Any) -> list[int]:
    """Temporary memory of a product of two matrices, or two batches of matrices, on a CPU.

    MKL takes products of batches, and copies 16-bit matrices that are contiguous neither by rows nor by columns, such
    as those of heads (torch 2.13, aten/src/ATen/native/mkldnn/Matmul.cpp).
    """
    left, right = _PRODUCTS[name](args)
    batch, rows, columns = left.shape[:-2].numel(), left.shape[-2], right.shape[-1]
    operations = 2 * left.numel() * columns
    if left.dtype is torch.bfloat16 and left.dim() == 2 and operations <= _LARGEST_TRIAL and _multiplies_bfloat16():
        if is_profiling():
            return [torch.get_num_threads() * _TILES]
        return _by_trial(left.shape, left.stride(), right.shape, right.stride(), torch.get_num_threads())
    scratch = _float32_sums(left, batch, rows, columns)
    if name in ("aten::bmm", "aten::baddbmm") and right.dtype is torch.bfloat16 and _is_of_onednn():
        matrices = [matrix for matrix in (left, right) if not (matrix.is_contiguous() or matrix.mT.is_contiguous())]
        scratch += [matrix.numel() * matrix.element_size() for matrix in matrices]
    return scratch


_LARGEST_TRIAL = 2**28
"""Operations of the largest product that is run once to learn what it allocates, which takes milliseconds."""


@functools.cache
def _by_trial(rows: Any, row_strides: Any, columns: Any, column_strides: Any, threads: int) -> list[int]:
    """Sizes that this CPU allocates within a bfloat16 product of matrices of these shapes, read from one that is run.

    A CPU with a unit for such products packs blocks of both operands, as many as heuristics choose that know the sizes
    of its caches (oneDNN 3.12, src/cpu/x64/matmul/brgemm_matmul_utils.cpp `init_scratchpad`). torch's older profiler
    reports single allocations as well, without the second that the other one needs to start.
    """
    memory_alone = torch.autograd.ProfilerConfig(
        torch.autograd.ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()
    )
    # The public class around these keeps sums alone.
    enable, disable = torch.autograd._enable_profiler_legacy, torch.autograd._disable_profiler_legacy  # noqa: SLF001
    with unset_fake_temporarily():
        left = torch.empty_strided(rows, row_strides, dtype=torch.bfloat16)
        right = torch.empty_strided(columns, column_strides, dtype=torch.bfloat16)
        out = torch.empty(rows[0], columns[1], dtype=torch.bfloat16)
        enable(memory_alone)
        try:
            torch.mm(left, right, out=out)
        finally:
            events = itertools.chain(*disable())
    sizes = [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]
    return [size for size in sizes if size > 0]  # those below are frees


_TILES = 8 * 1024
"""Bytes that AMX's tiles take: 1 KiB each, four or five as a rule, and no more than the CPU's eight (oneDNN 3.12,
src/cpu/x64/brgemm/brgemm_types.hpp `get_wsp_buffer_size`, `AMX_TILES_NUM`)."""


def _float32_sums(left: Any, batch: int, rows: int, columns: int) -> list[int]:
    """Accumulators of a bfloat16 product: its result in float32, or the tiles of a CPU that has them.

    Without a unit for such products oneDNN keeps the whole result. (oneDNN 3.12, src/cpu/matmul/gemm_based_common.hpp
    `book_acc_scratchpad`, for each thread that has a matrix of its own, in blocks of 64 values; 128 bytes align it.)
    Without AVX-512 oneDNN multiplies none, and torch's own loops allocate nothing (measured with torch 2.13 on an EPYC
    with AVX2 alone). With a unit it packs blocks of the operands instead
    (`_by_trial`), and with AMX each thread has room for the tiles that it sums up in.
    """
    if left.dtype is not torch.bfloat16 or not _is_of_onednn():
        return []
    if _has_amx():
        return [torch.get_num_threads() * _TILES]
    if _multiplies_bfloat16():
        return []
    return [4 * _round_up(min(batch, torch.get_num_threads()) * rows * columns, 64) + 128]


def _is_of_onednn() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices on this CPU, for which it needs AVX-512 or ARM's instructions."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 -- no public name


def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16."""
    return bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def _has_amx() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices in AMX's tiles, which the operating system must permit too.

    (oneDNN 3.12, src/cpu/x64/cpu_isa_traits.hpp `mayiuse`: avx512_core_amx.)
    """
    capabilities = torch.cpu.get_capabilities()
    units = ("amx_int8", "amx_bf16", "avx512_fp16", "avx512_bf16", "avx_vnni")
    return all(capabilities.get(unit) for unit in units) and torch.cpu._init_amx()  # noqa: SLF001 -- asks the system


_PRODUCTS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    **dict.fromkeys(("aten::mm", "aten::mm.out", "aten::bmm"), lambda args: args[:2]),
    **dict.fromkeys(("aten::addmm", "aten::addmm.out", "aten::addmm_", "aten::baddbmm"), lambda args: args[1:3]),
    "aten::linear": lambda args: (args[0].flatten(0, -2), args[1].t()),
}
"""Matrix products: the left operand and the right one, batched alike."""


def _flash_tiles(query: Any, key: Any, *, tiles: int) -> list[int]:
    """Buffers of each thread in a CPU's flash attention: `tiles` of scores in float32, and a copy in 16 bit.

    `query` and `key`: (rows, heads, tokens, head size). (torch 2.13, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp,
    `cpu_flash_attention` and `cpu_flash_attention_backward`: buf, buf_reduced.)
    """
    threads, size = torch.get_num_threads(), query.shape[3]
    rows, columns = _flash_tile(query, key)
    sums = rows * (2 + size) if tiles == 1 else 0  # the forward pass keeps its output, maxima and sums there
    scratch = [4 * threads * (tiles * rows * columns + sums)]
    if query.dtype is not torch.float32:
        scratch.append(query.element_size() * threads * tiles * rows * columns)
    return scratch


def _flash_packed(query: Any, key: Any, causal: bool) -> list[int]:
    """Keys and values in the layout of AMX, and what each thread needs to write it: in the forward pass alone.

    Done where a thread's share of the products is at least four times as large as what it takes to pack. Tokens are
    packed in pairs, in the copy of the scores as well. (torch 2.13, FlashAttentionKernel.cpp `cpu_flash_attention`:
    need_pack, key_t_reorder, value_t_reorder, tranpose_t_reorder, ekvSplitSize; CPUBlas.cpp `could_pack`.)
    """
    (rows, heads, tokens, size), (key_heads, keys) = query.shape, key.shape[1:3]
    if query.dtype is not torch.bfloat16 or min(tokens, keys) < 64 or not _has_amx():
        return []
    threads, (tile, columns) = torch.get_num_threads(), _flash_tile(query, key)
    tiles = -(-rows * heads * -(-tokens // tile) // threads)
    if tiles * tile * (min(tokens, keys) if causal else keys) < 4 * rows * key_heads * keys:
        return []
    packed = [rows * key_heads * size * length for length in (keys, _round_up(keys, 2))]
    return [2 * count for count in (*packed, threads * (columns * size + columns % 2 * tile))]


def _flash_backward_tiles(gradient: Any, query: Any, key: Any) -> list[int]:
    """The same for the backward pass, with row sums, a product's sums, and a gradient that lies otherwise copied."""
    rows, columns = _flash_tile(query, key)
    scratch = _flash_tiles(query, key, tiles=2)
    scratch.append(4 * torch.get_num_threads() * rows)
    scratch += _float32_sums(query, 1, columns, query.shape[3])
    if not gradient.transpose(1, 2).is_contiguous():
        scratch.append(gradient.numel() * gradient.element_size())
    return scratch


def _flash_tile(query: Any, key: Any) -> tuple[int, int]:
    """Rows and columns of a tile of scores (`flash_attention_kernel_impl`)."""
    tokens = query.shape[2]
    return min(256 if tokens >= 768 else 64 if tokens >= 192 else 32, tokens), min(512, key.shape[2])


def _scratch_on_cuda(func: Any, args: Any, named: Any) -> list[int]:
    """The workspaces of attention, of weights in blocks, and of putting features of images in the place of tokens."""
    name = func.name()
    if name in _IN_PARTS:
        return _parts_scratch(name, args, "cuda")
    if name == "aten::masked_scatter":
        # Where each number goes, and the mask for each number (torch 2.13, IndexKernel.cpp `masked_scatter__cuda`,
        # IndexKernel.cu `launch_masked_scatter_kernel`: maskPrefixSum, mask_cont).
        return [8 * args[0].numel(), args[0].numel()]
    if name == _SUM and args[0].dtype is torch.bool:
        return [8 * args[0].numel()]
    if name == _FLASH and named.get("attn_mask") is not None:
        return _padded_mask(args[0], named["attn_mask"])
    if name == f"{_FLASH}_backward":
        return _attention_scratch(*args)
    return _packed_attention_scratch(*args) if name == f"{_VARLEN}_backward" else []


def _padded_mask(query: Any, mask: Any) -> list[int]:
    """A mask that is copied into rows of a multiple of 8, which the memory-efficient kernel wants.

    The copy replaces the mask before the output is made, so that the smaller of these two does not count beside it.
    (aten/src/ATen/native/transformers/attention.cpp, `preprocess_mask`, `pad_bias`.)
    """
    tokens = mask.shape[-1]
    if tokens % _MASK_ROW == 0:
        return []
    padded = mask.numel() // tokens * _round_up(tokens, _MASK_ROW) * mask.element_size()
    return [padded - min(mask.numel() * mask.element_size(), query.numel() * query.element_size())]


def _packed_attention_scratch(
    gradient: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, starts: Any, *rest: Any
) -> list[int]:
    """The same for packed rows (tokens, heads, head size), each of which gets a block more.

    (torch 2.13, flash_api.cpp `mha_varlen_bwd`: dq_accum, softmax_d, dk_expanded, dv_expanded.)
    """
    tokens, heads, size = query.shape
    positions = heads * (tokens + _FLASH_LENGTH * (len(starts) - 1))
    scratch = [4 * positions * _round_up(size, _FLASH_HEAD), 4 * positions]
    if key.shape[1] != heads:
        scratch += [heads * key.shape[0] * size * key.element_size()] * 2
    return scratch


def _attention_scratch(gradient: Any, query: Any, key: Any, *rest: Any) -> list[int]:
    """FlashAttention-2's backward: the gradient of the queries in float32, and a row sum for each query.

    With fewer heads of keys than of queries, gradients of keys and values are made for each query's head first.
    (torch 2.13, flash_api.cpp `mha_bwd`: dq_accum, softmax_d, dk_expanded, dv_expanded.) The memory-efficient kernel,
    which rows of different length take, accumulates the same way (kernel_backward.h, `workspace_elements_gq`).
    """
    batch, heads, length, size = query.shape
    length, size = _round_up(length, _FLASH_LENGTH), _round_up(size, _FLASH_HEAD)
    rows = batch * heads * length
    scratch = [4 * rows * size, 4 * rows]
    if key.shape[1] != heads:
        scratch += [batch * heads * key.shape[2] * key.shape[3] * key.element_size()] * 2
    return scratch


def _round_up(number: int, grain: int) -> int:
    return -(-number // grain) * grain


@contextlib.contextmanager
def _on_cuda() -> Iterator[None]:
    """Let libraries decide as on CUDA where they look at the device.

    Autocast casts as on CUDA. Without an argument `torch.is_autocast_enabled` answers for CUDA (so PEFT, lora/bnb.py,
    and Nemotron call it), which in a trace is the CPU's autocast. And gradients that are clipped one by one on a CPU
    are clipped all at once (torch 2.13, nn/utils/clip_grad.py, which looks at a tensor's class and its device).
    """
    plain = torch.is_autocast_enabled
    with (
        autocast.as_on_cuda(),
        patches.IS_AUTOCAST_ENABLED.by(lambda device_type="cpu": plain(device_type)),
        patches.FOREACH_CLIPPING.by(lambda tensors, device: True),
    ):
        yield


def take_at_once(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that goes from weight to weight on a CPU take all at once, as it does by itself on CUDA.

    Copies are then as large as all gradients, such as SGD's with weight decay. (torch 2.13, optim/optimizer.py
    `_default_to_fused_or_foreach`, which looks at a tensor's class and its device; DTensor is not among the classes.)
    """
    for group in optimizer.param_groups:
        left_to_torch = group.get("foreach", True) is None and group.get("fused") is None
        if left_to_torch and all(type(one) in (torch.nn.Parameter, FakeTensor) for one in group["params"]):
            group["foreach"] = True


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Two products of queries and keys, whole squares (torch.utils.flop_counter `sdpa_flop_count`)."""
    return sdpa_flop_count(query.shape, _heads(key, query), _heads(value, query))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, _heads(key, query), _heads(value, query))


def _heads(key: Any, query: Any) -> torch.Size:
    """The key's shape with a head for each of the query's, which share them in groups."""
    return torch.Size((key.shape[0], query.shape[1], *key.shape[2:]))


def _linear(A: Any, B: Any, *args: Any, **kwargs: Any) -> int:
    """A product with a weight of shape [outputs, inputs]."""
    return 2 * A.numel() * B.shape[0]


def _packed(
    query: Any, key: Any, value: Any, starts: Any, key_starts: Any, longest: int, longest_key: int,
    causal: bool = False, scale: float | None = None, window: Sequence[int] = (-1, -1), *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return sum(
        int(sdpa_flop_count(shape, shape, shape) * _share_in_window(shape[2], window))
        for shape in _packed_shapes(query, longest)
    )


def _packed_backward(
    gradient: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, starts: Any, key_starts: Any, longest: int,
    longest_key: int, causal: bool, rng_state: Any, scale: float | None = None, window: Sequence[int] = (-1, -1),
    *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return sum(
        int(sdpa_backward_flop_count(shape, shape, shape, shape) * _share_in_window(shape[2], window))
        for shape in _packed_shapes(query, longest)
    )


def _packed_shapes(query: Any, longest: int) -> list[torch.Size]:
    """(1, heads, length, head size) of packed rows as long as the longest: a fake tensor does not say where they begin.

    The largest micro-batch is made of the longest rows, so that little is missed.
    """
    whole, rest = divmod(query.shape[0], longest)
    return [torch.Size((1, query.shape[1], length, query.shape[2])) for length in [longest] * whole + [rest]]


def _share_in_window(length: int, window: Sequence[int]) -> float:
    """The share of a row's pairs of tokens inside a window of `window[0]` tokens before a query and itself."""
    if window[0] < 0:
        return 1.0
    width = min(window[0] + 1, length)
    return (length * width - width * (width - 1) / 2) / max(1, length) ** 2


_FLOPS: dict[str, Callable[..., int]] = {
    "aten::linear": _linear,
    _VARLEN: _packed,
    f"{_VARLEN}_backward": _packed_backward,
    _FLASH: _attention,
    f"{_FLASH}_backward": _attention_backward,
}

# Where these operators' arguments say whether attention is causal.
_IS_CAUSAL = {_FLASH: 4, f"{_FLASH}_backward": 7, _VARLEN: 7, f"{_VARLEN}_backward": 10}


def _flops_on_cuda() -> dict[str, Callable[..., int]]:
    def halved_if_causal(name: str) -> Callable[..., int]:
        """FlashAttention leaves out the blocks above the diagonal."""

        def flops(*args: Any, **kwargs: Any) -> int:
            return _FLOPS[name](*args, **kwargs) // (2 if _is_causal(name, args, kwargs) else 1)

        return flops

    onto = ("aten::addmm_", "finetune::multiply_", "finetune::multiply_joined_", "finetune::add_product_")
    return {
        **_FLOPS, **{name: halved_if_causal(name) for name in _IS_CAUSAL},
        "finetune::product": lambda left, right, *_, **__: 2 * left.numel() * right.shape[1],
        "finetune::gated": _gated, "finetune::gated_backward_": _gated_backward,
        **dict.fromkeys(onto, lambda held, left, right, *_, **__: 2 * left.numel() * right.shape[1]),
    }  # fmt: skip


def _gated(gate: Any, up: Any, activation: str, room: int = 0, factor: Any = None, *_: Any, **__: Any) -> int:
    """The product with a factor, if there is one."""
    return 0 if factor is None else 2 * gate.numel() * len(factor)


def _gated_backward(gate: Any, up: Any, da: Any, activation: str, *lows: Any, **__: Any) -> int:
    """The products with `s`, `of_gate` and `of_up`."""
    return 2 * gate.numel() * sum(low.shape[1] for low in lows[:3])


def _is_causal(name: str, args: Any, named: Any) -> bool:
    """Whether a call of an attention operator is causal, by position or by name."""
    index = _IS_CAUSAL[name]
    return bool(args[index] if len(args) > index else named.get("is_causal", False))
