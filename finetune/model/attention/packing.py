"""Attention over packed rows: several rows concatenated into one, which do not attend to each other.

transformers handles a packed row with a quadratic mask over all its tokens, and so it does a sliding window. To avoid
the mask, its attention function is called here for each row, or each block of a row (`windows`); on GPUs that support
it, PyTorch's variable-length kernel processes all rows at once, packed or not. flash-attn and flex_attention support
packed rows and windows themselves.

A packed micro-batch has no `attention_mask`, `position_ids` that restart at each row, and `cu_seq_lens_q`: the start of
each row and the end of the last one. Here a row is one sequence.

Sequences that begin with the same tokens, such as both answers to a prompt, can have them computed once, in the first
of them (arXiv 2410.20305). The others then consist of the tokens that follow, at the positions after the shared ones,
and attention sees the keys and values of the shared tokens before their own: `key_parts` has the lengths of the parts
into which keys are split, and the order in which parts make up the sequences, whose starts are `cu_seq_lens_k`.

What keeps rows apart in a step: `training.collator` joins them and adds `places`; `backends.choose` gives the model the
name of a `variant` when it is loaded; and the function that `register` has given that name splits by `cu_seq_lens_q`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad

from finetune.errors import MachineError
from finetune.model.attention import windows
from finetune.model.source import catalog
from finetune.runtime import patches

EACH, VARLEN, EAGER = "packed_sdpa", "packed_sdpa_varlen", "packed_eager"
"""Names in transformers: SDPA for each row, PyTorch's variable-length kernel, eager attention for each row."""
_PACKED, WINDOWED = "packed", "windowed"
"""Prefixes of the names; the second is for rows that are not packed, but longer than a layer's window."""

_FLASH = ("flash_attention_2", "flash_attention_3")

KeyParts: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The lengths of the parts of keys, and the order in which they make up the sequences."""

REMEDY = "set `data.packing: false`, and `training.micro_batch_tokens` to keep padding low"


def places(lengths: Sequence[int], shared: Sequence[int] = (), device: Any = "cpu") -> dict[str, Any]:
    """The keyword arguments that tell a model where packed sequences of these `lengths` begin.

    `shared`: how many tokens each sees before its own, which are the first ones of the last sequence that sees none.
    """
    before = list(shared) or [0] * len(lengths)
    seen = [own + first for own, first in zip(lengths, before, strict=True)]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    key_starts = starts
    if any(before):
        key_starts = torch.tensor([0, *itertools.accumulate(seen)], dtype=torch.int32, device=device)
    sizes: list[int] = []
    order: list[int] = []
    first = 0  # the part that the sequences of a row share
    for length, sees, after in zip(lengths, before, [*before[1:], 0], strict=True):
        if not sees:
            first = len(sizes)
        own = [after, length - after] if after and not sees else [length]
        order += [*([first] if sees else []), *range(len(sizes), len(sizes) + len(own))]
        sizes += own
    positions = [torch.arange(first, end, device=device) for first, end in zip(before, seen, strict=True)]
    number = torch.arange(len(lengths), dtype=torch.int32, device=device)
    return {
        "position_ids": torch.cat(positions)[None],
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": key_starts,
        "max_length_q": max(lengths),
        "max_length_k": max(seen),
        "seq_idx": number.repeat_interleave(starts.diff())[None],
        **({"key_parts": (tuple(sizes), tuple(order))} if any(before) else {}),
    }


def whole(parts: KeyParts | None, tokens: torch.Tensor, dim: int) -> torch.Tensor:
    """The tokens of all sequences one after the other, those that they share repeated.

    By parts rather than by an index, whose gradient CUDA would sum in any order.
    """
    if parts is None:
        return tokens
    sizes, order = parts
    split = tokens.split(sizes, dim)
    return torch.cat([split[number] for number in order], dim)


def cannot_share(attention: str, config: Any) -> str | None:
    """Why sequences cannot share tokens in a model, by the name of its attention in the config, in one clause; None if
    they can.
    """
    if attention == "flex":
        return "flex_attention has masks of its own"
    if catalog.model_class(config) is None:
        return "the model has its own code"
    return "attention is in chunks" if any(catalog.values(config, "attention_chunk_size")) else None


def variant(implementation: str, config: Any, *, varlen: bool) -> str:
    """The variant of `implementation` for packed rows; `varlen`: the device has a variable-length flash kernel.

    Raises MachineError for an architecture that mixes tokens by other means than the attention replaced here.
    """
    if how := mixes_otherwise(config):
        raise MachineError(f"`data.packing`: {config.model_type} models {how}, which would mix packed rows; {REMEDY}")
    if implementation != "sdpa":
        return EAGER if implementation == "eager" else implementation
    if not varlen:
        return EACH
    sizes = [size for size in catalog.values(config, "head_dim") if size]
    if not sizes:
        hidden, heads = (catalog.values(config, name) for name in ("hidden_size", "num_attention_heads"))
        sizes = [size // count for size, count in zip(hidden, heads, strict=True)]
    return VARLEN if max(sizes) <= 256 else EACH  # the largest head of the kernel


def windowed(implementation: str, config: Any, longest: int, *, varlen: bool) -> str:
    """The variant of `implementation` for rows of up to `longest` tokens, not packed, if they exceed a window."""
    window = windows.of(config)
    if window is None or catalog.model_class(config) is None or mixes_otherwise(config):
        return implementation
    packed = variant(implementation, config, varlen=varlen)
    exceeds = packed.startswith(_PACKED) and longest > window + _beyond(packed)
    return packed.replace(_PACKED, WINDOWED) if exceeds else implementation


def eager_like(name: str) -> str:
    """Eager attention for the same rows: packed, longer than a window, or neither."""
    if name.startswith(WINDOWED):
        return EAGER.replace(_PACKED, WINDOWED)
    return EAGER if name.startswith(_PACKED) else "eager"


def _beyond(name: str) -> int:
    """The number of tokens by which rows may exceed a window and still get transformers' mask."""
    return 0 if name == VARLEN else windows.BLOCK


