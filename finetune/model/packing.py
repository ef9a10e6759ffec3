"""Attention over packed rows: several rows concatenated into one, which do not attend to each other.

transformers handles a packed row with a quadratic mask over all its tokens. To avoid the mask, its attention function
is called here for each row; on GPUs that support it, PyTorch's variable-length kernel processes all rows at once.
flash-attn and flex_attention support packed rows themselves.

A packed micro-batch has no `attention_mask`, `position_ids` that restart at each row, and `cu_seq_lens_q`: the start of
each row and the end of the last one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import masking_utils

from finetune.errors import MachineError, first_line
from finetune.model import catalog, probes
from finetune.runtime.libraries import replaced

EACH, VARLEN, EAGER = "packed_sdpa", "packed_sdpa_varlen", "packed_eager"
"""Names in transformers: SDPA for each row, PyTorch's variable-length kernel, eager attention for each row."""

# Allowed relative change of a row's logits when other rows are packed with it. In the models tested, 16-bit rounding
# stays below 1%; a row that sees a neighbour changes by a third or more.
_STRAYS = 0.1
# Allowed change of the logits when the tokens of the previous row change, relative to the change if both were one row.
# It is zero except for rounding in a mixture of experts; a convolution over a few tokens causes little more.
_LEAKS = 0.01
_REMEDY = "set `data.packing: false`, and `training.micro_batch_tokens` to keep padding low"


def variant(implementation: str, config: Any, device: str, precision: str) -> str:
    """The variant of `implementation` for packed rows.

    Raises MachineError for an architecture that mixes tokens by other means than the attention replaced here.
    """
    if how := mixes_otherwise(config):
        raise MachineError(f"`data.packing`: {config.model_type} models {how}, which would mix packed rows; {_REMEDY}")
    if implementation != "sdpa":
        return EAGER if implementation == "eager" else implementation
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return VARLEN if device == "cuda" and precision != "fp32" and head <= 256 else EACH


