"""GGUF files: llama.cpp and transformers make of them what the model does that they were written from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf_in_llama_cpp as bench
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from jobs import TINY, sampled
from messages import refusal
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import finetune
from finetune.choices import load_config
from finetune.data.examples import Chat
from finetune.data.media import NOTHING
from finetune.data.prepare import ComparedRows
from finetune.errors import ArtifactError, ConfigError, MachineError
from finetune.export.conversion import Conversion
from finetune.export.gguf import gguf_export, gguf_model, gguf_recipes, gguf_types, gguf_vocabulary, llama_cpp
from finetune.model.source import catalog, chat_template, gguf_families, gguf_names
from finetune.storage.rundir import RunDirectory
from tests.published_bases import publish

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Made:
    """A model made here, with its tokenizer, and as a folder."""

    tokenizer: Any
    config: Any
    model: Any
    folder: Path

    def export(self, file: Path, kind: str = "f16") -> Path:
        bench.export(self.folder, self.tokenizer, file, kind)
        return file


def make(name: str, folder: Path, steps: int) -> Made:
    shape = bench.SHAPES[name]
    tokenizer = shape.tokenizer()
    config = bench.architecture(shape, len(tokenizer) + 3)  # a vocabulary with room, as many models have
    model = bench.train(config, tokenizer, steps)
    bench.write(model, tokenizer, folder)
    return Made(tokenizer, config, model, folder)


@pytest.fixture(scope="module", params=sampled(["llama", "qwen2.5", "gemma2"], "llama"))
def trained_shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(request.param, tmp_path_factory.mktemp("model"), steps=60)


@pytest.fixture
def llama(tmp_path: Path) -> Made:
    return make("llama", tmp_path / "model", steps=0)


@torch.inference_mode()
def relative_error(model: Any, expected: Any) -> float:
    ids = torch.arange(20, 84)[None]
    these, those = model(input_ids=ids).logits, expected(input_ids=ids).logits
    return float((these - those).norm() / those.norm())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "agreement"), [("f16", 0.95), ("q8_0", 0.85)])
def test_llama_cpp_gives_the_models_answers(trained_shape: Made, kind: str, agreement: float, tmp_path: Path) -> None:
    """Few positions of a model that learnt little, where one tie counts; `make exports` holds 500 to 99% and 98%."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    file = trained_shape.export(tmp_path / "model.gguf", kind)
    read = gguf_export.load(file, trained_shape.config, torch.float32, CPU)
    assert relative_error(read, trained_shape.model) < 4 * gguf_types.TYPES[kind].roundoff
    with llama_cpp.serving(file, 2 * bench.CONTEXT) as server:
        found = bench.compare(server, trained_shape.model, trained_shape.tokenizer, positions=60, count=150)
    assert found["same_top"] >= agreement
    assert found["strings_alike"] == 150
    assert found["conversations_alike"] == found["conversations"] >= 2


