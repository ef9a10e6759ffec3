"""Packed weights in GGUF files: the bytes that were trained on, read by transformers, gguf and llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_in_llama_cpp as bench
import pytest
import torch
from gguf import GGUFReader, dequantize
from messages import refusal
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config import ModelSection
from finetune.errors import ConfigError
from finetune.export.gguf import gguf_export, gguf_model, llama_cpp
from finetune.forms import packed
from finetune.model import build
from finetune.model.source import chat_template, gguf_families

CPU = torch.device("cpu")


class Packed:
    """A model of a family with packed weights, in a folder and as a GGUF file."""

    def __init__(self, name: str, form: str, folder: Path, endings: tuple[str, ...]) -> None:
        shape = bench.SHAPES[name]
        self.tokenizer = shape.tokenizer()
        config = bench.architecture(shape, len(self.tokenizer) + 3)
        torch.manual_seed(1)
        model = bench.train(config, self.tokenizer, steps=0)
        model.get_output_embeddings().weight.data *= 16  # else all tokens are alike
        bench.write(model, self.tokenizer, folder)
        self.config, self.folder = AutoConfig.from_pretrained(folder), folder
        transposed = shape.fields["model_type"] == "gpt_oss"
        self.weights = {
            key: packed.pack(form, weight.data * 8, transposed=transposed and weight.dim() == 3)
            for key, weight in model.named_parameters()
            if key.endswith(endings)
        }
        assert len(self.weights) >= config.get_text_config().num_hidden_layers

    def written(self, file: Path, kind: str = "f16") -> Path:
        prompt = chat_template.ids(self.tokenizer, [{"role": "user", "content": "Hi"}], prompt=True)
        gguf_model.write(
            self.folder, self.config, self.tokenizer, file, kind, packed=self.weights,
            starts_with_bos=prompt[0] == self.tokenizer.bos_token_id,
        )  # fmt: skip
        return file

    def model(self) -> Any:
        """The model that was trained: with the values of the packed weights, in float32."""
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        for name, weight in self.weights.items():
            model.get_parameter(name).data.copy_(packed.exact(weight))
        return model.eval()


@pytest.mark.parametrize(
    ("name", "form", "endings"),
    [
        ("llama", "q4_0", ("_proj.weight", "embed_tokens.weight", "lm_head.weight")),  # rows of queries are permuted
        ("llama", "mxfp4", ("_proj.weight",)),
        ("qwen2.5", "q8_0", ("_proj.weight", "embed_tokens.weight")),  # a tied head
        ("qwen3 mixture", "q4_0", ("experts.gate_up_proj", "experts.down_proj", "_proj.weight")),
        ("phi4", "q4_0", ("qkv_proj.weight", "gate_up_proj.weight")),
    ],
)
def test_transformers_reads_the_values_that_were_packed(
    name: str, form: str, endings: tuple[str, ...], tmp_path: Path
) -> None:
    made = Packed(name, form, tmp_path / "model", endings)
    read = gguf_export.load(made.written(tmp_path / "model.gguf"), made.config, torch.float32, CPU)
    for key, weight in made.weights.items():
        assert torch.equal(read.get_parameter(key), packed.exact(weight)), key


@pytest.mark.parametrize(
    ("name", "form"), [("llama", "q4_0"), ("llama", "nvfp4"), ("gpt-oss", "mxfp4"), ("qwen3 mixture", "nvfp4")]
)
def test_llama_cpp_computes_with_the_values_that_were_packed(name: str, form: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    experts = ("experts.gate_up_proj", "experts.down_proj")
    made = Packed(name, form, tmp_path / "model", experts if form == "mxfp4" else (*experts, "_proj.weight"))
    file = made.written(tmp_path / "model.gguf")
    model = made.model()
    ids = made.tokenizer(bench.texts()[-1], add_special_tokens=False)["input_ids"][:24]
    gguf_families.family(model.config).approximate(model)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        unpacked = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32).eval()
        others = unpacked(torch.tensor([ids])).logits[0].log_softmax(-1)
    bare = (expected.exp() * (expected - others)).sum(-1).mean()
    divergence = []
    with llama_cpp.serving(file, 64) as server:
        for length in range(4, 25, 4):
            said = server.log_probs(ids[:length], expected.shape[-1])
            if not said:  # a part of a character
                continue
            found = expected[length - 1].clone()
            found[torch.tensor(list(said))] = torch.tensor(list(said.values()))
            divergence.append(float((expected[length - 1].exp() * (expected[length - 1] - found)).sum()))
    assert len(divergence) >= 3
    assert max(divergence) < 0.005 < bare / 10  # 8-bit activations; `bare` without what was packed


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_gguf_decodes_experts_to_the_values_that_were_packed(form: str, tmp_path: Path) -> None:
    made = Packed("gpt-oss", form, tmp_path / "model", ("experts.gate_up_proj", "experts.down_proj"))
    stored = {one.name: one for one in GGUFReader(made.written(tmp_path / "model.gguf")).tensors}
    for layer in range(2):
        both = packed.exact(made.weights[f"model.layers.{layer}.mlp.experts.gate_up_proj"]).mT
        for part, expected in (("gate", both[:, ::2]), ("up", both[:, 1::2])):
            one = stored[f"blk.{layer}.ffn_{part}_exps.weight"]
            found = torch.from_numpy(dequantize(one.data, one.tensor_type))
            if form == "nvfp4":  # the factor of each expert is a tensor of its own
                scale = torch.from_numpy(stored[f"blk.{layer}.ffn_{part}_exps.scale"].data.copy())
                assert scale.shape == (4,)
                torch.testing.assert_close(found * scale[:, None, None], expected, rtol=2**-22, atol=0)
            else:
                assert torch.equal(found, expected)


def test_bytes_that_llama_cpp_would_have_in_other_columns_are_refused(tmp_path: Path) -> None:
    rows = Packed(
        "qwen3.5", "q4_0", tmp_path / "rows", ("in_proj_qkv.weight", "in_proj_z.weight", "mlp.up_proj.weight")
    )
    rows.written(tmp_path / "rows.gguf")
    columns = Packed("qwen3.5", "q4_0", tmp_path / "columns", ("linear_attn.out_proj.weight", "mlp.up_proj.weight"))
    with refusal(ConfigError, "model.layers.0.linear_attn.out_proj"):
        columns.written(tmp_path / "columns.gguf")


@pytest.mark.parametrize("kind", ["q4_0", "nvfp4"])
def test_weights_with_other_columns_in_llama_cpp_are_rounded_by_themselves(kind: str, tmp_path: Path) -> None:
    made = Packed("qwen3.5", "q4_0", tmp_path / "model", ("linear_attn.out_proj.weight", "mlp.up_proj.weight"))
    model = build.weightless(ModelSection(name=str(tmp_path / "model")))
    forms = gguf_export.forms(model, kind)
    assert {name.split(".")[-2] for name in made.weights if name not in forms} == {"out_proj"}
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    tied = model.all_tied_weights_keys
    made.weights = {name: packed.pack(form, state[name]) for name, form in forms.items() if name not in tied}
    written = {one.name: one.tensor_type.name for one in GGUFReader(made.written(tmp_path / "a.gguf", kind)).tensors}
    matrices = {name: stored for name, stored in written.items() if name.endswith(("ssm_out.weight", "ffn_up.weight"))}
    assert {*matrices.values()} == {kind.upper()}
    assert "blk.0.ssm_out.weight" in matrices


def test_a_form_that_gguf_lacks_is_refused(tmp_path: Path) -> None:
    made = Packed("llama", "fp8", tmp_path / "model", ("_proj.weight",))
    with refusal(ConfigError, "held in fp8, which GGUF files do not have"):
        made.written(tmp_path / "model.gguf")
