"""Checks that a merged model equals the trained one, by comparing logits against a derived bound.

A 16-bit merged weight is W + s·BA rounded once, with relative error u = 2^-9 (bfloat16) or 2^-12 (float16). Independent
rounding errors add up like a random walk, so after L layers of two blocks each the relative error of a hidden state
grows like u·sqrt(2L) (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). The factor `SAFETY` allows for
the several matrix products in a layer. A format that rounds more declares its `roundoff`. The measure is the root mean
square of the difference of the centred logits, relative to that of the centred logits themselves; they are centred
because softmax ignores a constant shift.

Some models amplify rounding by more than their depth explains, such as Gemma 4, whose attention does not scale its
scores. Where the bound is exceeded, a merge is therefore compared once more, in float32, so that only the weights are
rounded, and the effect of rounding is measured: the trained model is run with a random error of the same distribution
in each weight that the adapter changes (`rounded_at_random`), which knows nothing of what was merged, and with the
others rounded to the type of the merged model, as a base stored in float32 has them. The error of the merge may then be
`MEASURED` times that effect, and no more.

Rounding may explain more than a gentle adapter changes, and then the bare base would lie within the bound as well. So
the change itself must be there: with d the adapter's change of the logits and m that of the export, both from the base,
<m, d> / <d, d> is 1 for an exact export and 0 for the base. Rounding errors do not point along d, so at least `KEPT` is
left unless rounding swallowed the adapter.

A mixture of experts is not a continuous function: if two experts are nearly tied, rounding decides between them, and
the logits of that token can differ by any amount. For a mixture, both measures are therefore taken at the median token.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from finetune.data.encoded import IGNORE
from finetune.data.media import NOTHING, Shown
from finetune.errors import ArtifactError
from finetune.model.structure import sequence_head, streamed
from finetune.runtime import libraries, patches

# The relative error of a rounded weight.
ROUNDOFF = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-24}
SAFETY = 4.0
MEASURED = 2.0
KEPT = 0.5

# Number of held-out rows, and tokens of each, on which logits are compared.
ROWS, ROW_TOKENS = 8, 256

# Bytes of a row's logits in float32; tokens whose logits are compared at once; rows of the head that are multiplied at
# once. They bound the host memory of a proof.
_ROW_BYTES = 32 * 2**20
_TOKENS = 16
_HEAD_ROWS = 2**13


@dataclass(frozen=True)
class Proof:
    """The comparison of exported with trained logits on `rows` held-out rows with `tokens` tokens in total.

    `error` and `bound` are relative (see the module); `effect` is how much the adapter changed the base's logits, in
    the same measure, and `kept` the share of that change which the export has (1 where there is none); `agreement` is
    the share of positions with the same most likely next token. `median`: whether the measures are taken at the median
    token.
    """

    rows: int
    tokens: int
    error: float
    bound: float
    effect: float
    kept: float
    agreement: float
    median: bool = False

    @property
    def holds(self) -> bool:
        """Whether rounding explains the error, and the export has the adapter's change."""
        return self.error <= self.bound and self.kept >= KEPT


def bound(layers: int, roundoff: float) -> float:
    """The relative logit error explained by one of `roundoff` in each merged weight; at most that of zeros, 1."""
    return min(1.0, SAFETY * roundoff * math.sqrt(2 * layers))


