"""The table of GPUs: every figure is plausible and agrees with its source, and a name finds one card or none."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest

from finetune.errors import ConfigError
from finetune.forecast import gpus
from finetune.model.precision import of_card

NAMES = gpus.names()
MIB = 2**20
GIB = 2**30


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as raised:
        gpus.find(name)
    return str(raised.value)


def test_the_table_has_the_cards_people_train_on() -> None:
    assert {"T4", "RTX 3060 12GB", "RTX 3090", "RTX 4060 Ti 16GB", "RTX 4090", "RTX 5090"} <= set(NAMES)
    assert {"RTX A6000", "A10G", "L4", "L40S", "A100 40GB", "A100 80GB", "H100", "H200", "B200"} <= set(NAMES)


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


def test_every_figure_is_plausible(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            gpu = gpus.find(name)
            assert isinstance(gpu.total_bytes, int)
            # ECC in memory takes 1/16, the driver the rest; T4, with ECC always on, reports the least of its size.
            assert 0.88 <= gpu.total_bytes / (gpu.sold_as_gb * GIB) <= 1
            assert (6, 0) <= gpu.compute_capability <= (12, 0)
            assert 15e12 <= gpu.flops <= 2.5e15
            assert 250e9 <= gpu.bandwidth_bytes <= 8e12
            # A rate with sparsity, or of 8 bits, would put a card above this number of operations a byte.
            assert 20 <= gpu.flops / gpu.bandwidth_bytes <= 425
            assert 15e9 <= gpu.pcie_bytes <= 64e9
            assert gpu.nvlink_bytes == 0 or 80e9 <= gpu.nvlink_bytes <= 900e9


def test_the_rates_of_links_are_those_one_way() -> None:
    """By hand: 16 lanes of 16 GT/s, of which 128 of 130 bits are data, and half of H100's 900 GB/s."""
    assert gpus.find("RTX 4090").pcie_bytes == pytest.approx(31.508e9, rel=1e-4)
    assert gpus.find("RTX 4060 Ti 16GB").pcie_bytes == pytest.approx(15.754e9, rel=1e-4)
    assert (gpus.find("RTX 4090").nvlink_bytes, gpus.find("H100").nvlink_bytes) == (0, 450e9)


