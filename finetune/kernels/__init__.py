"""Fused kernels of the training step: they compute what PEFT's and transformers' modules do, from the same parameters.

A kernel is one entry in KERNELS. It recognises modules by their structure and by running their code, never by a model's
name, says why it cannot compute some of them, and replaces the forward pass of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from finetune.kernels import fused_attention, lora, mlp, norm
from finetune.model.recompute import checkpointing
from finetune.model.structure import experts

Undo = Callable[[], None]


@dataclass(frozen=True)
class Kernel:
    """A replacement for the forward pass of each module that has the structure and no obstacle.

    `layers` are the linear layers that such a module computes. `replace` returns a function that undoes it; that of a
    norm also takes the columns of room that it leaves.
    """

    help: str
    has_structure: Callable[[nn.Module], bool]
    obstacle: Callable[[nn.Module], str | None]
    replace: Callable[..., Undo]
    layers: Callable[[nn.Module], list[nn.Module]] = lambda module: []


# The order matters: a layer that an attention or an MLP computes is not replaced by itself.
KERNELS: dict[str, Kernel] = {
    "norm": Kernel("root-mean-square normalization", norm.has_structure, norm.obstacle, norm.replace),
    "attention": Kernel(
        "queries, keys and values as one product, rotated in place",
        fused_attention.has_structure, fused_attention.obstacle, fused_attention.replace, fused_attention.layers,
    ),
    "mlp": Kernel("a gated MLP with its adapters", mlp.has_structure, mlp.obstacle, mlp.replace, mlp.layers),
    "lora": Kernel("a linear layer with an adapter", lora.is_adapted, lora.obstacle, lora.replace),
}  # fmt: skip


@dataclass
class Attached:
    """The replaced modules of a model, by kernel, each with a function that undoes it.

    `room` has the columns that norms leave beside their outputs and the gradients of their inputs. `lines` say which
    modules were not replaced, and why.
    """

    replaced: dict[str, dict[nn.Module, Undo]] = field(default_factory=lambda: {name: {} for name in KERNELS})
    room: dict[nn.Module, tuple[int, int]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @property
    def fusing(self) -> set[str]:
        """The kernels that replace any module."""
        return {kernel for kernel, modules in self.replaced.items() if modules}

    def replace(self, kernel: str, module: nn.Module) -> None:
        """Replace the forward pass of a module, which the kernel can compute."""
        room = [self.room[module]] if module in self.room else []
        self.replaced[kernel][module] = KERNELS[kernel].replace(module, *room)

    def detach(self, kernel: str | None = None) -> None:
        """Restore the own forward pass of the modules of one kernel, or of all."""
        for name in [kernel] if kernel else KERNELS:
            for undo in self.replaced[name].values():
                undo()
            self.replaced[name].clear()


def attach(model: Any, fused: str, *, triton: bool = True, without: Collection[str] = ()) -> Attached:
    """Replace the modules of `model`, wrapped by PEFT or not, that kernels can compute; none if `fused` is `off`.

    An MLP that is not replaced still takes long inputs in tiles. `triton`: False if the device needs Triton
    and cannot run it; a CPU needs none (`ops`). `without`: the kernels that do not replace any.
    """
    attached = Attached()
    if fused != "off" and triton:
        _replace(model, attached, without)
    elif fused != "off":
        attached.lines.append("kernels: none is fused: Triton does not run here")
    for layer in checkpointing.layers(model):
        for module in filter(mlp.has_structure, layer.modules()):
            if module not in attached.replaced["mlp"]:
                mlp.tile(module)
    return attached


def _replace(model: Any, attached: Attached, without: Collection[str]) -> None:
    covered: set[nn.Module] = set()
    chosen: dict[str, list[nn.Module]] = {kind: [] for kind in KERNELS}
    reasons: dict[str, list[str]] = {}
    for kind, kernel in KERNELS.items():
        if kind in without:
            continue
        for name, module in model.named_modules():
            if module in covered or not kernel.has_structure(module):
                continue
            if reason := kernel.obstacle(module):
                reasons.setdefault(reason, []).append(name.rpartition(".")[2])
                continue
            chosen[kind].append(module)
            covered.update(kernel.layers(module))
    attached.room = _room(model, {kind: set(modules) for kind, modules in chosen.items()})
    for kind, modules in chosen.items():
        for module in modules:
            attached.replace(kind, module)
    if experts.is_mixture(model):
        reasons["experts of a mixture"] = ["experts"]
    for reason, names in reasons.items():
        attached.lines.append(f"kernels: `{'`, `'.join(dict.fromkeys(names))}` not fused: {reason}")


def _room(model: nn.Module, replaced: Mapping[str, Set[nn.Module]]) -> dict[nn.Module, tuple[int, int]]:
    """The columns of room for rank-r products (`kernels.room`) that norms leave: beside their output, for the blocks
    next to them, and beside the gradient of their input, for the layers whose outputs were summed up in it.
    """
    room: dict[nn.Module, tuple[int, int]] = {}
    last: dict[int, int] = {}
    for layer in (*replaced["lora"], *(mlp.layers(module)[-1] for module in replaced["mlp"])):
        one = lora.current(layer)
        last[one.outputs] = max(last.get(one.outputs, 0), lora.rank([one]))
    for parent in model.modules():
        ranks: dict[int, int] = {}
        for block in parent.children():
            # Layers that take the block's input, those that share it together.
            firsts = [[layer] for layer in block.children() if layer in replaced["lora"]]
            if block in replaced["attention"] and (projections := fused_attention.layers(block)):
                firsts.append(projections)
            if block in replaced["mlp"]:
                firsts.append(mlp.layers(block)[:-1])
            for first in firsts:
                layers = [lora.current(layer) for layer in first]
                ranks[layers[0].inputs] = max(ranks.get(layers[0].inputs, 0), lora.rank(layers))
        for module in parent.children():
            if module in replaced["norm"]:
                width = len(module.weight)
                room[module] = ranks.get(width, 0), last.get(width, 0)
    return room