@torch.no_grad()
def shake(model: Any) -> Any:
    """Weights with which every part of the model matters; those it starts with attend to all tokens alike."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if weight.is_floating_point() and not name.endswith("inv_freq"):
            strength = 0.15 if weight.dim() > 1 else 0.3
            weight += strength * torch.randn(weight.shape, generator=generator)
    return bench.rounded(model)


def made_of(name: str, folder: Path, kind: str = "f16", **room: Any) -> Conversion:
    """A conversion of a small model with a tokenizer of its family, on two rows of text."""
    run, shape = RunDirectory(folder), bench.SHAPES[name]
    tokenizer = shape.tokenizer()
    config = bench.architecture(bench.Shape(shape.tokenizer, shape.fields | room), len(tokenizer) + 3)
    bench.write(shake(bench.train(config, tokenizer, steps=0)), tokenizer, run.merged)
    job = [f"model.name={run.merged}", "model.weights=random", "output.merge=false", "data.train=x.jsonl"]
    ids = tokenizer(bench.texts()[-1], add_special_tokens=False)["input_ids"]

    def load(dtype: torch.dtype | None) -> Any:
        return AutoModelForCausalLM.from_pretrained(run.merged, dtype=dtype)

    compared = ComparedRows([ids[:100], ids[100:120]], [], NOTHING, "the rows")
    return Conversion(
        run=run, config=load_config(TINY, job), tokenizer=tokenizer, device=CPU, kind=kind, compared=compared,
        base_identity=None, load_merged=load,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sampled(
        sorted(bench.SHAPES.keys() - {"llama", "qwen2.5", "gemma2"}), "gemma3", "gpt-oss",
        "qwen3.5, which also sees",
    ),
)  # fmt: skip
def test_every_family_is_proven_in_llama_cpp_and_a_wrong_tensor_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    job = made_of(name, tmp_path)
    facts = gguf_export.make(job, tmp_path)
    assert facts["error"] <= facts["bound"] < 0.01
    assert facts["llama_cpp"]["agreement"] >= 0.95
    assert facts["llama_cpp"]["tokenized_alike"] == 2
    stored = gguf_names.stored

    def wrong(tensor: str, *others: Any, **named: Any) -> Any:
        parts = stored(tensor, *others, **named)
        return {
            part: each.roll(1, -2) if "layers.1." in part and "up_proj" in part else each
            for part, each in parts.items()
        }

    monkeypatch.setattr(gguf_names, "stored", wrong)
    with refusal(ArtifactError, "is not the trained model"):
        gguf_export.make(job, tmp_path)


@pytest.mark.parametrize(("name", "kind"), sampled([("smollm3", "q4_k_m"), ("gpt-oss", "bf16")], ("gpt-oss", "bf16")))
def test_other_types_are_proven_in_llama_cpp_too(name: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    facts = gguf_export.make(made_of(name, tmp_path, kind), tmp_path)
    assert facts["error"] <= facts["bound"]
    assert facts["compared_with"] == "the merged model, in llama.cpp"


@pytest.mark.parametrize(
    ("kind", "main"),
    sampled(
        [("q4_0", "Q4_0"), ("iq4_xs", "IQ4_NL"), ("mxfp4", "MXFP4"), ("nvfp4", "NVFP4")],
        ("iq4_xs", "IQ4_NL"),
        ("nvfp4", "NVFP4"),
    ),
)
def test_four_bits_are_read_by_transformers_and_run_in_llama_cpp(kind: str, main: str, tmp_path: Path) -> None:
    """Rows of 64: with blocks of 256 too wide, the head is in Q8_0, and IQ4_NL takes the place of IQ4_XS."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    facts = gguf_export.make(made_of("llama", tmp_path, kind), tmp_path)
    stored = {one.tensor_type.name for one in GGUFReader(tmp_path / facts["file"]).tensors}
    assert stored == {main, "Q8_0", "F32"}
    assert facts["error"] <= facts["bound"]
    assert facts["kept"] > 0.8
    assert 0 < facts["weights"]["differing"] < facts["weights"]["count"]
    if kind != "nvfp4":  # whose factors transformers does not read
        assert facts["llama_cpp"]["agreement"] >= 0.9


def test_a_family_that_llama_cpp_alone_reads_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = made_of("smollm3", tmp_path)
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)
    with refusal(MachineError, "`smollm3`", "llama.cpp", "pip install xllamacpp`"):
        gguf_export.check(job)


def test_every_model_of_the_catalog_is_written() -> None:
    for name in catalog.names():
        gguf_families.family(catalog.config(name))
    assert gguf_families.FAMILIES.keys() >= catalog.families()


def test_vectors_stay_in_float32_and_rows_of_other_lengths_than_blocks_in_float16(llama: Made, tmp_path: Path) -> None:
    kinds = {one.name: one.tensor_type.name for one in GGUFReader(llama.export(tmp_path / "a.gguf", "q8_0")).tensors}
    assert kinds["blk.0.attn_norm.weight"] == kinds["rope_freqs.weight"] == "F32"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"
    assert gguf_model._type("x.weight", [8, 33], "q8_0", llama.config).name == "F16"


