"""Loading: weights arrive in their final form, or a clear error does."""

import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import every_architecture
import pytest
import torch
from bases import loaded
from jobs import sampled
from messages import refusal
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config import ModelSection
from finetune.config.serving import GGUF
from finetune.errors import ArtifactError
from finetune.model.source.chat_template import named
from finetune.model.source.tokenizer import load_tokenizer
from finetune.model.structure.quantization import QUANTIZATIONS

# In 16 bit, as the built-in base is published.
SHARES_OF_16_BIT = {
    "nf4": 0.25, "fp4": 0.25, "int8": 0.5, "mxfp4": 0.25, "nvfp4": 0.25, "fp8": 0.5, "none": 1.0, "published": 1.0,
    "auto": 1.0,
    # Rows of 192 weights, which blocks of 256 do not divide: Q5_0, Q5_1, Q8_0 and IQ4_NL.
    "q4_k_m": 22 / 64, "q5_k_m": 24 / 64, "q6_k": 34 / 64, "q8_0": 34 / 64, "q4_0": 18 / 64, "iq4_xs": 18 / 64,
    "int4": 1.0,  # 16 bit
}  # fmt: skip


def load(kind: str = "nf4", *, dtype: torch.dtype = torch.bfloat16, **given: Any) -> Any:
    return loaded(kind, dtype=dtype, **given)


def weight_bytes(module: torch.nn.Module) -> int:
    return module.weight.numel() * module.weight.element_size()


assert set(QUANTIZATIONS) == SHARES_OF_16_BIT.keys() | {"gguf"}, "which is that of files in GGUF"


@pytest.mark.parametrize(
    ("kind", "weights"),
    sampled(
        itertools.product(SHARES_OF_16_BIT, ("pretrained", "random")),
        *((kind, "pretrained") for kind in SHARES_OF_16_BIT),
        *((kind, "random") for kind in ("nf4", "int8", "fp8", "q4_k_m", "none")),
    ),
)
def test_linear_layers_take_the_bytes_of_their_kind(kind: str, weights: str, shallow_base: Path) -> None:
    model = load(kind, weights=weights, name=str(shallow_base))
    projection = model.model.layers[0].mlp.up_proj
    assert weight_bytes(projection) == SHARES_OF_16_BIT[kind] * 2 * 192 * 512
    of_a_file = kind in GGUF
    assert model.model.embed_tokens.weight.dtype == (torch.uint8 if of_a_file else torch.bfloat16), "not cast up"
    assert (type(model.lm_head) is torch.nn.Linear) is not of_a_file, "the head is quantized where a file has it so"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("kind", ["nf4", "none"])