@contextlib.contextmanager
def known(inputs: dict[str, Any]) -> Iterator[None]:
    """In the block, transformers takes from here whether the micro-batch `inputs` is packed, not from its positions.

    Finding out from positions would wait for the GPU. With row numbers, transformers asks for a mask without
    `allow_is_causal_skip`, by which `_without_squares` knows packed rows.
    """
    packed = len(inputs.get("cu_seq_lens_q", ())) > 2

    def row_numbers(positions: torch.Tensor) -> torch.Tensor | None:
        """The row index of each token, from where positions (1, tokens) restart."""
        return (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1) if packed else None

    with (
        patches.PACKED_INDICES.by(row_numbers),
        patches.PACKED_SEQUENCE.by(lambda position_ids, batch_size: False),
    ):
        yield


def mixes_otherwise(config: Any) -> str | None:
    """A clause on how a model mixes tokens apart from transformers' attention functions; None if it does not.

    A recurrent model carries a state from token to token. Older code, such as that of Bloom, MPT and Falcon, does not
    use transformers' attention registry, or looks into its own table first.
    """
    if (model_class := catalog.model_class(config)) is None:
        return None
    if catalog.says(model_class, "_is_stateful"):
        return "are recurrent"
    names = catalog.text_code(config) or {}
    if "ALL_ATTENTION_FUNCTIONS" not in names or any(name.endswith("ATTENTION_CLASSES") for name in names):
        return "have attention functions of their own"
    return None


