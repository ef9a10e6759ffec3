"""What people get wrong in a model and in configs for it: each mistake ends the command with a cure, before the data.

The command is the real one; preparing data, or loading weights, fails the test.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every_architecture
import pytest
import torch
from jobs import TINY
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from finetune.runtime import environment

Call = Callable[..., tuple[int, str, str]]
Change = Callable[[Path], object]
Refusal = Callable[..., tuple[int, str]]

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
_CODE = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4000000\n"
_INDEX = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
_Q, _SHARD = "model.layers.0.self_attn.q_proj.weight", "model-00001-of-00001.safetensors"
_MAP = {_Q: _SHARD}
_ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "some/base"}
_THINKS = "{% if enable_thinking %}{{ messages }}{% endif %}"


def says(values: dict[str, Any]) -> Change:
    """Writes these values into config.json beside those of the base."""

    def write(folder: Path) -> None:
        before = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**before, **values}))

    return write


def quantized(**stated: Any) -> Change:
    return says({"quantization_config": stated})


def config(values: dict[str, Any]) -> Change:
    """Writes another config.json, to which no weights belong."""

    def write(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(values))
        (folder / "model.safetensors").unlink()

    return write


def default(model_type: str, **values: Any) -> Change:
    """Writes transformers' default config of a type."""
    return lambda folder: config({**CONFIG_MAPPING[model_type]().to_dict(), **values})(folder)


def small(model_type: str) -> Change:
    """Writes a small one."""
    return lambda folder: config(every_architecture.config(model_type).to_dict())(folder)


