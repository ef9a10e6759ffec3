"""`output.serve`, `.runtime` and `.way`: what follows from them, and that each contradiction is told with its cure."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from messages import refusal
from safetensors.torch import save_file

from finetune.cli.output import announce
from finetune.config import Config, dump, values_of
from finetune.config.serving import GGUF, GRIDS, RUNTIMES, SERVED, resolved
from finetune.errors import ConfigError
from finetune.lifecycle import provenance
from finetune.model import bounds
from finetune.settings import CHOICES, load_config
from finetune.storage.rundir import RunDirectory
from finetune.training.checks import check


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("data: {train: builtin:python_docs}\n")
    return path


def chosen(config: Config) -> tuple[str | None, str, str]:
    config, _ = resolved(config)
    return config.output.runtime, config.output.way, config.quantization.kind


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (None, "auto", "nf4")),
        (["output.serve=q4_k_m"], ("llama.cpp", "adapter", "q4_k_m")),
        (["output.serve=q4_k_m", "quantization.kind=auto"], ("llama.cpp", "adapter", "q4_k_m")),
        (["output.serve=q4_k_m", "output.runtime=ollama"], ("ollama", "rounded", "nf4")),
        (["output.serve=q4_k_m", "output.runtime=vllm"], ("vllm", "rounded", "nf4")),
        (["output.serve=fp8"], ("vllm", "adapter", "fp8")),
        (["output.serve=fp8", "output.runtime=sglang"], ("sglang", "rounded", "nf4")),
        (["output.serve=16bit", "output.runtime=sglang"], ("sglang", "adapter", "none")),
        (["output.serve=16bit", "output.runtime=ollama"], ("ollama", "rounded", "nf4")),
        (["output.serve=nvfp4", "output.runtime=llama.cpp"], ("llama.cpp", "rounded", "nf4")),
        (["output.serve=q5_k_m", "output.way=rounded"], ("llama.cpp", "rounded", "nf4")),
    ],
    ids=str,
)
def test_runtime_way_and_kind_follow_from_what_is_served(
    job: Path, overrides: list[str], expected: tuple[str | None, str, str]
) -> None:
    config = load_config(job, overrides)
    assert chosen(config) == expected
    (unresolved := job.with_name("unresolved.yaml")).write_text(dump(config))
    assert chosen(load_config(unresolved)) == expected, "as `launch` writes it for another machine"
    assert chosen(load_config(values_of(config))) == expected
    again, _ = resolved(config)
    job.write_text(dump(again))
    assert chosen(load_config(job)) == expected, "a run's own config says the same"


@pytest.mark.parametrize(
    ("written", "meant"), [("serve=FP8", "fp8"), ("runtime=VLLM", "vllm"), ("way=ROUNDED", "rounded")]
)
def test_capital_letters_are_no_other_name(job: Path, written: str, meant: str) -> None:
    with refusal(ConfigError, f"`{meant}`"):
        load_config(job, ["output.serve=int4", f"output.{written}"])


def test_a_line_says_what_was_chosen_and_why(job: Path) -> None:
    said = {
        runtime: resolved(load_config(job, ["output.serve=q4_k_m", f"output.runtime={runtime}"]))[1]
        for runtime in RUNTIMES
    }
    assert said == {
        "llama.cpp": "output.serve: q4_k_m for llama.cpp as an adapter beside its base (llama.cpp takes adapters on "
        "q4_k_m); quantization.kind: q4_k_m",
        "ollama": "output.serve: q4_k_m for ollama as one file, rounded after training (ollama takes no adapters at "
        "all)",
        "vllm": "output.serve: q4_k_m for vllm as one file, rounded after training (vllm takes no adapters on q4_k_m)",
        "sglang": "output.serve: q4_k_m for sglang as one file, rounded after training (sglang takes no adapters on "
        "q4_k_m)",
    }


def test_every_form_is_read_by_a_runtime_and_is_a_kind() -> None:
    for form in SERVED:
        assert any(form in runtime.reads for runtime in RUNTIMES.values())
    for runtime in RUNTIMES.values():
        assert {*runtime.adapters} <= {*runtime.reads} <= SERVED.keys()
    assert set(GRIDS) <= CHOICES["quantization.kind"].keys()


_NOT_READ = [
    (f"output.serve={form}", f"output.runtime={name}")
    for name, runtime in RUNTIMES.items()
    for form in SERVED
    if form not in runtime.reads
]
_NO_ADAPTERS = [
    (f"output.serve={form}", f"output.runtime={name}", "output.way=adapter")
    for name, runtime in RUNTIMES.items()
    for form in runtime.reads
    if form not in runtime.adapters and form in ("q4_k_m", "mxfp4", "fp8")
]
_ADAPTER = ("output.serve=q4_k_m", "output.way=adapter")
_AUTO = ("output.serve=q4_k_m",)
WRONG: list[tuple[tuple[str, ...], str, tuple[str, ...]]] = [
    *((broken, "output.runtime", ("output.runtime=vllm",)) for broken in _NOT_READ),
    *((broken, "output.way", ("output.way=rounded",)) for broken in _NO_ADAPTERS),
    (("output.runtime=vllm",), "output.runtime", ("output.serve=fp8",)),
    ((*_ADAPTER, "adapter.dora=true"), "adapter.dora", ("adapter.dora=false",)),
    (("output.serve=16bit", "output.way=adapter", "adapter.dora=true"), "adapter.dora", ("output.way=rounded",)),
    ((*_ADAPTER, "adapter.init=pissa"), "adapter.init", ("adapter.init=default",)),
    ((*_ADAPTER, "adapter.extra_modules=[lm_head]"), "adapter.extra_modules", ("adapter.extra_modules=[]",)),
    (
        ("output.serve=fp8", "adapter.extra_modules=[lm_head]"), "adapter.extra_modules", ("adapter.extra_modules=[]",)
    ),
    ((*_AUTO, "data.new_tokens=[<tool>]"), "data.new_tokens", ("output.way=rounded",)),
    (("quantization.kind=q6_k", "data.new_tokens=[<tool>]"), "data.new_tokens", ("quantization.kind=nf4",)),
    (("quantization.kind=q6_k", "model.vocabulary=99000"), "model.vocabulary", ("quantization.kind=nf4",)),
    (("quantization.kind=q6_k", "adapter.extra_modules=[embed_tokens]"), "adapter.extra_modules",
     ("quantization.kind=nf4",)),
    ((*_AUTO, "adapter.kind=none"), "output.serve", ("adapter.kind=lora",)),
    ((*_AUTO, "training.objective=reward"), "output.serve", ("training.objective=supervised",)),
    ((*_AUTO, "output.merge=true"), "output.merge", ("output.merge=false",)),
    ((*_AUTO, "quantization.kind=nf4"), "quantization.kind", ("output.way=rounded",)),
    ((*_AUTO, "quantization.kind=none"), "quantization.kind", ("output.way=rounded",)),
    ((*_AUTO, "quantization.kind=q5_k_m"), "quantization.kind", ("quantization.kind=q4_k_m",)),
    (("output.serve=16bit", "output.way=adapter", "quantization.kind=nf4"), "quantization.kind",
     ("quantization.kind=none",)),
    (("output.serve=q4_k_m", "output.runtime=ollama", "quantization.kind=q4_k_m"), "quantization.kind",
     ("quantization.kind=none",)),
    (("output.serve=q8_0", "output.way=rounded", "quantization.kind=q4_0"), "quantization.kind",
     ("quantization.kind=nf4",)),
    ((*_AUTO, "distributed.kind=fsdp"), "quantization.kind", ("distributed.kind=ddp",)),
    ((*_AUTO, "distributed.kind=deepspeed"), "quantization.kind", ("distributed.kind=ddp",)),
    (("output.serve=fp8", "model.vision=frozen"), "quantization.kind", ("model.vision=none",)),
    (("output.serve=q8_0", "output.way=rounded", "model.vision=frozen"), "output.serve", ("model.vision=none",)),
    (("output.serve=fp8", "output.way=rounded", "model.vision=frozen"), "output.serve", ("output.serve=16bit",)),
    (
        ("output.serve=16bit", "output.runtime=ollama", "model.vision=frozen"), "output.runtime",
        ("output.runtime=vllm",),
    ),
]  # fmt: skip


def test_there_are_many_wrong_combinations() -> None:
    assert len(WRONG) >= 35
    assert len(_NOT_READ) >= 5 <= len(_NO_ADAPTERS)


@pytest.mark.parametrize(("broken", "key", "cure"), WRONG, ids=str)
def test_a_contradiction_names_its_key_and_a_cure_that_works(
    job: Path, broken: tuple[str, ...], key: str, cure: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(job, broken)
    said = str(error.value)
    assert f"`{key}`: " in said
    assert error.value.exit_code == 2
    replaced, _, value = cure[0].partition("=")
    assert re.search(rf"`{re.escape(value)}`|: {re.escape(value)}`|remove it|`{re.escape(replaced)}", said), said
    kept = [one for one in broken if not one.startswith(f"{replaced}=")]
    load_config(job, [*kept, *cure])


@pytest.mark.parametrize(
    "wrong",
    [
        "adapter.dora=true", "adapter.init=loftq", "adapter.init=pissa", "adapter.extra_modules=[lm_head]",
        "adapter.extra_modules=[norm]", "data.new_tokens=[<tool>]", "model.vocabulary=99000",
    ],
)  # fmt: skip
def test_what_a_way_excludes_is_reported_once_with_cures_that_leave_the_kind_to_it(job: Path, wrong: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(job, [*_ADAPTER, wrong])
    (said,) = str(error.value).splitlines()
    assert "`output.way: rounded`" in said
    assert "quantization.kind" not in said
    rounded = [*_AUTO, "output.way=rounded", wrong]
    load_config(job, [*rounded, *["quantization.kind=none"] * ("pissa" in wrong)])


@pytest.mark.parametrize("objective", ["reward", "classification"])
def test_a_head_for_scores_is_reported_once_whatever_is_served(job: Path, objective: str) -> None:
    for way in ([], ["output.way=adapter"], ["output.way=rounded"]):
        with pytest.raises(ConfigError) as error:
            load_config(job, ["output.serve=q4_0", *way, f"training.objective={objective}"])
        (said,) = str(error.value).splitlines()
        assert "`output.serve`: a model with a head for scores is served as it is; remove it" in said
    load_config(job, ["quantization.kind=q4_0", f"training.objective={objective}"])


def base(folder: Path, **changed: object) -> Path:
    """A base by its config.json alone."""
    sizes = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": 4096,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **changed}))
    return folder


_MIXTURE = {"model_type": "qwen3_moe", "num_experts": 4, "norm_topk_prob": True}
_NVFP4 = {
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": True}
            }
        },
    }
}  # fmt: skip
_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


_GGUF = {
    "quantization_config": {"quant_method": "gguf", "modules_to_convert": {"model.layers.0.mlp.up_proj.weight": "q4_0"}}
}
_GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 4}
_WHOLE_EXPERTS = {"model_type": "granitemoe", "num_local_experts": 4}
_UNKNOWN_EXPERTS = {"model_type": "ernie4_5_moe", "moe_num_experts": 4}
_GPT_2 = {"model_type": "gpt2", "n_embd": 256, "n_head": 4}
_WIDE = {"hidden_size": 1024, "intermediate_size": 1024}
_QWEN_35 = {"model_type": "qwen3_5_text", "num_hidden_layers": 4}
_BY_NAME = "adapter.targets=[q_proj,experts.gate_up_proj,experts.down_proj]"
_BESIDE = "output.way=adapter"


@pytest.mark.parametrize(
    ("of_base", "overrides", "key", "cure"),
    [
        (_FP8, ["output.serve=q8_0", _BESIDE], "output.way", "output.serve=fp8"),
        (_FP8, ["output.serve=16bit", _BESIDE], "output.way", "output.way=rounded"),
        (_FP8, ["output.serve=fp8", "output.runtime=sglang"], "output.way", "output.runtime=vllm"),
        ({"hidden_size": 192}, ["output.serve=fp8"], "output.serve", "output.serve=q8_0"),
        ({"hidden_size": 192}, ["output.serve=int4"], "output.serve", "output.serve=16bit"),
        ({"head_dim": 48}, ["output.serve=int4"], "output.serve", "output.serve=q8_0"),
        ({"head_dim": 48}, ["output.serve=fp8", "output.way=rounded"], "output.serve", "output.serve=16bit"),
        ({"intermediate_size": 500}, ["output.serve=mxfp4"], "output.serve", "output.serve=q8_0"),
        ({"intermediate_size": 500}, ["output.serve=nvfp4"], "output.serve", "output.serve=q8_0"),
        (_NVFP4, ["output.serve=nvfp4", "output.way=rounded"], "output.way", "output.way=adapter"),
        (_GGUF, ["output.serve=q4_0", "output.runtime=ollama"], "output.way", "output.runtime=llama.cpp"),
        (_GGUF, ["output.serve=q4_0", "output.way=rounded"], "output.way", "output.way=adapter"),
        (_MIXTURE, ["output.serve=q4_0", _BESIDE], "output.way", "adapter.expert_rank=0"),
        (_MIXTURE, ["output.serve=q4_0", _BESIDE], "output.way", "output.way=rounded"),
        (_MIXTURE, ["output.serve=q4_0", _BESIDE, _BY_NAME], "output.way", "output.way=rounded"),
        (_MIXTURE, ["output.serve=fp8", _BESIDE], "output.way", "output.way=rounded"),
        (_MIXTURE, ["output.serve=fp8", _BESIDE], "output.way", "adapter.expert_rank=0"),
        (_MIXTURE | _FP8, ["output.serve=fp8"], "output.way", "adapter.expert_rank=0"),
        (_QWEN_35, ["output.serve=q4_k_m", _BESIDE], "output.way", "output.way=rounded"),
        ({}, ["output.serve=nvfp4", _BESIDE], "output.way", "output.way=rounded"),
        ({"model_type": "olmo2"}, ["output.serve=q4_k_m"], "output.serve", "output.serve=16bit"),
        ({"hidden_act": "gelu"}, ["output.serve=q8_0"], "output.serve", "output.serve=16bit"),
        (_GPT_OSS, ["output.serve=fp8"], "output.serve", "output.serve=mxfp4"),
        (_GPT_OSS, ["output.serve=nvfp4", "output.way=rounded"], "output.serve", "output.serve=q8_0"),
        (_GPT_OSS, ["output.serve=mxfp4", _BESIDE], "output.way", "output.way=rounded"),
        (_WHOLE_EXPERTS, ["output.serve=int4"], "output.serve", "output.serve=fp8"),
        (_GPT_2, ["output.serve=int4"], "output.serve", "output.serve=16bit"),
        (_UNKNOWN_EXPERTS, ["output.serve=16bit", _BESIDE], "output.way", "output.way=rounded"),
        (_UNKNOWN_EXPERTS, ["output.serve=16bit", _BESIDE], "output.way", "adapter.expert_rank=0"),
        (_MIXTURE, ["output.serve=16bit", "output.runtime=sglang", _BESIDE], "output.way", "adapter.expert_rank=0"),
        (
            _MIXTURE, ["output.serve=16bit", _BESIDE, "adapter.targets=[experts.gate_up_proj]"], "output.way",
            "output.way=rounded",
        ),
        (
            _MIXTURE, ["output.serve=16bit", _BESIDE, "adapter.targets=[q_proj,gate.weight]"], "output.way",
            "output.way=rounded",
        ),
        (_WIDE, ["output.serve=fp8", _BESIDE, "adapter.rank=600"], "output.way", "output.way=rounded"),
        (_WIDE, ["output.serve=int4", _BESIDE, "adapter.ranks={q_proj: 513}"], "output.way", "output.way=rounded"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_base_cannot_be_served_as_is_refused_once_it_is_known(
    job: Path, of_base: dict[str, object], overrides: list[str], key: str, cure: str, tmp_path: Path
) -> None:
    named = f"model.name={base(tmp_path / 'base', **of_base)}"
    with refusal(ConfigError, f"`{key}`") as error:
        bounds.as_known_base_allows(load_config(job, [named, *overrides]))
    assert error.value.exit_code == 2
    changed, _, value = cure.partition("=")
    assert f"`{value}`" in str(error.value) or f": {value}`" in str(error.value)
    kept = [one for one in overrides if not one.startswith(f"{changed}=")]
    config, note = bounds.as_known_base_allows(load_config(job, [named, *kept, cure]))
    assert note is not None
    assert note.startswith("output.serve: ")
    assert config.output.way != "auto"


@pytest.mark.parametrize(
    ("of_base", "overrides", "why"),
    [
        (_MIXTURE, ["output.serve=fp8"], "vLLM computes nonsense with an adapter on experts in FP8"),
        (_MIXTURE, ["output.serve=q4_k_m"], "llama.cpp has no form for an adapter on experts"),
        (_MIXTURE, ["output.serve=q4_k_m", _BY_NAME], "llama.cpp has no form for an adapter on experts"),
        (_QWEN_35, ["output.serve=q4_k_m"], "llama.cpp stores columns of `linear_attn.out_proj`"),
        ({}, ["output.serve=nvfp4"], "vllm computes several weights as one"),
        ({}, ["output.serve=nvfp4", "output.runtime=vllm"], "vllm computes several weights as one"),
        (_FP8, ["output.serve=16bit"], "is published in FP8, which is not quantized again to 16bit"),
        (_FP8, ["output.serve=q8_0"], "is published in FP8, which is not quantized again to q8_0"),
        (_GPT_OSS, ["output.serve=mxfp4"], "files for vLLM have MXFP4 of the experts of gpt-oss alone"),
        (_UNKNOWN_EXPERTS, ["output.serve=16bit"], "form that vLLM reads for `ernie4_5_moe` is unknown here"),
        (_MIXTURE, ["output.serve=16bit", "output.runtime=sglang"], "by which SGLang finds an adapter on experts"),
        (_WIDE, ["output.serve=16bit", "adapter.rank=600"], "its rank is 600, and vLLM takes at most 512"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_base_cannot_have_beside_it_is_rounded_by_itself(
    job: Path, of_base: dict[str, object], overrides: list[str], why: str, tmp_path: Path
) -> None:
    named = f"model.name={base(tmp_path / 'base', **of_base)}"
    config, note = bounds.as_known_base_allows(load_config(job, [named, *overrides]))
    assert config.output.way == "rounded"
    assert "as one file, rounded after training (" in str(note)
    assert why in str(note)
    (saved := tmp_path / "saved.yaml").write_text(dump(config))
    assert bounds.as_known_base_allows(load_config(saved))[0] == config
    with refusal(ConfigError, "`output.way`"):
        bounds.as_known_base_allows(load_config(job, [named, *overrides, _BESIDE]))


def test_the_header_of_a_plan_says_it_of_its_base(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for mixture, said in (
        (_MIXTURE, "(llama.cpp has no form for an adapter on experts)"),
        ({}, "quantization.kind: q4_0"),
    ):
        named = f"model.name={base(tmp_path / str(len(mixture)), **mixture)}"
        announce("plan", load_config(job, [named, "output.serve=q4_0"]))
        title, line = capsys.readouterr().out.splitlines()[:2]
        assert ("q4_0" in title) == (not mixture)
        assert line.startswith("output.serve: q4_0 for llama.cpp as ")
        assert said in line


def test_a_mixture_whose_experts_have_no_adapter_is_served_beside_one(job: Path, tmp_path: Path) -> None:
    named = f"model.name={base(tmp_path / 'base', **_MIXTURE)}"
    for serve in ("q4_k_m", "fp8"):
        for without in ("adapter.expert_rank=0", "adapter.targets=[q_proj]"):
            config, _ = bounds.as_known_base_allows(load_config(job, [named, f"output.serve={serve}", without]))
            assert config.output.way == "adapter"


def test_experts_that_are_published_in_a_form_and_have_no_adapter_are_served_in_it(job: Path, tmp_path: Path) -> None:
    in_mxfp4 = {"model_type": "gpt_oss", "num_local_experts": 4, "quantization_config": {"quant_method": "mxfp4"}}
    serve = [f"model.name={base(tmp_path / 'base', **in_mxfp4)}", "output.serve=mxfp4", "output.runtime=ollama"]
    config, _ = bounds.as_known_base_allows(load_config(job, [*serve, "adapter.expert_rank=0"]))
    assert config.output.way == "rounded"
    with refusal(ConfigError, "in mxfp4 already, and rounding them to it again undoes most"):
        bounds.as_known_base_allows(load_config(job, serve))


def test_a_kind_that_rounding_would_undo_is_refused_once_the_base_needs_it(job: Path, tmp_path: Path) -> None:
    named = f"model.name={base(tmp_path / 'base', **_MIXTURE)}"
    config = load_config(job, [named, "output.serve=q4_0", "quantization.kind=q4_0"])
    with refusal(ConfigError, "`quantization.kind`", "q4_0") as error:
        bounds.as_known_base_allows(config)
    assert "output.way: adapter" not in str(error.value), "from which `auto` has fallen back"


def test_experts_that_files_have_in_one_tensor_are_refused_where_servers_read_them_one_by_one(
    job: Path, tmp_path: Path
) -> None:
    folder = base(tmp_path / "base", **_MIXTURE)

    def resolved_as(serve: str) -> str:
        config, note = bounds.as_known_base_allows(load_config(job, [f"model.name={folder}", f"output.serve={serve}"]))
        return f"{config.output.way}: {note}"

    assert resolved_as("int4").startswith("adapter: ")
    save_file({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(1)}, folder / "model.safetensors")
    assert "rounded: " in (said := resolved_as("16bit"))
    assert "vLLM reads adapters on experts of `qwen3_moe` one by one" in said
    with refusal(ConfigError, "`output.serve`", "`fp8`"):
        resolved_as("int4")


def test_llama_cpp_takes_an_adapter_of_any_rank(job: Path, tmp_path: Path) -> None:
    named = f"model.name={base(tmp_path / 'base', **_WIDE)}"
    config, _ = bounds.as_known_base_allows(load_config(job, [named, "output.serve=q8_0", "adapter.rank=600"]))
    assert config.output.way == "adapter"


def test_advice_says_of_which_bases_a_runtime_takes_an_adapter(job: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(job, ["output.serve=nvfp4", "output.runtime=sglang", _BESIDE])
    assert str(error.value).endswith("`output.runtime` to one of `vllm` for a base that is published in nvfp4")


@pytest.mark.parametrize(
    ("of_base", "serve", "lossy"),
    [(_GGUF, "q4_k_m", True), (_GGUF, "q8_0", False), (_NVFP4, "mxfp4", True), (_FP8, "q4_k_m", False)],
    ids=str,
)
def test_rounding_from_one_coarse_form_to_another_is_warned_of(
    job: Path, of_base: dict[str, object], serve: str, lossy: bool, tmp_path: Path
) -> None:
    named = f"model.name={base(tmp_path / 'base', **of_base)}"
    _, note = bounds.as_known_base_allows(load_config(job, [named, f"output.serve={serve}", "output.way=rounded"]))
    assert ("a part of a small update is lost" in str(note)) == lossy


def test_random_weights_are_planned_but_not_trained_to_be_served(job: Path) -> None:
    served = ["output.serve=q4_0", "output.way=rounded"]
    with refusal(ConfigError, "`output.serve`") as error:
        check(load_config(job, [*served, "model.weights=random"]), torch.device("cpu"))
    assert error.value.exit_code == 2
    check(load_config(job, served), torch.device("cpu"))


def test_a_published_base_is_served_as_it_is(job: Path, tmp_path: Path) -> None:
    named = f"model.name={base(tmp_path / 'base', **_FP8)}"
    config, _ = bounds.as_known_base_allows(load_config(job, [named, "output.serve=fp8"]))
    assert (config.quantization.kind, config.output.way) == ("fp8", "adapter")
    rounded = ["output.serve=q4_k_m", "output.way=rounded"]
    config, note = bounds.as_known_base_allows(load_config(job, [named, *rounded]))
    assert (config.quantization.kind, config.output.way) == ("fp8", "rounded")
    assert note is not None
    assert len(note.splitlines()) == 2
    assert len(GGUF) == 6


def test_a_file_in_16_bit_is_for_families_that_llama_cpp_has(job: Path, tmp_path: Path) -> None:
    in_16_bit = ["output.serve=16bit", "output.runtime=llama.cpp"]
    named = f"model.name={base(tmp_path / 'olmo', model_type='olmo2')}"
    with refusal(ConfigError, "`output.serve`", "output.runtime"):
        bounds.as_known_base_allows(load_config(job, [named, *in_16_bit]))
    named = f"model.name={base(tmp_path / 'qwen', **_QWEN_35)}"
    config, note = bounds.as_known_base_allows(load_config(job, [named, *in_16_bit]))
    assert (config.output.way, "linear_attn.out_proj" in str(note)) == ("rounded", True)
    config, _ = bounds.as_known_base_allows(load_config(job, [named, *in_16_bit, "adapter.targets=[q_proj]"]))
    assert config.output.way == "adapter"


def test_a_trained_run_is_read_though_rules_of_serving_have_changed(tmp_path: Path) -> None:
    values = values_of(Config())
    values["output"] |= {"serve": "nvfp4", "runtime": "llama.cpp", "way": "adapter"}
    values["quantization"]["kind"] = "nvfp4"
    with refusal(ConfigError, "takes no adapters"):
        load_config(values)
    (run := RunDirectory(tmp_path)).config_file.write_text(json.dumps(values))
    assert run.config().output.way == "adapter"


def test_a_job_whose_base_cannot_be_read_is_still_that_of_its_run(job: Path, tmp_path: Path) -> None:
    folder = base(tmp_path / "base", **_MIXTURE)
    config = load_config(job, [f"model.name={folder}", "output.serve=q4_0"])
    run = RunDirectory(tmp_path / "run")
    run.create(bounds.as_known_base_allows(config)[0])
    folder.rename(tmp_path / "elsewhere")
    provenance.refuse_changes(bounds.as_known_base_allows(config)[0], run)