def rounded_at_random(weight: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """`weight` in float32 with an error in each element that is distributed as that of rounding to `dtype`."""
    exact = weight.float()
    generator = torch.Generator(exact.device).manual_seed(seed)
    _, exponent = torch.frexp(exact)
    last_place = torch.ldexp(torch.full_like(exact, torch.finfo(dtype).eps), exponent - 1)
    return exact + last_place * (torch.rand(exact.shape, generator=generator, device=exact.device) - 0.5)


@torch.inference_mode()
def logits(model: Any, rows: list[list[int]], shown: Shown = NOTHING) -> list[torch.Tensor]:
    """Logits of each row of token ids, centred over the vocabulary, float32 on the CPU, (tokens, vocabulary).

    The rows show the images `shown`. Of a sequence classifier, the scores of each token (tokens, labels) as they are.
    """
    model.eval()
    return [_centred(model, row, model.device, shown, number) for number, row in enumerate(rows)]


def _centred(model: Any, row: list[int], device: torch.device, shown: Shown = NOTHING, number: int = 0) -> torch.Tensor:
    ids = torch.tensor([row], device=device)
    with libraries.without_cudnn_attention():
        output: torch.Tensor = model(input_ids=ids, **shown.arguments(ids, [number])).logits[0].float().cpu()
    return output if sequence_head.is_classifier(model) else output.sub_(output.mean(dim=-1, keepdim=True))


class Streamed:
    """The logits of a model whose weights `fetch` reads one by one.

    Only every `stride`-th token of a row has logits. The layers are computed once for all rows, and the head for one
    row at a time.
    """

    def __init__(
        self, model: Any, fetch: Callable[[str], torch.Tensor | None], rows: list[list[int]], stride: int,
        device: torch.device, shown: Shown = NOTHING,
    ) -> None:  # fmt: skip
        self._model, self._fetch, self._rows, self._device = model.eval(), fetch, rows, device
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._layers, self._head = base.base_model, base.get_output_embeddings()
        longest = max(map(len, rows))
        # Padded on the right, where no token of a causal model sees it, nor one of an image: (rows, tokens).
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
        seen = shown.arguments(ids, range(len(rows)))
        with torch.no_grad(), libraries.without_cudnn_attention(), streamed.running(model, fetch, device):
            output = self._layers(input_ids=ids, use_cache=False, **seen)
        self._kind = type(output)
        self._states = [
            states[:, : len(row) : stride] for row, states in zip(rows, output.last_hidden_state.split(1), strict=True)
        ]

    def logits(self, row: int) -> torch.Tensor:
        """Logits of a row as `proof.logits` returns them."""
        with self._known(self._states[row]):
            return _centred(self._model, self._rows[row], self._device)

    def published_scores(self, padding: int, side: Literal["left", "right"]) -> torch.Tensor:
        """The scores (rows, labels) that transformers' own class gives all rows at once, padded on this side.

        Of a sequence classifier; every token must have logits.
        """
        longest = max(map(len, self._rows))
        left = [longest - len(row) if side == "left" else 0 for row in self._rows]
        ids = torch.full((len(self._rows), longest), padding)
        states = self._states[0].new_zeros(len(self._rows), longest, self._states[0].shape[-1])
        for number, (row, start) in enumerate(zip(self._rows, left, strict=True)):
            ids[number, start : start + len(row)] = torch.tensor(row)
            states[number, start : start + len(row)] = self._states[number][0]
        with self._known(states):
            return sequence_head.published_scores(self._model, ids.to(self._device)).float().cpu()

    @contextlib.contextmanager
    def _known(self, states: torch.Tensor) -> Iterator[None]:
        """In the block, the layers give these states (rows, tokens, channels)."""
        known = self._kind(last_hidden_state=states)
        with (
            torch.no_grad(),
            streamed.running(self._model, self._fetch, self._device),
            patches.CAUSAL_MODEL_FORWARD.by(lambda *_, **__: known, self._layers),
            _in_parts(self._head),
        ):
            yield


@contextlib.contextmanager
def _in_parts(head: Any) -> Iterator[None]:
    """In the block, a linear head multiplies by a few rows of its weight at a time.

    On a CPU the product of bfloat16 matrices copies the weight to another layout (torch 2.13, oneDNN).
    """
    if type(head) is not nn.Linear:
        yield
        return

    def product(hidden: torch.Tensor) -> torch.Tensor:
        biases = repeat(None) if head.bias is None else head.bias.split(_HEAD_ROWS)
        parts = zip(head.weight.split(_HEAD_ROWS), biases, strict=False)
        return torch.cat([functional.linear(hidden, weight, bias) for weight, bias in parts], dim=-1)

    with patches.MODULE_FORWARD.by(product, head):
        yield


def stride(vocabulary: int, tokens: int) -> int:
    """The distance between compared tokens at which the logits of a row of `tokens` take at most `_ROW_BYTES`."""
    return math.ceil(tokens * vocabulary * 4 / _ROW_BYTES)


class LogitComparison:
    """The comparison of three models' centred logits, row by row; `mixture`: whether the models have experts."""

    def __init__(self, *, mixture: bool = False) -> None:
        self._mixture = mixture
        self._parts: list[torch.Tensor] = []
        self._count = 0

    def add(self, merged: torch.Tensor, adapted: torch.Tensor, base: torch.Tensor) -> None:
        """One row's logits, each (tokens, vocabulary)."""
        for some in zip(*(each.split(_TOKENS) for each in (merged, adapted, base)), strict=True):
            written, trained, before = some
            change = (before - trained).double()
            part = [
                (written - trained).double().square().sum(-1),
                trained.double().square().sum(-1),
                change.square().sum(-1),
                ((before - written).double() * change).sum(-1),
                (written.argmax(-1) == trained.argmax(-1)).double(),
            ]
            self._parts.append(torch.stack(part))
        self._count += 1

    def result(self, bound: float) -> Proof:
        """The proof over all rows."""
        # Squares for each token: of the error, the logits, the adapter's change, and the export's along that.
        error, size, change, along, same = torch.cat(self._parts, dim=1)

        def share(part: torch.Tensor, whole: torch.Tensor) -> float:
            # NaN where there is one, which fails every comparison with a bound.
            return float((part / whole).median() if self._mixture else part.sum() / whole.sum())

        changed = change > 0
        return Proof(
            rows=self._count,
            tokens=len(same),
            error=math.sqrt(share(error, size)),
            bound=bound,
            effect=math.sqrt(share(change, size)),
            kept=share(along[changed], change[changed]) if changed.any() else 1.0,
            agreement=float(same.mean()),
            median=self._mixture,
        )


def compare(
    merged: Iterable[torch.Tensor], adapted: Iterable[torch.Tensor], base: Iterable[torch.Tensor], bound: float, *,
    mixture: bool = False,
) -> Proof:  # fmt: skip
    """Compare the three models' centred logits on the same rows; `mixture`: whether the models have experts."""
    comparison = LogitComparison(mixture=mixture)
    for row in zip(merged, adapted, base, strict=True):
        comparison.add(*row)
    return comparison.result(bound)


def refuse_unless_equal(
    result: Proof, what: str, *, compared_with: str = "the trained ones", changed_by: str = "training",
    otherwise: str = "",
) -> None:  # fmt: skip
    """Raise ArtifactError unless the proof of an export holds.

    In the message, `compared_with` are the expected logits, `changed_by` is what changed those of the base, and
    `otherwise` is the end.
    """
    if result.holds:
        return
    if result.error <= result.bound:
        raise ArtifactError(
            f"the {what} has only {result.kept:.0%} of what {changed_by} changed (by {result.effect:.2%}): its weights "
            f"are rounded more coarsely than that. Nothing was published{otherwise}"
        )
    raise ArtifactError(
        f"the {what} is not the trained model: its logits differ by {result.error:.2%} from {compared_with}, but "
        f"rounding explains only {result.bound:.2%} ({changed_by} itself changed them by {result.effect:.2%}). Nothing "
        f"was published{otherwise}"
    )


class Likeness:
    """The similarity of a model to the trained one: KL divergence (nats), share of equal most likely tokens, and its
    loss (nats per trained token).
    """

    def __init__(self) -> None:
        self._tokens: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []

    def add(self, trained: torch.Tensor, other: torch.Tensor, following: torch.Tensor) -> None:
        """One row's logits, each (tokens, vocabulary), and the labels of what follows its first tokens."""
        for start in range(0, len(trained), _TOKENS):
            p, q = (each[start : start + _TOKENS].log_softmax(-1) for each in (trained, other))
            kl = functional.kl_div(q, p, log_target=True, reduction="none").double().sum(-1)
            self._tokens.append(torch.stack([kl, (p.argmax(-1) == q.argmax(-1)).double()]))
            labels = following[start : start + _TOKENS]
            trained_on = labels != IGNORE
            losses = -q[: len(labels)][trained_on].gather(-1, labels[trained_on, None])
            self._losses.append(losses.double()[:, 0])

    def losses(self) -> torch.Tensor:
        """The loss of each trained token, in nats."""
        return torch.cat(self._losses)

    def result(self) -> dict[str, float]:
        """`kl` and `agreement` over all rows, and the largest divergence at one token, `kl_max`."""
        tokens = torch.cat(self._tokens, dim=1)
        kl, same = tokens.mean(dim=1).tolist()
        return {"kl": max(kl, 0.0), "kl_max": max(float(tokens[0].max()), 0.0), "agreement": same}


LEAST_GAIN = 0.9
"""The share of what training gained that an export must keep to be uploaded without being asked twice."""
_ERRORS = 2.0
"""Standard errors of the mean by which training must have lowered the loss, for a share of that to mean something."""


def gain_kept(base: torch.Tensor, trained: torch.Tensor, served: torch.Tensor) -> tuple[float | None, str | None]:
    """The share of training's reduction of the loss that the served model keeps, from the losses of the same trained
    tokens of held-out rows; or None, and the reason.
    """
    gain = base - trained
    mean, error = float(gain.mean()), float(gain.std() / math.sqrt(len(gain))) if len(gain) > 1 else math.inf
    if not mean > _ERRORS * error:
        return None, (
            f"training changed the loss of these {len(gain)} tokens by {-mean:+.4f} \N{PLUS-MINUS SIGN} {error:.4f} "
            "nats, and only of a loss that it lowered by two standard errors is there a share"
        )
    return float((base - served).mean()) / mean, None


def served(
    trained: list[torch.Tensor], written: list[torch.Tensor], base: list[torch.Tensor] | None,
    following: list[list[int]], unknown: str | None,
) -> dict[str, Any]:  # fmt: skip
    """The keys `served`, `losses`, `gain_kept` and `gain_unknown` of a record: the loss from the trained to the served
    model, from centred logits of the same rows and the label that follows each of their tokens.

    `unknown` is the reason why the share of the gain cannot be computed, if so; it must be given without a `base`.
    """
    models = {"trained": trained, "served": written} | ({"base": base} if base else {})
    likeness = {name: Likeness() for name in models}
    for row, labels in enumerate(following):
        for name, logits in models.items():
            likeness[name].add(trained[row], logits[row], torch.tensor(labels, dtype=torch.long))
    record: dict[str, Any] = {"served": likeness["served"].result()}
    if unknown:
        return {**record, "gain_kept": None, "gain_unknown": unknown}
    return record | gain(likeness, "served")


def gain(likeness: Mapping[str, Likeness], written: str) -> dict[str, Any]:
    """The keys `losses`, `gain_kept` and `gain_unknown` of a record; `written` names the served model. `base` and
    `trained` must be among the models.
    """
    losses = {name: each.losses() for name, each in likeness.items()}
    if not len(losses[written]):
        return {"gain_kept": None, "gain_unknown": "training has no loss on any token that was compared"}
    kept, why = gain_kept(losses["base"], losses["trained"], losses[written])
    means = {name: float(each.mean()) for name, each in losses.items()}
    return {"losses": means, "gain_kept": kept, "gain_unknown": why}
