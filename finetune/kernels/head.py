"""Log-probabilities of labels by a frozen head, and their gradient in the same pass.

The gradient of a label's log-probability with respect to its hidden state depends on that token alone. So it is
computed while the logits exist, and the backward pass only scales it: two products with the head, where TRL's function
computes the logits again for a third. It is kept instead of the hidden states, in as many bytes.

`objectives.log_probs` lists everything that replaces a part of TRL's function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from trl.kernels import ChunkedLogProbFunction, chunked_logprob

from finetune.kernels import ops

# The product of fewer tokens with the whole vocabulary waits for the head's weights to be read (H100: 295 operations a
# byte).
_LEAST_TOKENS = 512
_BLOCK = 1024  # columns of logits that a kernel takes at a time
# In fp16 the gradient is kept multiplied by this, because it is computed before the loss is scaled: values below 6e-8,
# as for tokens that the model is sure of, would be lost.
_FP16_SCALE = 256.0


class LogProbs(ChunkedLogProbFunction):
    """TRL's function, left to its own code if the head is trained or more than log-probabilities is wanted."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
        chunk_size: int, softcap: float | None, logit_scale: float, outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """From hidden states (tokens, width), the head's weight (vocabulary, width), and labels (tokens)."""
        device, dtype = hidden.device.type, dtype_of(hidden)
        of_hidden, *of_head = ctx.needs_input_grad[:3]
        ctx.ahead = of_hidden and not any(of_head) and weight.dtype is dtype and tuple(outputs) == ("log_probs",)
        if not ctx.ahead:
            of_trl: tuple[Tensor | None, ...] = ChunkedLogProbFunction.forward(
                ctx, hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
            )
            return of_trl
        ctx.set_materialize_grads(False)
        ctx.dtype = hidden.dtype
        ctx.scale = _FP16_SCALE if dtype is torch.float16 else 1.0
        constants = {
            "logit_scale": logit_scale,
            "softcap": softcap or 1.0,
            "inv_t": 1 / temperature,
            "HAS_SOFTCAP": softcap is not None,
        }
        tokens = chunked_logprob.TOKEN_CHUNK_SIZE
        vocabulary = len(weight)
        each = min(tokens, max(tokens * chunk_size // vocabulary, _LEAST_TOKENS))
        gradient = torch.empty_like(hidden, dtype=dtype)
        log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
        logits = hidden.new_empty(min(len(hidden), each), vocabulary, dtype=dtype)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            for at in range(0, len(hidden), each):
                part = slice(at, min(at + each, len(hidden)))
                tile, labels = logits[: part.stop - at], targets[part]
                ops.multiply_(tile, hidden[part].to(dtype), weight.t(), bias)
                log_z = _fold(tile, labels, log_probs[part], constants)
                _unfold_(tile, labels, log_z, ctx.scale, constants)
                ops.multiply_(gradient[part], tile, weight)
        ctx.save_for_backward(gradient)
        return log_probs, None, None, None, None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        if not ctx.ahead:
            of_trl: tuple[Tensor | None, ...] = ChunkedLogProbFunction.backward(ctx, of_log_probs, *others)
            return of_trl
        dx = None
        if of_log_probs is not None:
            (gradient,) = ctx.saved_tensors
            factor = (of_log_probs if ctx.scale == 1 else of_log_probs / ctx.scale).unsqueeze(1)
            dx = torch.mul(gradient, factor, out=torch.empty_like(gradient)).to(ctx.dtype)
        return dx, *[None] * 8


def dtype_of(hidden: Tensor) -> torch.dtype:
    """The type in which the logits of `hidden` are computed."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _fold(logits: Tensor, labels: Tensor, log_probs: Tensor, constants: dict[str, Any]) -> Tensor:
    """Write the log-probabilities of `labels`; returns the logarithms of the sums of exponentials (tokens)."""
    largest = torch.full_like(log_probs, -torch.inf)
    total, of_label, unused = torch.zeros(3, *log_probs.shape, device=log_probs.device)
    _kernel("forward", logits, len(logits))(
        logits, logits.stride(0), labels, largest, total, unused, unused, unused, unused, of_label, 0, logits.shape[1],
        HAS_ENTROPY=False, HAS_LOG_SUM_SQ_PROBS=False, HAS_MEAN_LOGITS=False, HAS_IS_TOP1=False, BLOCK_SIZE=_BLOCK,
        **constants,
    )  # fmt: skip
    log_z = total.log_().add_(largest)
    torch.sub(of_label, log_z, out=log_probs)
    return log_z


def _unfold_(logits: Tensor, labels: Tensor, log_z: Tensor, scale: float, constants: dict[str, Any]) -> None:
    """Replace the logits by `scale` times the gradient of each token's log-probability with respect to them."""
    _kernel("backward", logits, len(logits), -(-logits.shape[1] // _BLOCK))(
        logits, logits.stride(0), labels, log_z, log_z, torch.full_like(log_z, scale), log_z, 0, logits.shape[1],
        HAS_LOGPROB_GRAD=True, HAS_ENTROPY_GRAD=False, BLOCK_SIZE=_BLOCK, **constants,
    )  # fmt: skip


def _kernel(name: str, logits: Tensor, *grid: int) -> Any:
    """TRL's Triton kernel, or its twin of torch's operators without Triton; neither has a public name (1.16)."""
    if chunked_logprob._use_triton(logits.device):  # noqa: SLF001
        return getattr(chunked_logprob, f"_{name}_kernel")[grid]
    return getattr(chunked_logprob, f"_{name}_tile")
