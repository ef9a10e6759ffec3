"""The table of GPUs: every figure is plausible and agrees with its source, and a name finds one card or none."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest
from messages import refusal

from finetune.errors import ConfigError
from finetune.forecast import gpus
from finetune.model.precision import of_card

NAMES = gpus.names()
MIB = 2**20
GIB = 2**30


def test_no_name_is_written_twice_in_the_file() -> None:
    text = resources.files("finetune.forecast").joinpath("gpus.json").read_text(encoding="utf-8")
    written = []

    def keep(pairs: list[tuple[str, object]]) -> dict[str, object]:
        written.append([key for key, _ in pairs])
        return dict(pairs)

    json.loads(text, object_pairs_hook=keep)
    assert sorted(written[-1]) == sorted(NAMES)
    assert all(len(keys) == len(set(keys)) for keys in written)


def test_smallest_first() -> None:
    totals = [gpu.total_bytes for gpu in gpus.smallest_first()]
    assert totals == sorted(totals)
    assert [gpu.name for gpu in gpus.smallest_first()] == NAMES
    assert len(totals) == len(set(NAMES))


def test_every_figure_is_plausible_and_says_where_it_comes_from() -> None:
    assert len(NAMES) >= 29
    for gpu in map(gpus.find, NAMES):
        assert isinstance(gpu.total_bytes, int)
        # ECC in memory takes 1/16, the driver the rest; T4, with ECC always on, reports the least of its size.
        assert 0.88 <= gpu.total_bytes / (gpu.sold_as_gb * GIB) <= 1, gpu.name
        assert (6, 0) <= gpu.compute_capability <= (12, 0), gpu.name
        assert 15e12 <= gpu.rates.flops <= 2.5e15, gpu.name
        assert 250e9 <= gpu.rates.bandwidth_bytes <= 8e12, gpu.name
        # A rate with sparsity, or of 8 bits, would put a card above this number of operations a byte.
        assert 20 <= gpu.rates.flops / gpu.rates.bandwidth_bytes <= 425, gpu.name
        assert 15e9 <= gpu.rates.pcie_bytes <= 64e9, gpu.name
        assert gpu.rates.nvlink_bytes == 0 or 80e9 <= gpu.rates.nvlink_bytes <= 900e9, gpu.name
        assert len(gpu.source) >= 2, gpu.name
        assert all(re.match(r"https://\S+\.\S+|log found by code search", item) for item in gpu.source), gpu.name
        assert any(item.startswith("https://") for item in gpu.source), gpu.name


def test_the_rates_of_links_are_those_one_way() -> None:
    """By hand: 16 lanes of 16 GT/s, of which 128 of 130 bits are data, and half of H100's 900 GB/s."""
    assert gpus.find("RTX 4090").rates.pcie_bytes == pytest.approx(31.508e9, rel=1e-4)
    assert gpus.find("RTX 4060 Ti 16GB").rates.pcie_bytes == pytest.approx(15.754e9, rel=1e-4)
    assert (gpus.find("RTX 4090").rates.nvlink_bytes, gpus.find("H100").rates.nvlink_bytes) == (0, 450e9)


def test_the_total_is_the_smallest_that_its_sources_state() -> None:
    unit_bytes = {"bytes": 1, "MiB": MIB, "MB": MIB, "GiB": GIB, "GB": GIB}
    for gpu in map(gpus.find, NAMES):
        stated = []
        for source in gpu.source:
            # Whole gigabytes are a part of a card's name.
            for number, unit in re.findall(r"(\d+\.\d+|\d{5,}) ?(bytes|MiB|MB|GiB|GB)\b", source):
                decimals = len(number.partition(".")[2])
                stated.append((float(number) * unit_bytes[unit], 0.51 * unit_bytes[unit] / 10**decimals))
        smallest, rounding = min(stated)
        assert abs(gpu.total_bytes - smallest) <= rounding, gpu.name


def test_rates() -> None:
    for name, capability, teraflops, gigabytes in [
        # Volta, Turing, Ampere, Ada, Hopper and Blackwell, from NVIDIA's data sheets and white papers. GeForce
        # cards sum in 32 bits at half of their rate in 16, as the RTX A6000 and the RTX 3090, one chip, show.
        ("T4", (7, 5), 65, 320),
        ("RTX 3090", (8, 6), 71, 936),
        ("RTX A6000", (8, 6), 154.8, 768),
        ("A100 80GB", (8, 0), 312, 1935),
        ("RTX 4090", (8, 9), 165.2, 1008),
        ("H100", (9, 0), 989.4, 3350),
        ("B200", (10, 0), 2250, 7670),
        ("RTX 5090", (12, 0), 209.5, 1792),
    ]:
        gpu = gpus.find(name)
        assert gpu.compute_capability == capability, name
        assert gpu.rates.flops == pytest.approx(teraflops * 1e12), name
        assert gpu.rates.bandwidth_bytes == pytest.approx(gigabytes * 1e9), name