def known(inputs: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """In the block, transformers is told whether the micro-batch `inputs` is packed.

    Otherwise it infers that from the positions, which synchronises with the device in every forward pass (5.23,
    `masking_utils`).
    """
    packed = len(inputs.get("cu_seq_lens_q", ())) > 2
    return replaced(masking_utils, "find_packed_sequence_indices", _row_numbers if packed else lambda positions: None)


def _row_numbers(positions: torch.Tensor) -> torch.Tensor:
    """The row index of each token, from where positions (1, tokens) restart."""
    numbers: torch.Tensor = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    return numbers


def mixes_otherwise(config: Any) -> str | None:
    """How a model mixes tokens other than by transformers' attention functions; None if its class does not say.

    A recurrent model carries a state from token to token. Older code, such as that of Bloom, MPT and Falcon, does not
    use transformers' attention registry, or looks into its own table first.
    """
    if (found := catalog.model_class(config)) is None:
        return None
    if catalog.says(found, "_is_stateful"):
        return "are recurrent"
    beside = vars(sys.modules[found.__module__])
    if "ALL_ATTENTION_FUNCTIONS" not in beside or any(name.endswith("ATTENTION_CLASSES") for name in beside):
        return "have attention functions of their own"
    return None


def register() -> None:
    """Register the implementations with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask

    sdpa = _by_row(lambda module: sdpa_attention_forward, _sdpa_mask)
    AttentionInterface.register(EACH, sdpa)
    AttentionInterface.register(VARLEN, _varlen(sdpa))
    AttentionInterface.register(EAGER, _by_row(eager_of, _eager_mask))
    for name, mask in ((EACH, sdpa_mask), (VARLEN, sdpa_mask), (EAGER, eager_mask)):
        AttentionMaskInterface.register(name, _none_where_packed(mask))


def _none_where_packed(make: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' mask function, returning None for packed rows: no padding mask, but not plainly causal."""

    def mask(*args: Any, attention_mask: Any = None, allow_is_causal_skip: bool = True, **kwargs: Any) -> Any:
        if attention_mask is None and not allow_is_causal_skip:
            return None
        return make(*args, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **kwargs)

    return mask


def _by_row(
    attention_of: Callable[[Any], Callable[..., Any]], mask_of: Callable[[int, int | None, torch.Tensor], Any]
) -> Callable[..., Any]:
    """An attention function that calls the module's own one for each row, with a mask for that row if needed."""

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, cu_seq_lens_q: Any = None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        attend = attention_of(module)
        if attention_mask is not None or cu_seq_lens_q is None:
            return attend(module, query, key, value, attention_mask, **options)
        lengths = _lengths(cu_seq_lens_q)
        window = _window(module, max(lengths), options)
        rows = zip(lengths, query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
        outputs = [
            attend(module, row_query, row_key, row_value, mask_of(length, window, query), **options)[0]
            for length, row_query, row_key, row_value in rows
        ]
        return torch.cat(outputs, dim=1), None

    return attention


def _window(module: Any, longest: int, options: dict[str, Any]) -> int | None:
    """The layer's sliding window, or None. Some models pass it to the mask function and not to attention."""
    if "sliding_window" in options or hasattr(module, "sliding_window"):
        found: int | None = options.get("sliding_window", getattr(module, "sliding_window", None))
        return found
    window = getattr(module.config, "sliding_window", None)
    if window is not None and longest > window and getattr(module.config, "use_sliding_window", True):
        raise MachineError(
            f"`data.packing`: {type(module).__name__} does not say which of its layers have the sliding window of "
            f"{window} tokens, but a row has {longest}; set `data.packing: false`, or `data.max_length: {window}`"
        )
    return None


def _lengths(starts: torch.Tensor) -> list[int]:
    return [end - start for start, end in itertools.pairwise(starts.tolist())]


def _sdpa_mask(length: int, window: int | None, query: torch.Tensor) -> Any:
    """None if SDPA's `is_causal` flag suffices."""
    if window is None or window >= length:
        return None
    return _mask(length, window, query)


def _eager_mask(length: int, window: int | None, query: torch.Tensor) -> Any:
    seen = _mask(length, window, query)
    return torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)


def _mask(length: int, window: int | None, query: torch.Tensor) -> torch.Tensor:
    """The keys that each query sees, as booleans (1, 1, length, length)."""
    at = torch.arange(length, device=query.device)
    behind = at[:, None] - at[None, :]
    seen = behind >= 0
    if window is not None:
        seen = seen & (behind < window)
    return seen[None, None]


def eager_of(module: Any) -> Callable[..., Any]:
    """The eager attention in the model's own module, with its specifics (soft caps, sinks)."""
    found: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return found


def _varlen(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """All rows in one call of `torch.nn.attention.varlen`; unpacked micro-batches use `otherwise`."""

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
        cu_seq_lens_q: Any = None, max_length_q: int | None = None, **options: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        if attention_mask is not None or cu_seq_lens_q is None or options.get("dropout"):
            # The kernel has no dropout.
            return otherwise(
                module, query, key, value, attention_mask, scaling=scaling, cu_seq_lens_q=cu_seq_lens_q, **options
            )
        from torch.nn.attention.varlen import varlen_attn

        window = _window(module, int(max_length_q or 0), options)

        # The kernel computes in 16 bit. Under autocast, norms may have produced float32 queries and keys.
        dtype = value.dtype if value.dtype != torch.float32 else torch.get_autocast_dtype(value.device.type)
        query, key, value = (part.transpose(1, 2).squeeze(0).to(dtype) for part in (query, key, value))
        output = varlen_attn(
            query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling,
            # The kernel's window excludes the query's own position; transformers' includes it.
            window_size=(-1 if window is None else window - 1, 0),
            **({"enable_gqa": query.shape[1] != key.shape[1]} if _asks_for_groups(varlen_attn) else {}),
        )  # fmt: skip
        return output.unsqueeze(0), None

    return attention


@functools.cache
def _asks_for_groups(varlen_attn: Callable[..., Any]) -> bool:
    """Whether grouped-query attention needs an argument; torch 2.11 has none and supports it implicitly."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def prove(model: Any) -> None:
    """Check on `model` itself that a packed row's logits do not depend on the row before it.

    Runs five short forward passes under the autocast of a step. Raises MachineError for a model that mixes packed rows
    or does not support them.
    """
    first, other, row = (each[0] for each in probes.rows(3, probes.TOKENS, model))
    try:
        alone = _last_logits(model, [row])
        after, joined = (
            [_last_logits(model, rows(before))[-len(row) :] for before in (first, other)]
            for rows in (lambda before: [before, row], lambda before: [torch.cat([before, row])])
        )
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # code not written for packed rows may raise anything
        raise MachineError(
            f"`data.packing`: this model cannot take packed rows ({first_line(error)}); {_REMEDY}"
        ) from error
    strayed = max(float((each - alone).norm() / alone.norm().clamp(min=1e-30)) for each in after)
    moved, mixed = (float((one - two).norm()) for one, two in (after, joined))
    # Non-finite logits are reported by `causality.prove`.
    if math.isfinite(strayed) and not (strayed <= _STRAYS and moved <= _LEAKS * mixed):
        raise MachineError(
            f"`data.packing`: packed rows influence each other in this model (by {strayed:.1%}); {_REMEDY}"
        )


def _last_logits(model: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Centred logits (tokens, vocabulary) of the last of the packed `rows`."""
    lengths, device = [len(row) for row in rows], model.device
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    number = torch.arange(len(rows), dtype=torch.int32, device=device)  # row index
    return probes.logits(
        model,
        input_ids=torch.cat(list(rows))[None],
        position_ids=torch.cat([torch.arange(length, device=device) for length in lengths])[None],
        cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=max(lengths), max_length_k=max(lengths),
        seq_idx=number.repeat_interleave(starts.diff())[None],
    )[0, -lengths[-1] :]  # fmt: skip
