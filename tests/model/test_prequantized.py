"""Facts about bases that are published with quantized weights: every command says so before it does anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import sampled
from messages import refusal, reported
from transformers import LlamaConfig
from transformers.quantizers import auto
from transformers.quantizers.quantizers_utils import should_convert_module

from finetune.choices import load_config
from finetune.config import ModelSection
from finetune.data import fingerprint
from finetune.errors import ArtifactError, ConfigError
from finetune.model import skeleton
from finetune.model.base import load_architecture
from finetune.model.source import identity, prequantized
from finetune.model.source.tokenizer import load_tokenizer
from finetune.model.structure import quantizers
from finetune.resolve import resolve
from finetune.storage.rundir import RunDirectory

Call = Callable[..., tuple[int, str, str]]
Copies = Callable[..., Path]

# As in the config.json of published models.
PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "one scale a weight": ({"quant_method": "fp8", "weight_block_size": None}, "FP8"),
    "4-bit experts": ({"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}, "FP8"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, "GPTQ, 4 bit"),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
        "compressed-tensors, pack-quantized",
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes, 4 bit",
    ),
    "bitsandbytes 8": ({"load_in_4bit": False, "load_in_8bit": True}, "bitsandbytes, 8 bit"),
    "of tomorrow": ({"quant_method": "ternary"}, "ternary"),
    "scaled inputs": ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "ModelOpt, NVFP4_AWQ"),
    "in larger blocks": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "ModelOpt, NVFP4"),
}


def _of_compressed_tensors(**changed: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": True}
    one = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
    return {**one, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}} | changed


_ROTATED = _of_compressed_tensors(transform_config={"config_groups": {"R1": {}}})
_OTHERS = {"format": "float-quantized", "targets": ["re:.*experts.*"], "weights": {"group_size": 16}}
_MIXED = _of_compressed_tensors()
_MIXED["config_groups"] = {**_MIXED["config_groups"], "group_1": _OTHERS}
PUBLISHED["rotated"] = _ROTATED, "compressed-tensors, nvfp4-pack-quantized"
PUBLISHED["two forms"] = _MIXED, "compressed-tensors, nvfp4-pack-quantized"


@pytest.fixture
def packed(tmp_path: Path, shallow_base: Path) -> Callable[..., Path]:
    """Makes copies of a base whose config.json says that its weights are quantized."""

    def make(quantization: Any, name: str = "base", key: str = "quantization_config") -> Path:
        place = tmp_path / name
        shutil.copytree(shallow_base, place)
        (place / "README.md").unlink(missing_ok=True)
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, key: quantization}))
        return place

    return make


def refused(place: Path) -> str:
    with pytest.raises(ConfigError) as error:
        load_architecture(ModelSection(name=str(place)))
    return str(error.value)


@pytest.mark.parametrize(("quantization", "words"), PUBLISHED.values(), ids=PUBLISHED)
def test_a_quantized_base_is_refused_by_the_name_of_its_quantization(
    quantization: dict[str, Any], words: str, packed: Copies
) -> None:
    assert words in refused(packed(quantization))


KEPT = {
    "MXFP4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "NVFP4": _of_compressed_tensors(),
    "FP8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "ModelOpt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    "GGUF": {"quant_method": "gguf", "modules_to_convert": {"lm_head.weight": "q8_0"}},
}


MISSHAPEN: dict[str, list[Any]] = {
    "`config_groups`": [
        _of_compressed_tensors(config_groups=[1]),
        _of_compressed_tensors(config_groups={"group_0": 1}),
        _of_compressed_tensors(config_groups={"group_0": {"targets": ["Linear"], "weights": [1]}}),
        _of_compressed_tensors(config_groups={"group_0": {"targets": ["Linear"], "format": 1}}),
    ],
    "`group_size`": [_of_compressed_tensors(group_size=[16])],
    "`format`": [_of_compressed_tensors(format=["nvfp4-pack-quantized"])],
    "`ignore`": [_of_compressed_tensors(ignore=5), _of_compressed_tensors(ignore=[5])],
    "`exclude_modules`": [{"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": [["a"]]}],
    "`weight_block_size`": [{"quant_method": "fp8", "weight_block_size": size} for size in (5, [0, -1], [128], "ab")],
    "`modules_to_not_convert`": [
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": 7},
        {"quant_method": "mxfp4", "modules_to_not_convert": [1]},
    ],
    "`modules_to_convert`": [{"quant_method": "gguf", "modules_to_convert": 5}],
    # No quantization at all is an unknown one.
    "": [{"quant_method": "gguf", "modules_to_convert": {"a": ["q4_k"]}}, {"quant_method": ["fp8"]}, 5, [1], "fp8"],
}


@pytest.mark.parametrize(
    ("field", "quantization"), [(field, one) for field, each in MISSHAPEN.items() for one in each], ids=str
)
def test_a_field_of_another_shape_is_named(field: str, quantization: Any) -> None:
    with refusal(ArtifactError if field else ConfigError, "`model.name`", "config.json" if field else "", field):
        prequantized.refuse(ModelSection(name="base"), LlamaConfig(quantization_config=quantization))


# What transformers' quantization configs read, of any method, and names that collide with their arguments.
_FIELDS = (
    "quant_method", "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "modules_to_convert",
    "weight_block_size", "activation_scheme", "dequantize", "scale_fmt", "expert_dtype", "config_groups", "format",
    "group_size", "quant_algo", "transform_config", "bits", "desc_act", "zero_point", "load_in_4bit", "load_in_8bit",
    "llm_int8_skip_modules", "bnb_4bit_compute_dtype", "self", "config_dict", "return_unused_kwargs",
)  # fmt: skip
_PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 2**70), st.floats(), st.text(max_size=4),
    st.sampled_from(["fp8", "dynamic", "nonsense", "re:(", "lm_head", "q4_k", "Linear"]),
)  # fmt: skip
_VALUES = st.recursive(
    _PLAIN,
    lambda each: st.lists(each, max_size=2) | st.dictionaries(st.sampled_from(["a", "weights"]), each),
    max_leaves=3,
)


@pytest.mark.parametrize("kind", sampled(["published", "none"], "published"))
@pytest.mark.parametrize("form", ["FP8", "MXFP4", "NVFP4", "ModelOpt", "GGUF"])
@settings(max_examples=20)
@given(changed=st.dictionaries(st.sampled_from(_FIELDS), _VALUES, min_size=1, max_size=2))
def test_a_forged_quantization_is_read_or_refused(form: str, kind: str, changed: dict[str, Any]) -> None:
    """Reading goes as far as the layers of the base, to which transformers' quantizers hand what they read."""
    architecture = LlamaConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, quantization_config={**KEPT[form], **changed},
    )  # fmt: skip
    job = {"model": {"name": "base"}, "quantization": {"kind": kind}, "data": {"train": "builtin:python_docs"}}
    try:
        prequantized.refuse(ModelSection(name="base"), architecture)
        config = load_config(job)
        config = config.changed(prequantized.kept(config, architecture)[0])
        prequantized.main_form(architecture)
        skeleton.weightless_base(architecture, config.quantization, attention="sdpa", dtype=torch.bfloat16)
    except (ArtifactError, ConfigError) as error:
        assert "base" in str(error)  # noqa: PT017 - reading is right too
        assert "config.json" in str(error) or error.exit_code == 2  # noqa: PT017


