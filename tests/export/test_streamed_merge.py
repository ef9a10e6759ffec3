"""The merge from file to file: bit for bit what merging in memory gives, and nothing half-written."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from jobs import sampled
from messages import refusal
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import finetune
from finetune.choices import load_config
from finetune.config import AdapterSection, Config
from finetune.data.media import NOTHING
from finetune.data.prepare import ComparedRows
from finetune.errors import ArtifactError, ConfigError, MachineError
from finetune.export import proof
from finetune.export.merging import merge, merged_files
from finetune.export.merging.bases import Bases, Merging, Onto
from finetune.export.merging.updates import base_name
from finetune.model.adapters import adapter, adapter_files
from finetune.model.base import load_architecture
from finetune.model.build import Blueprint
from finetune.model.skeleton import make_buffers
from finetune.model.source import identity
from finetune.model.source.locate import BUILTIN_BASE, locate
from finetune.model.structure import eight_bit
from finetune.storage import weight_files
from finetune.storage.rundir import RunDirectory

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import merge as merging

CPU = torch.device("cpu")
IDS = torch.arange(3, 35)[None]
_SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_LAYERS = ["sliding_attention", "full_attention"]
_GEMMA4: dict[str, Any] = {
    "head_dim": 8, "global_head_dim": 16, "layer_types": 2 * _LAYERS, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"head_dim": 8},
    "phi3": {},
    "mixtral": _EXPERTS,
    "qwen3_moe": {**_EXPERTS, "head_dim": 8, "moe_intermediate_size": 16},
    "gpt_oss": {**_EXPERTS, "head_dim": 8},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "layer_types": _LAYERS},
    "gemma4_text": _GEMMA4,
    "gemma4": {
        "text_config": {**_SIZES, **_GEMMA4},
        "audio_config": None,
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
        },
        "image_token_id": 120, "audio_token_id": 121, "boi_token_id": 122, "eoi_token_id": 123, "boa_token_id": 124,
        "eoa_token_id": 125,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama4_text": {**_EXPERTS, "head_dim": 8, "intermediate_size_mlp": 48},
}  # fmt: skip
VARIANTS: dict[str, tuple[str, list[str], Onto]] = {
    "lora": ("llama", [], "16-bit"),
    "quantized twice": ("llama", ["quantization.double=true"], "quantized"),
    "8 bits": ("llama", ["quantization.kind=int8"], "quantized"),
    "rslora, ranks, biases": (
        "qwen2", ["adapter.rslora=true", "adapter.targets=[q_proj, v_proj, down_proj]", "adapter.ranks.v_proj=2"],
        "16-bit",
    ),
    "dora, float16": ("gemma2", ["adapter.dora=true", "training.precision=fp16"], "16-bit"),
    "dora, quantized": ("phi3", ["adapter.dora=true"], "quantized"),
    "pissa, ranks, bfloat16": (
        "llama",
        ["adapter.init=pissa", "adapter.dtype=bfloat16", "quantization.kind=none", "adapter.ranks.q_proj=2"],
        "16-bit",
    ),
    "loftq": ("qwen2", ["adapter.init=loftq"], "quantized"),
    "trained embeddings": ("qwen2", ["adapter.extra_modules=[embed_tokens, norm]"], "16-bit"),
    "trained head": ("gemma2", ["adapter.extra_modules=[lm_head]"], "quantized"),
    "experts": (
        "mixtral",
        ["adapter.targets=[q_proj, experts.gate_up_proj, experts.down_proj]", "quantization.kind=int8"],
        "16-bit",
    ),
    "quantized experts": ("qwen3_moe", [], "quantized"),
    "transposed layers": (
        "gpt2", ["adapter.dora=true", "adapter.targets=[c_attn, c_fc]", "adapter.ranks.c_fc=2",
                 "quantization.kind=none"], "16-bit",
    ),
    "transposed layers, quantized": ("gpt2", [], "quantized"),
    "transposed layers, 8 bits": ("gpt2", ["quantization.kind=int8"], "quantized"),
    "transposed experts": (
        "gpt_oss", ["adapter.targets=[experts.gate_up_proj, experts.down_proj]", "quantization.kind=none"], "16-bit",
    ),
}  # fmt: skip


def base_at(folder: Path, name: str, tiny_base: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A model in three shards, with the built-in base's tokenizer."""
    torch.manual_seed(0)
    fields = ARCHITECTURES[name]
    config = AutoConfig.for_model(name, **(fields if "text_config" in fields else {**_SIZES, **fields}))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    size = sum(weight.nbytes for weight in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // 3)
    for file in tiny_base.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    return folder


def base_of(config: Config, dtype: torch.dtype) -> Any:
    return Blueprint(config.model, config.quantization, load_architecture(config.model), "eager", dtype).load(CPU)


def write_adapter(config: Config, folder: Path) -> None:
    """An adapter as training publishes it, with weights that matter."""
    plain = config.changed({"quantization.kind": "none", "quantization.double": None})
    section: AdapterSection = adapter_files.published(config.adapter)
    model = adapter.attach(base_of(plain, torch.float32), section, config.model.name, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in adapter_files.weights(model).values():
            weight.add_(0.05 * torch.randn_like(weight))
    model.save_pretrained(str(folder), save_embedding_layers=False)


def _transposed(config: Config) -> bool:
    """Whether dequantizing a model does not give back its layers (transformers 5.24: linear ones for GPT-2's)."""
    return load_architecture(config.model).model_type == "gpt2"


def merged_in_memory(config: Config, folder: Path, onto: Onto, dtype: torch.dtype) -> Any:
    """PEFT's merge of the whole model in float32, rounded once."""
    plain = config.changed({"quantization.kind": "none", "quantization.double": None})
    if onto == "16-bit":
        base = base_of(plain, torch.float32)
    elif config.quantization.kind == "int8" or _transposed(config):
        base, trained = base_of(plain, torch.float32), base_of(config, dtype)
        for name, layer in trained.named_modules():
            weight = None
            if isinstance(layer, eight_bit.WeightOnly):
                weight = eight_bit.dequantized(layer.weight.data, layer.weight.SCB, dtype)
            elif isinstance(layer, bnb.nn.Linear4bit):
                weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            if weight is not None:
                whole = base.get_submodule(name)
                whole.weight.data = (weight.T if isinstance(whole, Conv1D) else weight).float().contiguous()
    else:
        base = base_of(config, dtype).dequantize(dtype).float()
    merged = adapter_files.load_adapter(base, folder, config.adapter).merge_and_unload()
    for weight in merged.parameters():  # buffers, such as rotary frequencies, stay in float32
        weight.data = weight.data.to(dtype)
    return merged


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


# PEFT warns of what the merge takes care of.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Input and output embeddings are no")
@pytest.mark.parametrize(
    "variant",
    sampled(
        VARIANTS, "quantized twice", "8 bits", "rslora, ranks, biases", "dora, float16", "pissa, ranks, bfloat16",
        "loftq", "trained embeddings", "trained head", "experts", "quantized experts", "transposed layers",
        "transposed layers, quantized", "transposed experts",
    ),
)  # fmt: skip
def test_the_streamed_merge_equals_the_merge_in_memory_bit_for_bit(
    variant: str, tiny_base: Path, tmp_path: Path
) -> None:
    name, changes, onto = VARIANTS[variant]
    base = base_at(tmp_path / "base", name, tiny_base)
    job = ["configs/tiny_cpu.yaml", f"model.name={base}", "training.precision=bf16", "data.train=x.jsonl", *changes]
    config = load_config(Path(job[0]), job[1:])
    folder, target = tmp_path / "adapter", tmp_path / "merged"
    write_adapter(config, folder)
    bases = Bases(config, folder, identity.loaded_files(base), CPU)
    target.mkdir()
    merged_files.write_weights(bases.merging(onto), target)
    bases.merged_architecture.save_pretrained(target)

    expected = merged_in_memory(config, folder, onto, bases.dtype)
    model, report = AutoModelForCausalLM.from_pretrained(
        target, dtype=bases.dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = dict(expected.named_parameters())
    assert [name for name, weight in model.named_parameters() if not torch.equal(weight, weights[name])] == []
    assert torch.equal(logits(model), logits(expected))
    untrained = AutoModelForCausalLM.from_pretrained(base, dtype=bases.dtype, attn_implementation="eager")
    assert not torch.equal(logits(model), logits(untrained))
    assert {file.name for file in target.glob("*.safetensors")} == {file.name for file in base.glob("*.safetensors")}
    index = [json.loads((place / "model.safetensors.index.json").read_text())["weight_map"] for place in (base, target)]
    added = index[1].keys() - index[0].keys()
    assert added == ({"lm_head.weight"} if "trained" in variant else set())
    assert index[1].items() >= index[0].items()


# -- the proof ---------------------------------------------------------------------------------------------------------


def _dropped(merging: Merging, name: str, base: torch.Tensor) -> torch.Tensor:
    """Without the update of one layer."""
    return base if re.search(r"(layers|h)\.1\.", name) else merging.bases.updates.apply(name, base)


def _scaled(merging: Merging, name: str, base: torch.Tensor) -> torch.Tensor:
    """With 1.1 times the update."""
    merged = merging.bases.updates.apply(name, base)
    return base.float() + 1.1 * (merged.float() - base.float())


def _swapped(merging: Merging, name: str, base: torch.Tensor) -> torch.Tensor:
    """With one matrix updated by another layer's."""
    updates, weights = merging.bases.updates, merging.bases.weights
    if not re.search(r"(layers\.0\.self_attn\.o_proj|h\.0\.attn\.c_proj)\.weight", name) or "tower" in name:
        return updates.apply(name, base)
    others = (re.sub(r"(layers|h)\.0", rf"\1.{layer}", name) for layer in (1, 2))
    other = next(each for each in others if weights[each].shape == base.shape)
    return base.float() + updates.apply(other, weights[other]) - weights[other].float()


WRONG = (_scaled, _dropped, _swapped)
# Those whose merges or proofs differ in kind: plain, of experts, transposed, and compared in float32.
DIFFERENT = ("llama", "mixtral", "gpt2", "gemma4_text")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_random_error_is_distributed_like_rounding(dtype: torch.dtype) -> None:
    weight = torch.randn(10**6, generator=torch.Generator().manual_seed(0))
    rounding, random = weight.to(dtype).float() - weight, proof.rounded_at_random(weight, dtype, seed=1) - weight
    assert random.norm() == pytest.approx(float(rounding.norm()), rel=0.01)
    assert random.abs().max() == pytest.approx(float(rounding.abs().max()), rel=0.05)
    assert abs(torch.dot(rounding, random)) < 0.01 * rounding.norm() * random.norm(), "the two are independent"


def test_the_effect_of_rounding_is_that_of_all_weights_which_a_merge_rounds(tiny_base: Path, tmp_path: Path) -> None:
    """An adapter's own weights are not rounded by themselves."""
    base = base_at(tmp_path / "base", "gemma2", tiny_base, torch.float32)
    job = [f"model.name={base}", "training.precision=fp32", "quantization.kind=none", "data.train=x.jsonl"]
    config = load_config(Path("configs/tiny_cpu.yaml"), job)
    write_adapter(config, tmp_path / "adapter")
    bases = Bases(config, tmp_path / "adapter", identity.loaded_files(base), CPU)
    found, of = bases.merging("16-bit"), set[str]()
    for name, _ in bases.adapted.named_parameters():
        known, plain = found.rounded_at_random(name), base_name(name)
        assert known is not None
        if ".default." in name:
            of.add("adapter")
            assert torch.equal(known, found.adapted(name))
        elif plain in bases.updates:
            of.add("updated")
            assert not torch.equal(known.bfloat16(), found.merged(plain))
        else:
            of.add("others")
            assert torch.equal(known, found.merged(plain))
            assert known.dtype is torch.bfloat16
    assert of == {"adapter", "updated", "others"}
    rows = torch.randint(3, 120, (4, 48), generator=torch.Generator().manual_seed(0)).tolist()
    (written := tmp_path / "written").mkdir()
    merged_files.write_weights(found, written)
    for model in (bases.bare, bases.adapted.get_base_model()):
        make_buffers(model, CPU)
    proven = merge._measured(bases, found, rows, written)
    assert proven.error == pytest.approx(proven.bound / proof.MEASURED, rel=0.1), "the error is the effect of rounding"


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(ARCHITECTURES, "gpt2", "gpt_oss", "qwen3_moe"))
def test_a_correct_merge_is_proven_and_a_wrong_one_refused(
    name: str, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_at(tmp_path / "base", name, tiny_base)
    job = [f"model.name={base}", "training.precision=bf16", "quantization.kind=none", "data.train=x.jsonl"]
    config = load_config(Path("configs/tiny_cpu.yaml"), job)
    write_adapter(config, tmp_path / "adapter")
    rows = torch.randint(3, 120, (4, 48), generator=torch.Generator().manual_seed(0)).tolist()

    def prove(folder: Path) -> dict[str, Any]:
        bases = Bases(config, tmp_path / "adapter", identity.loaded_files(base), CPU)
        folder.mkdir()
        merged_files.write_weights(bases.merging("16-bit"), folder)
        return merge._prove(bases, "16-bit", ComparedRows(rows, rows, NOTHING, "random rows"), folder)

    proven = prove(tmp_path / "right")
    assert proven["error"] <= proven["bound"] < proven["effect"] / 10
    # Where the depth does not explain the error, the measured effect of rounding does.
    assert proven["computed_in"] == ("float32" if "gemma4" in name else "bfloat16")
    for wrong in WRONG if name in DIFFERENT else WRONG[:1]:

        def merged(merging: Merging, name: str, weight: torch.Tensor, wrong: Any = wrong) -> torch.Tensor:
            return merging._rounded(wrong(merging, name, merging._base(name, weight)))

        with monkeypatch.context() as patch:
            patch.setattr(Merging, "_merged", merged)
            with refusal(ArtifactError, "the merged model is not the trained model"):
                prove(tmp_path / wrong.__name__)


# -- whole commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run on a base of two layers in four shards, with an adapter that matters, and without a training."""
    architecture = AutoConfig.from_pretrained(locate(BUILTIN_BASE))
    architecture.num_hidden_layers = 2
    merging.write_base(tmp_path / "base", architecture, 4)
    return merging.make_run(tmp_path / "run", tmp_path / "base", tokens=1)[0]


def left(run: RunDirectory) -> list[str]:
    """What a merge left in the run directory."""
    return sorted(path.name for path in run.path.iterdir() if path.name.startswith("merged"))


@pytest.mark.slow
def test_both_merges_are_compared_with_the_trained_model(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Contradictory settings, as Llama 2 has, which transformers refuses to save once they are changed.
    settings = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(settings))
    plain = finetune.merge(run)
    said = " ".join(capsys.readouterr().out.split())
    assert "from the 16-bit base with the adapter" in said
    assert "onto quantized" in said
    published = json.loads((run.merged / "generation_config.json").read_text())
    assert published.items() >= settings.items()
    assert published["eos_token_id"]
    near = finetune.merge(run, onto="quantized")
    assert (plain["onto"], near["onto"]) == ("16-bit", "quantized")
    assert near["compared_with"] == "the dequantized nf4 base with the adapter"
    for record in (plain, near):
        assert record["error"] <= record["bound"] < record["effect"]
        assert record["to_trained"]["quantized"]["kl"] < 0.2 * record["to_trained"]["16-bit"]["kl"]
        assert record["to_trained"]["quantized"]["agreement"] > record["to_trained"]["16-bit"]["agreement"]
        assert record["losses"].keys() == {"16-bit", "quantized", "trained", "base"}
        assert record["losses"]["quantized"] == pytest.approx(record["losses"]["trained"], abs=0.01)
    # The one that is not written is computed from the same weights as the one that is.
    assert plain["to_trained"]["16-bit"] == pytest.approx(near["to_trained"]["16-bit"])
    assert plain["to_trained"]["quantized"] == pytest.approx(near["to_trained"]["quantized"])


@pytest.mark.slow
def test_an_interrupted_merge_goes_on_with_the_next_shard(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def write(path: Path, *arguments: Any) -> None:
        if path.name == stop_at:
            raise KeyboardInterrupt
        written.append(path.name)
        write_file(path, *arguments)

    write_file = weight_files.write
    monkeypatch.setattr(weight_files, "write", write)
    names = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    stop_at = names[2]
    with pytest.raises(KeyboardInterrupt):
        finetune.merge(run)
    assert left(run) == ["merged.incomplete"]
    stop_at = ""
    proven = finetune.merge(run)
    assert written == names
    assert left(run) == ["merged"]
    assert not (run.merged / "made_from.json").exists()
    written.clear()
    stop_at = names[1]
    with pytest.raises(KeyboardInterrupt):
        finetune.merge(run)
    stop_at = ""
    monkeypatch.setattr(merge, "_prove", lambda *_: proven)
    finetune.merge(run, onto="quantized")
    assert written == [names[0], *names], "what was begun onto another base is of no use"


@pytest.mark.slow
@pytest.mark.parametrize("change", sampled(["another", "removed", "half written"], "another", "half written"))
def test_a_base_that_changes_during_a_merge_is_not_published(
    change: str, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another base stands there before the first weight is read: every logit then agrees."""
    shard = tmp_path / "base" / "model-00002-of-00004.safetensors"
    settings = merged_files.write_settings

    def move(*arguments: Any) -> None:
        settings(*arguments)
        if change == "removed":
            shard.unlink()
            return
        tensors = {name: tensor * 1.1 for name, tensor in load_file(shard).items()}
        save_file(tensors, tmp_path / "other", {"format": "pt"})
        if change == "half written":
            (tmp_path / "other").write_bytes((tmp_path / "other").read_bytes()[:-1000])
        (tmp_path / "other").rename(shard)

    monkeypatch.setattr(merged_files, "write_settings", move)
    with refusal(ArtifactError):
        finetune.merge(run)
    assert left(run) == []


@pytest.mark.slow
def test_a_refused_merge_leaves_no_files(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = tmp_path / "base" / "model-00002-of-00004.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with refusal(ArtifactError, "model-00002-of-00004.safetensors:"):
        finetune.merge(run)
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with refusal(ArtifactError, "was trained on another base"):
        finetune.merge(run)
    shard.write_bytes(content)
    with refusal(ConfigError, "`quantized`"):
        finetune.merge(run, onto="quantised")
    monkeypatch.setattr(merged_files.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    with refusal(MachineError, "the merged weights need"):
        finetune.merge(run)
    assert left(run) == []


def test_a_base_that_the_run_does_not_have_is_refused() -> None:
    for change, onto, other in (
        ("quantization.kind=none", "quantized", "16-bit"), ("adapter.init=loftq", "16-bit", "quantized")
    ):  # fmt: skip
        config = load_config(Path("configs/tiny_cpu.yaml"), ["data.train=x.jsonl", change])
        sections = config.adapter, config.quantization, config.model
        with refusal(ConfigError, f"`{onto}`", f"`{other}`" if "loftq" in change else "was not quantized"):
            merge._chosen(onto, *sections)
        assert merge._chosen(None, *sections) == other