# MHz, of reviews where one was found and else from memory; of a card sold in two forms, that of the one in the table.
BOOST_CLOCKS = {
    "RTX 3080 10GB": 1710, "RTX 2080 Ti": 1545, "RTX 3060 12GB": 1777, "RTX 4070 Ti": 2610, "T4": 1590,
    "RTX 4080 SUPER": 2550, "RTX 4060 Ti 16GB": 2535, "RTX A4000": 1560, "RTX 4080": 2505, "V100 16GB": 1380,
    "P100 16GB": 1303, "A10G": 1710, "A10": 1695, "L4": 2040, "RTX A5000": 1695, "RTX 4090": 2520, "RTX 3090": 1695,
    "RTX 5090": 2407, "V100 32GB": 1380, "A100 40GB": 1410, "L40S": 2520, "RTX A6000": 1800, "RTX 6000 Ada": 2505,
    "A40": 1740, "H100 PCIe": 1755, "A100 80GB": 1410, "H100": 1980, "H200": 1980, "B200": 1980,
}  # fmt: skip


def test_the_float32_rate_is_that_of_the_cores_at_the_boost_clock() -> None:
    """Two operations a core and clock; 64 cores in a multiprocessor of P100, V100, Turing and A100, later 128."""
    for gpu in map(gpus.find, NAMES):
        cores = 128 if gpu.compute_capability > (8, 0) else 64
        # Data sheets round down: 14e12 for the 14.13e12 of the V100, 51e12 for the 51.2e12 of the H100 PCIe.
        rate = gpu.multiprocessors * cores * 2 * BOOST_CLOCKS[gpu.name] * 1e6
        assert gpu.rates.fp32_flops == pytest.approx(rate, rel=0.01), gpu.name


def test_the_cards_that_cannot_do_bf16_say_so() -> None:
    cards = gpus.smallest_first()
    assert [gpu for gpu in cards if "no bf16" in gpu.note] == [gpu for gpu in cards if gpu.compute_capability < (8, 0)]
    assert [gpu for gpu in cards if "bf16" not in of_card(gpu.name, gpu.compute_capability).native] == [
        gpu for gpu in cards if "no bf16" in gpu.note
    ]


# Beside each card the spellings of people and of torch.cuda.get_device_name.
SPELLINGS = {
    "RTX 4090": ["rtx4090", "4090", "RTX 4090 24GB", "NVIDIA GeForce RTX 4090"],
    "A100 80GB": ["a100-80gb", "A100 80G", "A100 80GiB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"],
    "A100 40GB": ["NVIDIA A100-PCIE-40GB"],
    "RTX A6000": ["a6000"],
    "RTX 4060 Ti 16GB": ["rtx4060ti-16gb"],
    "RTX 4080 SUPER": ["NVIDIA GeForce RTX 4080 SUPER"],
    "RTX 6000 Ada": ["NVIDIA RTX 6000 Ada Generation"],
    "T4": ["Tesla T4"],
    "V100 32GB": ["Tesla V100-SXM2-32GB"],
    "A10G": ["NVIDIA A10G"],
    "A10": ["NVIDIA A10"],
    "H100": ["NVIDIA H100 80GB HBM3", "H100 SXM"],
    "H100 PCIe": ["NVIDIA H100 PCIe"],
}


def test_spelling_does_not_count() -> None:
    for name in NAMES:
        usual = [name.lower().replace(" ", ""), f"  NVIDIA {name.upper().replace(' ', '-')}"]
        for spelling in (name, *usual, *SPELLINGS.get(name, [])):
            assert gpus.find(spelling).name == name, spelling


AMBIGUOUS = {
    "A100": "`A100 40GB` or `A100 80GB`",
    "NVIDIA A100-SXM4": "`A100 40GB` or `A100 80GB`",
    "V100": "`V100 16GB` or `V100 32GB`",
    # Sold with 8 GB too, which the table does not have.
    "RTX 4060 Ti": "`RTX 4060 Ti 16GB`",
    "rtx4060ti": "`RTX 4060 Ti 16GB`",
    "80GB": "`H100 PCIe`, `A100 80GB` or `H100`",
}
MISSPELT = {
    "RTX 4900": "`RTX 4090", "rtx-5009": "`RTX 5090", "L40": "`L40S", "H1000": "`H100", "RTX A6O00": "`RTX A6000",
}  # fmt: skip
# Other cards of the same number.
OTHERS = (
    "RTX 4090 Ti", "RTX 4090 48GB", "NVIDIA GeForce RTX 4090 Laptop GPU", "H100 NVL", "V100S-PCIE-32GB", "GTX 4090",
)  # fmt: skip


def test_a_name_that_is_no_cards_is_not_guessed() -> None:
    for name, *said in (
        *AMBIGUOUS.items(),
        *((name, "did you mean", hint) for name, hint in MISSPELT.items()),
        *((name,) for name in OTHERS),
    ):
        with refusal(ConfigError, f"`{name}`", "24GiB", *said):
            gpus.find(name)
    for name in ("", "RTX", "zzz"):
        with refusal(ConfigError, *NAMES) as raised:
            gpus.find(name)
        assert "did you mean" not in str(raised.value)


def test_nearest_names_three_cards_each_once() -> None:
    near = gpus.nearest("A100 60GB")
    assert near[:2] in (["A100 40GB", "A100 80GB"], ["A100 80GB", "A100 40GB"])
    assert len(near) == len(set(near)) == 3
