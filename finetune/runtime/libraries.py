"""Configures the libraries: no telemetry, no progress bars, and only warnings that a user can act on.

Each silenced message is listed with its reason; all others pass. `before_import` runs when `finetune` is imported,
because some libraries read these settings, or warn, when they are imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import MachineError, first_line
from finetune.runtime import patches

_SILENCED_WARNINGS = (
    # peft 0.21 and trl 1.16 still use names that transformers 5.24 deprecates.
    r"`is_gradient_checkpointing` is deprecated",
    r"`gradient_checkpointing` is deprecated",
    # PEFT's own conversion of PiSSA cannot scale several ranks with rsLoRA; model.adapters.peft_format has another one.
    r"Using Rank-Stabilized LoRA with rank_pattern/alpha_pattern and post-training conversion",
    # tqdm in a notebook wants widgets for progress bars that are switched off.
    r"IProgress not found",
    # bitsandbytes: training.optimizers.choose says the same in one line.
    r"Paged optimizers are not supported on CPU",
    # Engines of ranks call collectives by names that torch 2.13 deprecates.
    r"`torch.distributed.[a-z_]+` is deprecated",
    # torch.utils.checkpoint under autocast requests the state of a CUDA device even in a CPU-only build.
    r"User provided device_type of 'cuda', but CUDA is not available",
)


_SILENCED_LOGS = (
    # bitsandbytes reports on every CPU that an optional kernel package is missing.
    ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward"),
    # lm_eval warns that it is given a model instead of a name, which is meant.
    ("lm_eval.models.huggingface", "`pretrained` model kwarg is not of type"),
    ("lm_eval.models.huggingface", "Passed an already-initialized model"),
    # lm_eval reports each metric for which a task relies on its documented defaults.
    ("lm_eval.api.task", "is defined, but"),
)


# Lets tokenizers use all cores. If it has done so while this is unset, it warns on every later fork.
_PARALLEL = "TOKENIZERS_PARALLELISM"
_PARALLEL_ASKED = os.environ.get(_PARALLEL)


def _after_fork() -> None:
    # A fork does not have the threads that tokenizers may have started, and would wait for them forever.
    global _PARALLEL_ASKED
    os.environ[_PARALLEL] = _PARALLEL_ASKED = "false"


os.register_at_fork(after_in_child=_after_fork)


def _lacks(text: str) -> Callable[[logging.LogRecord], bool]:
    """A filter of messages that contain `text`."""
    return lambda record: text not in record.getMessage()


def before_import() -> None:
    """Set environment variables, warnings and log filters. Imports nothing heavy and keeps the user's settings."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault(_PARALLEL, "false")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes to stderr when it starts and stops
    for message in _SILENCED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for logger, text in _SILENCED_LOGS:
        logging.getLogger(logger).addFilter(_lacks(text))


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Speed up the imports in the block: 2.5 s instead of 4.6 (2026-11, CPU seconds of one core).

    For a process of the command line: the million objects that exist at the end of the block, nearly all of which live
    as long as the process, are excluded from later collections.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        # bitsandbytes first, because torch searches all loaded modules for the source of each operator it registers.
        import_bitsandbytes()
        with models_listed_once(), patches.SCIPY.by(lambda: False):
            yield
        gc.freeze()
    finally:
        if collecting:
            gc.enable()


def import_bitsandbytes() -> None:
    """Import bitsandbytes and torch, without the compiler that it needs for few kernels."""
    import torch

    with patches.COMPILE.by(_compiling_later(torch.compile)):
        import bitsandbytes  # noqa: F401


