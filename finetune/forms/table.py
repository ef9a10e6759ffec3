"""The table of forms. A new one is one entry, and a file beside this one with its codec.

Importing this module loads no library: `finetune --help` reads the table.
"""

from __future__ import annotations

from typing import Any

from finetune.forms.form import ALONE, WITH_ADAPTERS, WITH_ADAPTERS_AS_PUBLISHED, Form, GgufFile, Recipe, Serving


def _by_bitsandbytes(name: str, bits: int, held: str, **arguments: Any) -> Form:
    return Form(name, bits, held=held, arguments=arguments)


def _by_llama_cpp(
    name: str, bits: int, words: str, held: str, roundoff: float, recipe: Recipe, *,
    module: str = "", mixed: bool = True,
) -> Form:  # fmt: skip
    """A form of GGUF files, whose embedding and head are quantized too."""
    served = Serving({"llama.cpp": WITH_ADAPTERS, "ollama": ALONE, "vllm": ALONE, "sglang": ALONE})
    return Form(
        name, bits, words, f"{held}, as in a GGUF file of llama.cpp", "", roundoff, module, None,
        GgufFile(f"MOSTLY_{name.upper()}", recipe, mixed), served,
    )  # fmt: skip


FORMS: dict[str, Form] = {
    "nf4": _by_bitsandbytes(
        "nf4", 4, "4-bit NormalFloat in blocks of 64", load_in_4bit=True, bnb_4bit_quant_type="nf4"
    ),
    "fp4": _by_bitsandbytes("fp4", 4, "4-bit float in blocks of 64", load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    # A threshold above 0 separates outlier columns in every forward pass. A frozen base under an adapter does not need
    # that, and it makes the memory of a step depend on the data (arXiv 2208.07339, section 3.2).
    "int8": _by_bitsandbytes("int8", 8, "8-bit integers, one scale per row", load_in_8bit=True, llm_int8_threshold=0.0),
    "mxfp4": Form(
        "mxfp4", 4, "4-bit floats in blocks of 32",
        held="4-bit floats in blocks of 32 with a power of two as scale (OCP MX), as gpt-oss is published",
        published="MXFP4", roundoff=0.12, module="mxfp4",
        gguf=GgufFile("MOSTLY_MXFP4_MOE", block=32),
        serving=Serving(
            {"llama.cpp": WITH_ADAPTERS, "ollama": ALONE, "vllm": WITH_ADAPTERS, "sglang": ALONE}, block=32
        ),
    ),
    "nvfp4": Form(
        "nvfp4", 4, "4-bit floats in blocks of 16",
        held="4-bit floats in blocks of 16, each with a scale in 8 bits (NVIDIA), as compressed-tensors and ModelOpt "
        "write",
        published="NVFP4", roundoff=0.1, module="nvfp4",
        gguf=GgufFile("MOSTLY_NVFP4", block=64),
        # Beside the factors of NVFP4 and an adapter, llama.cpp aborts (llama-graph.cpp of 2026-10).
        serving=Serving({"llama.cpp": ALONE, "vllm": WITH_ADAPTERS_AS_PUBLISHED, "sglang": ALONE}, block=16),
    ),
    "fp8": Form(
        "fp8", 8, "8-bit floats in blocks of 128 x 128",
        held="8-bit floats in blocks of 128 x 128, as DeepSeek and Qwen's FP8 models are published",
        published="FP8", roundoff=0.03, module="fp8",
        serving=Serving(
            {"vllm": WITH_ADAPTERS, "sglang": ALONE}, block=128,
            without_experts={"vllm": "vLLM computes nonsense with an adapter on experts in FP8 (vllm#42007)"},
        ),
    ),
    "q4_k_m": _by_llama_cpp(
        "q4_k_m", 4, "4 and 6 bit", "4-bit integers with two levels of scales, and 6 bit in half of the layers", 0.08,
        Recipe("q4_k", "q6_k", more_bits=True),
    ),
    "q5_k_m": _by_llama_cpp(
        "q5_k_m", 5, "5 and 6 bit", "5-bit integers with two levels of scales, and 6 bit in half of the layers", 0.04,
        Recipe("q5_k", "q6_k", more_bits=True),
    ),
    "q6_k": _by_llama_cpp(
        "q6_k", 6, "6 bit", "6-bit integers with two levels of scales", 0.02, Recipe("q6_k", "q6_k"),
        module="k_quants",
    ),
    # Half a step is 1/254 of the largest of 32 weights, and so 2^-7 of their root mean square.
    "q8_0": _by_llama_cpp(
        "q8_0", 8, "8 bit in blocks of 32", "8-bit integers in blocks of 32", 2**-7, Recipe("q8_0", "q8_0"),
        module="small_blocks", mixed=False,
    ),
    "q4_0": _by_llama_cpp(
        "q4_0", 4, "4 bit in blocks of 32", "4-bit integers in blocks of 32", 0.09, Recipe("q4_0", "q6_k"),
        module="small_blocks",
    ),
    "iq4_xs": _by_llama_cpp(
        "iq4_xs", 4, "4 bit by a table of values", "4-bit codes of a table of values, with two levels of scales", 0.08,
        Recipe("iq4_xs", "q6_k"), module="k_quants",
    ),
    "int4": Form(
        "int4", 4, "4-bit integers in groups of 128",
        held="4-bit integers in blocks of 128, as compressed-tensors writes", roundoff=0.12, module="int4",
        serving=Serving({"vllm": WITH_ADAPTERS, "sglang": ALONE}, block=128),
    ),
    # Of single matrices in GGUF files.
    "q4_k": Form("q4_k", 4, module="k_quants"),
    "q5_k": Form("q5_k", 5, module="k_quants"),
    "q5_0": Form("q5_0", 5, module="small_blocks"),
    "q5_1": Form("q5_1", 5, module="small_blocks"),
    "iq4_nl": Form("iq4_nl", 4, module="small_blocks"),
    "gguf_mxfp4": Form("gguf_mxfp4", 4, module="mxfp4"),
    # Unquantized.
    "f16": Form("f16", 16, "16 bit, read everywhere", roundoff=2**-12, gguf=GgufFile("MOSTLY_F16", mixed=False)),
    "bf16": Form(
        "bf16", 16, "16 bit with the range of float32", roundoff=2**-9, gguf=GgufFile("MOSTLY_BF16", mixed=False)
    ),
    "16bit": Form(
        "16bit", 16, "the training precision",
        serving=Serving(
            {"llama.cpp": WITH_ADAPTERS, "ollama": ALONE, "vllm": WITH_ADAPTERS, "sglang": WITH_ADAPTERS}
        ),
    ),
}  # fmt: skip
"""Forms by name.

What runtimes read is as of 2026: llama.cpp#8056; ollama#14969; the tables of vllm#29424; sglang#9449. `gguf_mxfp4` is
MXFP4 in the layout of a GGUF file.
"""

LEAST_FIRST = ("none", "int8", "fp8", "nf4")
"""The kinds that `quantization.kind: auto` chooses from, by the error of a normally distributed weight (0.8%, 2.6% and
9%)."""