def file(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def tensors(change_them: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    """Writes other tensors into model.safetensors."""

    def write(folder: Path) -> None:
        save_file(change_them(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})

    return write


def _in_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {_Q: weight.to(torch.float8_e4m3fn), _Q + "_scale_inv": torch.ones(1, 1)}


def index(content: object) -> Change:
    """An index in place of model.safetensors, which becomes the only shard."""

    def write(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return write


def without(*names: str, then: Change = lambda folder: None) -> Change:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()
        then(folder)

    return remove


BASES: list[tuple[str, Change, list[str], int, str, str]] = [
    # (what is wrong, how the base's folder is changed, overrides, exit code, what is named, the cure)
    ("GPTQ", quantized(quant_method="gptq", bits=4), [], 2, "(GPTQ, 4 bit)", "name its 16-bit original"),
    ("FP8 and DoRA", quantized(**_FP8), ["adapter.dora=true"], 2, "`adapter.dora`", "set `dora: false`"),
    ("a kernel of the hub", says({"_attn_implementation": "some/flash"}), [], 7, "'some/flash'", "remove that line"),
    ("DoRA on experts", small("mixtral"), ["adapter.dora=true"], 2, "`adapter.dora`", "`adapter.expert_rank: 0`"),
    ("PiSSA on experts", small("mixtral"), ["adapter.init=pissa", "quantization.kind=none"], 2, "`adapter.init`",
     "`adapter.expert_rank: 0`"),
    ("LoftQ on experts", small("mixtral"), ["adapter.init=loftq"], 2, "`adapter.init`", "`adapter.expert_rank: 0`"),
    ("experts named and left out", small("mixtral"), ["adapter.targets=experts.down_proj", "adapter.expert_rank=0"],
     2, "`adapter.expert_rank`", "remove one of them"),
    ("the rank of experts above their width", small("mixtral"), ["adapter.expert_rank=4000"], 2,
     "`adapter.expert_rank`", "32 at most"),
    ("experts by another name", small("mixtral"), ["adapter.targets=experts.0.down_proj"], 2, "`adapter.targets`",
     "did you mean `experts.down_proj`?"),
    ("experts named, and DoRA", small("mixtral"), ["adapter.targets=experts.down_proj", "adapter.dora=true"], 2,
     "`adapter.dora`", "remove one"),
    ("a router and dropout", small("mixtral"), ["adapter.targets=gate.weight", "adapter.dropout=0.1"], 2,
     "`adapter.dropout`", "remove one"),
    ("a rank of experts without experts", small("mixtral"), ["adapter.targets=q_proj", "adapter.expert_rank=4"], 2,
     "`adapter.expert_rank`", "remove it"),
    ("ZeRO-3 with experts", small("mixtral"),
     ["distributed.kind=deepspeed", "distributed.stage=weights", "optimizer.kind=adamw_torch_fused"], 2,
     "`distributed.stage: weights`", "set `stage: gradients`"),
    ("rows over the positions", small("gpt2"), ["data.max_length=1024"], 2, "`data.max_length`", "set it to 512"),
    ("rotary scaling without rotations", small("gpt2"), ["model.rope_scaling={rope_type: yarn, factor: 4}"], 2,
     "`model.rope_scaling`", "remove it"),
    ("checkpointing unsupported", small("jetmoe"), ["memory.checkpointing=all", "model.weights=random"], 2,
     "`memory.checkpointing`", "set it to `none`"),
    ("packing of states", small("mamba"), ["data.packing=true"], 4, "`data.packing`", "set `data.packing: false`"),
    ("a newer type", config({"model_type": "next", "transformers_version": "9.1.0"}), [], 7, "models of type `next`",
     "install transformers 9.1"),
    ("a newer type that nobody dated", config({"model_type": "next"}), [], 7, "models of type `next`",
     "install a newer transformers"),
    ("code of its own", config(_CODE), [], 7, "Python code of its own", "set `model.trust_remote_code: true`"),
    ("code in a folder", says({}), ["model.trust_remote_code=true", f"model.revision={'a' * 40}"], 2,
     "`model.trust_remote_code`", "use the hub name"),
    ("an encoder", small("bert"), [], 2, "BertLMHeadModel", "use another base"),
    ("an encoder without a head", default("modernbert"), [], 2, "of type `modernbert`", "use a decoder"),
    ("an encoder and decoder", default("t5"), [], 2, "of type `t5`", "use a decoder"),
    ("a model of images", default("vit"), [], 2, "of type `vit`", "use a decoder"),
    ("images and text compared", default("clip"), [], 2, "of type `clip`", "published for text alone"),
    ("a model of sound and text", default("qwen2_audio"), [], 2, "of type `qwen2_audio`", "published for text alone"),
    ("two models of text", default("musicgen"), [], 2, "of type `musicgen`", "use a decoder"),
    ("a decoder that sees later tokens", default("xlm", vocab_size=4096), [], 7, "sees the token it predicts",
     "use a decoder"),
    ("another head", small("prophetnet"), [], 2, "ProphetNetForCausalLM", "use another base"),
    ("a gradient that stops", default("reformer", is_decoder=True, vocab_size=4096), [], 2, "no gradient reaches",
     "use another base"),
    ("code that fails in 16 bit", small("xlnet"), [], 2, "in bfloat16", "use another base"),
    ("bytes in patches", default("blt", vocab_size=4096), [], 2, "of type `blt`", "use another base"),
    ("a classifier", says({"architectures": ["LlamaForSequenceClassification"]}), [], 2, "sequence classifier",
     "name the language model"),
    ("no config.json", without("config.json"), [], 7, "needs config.json", "download the model again"),
    ("an adapter", without("config.json", then=file("adapter_config.json", json.dumps(_ADAPTER))), [], 7,
     "it has an adapter", "`adapter.start_from`"),
    ("an adapter beside the base", file("adapter_config.json", json.dumps(_ADAPTER)), [], 7, "adapter_config.json",
     "use a base without one"),
    ("a run directory", without("config.json", then=file("config.yaml", "")), [], 7, "a run directory", "`merged/`"),
    ("diffusers", without("config.json", then=file("model_index.json", "{}")), [], 7, "config.json", "no tokens"),
    ("Mistral's form", without("config.json", then=file("params.json", "{}")), [], 7, "config.json", "download"),
    ("config.json cut off", file("config.json", '{"model_type": "llama",'), [], 7, "not a valid JSON", "download"),
    ("config.json empty", file("config.json", ""), [], 7, "config.json", "download them again"),
    ("no type", config({"hidden_size": 32}), [], 7, "`model_type`", "download them again"),
    ("a word as size", says({"hidden_size": "big"}), [], 7, "'hidden_size'", "download them again"),
    ("heads that do not divide", says({"num_attention_heads": 5}), [], 7, "attention heads", "download them again"),
    ("no weights", without("model.safetensors"), [], 7, "it has no model.safetensors", "download the model again"),
    ("a shard missing", without("model.safetensors", then=file("model.safetensors.index.json", json.dumps(_INDEX))),
     [], 7, "model-00001-of-00002.safetensors: missing", "the download is incomplete"),
    *(
        (f"the index {content}", index(content), [], 7, ".index.json: not an index", "download it again")
        for content in (
            [], 5, {"metadata": {}}, {"metadata": {}, "weight_map": []}, {"metadata": {}, "weight_map": {}},
            {"metadata": {}, "weight_map": {"a": 7}}, {"metadata": {}, "weight_map": {"a": None}},
            {"weight_map": _MAP}, {"weight_map": _MAP, "metadata": []},
        )
    ),
    ("an index that leaves its folder and returns", index({"metadata": {}, "weight_map": {_Q: f"../base/{_SHARD}"}}),
     [], 7, "outside its folder", "download the model again"),
    ("an index cut off", without("model.safetensors", then=file("model.safetensors.index.json", "{")), [], 7,
     "model.safetensors.index.json: cannot be read", "download it again"),
    ("a shard of a checkpoint of ranks", file("shard-00000-model-00001-of-00001.safetensors", ""), [], 7,
     "shard-00000-model-00001-of-00001.safetensors", "Move these files elsewhere"),
    *(
        (f"a weight in {dtype}", tensors(lambda them, dtype=dtype: {**them, _Q: them[_Q].to(dtype)}), [], 7,
         f"`{_Q}` is of type {str(dtype).removeprefix('torch.')}", "download it again")
        for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64)
    ),
    ("a weight in FP8 with scales", tensors(lambda them: {**them, **_in_fp8(them[_Q])}), [], 7,
     f"`{_Q}` is of type float8_e4m3fn", "download it again"),
    ("weights elsewhere", says({"transformers_weights": "/opt/model.safetensors"}), [], 7, "outside its folder",
     "download the model again"),
    ("a weight twice", tensors(lambda them: {**them, _Q.removeprefix("model."): them[_Q] * 5}), [], 7,
     f"are both the weight `{_Q}`", "download it again"),
    ("a pickle", without("model.safetensors", then=file("pytorch_model.bin", "")), [], 7, "pytorch_model.bin",
     "convert it"),
    ("a pointer of Git LFS", file("model.safetensors", _POINTER), [], 7, "model.safetensors", "`git lfs pull`"),
    ("weights of another width", says({"hidden_size": 96, "head_dim": 16}), [], 7, "`model.embed_tokens.weight`",
     "download it again"),
    ("weights of a shallower model", says({"num_hidden_layers": 6}), [], 7, "weights are not in its files",
     "another architecture"),
    ("no tokenizer", without("tokenizer.json"), [], 7, "no tokenizer files", "set `model.tokenizer`"),
    ("a tokenizer cut off", file("tokenizer.json", "{"), [], 7, "the tokenizer of", "download them again"),
    ("a tokenizer without an end", file("tokenizer_config.json", "{}"), [], 7, "no end-of-text token",
     "set `eos_token`"),
    ("a tokenizer of a larger model", says({"vocab_size": 500}), [], 7, "ids up to 2047", "set `model.tokenizer`"),
    ("a template cut off", file("chat_template.jinja", "{% for m in messages %}{{ m.content }"), [], 7,
     "the chat template is not valid", "set `data.chat_template`"),
    ("an argument misspelt", file("chat_template.jinja", _THINKS), ["data.template_arguments={enable_thinkin: true}"],
     2, "`enable_thinkin`", "did you mean `enable_thinking`?"),
]  # fmt: skip

CONFIGS: list[tuple[list[str], int, str, str]] = [
    (["quantization.kind=gptq"], 2, "`quantization.kind`", "write `nf4`"),
    (["quantization.kind=nf5"], 2, "`quantization.kind`", "did you mean `nf4`?"),
    (["adapter.kind=none", "quantization.kind=nf4"], 2, "`adapter.kind`", "set `quantization.kind: none`"),
    *(
        ([f"model.attention={name}"], 4, f"`model.attention: {name}`", "set `auto`")
        for name in ("flash_attention_2", "flash_attention_3", "flex")
    ),
    (["model.attention=sageattention"], 2, "`model.attention`", "write `auto`"),
    (["adapter.targets=q_prj"], 2, "`adapter.targets`", "did you mean `q_proj`?"),
    (["adapter.targets=query_key_value"], 2, "`adapter.targets`", "choose from q_proj"),
    (["adapter.targets=['q_proj,v_proj']"], 2, "`adapter.targets`", "write several as a list"),
    (["adapter.targets=['.*vision.*']"], 2, "`adapter.targets`", "such as `model.layers.0.self_attn.q_proj`"),
    (["adapter.targets=['.*(q_proj']"], 2, "`adapter.targets.0`", "missing )"),
    (["adapter.ranks={qproj: 8}"], 2, "`adapter.ranks`", "did you mean `q_proj`?"),
    (["adapter.extra_modules=embed"], 2, "`adapter.extra_modules`", "did you mean `embed_tokens`?"),
    (["adapter.rank=4096"], 2, "`adapter.rank`", "8 to 256 is usual"),
    (["adapter.expert_rank=4"], 2, "`adapter.expert_rank`", "remove it"),
    (["adapter.init=pissa"], 2, "`adapter.init`", "set `quantization.kind: none`"),
    (["adapter.start_from=./none"], 7, "`adapter.start_from`", "no such folder"),
    (["data.new_tokens=the"], 2, "`data.new_tokens`", "a token of this tokenizer already; remove it"),
    (["data.new_tokens=<|im_start|>"], 2, "`data.new_tokens`", "remove it"),
    (["data.new_tokens=['<a>', '<a>']"], 2, "`data.new_tokens`", "remove duplicates"),
    (["data.new_tokens=[' ']"], 2, "`data.new_tokens`", "remove it"),
    (["data.new_tokens=<a>", "adapter.extra_modules=embed_tokens"], 2, "`adapter.extra_modules`", "remove one of them"),
    (["model.new_tokens=<a>"], 2, "`model.new_tokens`", "write `data.new_tokens`"),
    (["data.additional_special_tokens=<a>"], 2, "`data.additional_special_tokens`", "write `data.new_tokens`"),
    (["data.resize_vocab=true"], 2, "`data.resize_vocab`", "`data.new_tokens` adds the rows"),
    (["model.vocabulary=100"], 2, "`model.vocabulary`", "less than the 2048 rows"),
    (["data.template_arguments={enable_thinking: false}"], 2, "no variable `enable_thinking`", "it has no argument"),
    (["data.enable_thinking=false"], 2, "`data.enable_thinking`", "write `data.template_arguments: {enable_thinking"),
    (["data.chat_template=qwen3"], 2, "`data.chat_template`", "write `auto`"),
    (["data.chat_template=own.jinja"], 2, "own.jinja: no such file", "use a file that exists"),
    (["model.trust_remote_code=true", "model.revision=main"], 2, "`trust_remote_code: true`", "full 40-digit commit"),
    (["model.rope_scaling={rope_type: ntk, factor: 4}"], 2, "`model.rope_scaling.rope_type`", "'yarn'"),
    (["model.name=some/model"], 4, "the hub cannot be reached", "download it on a machine with a network"),
    (["model.name=https://huggingface.co/some/model"], 7, "https://", "give the model's name on the hub: some/model"),
    (["model.name=some/model-GGUF"], 7, "no such file", "download the GGUF file and give its path"),
    (["model.name=llama3.1:8b"], 7, "no such model directory", "such as `meta-llama/Llama-3.1-8B`"),
    (["model.name=builtin:tiny-lama"], 7, "`builtin:tiny-lama`", "did you mean `builtin:tiny-llama`?"),
    (["model.name=./models/none"], 7, "no such model directory", "check its spelling"),
    (["model.name=rows.jsonl"], 7, "rows.jsonl: a file", "name the directory of the model"),
    (["model.tokenizer=./none"], 7, "no such model directory", "check its spelling"),
]  # fmt: skip


@pytest.fixture
def refusal(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """The exit code and message of `finetune train` on a base; preparing data and loading weights fail the test."""

    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("data were prepared, or weights were loaded")

    monkeypatch.setattr("finetune.recipe.inputs.prepare", too_late)
    monkeypatch.setattr("finetune.model.build.load_base", too_late)
    monkeypatch.setattr(environment, "version_of", functools.cache(environment.version_of))
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"prompt": "Why? ", "completion": "So."}) + "\n")

    def run(*overrides: str) -> tuple[int, str]:
        job = ["data.train=rows.jsonl", "data.eval=none", "training.eval_every=null", "output.merge=false"]
        code, _, said = call("train", TINY, *job, *overrides)
        assert said.startswith("error: ")
        assert len(said.splitlines()) == 1
        assert not Path("runs").exists()
        return code, said

    return run