def register() -> None:
    """Register the implementations with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask

    def causal_mask(length: int, query: torch.Tensor) -> torch.Tensor:
        """For eager attention, which has no flag for it: (1, 1, length, length)."""
        at = torch.arange(length, device=query.device)
        return windows.additive((at[:, None] - at[None, :] >= 0)[None, None], query.dtype)

    sdpa = _by_row(lambda module: sdpa_attention_forward, lambda length, query: None)
    eager = _by_row(eager_of, causal_mask)
    for name in _FLASH:
        AttentionInterface.register(name, _with_shared_keys)
    for name, attention, mask in (
        (EACH, sdpa, sdpa_mask), (VARLEN, _varlen(sdpa), sdpa_mask), (EAGER, eager, eager_mask)
    ):  # fmt: skip
        for known_as in (name, name.replace(_PACKED, WINDOWED)):
            AttentionInterface.register(known_as, attention)
            AttentionMaskInterface.register(known_as, _without_squares(mask, name))


def _with_shared_keys(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, key_parts: KeyParts | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """flash-attn, which aligns the last query of a sequence with its last key (its README, 2.1: causal flag)."""
    from transformers.integrations.flash_attention import flash_attention_forward

    key, value = (whole(key_parts, each, 2) for each in (key, value))
    return flash_attention_forward(module, query, key, value, attention_mask, **options)


def _without_squares(make: Callable[..., Any], name: str) -> Callable[..., Any]:
    """transformers' mask function, except for causal attention without padding.

    Packed rows get no mask, though they are not plainly causal, and rows longer than a window get the band.
    """

    def mask(
        *, q_length: int, kv_length: int, config: Any, device: Any, attention_mask: Any = None,
        allow_is_causal_skip: bool = True, local_size: int | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        packed = attention_mask is None and not allow_is_causal_skip
        # Attention in chunks has a local size too.
        window = local_size if getattr(config, "attention_chunk_size", None) is None else None
        if attention_mask is None and q_length == kv_length and window:
            if kv_length > window + (0 if packed else _beyond(name)):
                return windows.band(window, device)
            local_size = local_size if kv_length > window else None
        if packed and not local_size:
            return None
        return make(
            q_length=q_length, kv_length=kv_length, config=config, device=device, attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip, local_size=local_size, **kwargs,
        )  # fmt: skip

    return mask


def _by_row(
    attention_of: Callable[[Any], Callable[..., Any]], mask_of: Callable[[int, torch.Tensor], Any]
) -> Callable[..., Any]:
    """An attention function that calls the module's own one for each row or block, with a mask for it if needed."""

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, cu_seq_lens_q: Any = None,
        cu_seq_lens_k: Any = None, key_parts: KeyParts | None = None, **options: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        window = windows.in_band(attention_mask, query, key)
        attend: Callable[..., Any] = functools.partial(attention_of(module), module, **options)
        if window is None and (attention_mask is not None or cu_seq_lens_q is None):
            return attend(query, key, value, attention_mask)
        band = windows.additive(attention_mask, value.dtype) if window else attention_mask
        lengths = [query.shape[2]] if cu_seq_lens_q is None else _lengths(cu_seq_lens_q)
        seen = lengths if key_parts is None else _lengths(cu_seq_lens_k)
        keys, values = (whole(key_parts, part, 2).split(seen, 2) for part in (key, value))
        outputs: list[torch.Tensor] = []
        for length, own, *row in zip(seen, query.split(lengths, 2), keys, values, strict=True):
            shared = length - own.shape[2]
            # With as many queries as keys no mask is needed: the last query sees the last key.
            queries = pad(own, (0, 0, shared, 0)) if shared else own
            if window is None or length <= window:
                parts = iter([attend(queries, *row, mask_of(length, query))[0]])
            else:
                parts = windows.attend(attend, band, queries, *row)
            outputs += _after(shared, parts) if shared else parts
        return torch.cat(outputs, dim=1), None

    return attention


def _after(first: int, parts: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Parts (rows, tokens, heads, head_dim) of a sequence, without its `first` tokens."""
    for part in parts:
        yield part[:, first:]
        first = max(0, first - part.shape[1])


def _lengths(starts: torch.Tensor) -> list[int]:
    return [end - start for start, end in itertools.pairwise(starts.tolist())]


def eager_of(module: Any) -> Callable[..., Any]:
    """The eager attention in the model's own module, with its specifics (soft caps, sinks)."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _varlen(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """All rows in one call of `torch.nn.attention.varlen`; `otherwise` for those with neither packing nor windows."""

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
        cu_seq_lens_q: Any = None, cu_seq_lens_k: Any = None, max_length_q: int | None = None,
        max_length_k: int | None = None, key_parts: KeyParts | None = None, **options: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        window = windows.in_band(attention_mask, query, key)
        # The kernel has no dropout.
        if (window is None and (attention_mask is not None or cu_seq_lens_q is None)) or options.get("dropout"):
            return otherwise(
                module, query, key, value, attention_mask, scaling=scaling, cu_seq_lens_q=cu_seq_lens_q,
                cu_seq_lens_k=cu_seq_lens_k, key_parts=key_parts, **options,
            )  # fmt: skip
        from torch.nn.attention.varlen import varlen_attn

        rows, _, tokens, _ = query.shape
        if cu_seq_lens_q is None:  # padding at the end of a row is seen by none of its tokens
            cu_seq_lens_q = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=query.device)
            max_length_q = tokens
        if key_parts is None:
            cu_seq_lens_k, max_length_k = cu_seq_lens_q, max_length_q
        # The kernel computes in 16 bit. Under autocast, norms may have produced float32 queries and keys.
        dtype = value.dtype if value.dtype != torch.float32 else torch.get_autocast_dtype(value.device.type)
        key, value = (whole(key_parts, part, 2) for part in (key, value))
        query, key, value = (part.transpose(1, 2).flatten(0, 1).to(dtype) for part in (query, key, value))
        output = varlen_attn(
            query, key, value, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, scale=scaling,
            # The last query of a sequence sees its last key, however many keys there are before its queries. The
            # kernel's window excludes the query's own position; transformers' includes it.
            window_size=(-1 if window is None else window - 1, 0),
            **({"enable_gqa": query.shape[1] != key.shape[1]} if _asks_for_groups(varlen_attn) else {}),
        )  # fmt: skip
        return output.unflatten(0, (rows, tokens)), None

    return attention


@functools.cache
def _asks_for_groups(varlen_attn: Callable[..., Any]) -> bool:
    """Whether grouped-query attention needs an argument; torch 2.11 has none and supports it implicitly."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters
