"""The memory and speed of well-known GPUs, so that a job can be planned for a card this machine does not have.

`gpus.json` holds, for each card, the total memory that CUDA reports. It is less than the size on the box, by up
to 9 %, because the driver keeps a part for itself and ECC, where it is on, takes another. The figure comes from
a message or log of a real machine, named in the entry's `source`, and where several were found it is the
smallest: newer drivers report less than older ones, and a plan that fits the smaller figure fits the larger.

The rates are NVIDIA's: of dense tensor-core products in 16 bits summed in 32, without sparsity, which on GeForce
cards is half of the rate summed in 16 bits, and of products in float32, without TF32, which is twice the number of
CUDA cores times the boost clock. The numbers of multiprocessors are NVIDIA's too. No job reaches them, so they bound a
time from below.

`pcie` is the card's own connector, generation and lanes, and `nvlink_bytes` the rate of NVLink, one way, half of what
NVIDIA states for both. Of a card that is sold with and without, it is that of the one with NVLink; bridges between two
cards do not count. The rates of lanes are those of the PCI Express Base Specification 3.0 to 5.0, in 128b/130b code.

A card whose total could not be traced to such a message is not in the table; a plan takes a size instead.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from finetune.errors import ConfigError

# A CUDA kernel's launch through PyTorch's dispatcher; below it a step is bound by the host, not by the card.
_CUDA_CALL_SECONDS = 5e-6


@dataclass(frozen=True)
class Rates:
    """How fast a device is. The rates rank settings, and bound a time from below.

    `flops` is the peak rate of 16-bit products, in operations a second with a multiply-add counted as two, and
    `fp32_flops` that of products in float32 (torch's default, without TF32). In bytes a second: `bandwidth_bytes` of
    memory, and one way `pcie_bytes` of PCI Express and `nvlink_bytes` of NVLink, 0 without it. `call_seconds` is the
    least time of one operator.
    """

    flops: float
    fp32_flops: float
    bandwidth_bytes: float
    call_seconds: float = _CUDA_CALL_SECONDS
    pcie_bytes: float = math.inf
    nvlink_bytes: float = 0.0

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic over bandwidth: an operator with fewer operations a byte is bound by the bandwidth."""
        return self.flops / self.bandwidth_bytes


@dataclass(frozen=True)
class Gpu:
    """The data sheet of one GPU.

    `total_bytes` is what `torch.cuda.get_device_properties` gives as `total_memory`. `sold_as_gb` is the number on the
    box. `source` says where the figures come from, the total first, and `note` what a reader of them should know.
    """

    name: str
    total_bytes: int
    compute_capability: tuple[int, int]
    multiprocessors: int
    rates: Rates
    sold_as_gb: int
    source: tuple[str, ...]
    note: str = ""


_TRANSFERS = {"3.0": 8e9, "4.0": 16e9, "5.0": 32e9}
"""A second on one lane, of one bit each, by the generation of PCI Express."""

_BRAND = re.compile(r"^(?:nvidia|geforce|tesla|rtx)+")
_SUFFIX = re.compile(r"(?<=\d)(?=ti\b|super\b)")
_GIGABYTES = re.compile(r"(\d+)g(?:i?b)?")


def _words(name: str) -> list[str]:
    """The words that tell cards apart: lower case, without brands, and every spelling of a size as `80gb`."""
    words = []
    for word in re.findall(r"[a-z0-9]+", _SUFFIX.sub(" ", name.lower())):
        size = _GIGABYTES.fullmatch(word)
        words.append(f"{size[1]}gb" if size else _BRAND.sub("", word))
    return [word for word in words if word]


def _key(name: str) -> str:
    return "".join(_words(name))


@cache
def _spellings() -> dict[str, tuple[Gpu, str]]:
    """Each card and the spelling that finds it, by the spelling's key.

    A card is found by its name, by its aliases, among which are the names that torch reports, and by its name
    followed by its size.
    """
    spellings: dict[str, tuple[Gpu, str]] = {}
    text = resources.files(__package__).joinpath("gpus.json").read_text(encoding="utf-8")
    for name, facts in json.loads(text).items():
        major, minor = facts["compute_capability"].split(".")
        generation, _, lanes = facts["pcie"].partition(" x")  # such as `4.0 x16`
        gpu = Gpu(
            name=name,
            total_bytes=facts["total_bytes"],
            compute_capability=(int(major), int(minor)),
            multiprocessors=facts["multiprocessors"],
            rates=Rates(
                flops=float(facts["bf16_flops"]),
                fp32_flops=float(facts["fp32_flops"]),
                bandwidth_bytes=float(facts["bandwidth_bytes"]),
                pcie_bytes=_TRANSFERS[generation] * int(lanes) * 128 / 130 / 8,
                nvlink_bytes=float(facts.get("nvlink_bytes", 0)),
            ),
            sold_as_gb=facts["sold_as_gb"],
            source=tuple(facts["source"]),
            note=facts.get("note", ""),
        )
        for spelling in [name, *facts["aliases"], f"{name} {gpu.sold_as_gb}GB"]:
            known, _ = spellings.setdefault(_key(spelling), (gpu, spelling))
            assert known is gpu, f"{spelling} finds both {known.name} and {name}"
    return spellings


def names() -> list[str]:
    """The names of the cards in the table, the smallest first."""
    return [gpu.name for gpu in smallest_first()]


def smallest_first() -> list[Gpu]:
    """Every card, by the memory that it reports."""
    return sorted({gpu for gpu, _ in _spellings().values()}, key=lambda gpu: (gpu.total_bytes, gpu.name))


def find(name: str) -> Gpu:
    """The card that `name` means, as people type it or as `torch.cuda.get_device_name` reports it.

    Case, spaces, dashes and the brands (`NVIDIA`, `GeForce`, `Tesla`, `RTX`) do not count, and a size may follow:
    `rtx4090`, `4090 24GB` and `NVIDIA GeForce RTX 4090` are the same card. A name that leaves out what tells
    cards apart is not guessed: `A100` fits two, and `RTX 4060 Ti` is sold with 8 GB as well, which the table
    does not have. `H100` alone is the SXM card, for that is an entry's own name.

    Raises `ConfigError` for such a name, with the cards it fits, and for an unknown one, with those most like it.
    """
    if spelling := _spellings().get(_key(name)):
        return spelling[0]

    words = set(_words(name))
    fits = {gpu for gpu, spelling in _spellings().values() if words and words <= set(_words(spelling))}
    if fitting := [gpu.name for gpu in smallest_first() if gpu in fits]:
        raise ConfigError(f"`{name}` does not say which GPU; write {_either(fitting)}, or give a size such as 24GiB")

    near = nearest(name)
    remedy = f"did you mean {_either(near)}? Or" if near else f"choose from {', '.join(names())}, or"
    raise ConfigError(f"`{name}` is not a GPU this tool knows; {remedy} give a size such as 24GiB, `auto` or `cpu`")


def nearest(name: str) -> list[str]:
    """Up to three names of cards that look like `name`, the closest first."""
    matches = difflib.get_close_matches(_key(name), _spellings(), n=len(_spellings()))
    return list(dict.fromkeys(_spellings()[match][0].name for match in matches))[:3]


def _either(choices: list[str]) -> str:
    quoted = [f"`{choice}`" for choice in choices]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)