@pytest.mark.parametrize(
    ("kind", "part", "layers", "plain", "finer"),
    [
        ("q4_k_m", "attn_v", 32, "Q4_K", [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]),
        ("q5_k_m", "ffn_down", 10, "Q5_K", [0, 3, 6, 8, 9]),
        ("q4_k_m", "attn_qkv", 80, "Q5_K", [*range(10), *range(12, 70, 3), *range(70, 80)]),
        ("q4_k_m", "ffn_up", 32, "Q4_K", []),
        ("q6_k", "attn_v", 4, "Q6_K", []),
    ],
)
def test_a_recipe_gives_some_layers_more_bits(kind: str, part: str, layers: int, plain: str, finer: list[int]) -> None:
    """As `llama-quantize` of llama.cpp b10605 does."""
    config = SimpleNamespace(num_hidden_layers=layers, tie_word_embeddings=False)
    found = [gguf_recipes.type_of(f"blk.{layer}.{part}.weight", kind, config).name for layer in range(layers)]
    assert found == ["Q6_K" if layer in finer else plain for layer in range(layers)]


def test_a_recipe_gives_the_output_more_bits(llama: Made) -> None:
    for kind, main in (("q4_0", "Q4_0"), ("q4_k_m", "Q4_K"), ("iq4_xs", "IQ4_XS")):
        for tied, names in ((True, ["Q6_K", "Q6_K"]), (False, [main, "Q6_K"])):
            config = SimpleNamespace(num_hidden_layers=2, tie_word_embeddings=tied)
            found = [gguf_recipes.type_of(f"{name}.weight", kind, config).name for name in ("token_embd", "output")]
            assert found == names, (kind, tied)
    assert gguf_model._type("output.weight", [8, 64], "q4_k_m", llama.config).name == "Q8_0"
    assert gguf_model._type("blk.0.ffn_up.weight", [8, 64], "q5_k_m", llama.config).name == "Q5_1"
    assert gguf_model._type("blk.0.ffn_up.weight", [8, 40], "q4_k_m", llama.config).name == "F16"


@pytest.mark.parametrize(("kind", "error"), [("Q6_K", 0.02), ("Q5_K", 0.04), ("Q4_K", 0.08), ("IQ4_XS", 0.08)])
def test_llama_cpp_quantizes_a_matrix(kind: str, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    matrix = np.random.default_rng(0).standard_normal((7, 512), dtype=np.float32)
    found = gguf_recipes.quantize(matrix, GGMLQuantizationType[kind])
    read = dequantize(found, GGMLQuantizationType[kind])
    assert error / 2 < np.sqrt(np.square(read - matrix).mean()) < error
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert np.array_equal(gguf_recipes.quantize(matrix, GGMLQuantizationType[kind]), found)


def test_a_tensor_is_written_in_parts_as_in_one(llama: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llama.export(tmp_path / "whole.gguf", "q8_0").read_bytes()
    monkeypatch.setattr(gguf_model, "_CHUNK", 200)
    assert llama.export(tmp_path / "parts.gguf", "q8_0").read_bytes() == whole


def test_a_weight_beyond_float16_asks_for_bf16(llama: Made, tmp_path: Path) -> None:
    weights = load_file(llama.folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e5
    save_file(weights, llama.folder / "model.safetensors", {"format": "pt"})
    with refusal(ConfigError, "blk.1.ffn_up", "--type"):
        llama.export(tmp_path / "a.gguf")
    llama.export(tmp_path / "b.gguf", "bf16")


# -- what llama.cpp cannot express -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("llama", {"hidden_act": "gelu"}, "uses the activation gelu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "by `dynamic`"),
        ("qwen2.5", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "uses a sliding window"),
        ("gemma2", {"query_pre_attn_scalar": 100}, "scales attention by another factor"),
        ("gemma2", {"attn_logit_softcapping": None}, "has no soft capping"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "has other layers with a sliding window than every second"),
        ("qwen3 mixture", {"mlp_only_layers": [0]}, "has layers without experts"),
        ("qwen3 mixture", {"norm_topk_prob": False}, "does not normalize the weights of its experts"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}, "has other layers without a rotary embedding"),
        ("smollm3", {"mlp_bias": True}, "has biases in its feed-forward layers"),
        ("ministral3", {"sliding_window": 8}, "uses a sliding window"),
        ("ministral3", {"rope_parameters": bench._MINISTRAL_ROPE | {"mscale": 0.7}}, "by YaRN with `mscale`"),
        ("ministral3", {"rope_parameters": bench._MINISTRAL_ROPE | {"beta_fast": 16}}, "by YaRN with `beta_fast`: 16"),
        ("qwen3.5", {"linear_key_head_dim": 32}, "has keys and values of different sizes"),
        ("qwen3.5", {"layer_types": ["full_attention"] + ["linear_attention"] * 3}, "has other layers with full"),
        ("gpt-oss", {"layer_types": ["full_attention"] * 2}, "has other layers with a sliding window"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "another limit of its activation"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "has another attention"),
    ],
)
def test_a_setting_that_llama_cpp_lacks_is_refused(name: str, changes: dict[str, Any], why: str) -> None:
    shape = bench.SHAPES[name]
    config = bench.architecture(bench.Shape(shape.tokenizer, shape.fields | changes), 600)
    with pytest.raises(ConfigError, match=why):
        gguf_families.family(config)