def _compiling_later(compiling: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` that loads inductor, a second's work, at the first call of the function it is given.

    bitsandbytes 0.50 compiles kernels of its slowest backend when it is imported.
    """

    def later(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = functools.cache(functools.partial(compiling, function, **options))
        return lambda *args, **kwargs: compiled()(*args, **kwargs)

    return later


def models_listed_once() -> contextlib.AbstractContextManager[None]:
    """Keep transformers from reading the 1,600 files of its models a second time when the first model is imported.

    The second listing is of `models/__init__.py`, which is equivalent to the folder.
    """
    import transformers
    from transformers.utils import import_utils

    listed = import_utils.create_import_structure_from_path
    package = Path(transformers.__file__).parent / "models"

    def list_once(path: Any) -> Any:
        return listed(package if str(path) == str(package / "__init__.py") else path)

    return patches.MODELS_LISTING.by(list_once)


@contextlib.contextmanager
def tokenizing_in_parallel() -> Iterator[None]:
    """In the block, tokenizers use all cores, unless the user has set TOKENIZERS_PARALLELISM or this is a fork."""
    if _PARALLEL_ASKED is not None:
        yield
        return
    os.environ[_PARALLEL] = "true"
    try:
        yield
    finally:
        os.environ[_PARALLEL] = "false"


def return_freed_memory() -> None:
    """Release unused memory: unreachable cycles, the CUDA cache, and glibc's heap.

    Models, their hooks and the errors of a failed pass form reference cycles. Quantizing on a CPU frees 16-bit weights
    between small blocks that remain, and glibc would keep these holes resident.
    """
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def exclude_from_collections() -> None:
    """Keep later collections from going through what is in memory now, for as long as `collecting_as_before` says.

    In a sweep from Python, that is half a million objects, and each training adds some ten thousand. Tensors among them
    are not counted any more (`measure.tensors`).
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def collecting_as_before() -> Iterator[None]:
    """After the block, what was excluded in it is collected again, unless this process excludes its imports.

    That is for a notebook, whose own objects were excluded; a process of the command line (`importing`) ends soon.
    """
    excluded = gc.get_freeze_count()
    try:
        yield
    finally:
        if not excluded:
            gc.unfreeze()


def quiet() -> None:
    """Turn off progress bars and logs of transformers, except for errors."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


_IN_USE = threading.RLock()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In the block, torch computes gradients and makes float32 tensors on the CPU, whatever a notebook has set.

    Raises MachineError if another thread is in such a block: both would replace functions of libraries.
    """
    import torch

    dtype = torch.get_default_dtype()
    if not _IN_USE.acquire(blocking=False):
        raise MachineError("another thread of this process is using finetune; wait until it is done, or use a process")
    try:
        on_cpu = contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
        with torch.inference_mode(False), torch.enable_grad(), on_cpu:
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_default_dtype(dtype)
        _IN_USE.release()


def save_model(model: Any, folder: Path | str, **options: Any) -> None:
    """Call `save_pretrained` without importing an engine of ranks only to ask whether it wraps the model."""
    with patches.ENGINE_TO_UNWRAP.by(lambda: False):
        model.save_pretrained(str(folder), **options)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """In the block, the hub is not contacted, not even to check whether cached files are current."""
    with patches.HUB_OFFLINE.by(True):
        yield


DETERMINISTIC_CUBLAS = ":4096:8"
"""`CUBLAS_WORKSPACE_CONFIG` of a deterministic run: eight buffers of 4096 KiB."""


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """In the block, the same computation gives the same bits on a GPU, with slower kernels where needed.

    https://docs.pytorch.org/docs/stable/notes/randomness.html; cuBLAS reads its setting when it is first used.
    """
    import torch

    variables = {"CUBLAS_WORKSPACE_CONFIG": DETERMINISTIC_CUBLAS, "FLASH_ATTENTION_DETERMINISTIC": "1"}
    ours = variables.keys() - os.environ.keys()
    os.environ.update({name: variables[name] for name in ours})
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        for name in ours:
            os.environ.pop(name, None)


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """In the block, scaled_dot_product_attention uses its flash and memory-efficient kernels, never cuDNN's.

    This applies wherever a model runs, so that evaluation and generation use the same kernels as training.

    torch prefers cuDNN's kernel on compute capability 9 and 10, but its backward pass gives NaN gradients of the
    queries with a mask, at lengths of 64 modulo 128 (pytorch/pytorch#196678, huggingface/trl#7181).
    """
    import torch

    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@functools.cache
def correct_dequantization() -> Any:
    """Fix dequantization of 4-bit weights on a CPU if the row length is not a multiple of the block size.

    Such a weight is passed to the kernel as one long row. Returns the registration, which lasts as long as this object.
    """
    import bitsandbytes  # noqa: F401  (registers the kernel)
    import torch

    name = "bitsandbytes::dequantize_4bit"
    kernel = torch.library.get_kernel(name, "CPU")

    def dequantize(
        keys: Any, packed: Any, absmax: Any, blocksize: int, quant_type: str, shape: list[int], dtype: Any
    ) -> Any:
        flat = [math.prod(shape)] if shape[-1] % blocksize else shape
        return kernel.call_boxed(keys, packed, absmax, blocksize, quant_type, flat, dtype).view(shape)

    registration = patches.DEQUANTIZE_4BIT.kernels()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        # torch 2.11 does not replace a kernel registered from Python without `allow_override`.
        registration.impl(name, dequantize, "CPU", with_keyset=True, allow_override=True)
    return registration


@functools.cache
def triton_obstacle() -> str | None:
    """The reason why Triton cannot run kernels on this GPU, in one clause; None if it can. Cached for the process.

    Triton builds its launcher with a C compiler when the first kernel starts (triton, runtime/build.py), and a slim
    container or a cluster node may lack one. The loss has Triton kernels, and so does torch's outer product, which
    every rotary embedding uses (torch 2.13, torch/_native/ops/bmm_outer_product).
    """
    try:
        from finetune.runtime import triton_probe

        triton_probe.run()
    except Exception as error:  # no compiler, no Python.h, no writable cache, a GPU that Triton does not support
        if "out of memory" in str(error):
            return None  # says nothing about the compiler
        return f"{type(error).__name__}: {first_line(error, '')[:160]}"
    return None


def without_triton() -> None:
    """Make torch's outer product use other operators on a GPU instead of its Triton kernel, as `kernels.ops` does.

    A model's kernels from other packages, such as mamba-ssm, are not affected.
    """
    from torch import backends

    if native := getattr(backends, "python_native", None):  # torch 2.11 has no such kernels
        native.triton.disable()
