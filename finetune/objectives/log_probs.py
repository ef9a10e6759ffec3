"""Log-probabilities of labels, computed in tiles without materialising the logits.

`model(**batch, fused_lm_head=True)` is one function made of parts that several modules own. From the outside in:

    context.split      in its block: whole rows become this rank's row slices, attention exchanges them
    attach             for good: `fused_head` takes the hidden states of the labelled tokens
    tiles              in its block: the tokens of a tile, and whether a frozen head's gradient is computed ahead
    kernels.head       the tiled function

`check` compares the whole with the model's own logits, and `prove` the gradient that is computed ahead with theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from finetune.errors import ConfigError
from finetune.forms.packed import packing_of
from finetune.kernels import head, self_test
from finetune.model import probes
from finetune.model.structure import experts, sequence_head
from finetune.objectives import fused_head

# Root mean square of the difference from the model's own log-probabilities, in nats: that of a model without such a
# step is below, but for what its type rounds of its largest logit.
_UNLIKE = 1e-2


def attach(model: Any) -> str | None:
    """Make `model(**batch, fused_lm_head=True)` return per-token log-probabilities (rows, tokens - 1) of `labels`.

    `model` may be wrapped by PEFT, and is modified in place. Returns a one-line note if a mixture of experts has to
    train without its load-balancing loss.
    A sequence classifier scores sequences already; only its balancing loss is prepared.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    unbalanced = _prepare_balancing_loss(base)
    if not sequence_head.is_classifier(model):
        fused_head.add(base)
    return unbalanced


def check(model: Any) -> None:
    """Compare the log-probabilities of a few tokens with those of the model's own logits. `model` must be attached.

    The fused head multiplies the states after the last layer, and knows some scales and caps of logits. Raises
    ConfigError for a model that computes anything else in between or after, such as ModernBERT's decoder.
    """
    if sequence_head.is_classifier(model):
        return
    (ids,) = probes.rows(1, probes.TOKENS, model)
    own = probes.logits(model, input_ids=ids)[:, :-1]
    expected = own.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    def refusal(error: Exception) -> ConfigError:  # states and head may have other sizes (RemBERT)
        return _other_head(model, f"that fails ({probes.Failed(error)})")

    with probes.evaluating(model), probes.attempt(refusal), torch.no_grad(), tiles(probes.TOKENS):
        fused = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    weight = model.get_output_embeddings().weight
    how = packing_of(weight)
    of_head = weight.new_empty(0, dtype=how.dtype if how else weight.dtype)
    rounding = 4 * torch.finfo(head.dtype_of(of_head)).eps * float(own.abs().max())
    distance = float((fused.float() - expected).square().mean().sqrt())
    if not distance <= _UNLIKE + rounding:
        raise _other_head(model, f"the log-probabilities of its tokens differ by {distance:.2g}")


def _other_head(model: Any, how: str) -> ConfigError:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return ConfigError(
        f"`model.name`: {type(base).__name__} does not multiply the states of its last layer by its head alone, as the "
        f"loss does here: {how}; use another base"
    )


def prove(model: Any) -> str | None:
    """Compare a gradient computed ahead with that of the head's whole logits; return a line if it fails or differs.

    Log-probabilities of a few tokens in two tiles and the gradient of their hidden states, under the autocast of a
    step. `model` must be attached.
    """
    if sequence_head.is_classifier(model):
        return None
    scores = model.get_output_embeddings()
    if any(weight is not None and weight.requires_grad for weight in (scores.weight, scores.bias)):
        return None  # nothing is computed ahead then
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    (ids,) = probes.rows(1, probes.TOKENS, model)
    try:
        with probes.evaluating(model), probes.attempt():
            with torch.no_grad():
                hidden = base.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            with torch.enable_grad(), tiles(probes.TOKENS // 2, fused=True):
                fused, plain = (_results(hidden, each, base, ids[:, 1:]) for each in (_tiled, _whole))
            unlike = self_test.difference(fused, plain, head.dtype_of(hidden), "the whole logits give")
    except probes.Failed as failed:
        unlike = f"it fails on this model ({failed})"
    return unlike and f"kernels: `loss` is off: {unlike}"


def _results(hidden: torch.Tensor, function: Any, *given: Any) -> dict[str, torch.Tensor]:
    """Log-probabilities, and the gradient of the hidden states."""
    hidden = hidden.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    output = function(hidden, *given)
    outer = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    (gradient,) = torch.autograd.grad(output, hidden, outer)
    return {"output": output.detach(), "gradient of the hidden states": gradient}


def _tiled(hidden: torch.Tensor, model: Any, labels: torch.Tensor) -> Any:
    return fused_head.scored(model, hidden, labels).log_probs


def _whole(hidden: torch.Tensor, model: Any, labels: torch.Tensor) -> Any:
    logits = fused_head.logits_of(model.config.get_text_config())
    z = model.get_output_embeddings()(hidden).float() * logits.scale
    if logits.softcap is not None:
        z = logits.softcap * torch.tanh(z / logits.softcap)
    return z.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


@contextlib.contextmanager
def tiles(tokens: int, *, fused: bool = False) -> Iterator[None]:
    """In the block, the head scores `tokens` tokens at a time.

    With `fused` the gradient is computed with the log-probabilities where the head is frozen.
    """
    before = fused_head.tile.set(head.Tile(tokens, ahead=fused))
    try:
        yield
    finally:
        fused_head.tile.reset(before)


def _prepare_balancing_loss(model: Any) -> str | None:
    """Make the head return the load-balancing loss if the model has experts, and only then; see `attach`.

    The config of some dense models has `output_router_logits` as well (Granite 4, Doge).
    """
    config = model.config.get_text_config()
    if not hasattr(config, "output_router_logits"):
        return None
    mixture = experts.is_mixture(model) or getattr(config, "is_moe", False)  # `is_moe`: Doge's, without a module
    wanted = bool(mixture and getattr(config, "router_aux_loss_coef", 0.0))
    readable = any("router_logits" in getattr(part, "can_record_outputs", ()) for part in model.modules())
    config.output_router_logits = wanted and readable
    if readable or not wanted:
        return None
    return (
        f"{type(model).__name__} has no router logits in transformers {transformers.__version__}: it trains without "
        "its load-balancing loss; a newer transformers may have them"
    )