@pytest.mark.parametrize("expression", ["re:(.|..|.)*[!?]", "re:("])
def test_an_expression_that_takes_forever_or_is_none_is_refused(
    expression: str, packed: Copies, call: Call, rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizers, "_MATCHING_SECONDS", 0.2)
    config = tmp_path / "job.yaml"
    config.write_text(f"model: {{name: {packed(_of_compressed_tensors(ignore=['lm_head', expression]))}}}\n")
    code, _, err = call("plan", config, f"data.train={rows_file}", "data.eval=none")
    assert code == 7
    assert "config.json" in err
    assert "regular expression" in err or "takes too long" in err


def test_expressions_leave_out_what_they_match_in_transformers() -> None:
    modules = [
        "model.layers.0",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.gate_proj",
        "model.layers.10",
        "lm_head",
    ]
    for names in (
        ["lm_head"],
        [r"model.layers.\d+"],
        ["(?:.*mlp.gate).*"],
        [r"model\.layers\.1.*"],
        ["gate"],
        [".*gate$"],
    ):
        made = quantizers._resolved(names, modules)
        assert [should_convert_module(name, made) for name in modules] == [
            should_convert_module(name, names) for name in modules
        ], names


def test_what_every_quantizer_of_transformers_makes_is_refused_or_kept(
    packed: Copies, subtests: pytest.Subtests
) -> None:
    assert len(auto.AUTO_QUANTIZER_MAPPING) > 20
    for method in auto.AUTO_QUANTIZER_MAPPING:
        with subtests.test(method):
            name, _, bits = method.partition("_")
            loaded = {f"load_in_{bits}": True} if name == "bitsandbytes" else {}
            stated = {"quant_method": name if loaded else method, **loaded}
            if method == "mxfp4":  # FP8's has to say more
                load_architecture(ModelSection(name=str(packed(stated, method))))
                continue
            said = refused(packed(stated, method))
            assert f"published with quantized weights ({prequantized.METHODS.get(method, name)}" in said
            assert said.startswith("`model.name`: ")
            assert "; name its 16-bit original, which `quantization.kind` then quantizes: " in said


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("MXFP4", "mxfp4"), ("MXFP4", "nf4"), ("MXFP4", "fp8"), ("NVFP4", "nvfp4"), ("NVFP4", "int8"),
        ("NVFP4", "mxfp4"), ("FP8", "fp8"), ("FP8", "fp4"), ("FP8", "nvfp4"),
    ],
)  # fmt: skip
def test_a_published_form_is_not_quantized_to_another(
    form: str, kind: str, packed: Copies, call: Call, tmp_path: Path
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(f"model: {{name: {packed(KEPT[form])}}}\nquantization: {{kind: {kind}}}\n")
    # Rows are read once the base is accepted.
    code, _, err = call("train", config, "data.train=none.jsonl", f"output.dir={tmp_path / 'run'}")
    if kind == form.lower():
        assert code == 3
        assert "none.jsonl" in err
        assert "not quantized again" not in err
        return
    assert code == 2
    reported(err, form, kind, "`published`")


@pytest.mark.parametrize("changed", [{"adapter": {"init": "loftq"}}, {"distributed": {"kind": "fsdp"}}], ids=str)
def test_a_key_that_excludes_the_published_form_is_refused(changed: dict[str, Any], packed: Copies) -> None:
    config = load_config(
        {"model": {"name": str(packed(KEPT["FP8"]))}, "data": {"train": "builtin:python_docs"}} | changed
    )
    with refusal(ConfigError, "is published in FP8"):
        resolve(config, until="form")


def test_every_command_refuses_a_quantized_base_before_it_reads_rows(
    packed: Copies, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = packed(PUBLISHED["gptq"][0])
    (place / "tokenizer.json").write_text("damaged")
    Path("rows.jsonl").write_text('{"no": "format"}\n')
    Path("job.yaml").write_text(f"model: {{name: {place}}}\ndata: {{train: rows.jsonl}}\noutput: {{dir: run}}\n")
    for command in (["plan", "job.yaml"], ["fit", "job.yaml"], ["train", "job.yaml"], ["init", place, "rows.jsonl"]):
        code, _, err = call(*command)
        assert (code, "published with quantized weights (GPTQ, 4 bit)" in err) == (2, True), command
    assert not Path("run").exists()
    assert not Path("rows.yaml").exists()


def test_the_commands_of_a_run_refuse_a_quantized_base(run: RunDirectory, packed: Copies, call: Call) -> None:
    """As a run of an earlier version has, which trained on some of them."""
    name = packed(PUBLISHED["gptq"][0])
    text = run.config_file.read_text()
    assert "name: builtin:tiny-llama" in text
    run.config_file.write_text(text.replace("name: builtin:tiny-llama", f"name: {name}"))
    section = ModelSection(name=str(name))
    fingerprint.save_tokenizer(load_tokenizer(section), identity.of_base(section), run.adapter)
    for command in (["merge"], ["eval"], ["generate", "--prompt", "x"], ["export", "--to", "gguf"]):
        code, _, err = call(command[0], run.path, *command[1:])
        assert (code, "published with quantized weights (GPTQ, 4 bit)" in err) == (2, True), (command, err)
    _, out, _ = call("doctor", run.path)
    assert "published with quantized weights (GPTQ, 4 bit)" in " ".join(out.split())


def test_other_places_of_a_quantization_are_known(packed: Copies, tmp_path: Path) -> None:
    for key in ("quantization", "compression_config"):  # as MLX and early compressed-tensors write them
        assert "quantized weights (4 bit)" in refused(packed({"group_size": 64, "bits": 4}, key, key=key))
    text = {"model_type": "gemma3_text", "quantization_config": PUBLISHED["gptq"][0]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert "published with quantized weights (GPTQ, 4 bit)" in refused(tmp_path)


def test_neither_an_empty_quantization_nor_one_of_random_weights_is_refused(packed: Copies) -> None:
    for name, quantization, weights in (
        ("null", None, "pretrained"), ("empty", {}, "pretrained"), ("gptq", PUBLISHED["gptq"][0], "random"),
    ):  # fmt: skip
        place = packed(quantization, name)
        assert load_architecture(ModelSection(name=str(place), weights=weights)).model_type == "llama"


def test_the_original_is_named_as_far_as_it_is_known(
    packed: Copies, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    quantization = PUBLISHED["gptq"][0]
    carded = packed(quantization, "carded")
    for base_model in ("meta-llama/Llama-3.1-8B", "\n- meta-llama/Llama-3.1-8B"):
        (carded / "README.md").write_text(f"---\nlicense: mit\nbase_model: {base_model}\n---\n# A model\n")
        assert "its model card names `meta-llama/Llama-3.1-8B` as its base" in refused(carded)
    (carded / "README.md").write_text("---\nbase_model: [/root/checkpoint, 7]\n---\n")
    assert "the hub may have a copy in 16 bit" in refused(carded)
    for copy, original in (
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B"),
        ("unsloth/Qwen3-14B-unsloth-bnb-4bit", "unsloth/Qwen3-14B"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct"),
        ("RedHatAI/Llama-3.1-8B-Instruct-quantized.w4a16", "RedHatAI/Llama-3.1-8B-Instruct"),
        ("mlx-community/Qwen3-4B-4bit", "mlx-community/Qwen3-4B"),
    ):
        packed(quantization, copy)
        assert f"by its name that may be `{original}`" in refused(Path(copy))
    packed(quantization, "openai/gpt-oss-20b")
    assert "`unsloth/gpt-oss-20b-BF16` is a copy in 16 bit, made by others" in refused(Path("openai/gpt-oss-20b"))
    assert "; if these weights are in 16 bit after all, remove that key from config.json" in refused(carded)