def test_the_total_is_the_smallest_that_its_sources_state(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            gpu = gpus.find(name)
            unit_bytes = {"bytes": 1, "MiB": MIB, "MB": MIB, "GiB": GIB, "GB": GIB}
            stated = []
            for source in gpu.source:
                # Whole gigabytes are a part of a card's name.
                for number, unit in re.findall(r"(\d+\.\d+|\d{5,}) ?(bytes|MiB|MB|GiB|GB)\b", source):
                    decimals = len(number.partition(".")[2])
                    stated.append((float(number) * unit_bytes[unit], 0.51 * unit_bytes[unit] / 10**decimals))
            smallest, rounding = min(stated)
            assert abs(gpu.total_bytes - smallest) <= rounding


def test_every_entry_says_where_its_figures_come_from(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            source = gpus.find(name).source
            assert len(source) >= 2
            assert all(re.match(r"https://\S+\.\S+|log found by code search", item) for item in source)
            assert any(item.startswith("https://") for item in source)


def test_rates(subtests: pytest.Subtests) -> None:
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
        with subtests.test(name=name):
            gpu = gpus.find(name)
            assert gpu.compute_capability == capability
            assert gpu.flops == pytest.approx(teraflops * 1e12)
            assert gpu.bandwidth_bytes == pytest.approx(gigabytes * 1e9)


# MHz, of reviews where one was found and else from memory; of a card sold in two forms, that of the one in the table.
BOOST_CLOCKS = {
    "RTX 3080 10GB": 1710, "RTX 2080 Ti": 1545, "RTX 3060 12GB": 1777, "RTX 4070 Ti": 2610, "T4": 1590,
    "RTX 4080 SUPER": 2550, "RTX 4060 Ti 16GB": 2535, "RTX A4000": 1560, "RTX 4080": 2505, "V100 16GB": 1380,
    "P100 16GB": 1303, "A10G": 1710, "A10": 1695, "L4": 2040, "RTX A5000": 1695, "RTX 4090": 2520, "RTX 3090": 1695,
    "RTX 5090": 2407, "V100 32GB": 1380, "A100 40GB": 1410, "L40S": 2520, "RTX A6000": 1800, "RTX 6000 Ada": 2505,
    "A40": 1740, "H100 PCIe": 1755, "A100 80GB": 1410, "H100": 1980, "H200": 1980, "B200": 1980,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_float32_rate_is_that_of_the_cores_at_the_boost_clock(name: str) -> None:
    """Two operations a core and clock; 64 cores in a multiprocessor of P100, V100, Turing and A100, later 128."""
    gpu = gpus.find(name)
    cores = 128 if gpu.compute_capability > (8, 0) else 64
    # Data sheets round down: 14e12 for the 14.13e12 of the V100, 51e12 for the 51.2e12 of the H100 PCIe.
    rate = gpu.multiprocessors * cores * 2 * BOOST_CLOCKS[name] * 1e6
    assert gpu.fp32_flops == pytest.approx(rate, rel=0.01)


def test_the_cards_that_cannot_do_bf16_say_so() -> None:
    cards = gpus.smallest_first()
    assert [gpu for gpu in cards if "no bf16" in gpu.note] == [gpu for gpu in cards if gpu.compute_capability < (8, 0)]
    assert [gpu for gpu in cards if "bf16" not in of_card(gpu.name, gpu.compute_capability).native] == [
        gpu for gpu in cards if "no bf16" in gpu.note
    ]


def test_spelling_does_not_count(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            gpu = gpus.find(name)
            assert gpu.name == name
            assert gpus.find(name.lower().replace(" ", "")) is gpu
            assert gpus.find(f"  NVIDIA {name.upper().replace(' ', '-')}") is gpu


def test_spellings(subtests: pytest.Subtests) -> None:
    for spelling, name in [
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("RTX 4090 24GB", "RTX 4090"),
        ("a100-80gb", "A100 80GB"),
        ("A100 80G", "A100 80GB"),
        ("A100 80GiB", "A100 80GB"),
        ("a6000", "RTX A6000"),
        ("rtx4060ti-16gb", "RTX 4060 Ti 16GB"),
        ("H100 SXM", "H100"),
        # As torch.cuda.get_device_name reports them.
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4080 SUPER", "RTX 4080 SUPER"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
    ]:
        with subtests.test(spelling=spelling):
            assert gpus.find(spelling).name == name


def test_a_name_that_leaves_out_what_tells_cards_apart_is_not_guessed(subtests: pytest.Subtests) -> None:
    for name, choices in [
        ("A100", "`A100 40GB` or `A100 80GB`"),
        ("NVIDIA A100-SXM4", "`A100 40GB` or `A100 80GB`"),
        ("V100", "`V100 16GB` or `V100 32GB`"),
        # Sold with 8 GB too, which the table does not have.
        ("RTX 4060 Ti", "`RTX 4060 Ti 16GB`"),
        ("rtx4060ti", "`RTX 4060 Ti 16GB`"),
        ("80GB", "`H100 PCIe`, `A100 80GB` or `H100`"),
    ]:
        with subtests.test(name=name):
            assert refusal(name) == f"`{name}` does not say which GPU; write {choices}, or give a size such as 24GiB"


def test_an_unknown_name_suggests_the_nearest(subtests: pytest.Subtests) -> None:
    for name, hint in [
        ("RTX 4900", "did you mean `RTX 4090`"),
        ("rtx-5009", "did you mean `RTX 5090`"),
        ("L40", "did you mean `L40S`"),
        ("H1000", "did you mean `H100`"),
        ("RTX A6O00", "did you mean `RTX A6000`"),
    ]:
        with subtests.test(name=name):
            message = refusal(name)
            assert message.startswith(f"`{name}` is not a GPU this tool knows; {hint}")
            assert message.endswith("? Or give a size such as 24GiB, `auto` or `cpu`")


def test_another_card_of_the_same_number_is_not_found(subtests: pytest.Subtests) -> None:
    for name in [
        "RTX 4090 Ti",
        "RTX 4090 48GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "H100 NVL",
        "V100S-PCIE-32GB",
        "GTX 4090",
    ]:
        with subtests.test(name=name):
            assert "is not a GPU this tool knows" in refusal(name)


def test_a_name_like_no_other_gets_the_list_alone(subtests: pytest.Subtests) -> None:
    for name in ["", "RTX", "zzz"]:
        with subtests.test(name=name):
            message = refusal(name)
            assert "did you mean" not in message
            assert all(known in message for known in NAMES)


def test_nearest_names_three_cards_each_once() -> None:
    near = gpus.nearest("A100 60GB")
    assert near[:2] in (["A100 40GB", "A100 80GB"], ["A100 80GB", "A100 40GB"])
    assert len(near) == len(set(near)) == 3