@pytest.mark.parametrize(
    ("name", "module", "place"),
    [
        ("gemma3, which also sees", "model.language_model.layers.1.self_attn.q_proj", "blk.1.attn_q"),
        ("qwen3.5", "model.layers.0.linear_attn.in_proj_z", "blk.0.attn_gate"),
        ("gpt-oss", "model.layers.1.self_attn.o_proj", "blk.1.attn_output"),
        ("qwen3.5", "model.layers.0.linear_attn.out_proj", None),
        ("qwen3 mixture", "model.layers.0.mlp.experts.gate_up_proj", None),
        ("llama", "model.layers.0.input_layernorm", None),  # llama.cpp skips adapters on norms
    ],
)
def test_a_lora_is_written_under_llama_cpp_s_names_or_refused(
    name: str, module: str, place: str | None, tmp_path: Path
) -> None:
    config = bench.architecture(bench.SHAPES[name], 600)
    pairs = {module: (torch.randn(4, 64), torch.randn(64, 4))}
    if place is None:
        with refusal(ConfigError):
            gguf_model.write_lora(config, pairs, 4, tmp_path / "a.gguf")
        return
    gguf_model.write_lora(config, pairs, 4, tmp_path / "a.gguf")
    found = {one.name for one in GGUFReader(tmp_path / "a.gguf").tensors}
    assert found == {f"{place}.weight.lora_a", f"{place}.weight.lora_b"}


def test_an_unsupported_family_names_the_converter() -> None:
    config = bench.architecture(bench.Shape(bench.qwen, {"model_type": "olmo2"}), 600)
    with refusal(ConfigError, "`olmo2`", "convert_hf_to_gguf"):
        gguf_families.family(config)


def _word_level() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="a")


def _own_words() -> Any:
    return bench.tokenizer(bench.byte_level(r"\w+|\W+", bench._CHATML), "chatml", eos_token="<|im_end|>")