def test_random_weights_have_the_models_own_statistics_and_positions(kind: str) -> None:
    model, reference = load(kind, weights="random"), load(kind)
    weight = model.model.layers[1].self_attn.q_proj.weight
    if kind == "nf4":
        weight = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    assert weight.detach().float().std() == pytest.approx(model.config.initializer_range, rel=0.05)
    assert torch.equal(model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    assert torch.equal(model.model.norm.weight, torch.ones_like(model.model.norm.weight))
    assert model.lm_head.weight is model.model.embed_tokens.weight, "tied as the architecture says"
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bit_weights_with_rows_of_partial_blocks_are_as_exact_as_others(kind: str, tmp_path: Path) -> None:
    """4-bit NormalFloat is off by some 9% of a normal variable's deviation, 4-bit float by 12%; see libraries."""
    config = AutoConfig.for_model(
        "llama", hidden_size=96, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    exact, quantized = load("none", name=str(tmp_path)), load(kind, name=str(tmp_path))
    weights = dict(exact.named_parameters())
    layers = {name: one for name, one in quantized.named_modules() if isinstance(one, bnb.nn.Linear4bit)}
    assert len(layers) == 7
    for name, layer in layers.items():
        weight = weights[f"{name}.weight"]
        x = torch.eye(layer.in_features, dtype=torch.bfloat16)
        assert (layer(x).T - weight).float().norm() < 0.15 * weight.float().norm(), name


def test_an_evaluation_does_not_end_the_training_after_it() -> None:
    """bitsandbytes would repack 4-bit weights in eval mode on some CPUs, after which there is no backward pass."""
    gradients = []
    for evaluates in (False, True):
        model = load("nf4")
        ids = torch.arange(32)[None]
        if evaluates:
            with torch.inference_mode():
                model.eval()(input_ids=ids)
        model.train()
        model.enable_input_require_grads()
        grads: list[torch.Tensor] = []
        model.model.layers[0].register_full_backward_hook(
            lambda _, inputs, outputs, kept=grads: kept.append(outputs[0])
        )
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(grads[0])
    assert gradients[0].abs().sum() > 0
    assert torch.equal(*gradients)


class Live(TorchDispatchMode):
    """The bytes of the tensors on the CPU that operators have made, now and at most; what a file maps has none."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(one) for one in self._storages((args, kwargs))}
        for storage in self._storages(out):
            if id(storage) not in given | self.known:
                self.known.add(id(storage))
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _free(self, key: int, size: int) -> None:
        self.known.remove(key)
        self.now -= size

    @staticmethod
    def _storages(tree: Any) -> list[Any]:
        tensors = [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor) and one.device.type == "cpu"]
        return [one.untyped_storage() for one in tensors]


@pytest.mark.parametrize("name", sampled(["llama", "mixtral"], "mixtral"))  # whose attention is dense
def test_loading_never_holds_a_second_full_copy(name: str, tmp_path: Path) -> None:
    """Of weights in 16 bit NF4 keeps a quarter, and loading needs little more at any moment."""
    config = every_architecture.config(name)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size = 24, 64, 128, 64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    layers_bytes = sum(2 * weight.numel() for name, weight in model.named_parameters() if "proj" in name)
    for weights in ("random", "pretrained"):
        gc.collect()
        with Live() as live:
            kept = load(name=str(tmp_path), weights=weights)
        assert kept is not None
        gc.collect()
        assert 0.25 * layers_bytes < live.now < 0.4 * layers_bytes, weights
        assert live.most - live.now < 0.25 * layers_bytes, "a second copy would be 1.0"


_MEASURE_LOAD = """
import gc, json, sys, threading, time
from finetune.runtime import libraries
with libraries.importing():
    import torch, finetune, bitsandbytes, transformers
    from finetune.config import ModelSection, QuantizationSection
    from finetune.model.base import load_architecture, load_base
libraries.quiet()
torch.set_num_threads(1)
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"): return int(line.split()[1]) * 1024
def load(name, weights):
    section = ModelSection(name=name, weights=weights)
    return load_base(section, QuantizationSection(), load_architecture(section), attention="sdpa",
                     dtype=torch.bfloat16, device=torch.device("cpu"))
load("builtin:tiny-llama", "random")  # what libraries take once
def measure(name, weights):
    global peak, done
    gc.collect()
    before, peak, done = anonymous(), 0, False
    watcher = threading.Thread(target=watch); watcher.start()
    model = load(name, weights)
    done = True; watcher.join()
    return {"peak": peak - before, "final": anonymous() - before}
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous()); time.sleep(0.001)
print(json.dumps([measure(*job.split("=")) for job in sys.argv[1:]]))
"""


# 45M parameters, of a Llama in linear layers, of a mixture nearly all in experts: two parameters in each of 40 layers.
_LLAMA = {"num_hidden_layers": 14, "hidden_size": 512, "intermediate_size": 1376}
_MIXTRAL = {"num_hidden_layers": 40, "hidden_size": 256, "intermediate_size": 256, "num_local_experts": 5}


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's accounting")
@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param([("mixtral", "random"), ("mixtral", "pretrained")], id="experts"),  # whose attention is dense
        pytest.param([("llama", "random"), ("llama", "pretrained")], id="dense"),
    ],
)
def test_a_process_never_holds_a_second_full_copy(
    jobs: list[tuple[str, str]], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """45M parameters in 16 bit are 90 MB. NF4 keeps 23 MB of them, and loading needs little more at any moment."""
    quantized = {"llama": 14 * (4 * 512**2 + 3 * 512 * 1376), "mixtral": 40 * (3 * 256**2 + 15 * 256**2)}
    shapes = {"llama": _LLAMA, "mixtral": _MIXTRAL}
    for name in dict(jobs):
        config = AutoConfig.for_model(
            name, **shapes[name], num_attention_heads=4, num_key_value_heads=4 if name == "llama" else 2,
            vocab_size=2048, tie_word_embeddings=True,
        )  # fmt: skip
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.to_empty(device="cpu").tie_weights()
        for weight in model.parameters():
            torch.nn.init.constant_(weight, 0.01)  # drawing so many takes seconds
        model.save_pretrained(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE_LOAD, *(f"{tmp_path / name}={weights}" for name, weights in jobs)],
        # Blocks over 64 KiB go back to the system when freed, so that what is counted is what is held.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    for (name, weights), measured in zip(jobs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        with subtests.test(name=name, weights=weights):
            linear_bytes = 2 * quantized[name]
            assert measured["final"] < 0.35 * linear_bytes
            assert measured["peak"] - measured["final"] < 0.25 * linear_bytes, "a second copy would be 1.0"


# -- what can be wrong with a model ------------------------------------------------------------------------------------


def _without(name: str) -> Callable[[Path], None]:
    def remove(file: Path) -> None:
        tensors = load_file(file)
        del tensors[name]
        save_file(tensors, file, metadata={"format": "pt"})

    return remove


_MISSING = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:100_000]), ""),
        (lambda file: file.unlink(), ""),
        (lambda file: file.rename(file.with_name("pytorch_model.bin")), ""),
        (_without(_MISSING), _MISSING),  # never filled with random numbers
    ],
    ids=["cut off", "none", "a pickle", "incomplete"],
)
def test_weights_that_are_not_whole_are_refused(
    damage: Callable[[Path], object], named: str, shallow_base: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(shallow_base, tmp_path / "base"))
    damage(folder / "model.safetensors")
    with refusal(ArtifactError, str(folder), named):
        load(name=str(folder))


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def test_random_weights_of_the_catalog_take_the_built_in_tokenizer() -> None:
    tokenizer = load_tokenizer(ModelSection(name="meta-llama/Llama-2-7b-hf", weights="random"))
    assert len(tokenizer) == 2048


def test_a_tokenizer_without_template_and_pad_gets_both(tiny_base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("pad_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(ModelSection(name=str(folder)))
    assert tokenizer.pad_token == tokenizer.eos_token
    assert tokenizer.chat_template == named("plain")
