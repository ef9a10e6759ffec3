"""Context parallelism: the ranks of a group compute each row together, every one a slice of its tokens.

What treats tokens one by one runs on the slice. Around attention the ranks exchange tokens for heads, so that each
computes attention over whole rows for its share of the heads (Ulysses, arXiv 2309.14509). The attention function is the
one that the model uses anyway, with the mask of whole rows.

`UlyssesSPAttentionHF`, which accelerate's `sp` is made of (1.15), does the same, but for one number of rows in all
micro-batches; it drops the masks that windows and padding need, and gathers the positions in every layer. accelerate's
`cp` is torch's own, which knows no masks either and has no SDPA on a CPU (torch 2.13).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from finetune.errors import ConfigError
from finetune.model.attention import packing
from finetune.model.source import catalog
from finetune.model.source.catalog import attention_of
from finetune.runtime import patches

# Rotary embeddings whose frequencies follow from the largest position in a pass, which is another one in each slice.
_BY_LENGTH = ("dynamic", "longrope")
REMEDY = "set `distributed.context: 1`"


def check(architecture: Any, size: int) -> None:
    """Raise ConfigError if the model's config rules out that this number of ranks shares its rows."""
    if size == 1:
        return
    if how := packing.mixes_otherwise(architecture):
        raise ConfigError(
            f"`distributed.context`: {architecture.model_type} models {how}, so that a slice would not see the tokens "
            f"before it; {REMEDY}"
        )
    text, heads = architecture.get_text_config(), math.gcd(*catalog.values(architecture, "num_attention_heads"))
    if heads % size:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ConfigError(
            f"`distributed.context`: {size} ranks cannot share {heads} attention heads; choose one of {fitting}"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    if by_length := kinds.intersection(_BY_LENGTH):
        raise ConfigError(
            f"`distributed.context`: the rotary embedding of {architecture.model_type} models (`{by_length.pop()}`) "
            f"depends on the longest row, which a slice does not show; {REMEDY}"
        )


@contextlib.contextmanager
def split(model: Any, group: ProcessGroup | None) -> Iterator[None]:
    """In the block, `model(**batch, fused_lm_head=True)` computes this rank's slice of whole rows; other passes do not.

    `model` must have the head of `objectives.log_probs`, which then returns what it does for the tokens of the slice.
    All ranks of `group` must take the same rows, whose length is a multiple of their number. A recomputation in the
    backward pass exchanges tokens as the forward pass did. Without a group nothing is split.
    """
    if group is None:
        yield
        return
    from transformers import masking_utils
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    name = attention_of(base.config)
    plain, make_mask = base.forward, ALL_MASK_ATTENTION_FUNCTIONS[name]

    @functools.wraps(plain)
    def forward(*args: Any, fused_lm_head: bool = False, **batch: Any) -> Any:
        if not fused_lm_head:
            return plain(*args, **batch)
        padding, rank, size = batch.get("attention_mask"), dist.get_rank(group), group.size()
        assert batch["input_ids"].shape[1] % size == 0, "the collator pads rows to a multiple"

        def mask(
            *args: Any, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **options: Any
        ) -> Any:
            """transformers' mask function, called with the lengths of slices, for whole rows."""
            whole = None if attention_mask is None or padding is None else padding.bool()
            return make_mask(
                *args, q_length=size * q_length, kv_length=size * kv_length, attention_mask=whole, **options
            )

        find, places = masking_utils.find_packed_sequence_indices, batch["position_ids"]
        # This rank's slice of the inputs of each token, and of the label that each token predicts.
        batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
        mine = {
            name: value.chunk(size, dim=1)[rank] if isinstance(value, Tensor) and value.dim() == 2 else value
            for name, value in batch.items()
        }
        # A mixture's load-balancing loss is computed over the tokens of all slices.
        balances = getattr(base.config.get_text_config(), "output_router_logits", False)
        balanced = patches.BALANCING_LOSS.by(functools.partial(_balancing_loss, group))
        with (
            patches.ATTENTION_TABLE.in_table(ALL_MASK_ATTENTION_FUNCTIONS, name, mask),
            patches.PACKED_INDICES.by(lambda _: find(places)),
            balanced if balances else contextlib.nullcontext(),
        ):
            return plain(*args, fused_lm_head=True, row_group=group, **mine)

    # transformers has no eager attention in its table, where it would be each model's own.
    attention = _exchanging(ALL_ATTENTION_FUNCTIONS.get(name))
    with (
        patches.ATTENTION_TABLE.in_table(ALL_ATTENTION_FUNCTIONS, name, attention),
        patches.CAUSAL_MODEL_FORWARD.by(forward, base),
    ):
        yield


def _balancing_loss(
    group: ProcessGroup, router_logits: tuple[Tensor, ...], experts: int, chosen: int, mask: Tensor | None
) -> Tensor:
    """The loss of arXiv 2101.03961, equations 4 to 6, for `chosen` of `experts`, as transformers 5.24 computes it.

    `router_logits`: of each layer (tokens, experts); `mask` (rows, tokens per row). A loss of each slice would not do:
    it is a product of means.
    """
    first = router_logits[0]
    weights = torch.ones(len(first), device=first.device) if mask is None else mask.reshape(-1).float()
    routed, likely = (torch.zeros(experts, device=first.device) for _ in range(2))
    for logits in router_logits:
        probabilities = logits.softmax(-1)
        taken = probabilities.topk(chosen, dim=-1).indices.reshape(-1)
        routed = routed.scatter_add(0, taken, weights.repeat_interleave(chosen))
        likely = likely + (probabilities.float() * weights[:, None]).sum(0)
    tokens = weights.sum() * len(router_logits)
    # Summed over the group; gradients of all ranks' sums come back to each.
    parts = torch.cat([routed, likely, tokens[None]]).expand(group.size(), -1)
    sums = _Exchange.apply(parts, group).sum(0)
    return (sums[:experts] / sums[-1] * (sums[experts:-1] / sums[-1])).sum() * experts


def _exchanging(attend: Callable[..., Any] | None) -> Callable[..., Any]:
    """An attention function that in a pass over slices calls `attend`, or eager attention, with whole rows and fewer
    heads.
    """

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any,
        row_group: ProcessGroup | None = None, **options: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        function = attend or packing.eager_of(module)
        if row_group is None:
            return function(module, query, key, value, attention_mask, *args, **options)
        options.pop("position_ids", None)  # flash attention would take those of a slice for packed rows
        ratio: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if copies := math.lcm(key.shape[1], row_group.size()) // key.shape[1] - 1:
            # With fewer key and value heads than ranks, heads are repeated so that every rank has those of its queries.
            key, value = (each.repeat_interleave(copies + 1, dim=1) for each in (key, value))
            ratio = patches.KEY_VALUE_GROUPS.by(query.shape[1] // key.shape[1], module)
        query, key, value = (_to_heads(each, row_group) for each in (query, key, value))
        with ratio:
            output, _ = function(module, query, key, value, attention_mask, *args, **options)
        return _to_tokens(output, row_group), None

    return attention


def _to_heads(slice_: Tensor, group: ProcessGroup) -> Tensor:
    """Make whole rows (rows, heads / ranks, tokens, dim) of slices of all heads (rows, heads, tokens / ranks, dim)."""
    size = group.size()
    rows, heads, tokens, dim = slice_.shape
    parts = slice_.view(rows, size, heads // size, tokens, dim).transpose(0, 1)
    return _Exchange.apply(parts, group).permute(1, 2, 0, 3, 4).reshape(rows, heads // size, size * tokens, dim)


def _to_tokens(whole: Tensor, group: ProcessGroup) -> Tensor:
    """A slice of all heads (rows, tokens / ranks, heads, dim) for whole rows (rows, tokens, heads / ranks, dim)."""
    size = group.size()
    rows, tokens, heads, dim = whole.shape
    parts = whole.view(rows, size, tokens // size, heads, dim).transpose(0, 1)
    return _Exchange.apply(parts, group).permute(1, 2, 0, 3, 4).reshape(rows, tokens // size, size * heads, dim)


class _Exchange(torch.autograd.Function):
    """Part i of (ranks, ...) goes to rank i, in the order of the ranks that they come from; gradients go back so.

    torch's own, in torch.distributed.nn, is deprecated for one under a private name (2.13).
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(parts: Tensor, group: ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