def _not_sentencepiece() -> Any:
    """A BPE trained with tokenizers: one way to make each token, where SentencePiece has all."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    backend.train_from_iterator(bench.texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<unk>")


def _unreachable(pattern: str, *, ignore_merges: bool) -> Any:
    """A byte-level BPE with a token that its merges do not make: whether they are ignored for whole words decides."""
    rules = json.loads(bench.byte_level(pattern, bench._CHATML, ignore_merges=ignore_merges).to_str())
    last = rules["model"]["merges"].pop()
    assert "".join(last) in rules["model"]["vocab"]
    return bench.tokenizer(Tokenizer.from_str(json.dumps(rules)), "chatml", eos_token="<|im_end|>")


@pytest.mark.parametrize(
    ("pattern", "ignore_merges", "name"),
    [
        (bench._LLAMA3, True, "llama-bpe"), (bench._LLAMA3, False, "dbrx"), (bench._TEKKEN, True, "tekken"),
        (bench._TEKKEN, False, None), (bench._O200K, True, None), (bench._O200K, False, "gpt-4o"),
    ],
)  # fmt: skip
def test_a_vocabulary_that_merges_do_not_make_is_written_as_llama_cpp_takes_words(
    pattern: str, ignore_merges: bool, name: str | None
) -> None:
    whole = bench.byte_level(pattern, bench._CHATML, ignore_merges=not ignore_merges)
    assert gguf_vocabulary._pre_tokenizer(json.loads(whole.to_str())), "merges make all: either way is the same"
    rules = json.loads(_unreachable(pattern, ignore_merges=ignore_merges).backend_tokenizer.to_str())
    if name:
        assert gguf_vocabulary._pre_tokenizer(rules) == name
    else:
        with refusal(ConfigError, "whole words before it merges"):
            gguf_vocabulary._pre_tokenizer(rules)


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (_word_level, "is a WordLevel model"),
        (_own_words, "splits text into words in its own way"),
        (_not_sentencepiece, "merges only some of the pairs"),
    ],
)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(tokenizer: Callable[[], Any], why: str) -> None:
    from gguf import GGUFWriter

    with refusal(ConfigError, "llama.cpp", why):
        gguf_vocabulary.add(GGUFWriter(None, "llama"), tokenizer(), 1000, starts_with_bos=False, end_of_turn=None)


def test_tokens_beyond_the_embeddings_are_refused(llama: Made, tmp_path: Path) -> None:
    llama.tokenizer.add_tokens([f"<|new {number}|>" for number in range(9)])
    with refusal(ConfigError, "tokens beyond the 603 embeddings"):
        llama.export(tmp_path / "a.gguf")


def test_a_template_renders_alike_without_its_generation_marks() -> None:
    tokenizer = bench.llama3()
    for name in chat_template.TEMPLATES.keys() - {"auto"}:
        text = chat_template.named(name)
        rendered = []
        for template in (text, chat_template.without_generation_marks(text)):
            tokenizer.chat_template = template
            rendered.append(chat_template.text(tokenizer, bench.conversations()[1], prompt=True)[0])
        assert "generation %}" not in chat_template.without_generation_marks(text)
        assert rendered[0] == rendered[1], name


# -- the check before a file is published ----------------------------------------------------------------------------


def test_a_file_that_llama_cpp_reads_differently_is_not_published(trained_shape: Made, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    tokenizer = trained_shape.tokenizer
    example = Chat([{"role": "user", "content": "Hi"}])
    rows = [tokenizer(bench.texts()[-1], add_special_tokens=False)["input_ids"][:40]]
    prompt = chat_template.ids(tokenizer, example.messages, prompt=True)
    job: Any = SimpleNamespace(tokenizer=tokenizer, rows=rows, example=example, prompt=prompt)
    file = trained_shape.export(tmp_path / "model.gguf")
    with torch.inference_mode():
        trained = [trained_shape.model(input_ids=torch.tensor(rows)).logits[0]]
    found, not_proven = llama_cpp.compare(file, job, trained)
    assert found is not None
    assert found["agreement"] >= 0.9
    assert (found["tokenized_alike"], found["prompt_alike"], not_proven) == (1, True, [])
    with refusal(ArtifactError, "another most likely next token at"):
        llama_cpp.compare(file, job, [-trained[0]], nearly=llama_cpp.NEARLY)
    first, second = trained[0].topk(2).values.unbind(-1)
    tied = torch.where(trained[0] == first[:, None], second[:, None] - 0.1, trained[0])
    near, _ = llama_cpp.compare(file, job, [tied], nearly=0.2)
    assert near is not None
    assert near["agreement"] <= 0.1
    with refusal(ArtifactError, "another most likely next token at"):
        llama_cpp.compare(file, job, [tied])
    job.tokenizer = bench.llama2()
    with refusal(ArtifactError, "splits 1 of 1 held-out rows into other tokens"):
        llama_cpp.compare(file, job, trained)
    known, _ = llama_cpp.compare(file, job, trained, tokenizes_alike=False)
    assert known is not None
    assert known["tokenized_alike"] == 0


@pytest.mark.slow
def test_a_character_of_several_tokens_is_compared_like_any_other(llama: Made, tmp_path: Path) -> None:
    """llama.cpp's server keeps a token back that is a part of a character, and names no probabilities of it."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    tokenizer, model = llama.tokenizer, llama.model
    row = [*tokenizer("东京 is 🎉, привет 你好", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=5e-3), torch.tensor([row])
    for _ in range(80):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    bench.write(model, tokenizer, llama.folder)
    job: Any = SimpleNamespace(tokenizer=tokenizer, rows=[row], prompt=[])
    with torch.inference_mode():
        expected = [bench.rounded(model)(input_ids=ids).logits[0]]
    file = llama.export(tmp_path / "model.gguf")
    found, _ = llama_cpp.compare(file, job, expected)
    assert found is not None
    assert found["agreement"] == 1
    with llama_cpp.serving(file, 128) as server:
        parts = sum(not server.log_probs(row[:length]) for length in range(1, len(row)))
        assert parts >= 5, "tokens whose probabilities the server does not give"
        assert server.next_token(row[:-1]) == tokenizer.eos_token_id


@pytest.mark.parametrize("room", [{"sliding_window": 32}, {"sliding_window": None, "max_position_embeddings": 32}])
def test_rows_are_compared_as_far_as_the_file_goes(room: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    job = made_of("mistral", tmp_path, **room)
    facts = gguf_export.make(job, tmp_path)
    assert facts["tokens"] == 31 + 20
    assert facts["llama_cpp"]["positions"] == 31 + 20


def test_a_refusal_of_llama_cpp_is_quoted(llama: Made, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    with (
        llama_cpp.serving(llama.export(tmp_path / "a.gguf"), 32) as server,
        refusal(ArtifactError, "/completion:"),
    ):
        server.next_token([5] * 999)


def test_a_failure_of_llama_cpp_is_not_reported_as_one_of_the_disk() -> None:
    with refusal(ArtifactError, "llama.cpp", "/apply-template"):
        llama_cpp.Server("http://127.0.0.1:9").post("/apply-template", messages=[])


def test_without_llama_cpp_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)
    nothing: Any = None
    found, [said] = llama_cpp.compare(Path("a.gguf"), nothing, [])
    assert found is None
    assert "llama.cpp was not run" in said


@pytest.mark.parametrize(
    ("name", "form"), sampled([("gpt-oss", "mxfp4"), ("llama", "fp8"), ("llama", "nvfp4")], ("gpt-oss", "mxfp4"))
)
def test_a_base_in_its_published_form_becomes_gguf_once_it_is_merged(
    name: str, form: str, quick: Any, call: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    made = make(name, tmp_path / "base", steps=0)
    bench.write(shake(made.model), made.tokenizer, made.folder)
    publish(made.folder, form)
    job = [f"model.name={made.folder}", "training.max_steps=1", "data.eval=none", "output.merge=true"]
    run = finetune.train(quick(*job)).run
    assert run.config().quantization.kind == form
    code, out, err = call("export", run.path, "--to", "gguf")
    assert code == 0, out + err
    exported = json.loads((run.path / "gguf" / "export.json").read_text())
    assert exported["error"] <= exported["bound"]