@pytest.fixture(scope="module")
def shallowest(shallow_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in base with one layer, to put something wrong into."""
    folder = Path(shutil.copytree(shallow_base, tmp_path_factory.mktemp("shallowest") / "base"))
    says({"num_hidden_layers": 1})(folder)
    tensors(lambda them: {name: one for name, one in them.items() if ".layers.1." not in name})(folder)
    return folder


@pytest.mark.slow
def test_wrong_bases_are_refused_with_the_cure_before_the_data(
    refusal: Refusal, shallowest: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for number, (what, change, overrides, expected, *words) in enumerate(BASES):
        with subtests.test(what=what):
            folder = Path(shutil.copytree(shallowest, tmp_path / f"base{number}"))
            change(folder)
            code, said = refusal(f"model.name={folder}", *overrides)
            assert (code, [word for word in words if word not in said]) == (expected, []), said


def test_wrong_configs_for_models_are_refused_with_key_and_cure_before_the_data(
    refusal: Refusal, tiny_base: Path, subtests: pytest.Subtests
) -> None:
    for overrides, expected, *words in CONFIGS:
        with subtests.test(overrides=overrides):
            code, said = refusal(*overrides)
            assert (code, [word for word in words if word not in said]) == (expected, []), said
    with pytest.raises(AssertionError, match="data were prepared"):
        refusal(f"model.name={tiny_base}")  # a good base
