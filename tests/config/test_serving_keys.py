"""`output.serve`, `.runtime` and `.way`: what follows from them, and that each contradiction is told with its cure."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from messages import refusal
from safetensors.torch import save_file

from finetune.choices import CHOICES, load_config
from finetune.cli.output import announce
from finetune.config import Config, dump
from finetune.config.serving import GRIDS, RUNTIMES, SERVED, consequences
from finetune.errors import ConfigError
from finetune.recipe import provenance
from finetune.resolve import resolve
from finetune.storage.rundir import RunDirectory
from finetune.training.checks import check


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("data: {train: builtin:python_docs}\n")
    return path


def chosen(config: Config) -> tuple[str | None, str, str]:
    config = config.changed(consequences(config.output, config.quantization.kind)[0])
    return config.output.runtime, config.output.way, config.quantization.kind


def table(text: str) -> list[list[str]]:
    """The cells of each line; of the keys of serving, `output.` is left out."""
    written = re.sub(
        r"(^| )(serve|runtime|way)=", r"\1output.\2=", text.strip().replace("BY_NAME", _BY_NAME), flags=re.M
    )
    return [line.split(" | ") for line in written.splitlines()]


_BY_NAME = "adapter.targets=[q_proj,experts.gate_up_proj,experts.down_proj]"
# Overrides, and the runtime, way and kind that follow.
CHOSEN = """
serve=q4_k_m | llama.cpp adapter q4_k_m
serve=q4_k_m quantization.kind=auto | llama.cpp adapter q4_k_m
serve=q4_k_m runtime=ollama | ollama rounded nf4
serve=q4_k_m runtime=vllm | vllm rounded nf4
serve=fp8 | vllm adapter fp8
serve=fp8 runtime=sglang | sglang rounded nf4
serve=16bit runtime=sglang | sglang adapter none
serve=16bit runtime=ollama | ollama rounded nf4
serve=nvfp4 runtime=llama.cpp | llama.cpp rounded nf4
serve=q5_k_m way=rounded | llama.cpp rounded nf4
"""


@pytest.mark.parametrize(("overrides", "expected"), table(CHOSEN))
def test_runtime_way_and_kind_follow_from_what_is_served(job: Path, overrides: str, expected: str) -> None:
    config = load_config(job, overrides.split())
    assert chosen(config) == tuple(expected.split())
    (unresolved := job.with_name("unresolved.yaml")).write_text(dump(config))
    assert chosen(load_config(unresolved)) == chosen(config), "as `launch` writes it for another machine"
    assert chosen(load_config(config.values())) == chosen(config)
    again = config.changed(consequences(config.output, config.quantization.kind)[0])
    job.write_text(dump(again))
    assert chosen(load_config(job)) == chosen(config), "a run's own config says the same"


def test_nothing_follows_where_nothing_is_served(job: Path) -> None:
    assert chosen(load_config(job)) == (None, "auto", "nf4")


@pytest.mark.parametrize(
    ("written", "meant"), [("serve=FP8", "fp8"), ("runtime=VLLM", "vllm"), ("way=ROUNDED", "rounded")]
)
def test_capital_letters_are_no_other_name(job: Path, written: str, meant: str) -> None:
    with refusal(ConfigError, f"`{meant}`"):
        load_config(job, ["output.serve=int4", f"output.{written}"])


def test_a_line_says_what_was_chosen_and_why(job: Path) -> None:
    for runtime, said in {
        "llama.cpp": " as an adapter beside its base (llama.cpp takes adapters on q4_k_m); quantization.kind: q4_k_m",
        "ollama": " as one file, rounded after training (ollama takes no adapters at all)",
        "vllm": " as one file, rounded after training (vllm takes no adapters on q4_k_m)",
    }.items():
        config = load_config(job, ["output.serve=q4_k_m", f"output.runtime={runtime}"])
        _, line = consequences(config.output, config.quantization.kind)
        assert str(line) == f"output.serve: q4_k_m for {runtime}{said}"


def test_every_form_is_read_by_a_runtime_and_is_a_kind() -> None:
    for form in SERVED:
        assert any(form in runtime.reads for runtime in RUNTIMES.values())
    for runtime in RUNTIMES.values():
        assert {*runtime.adapters} <= {*runtime.reads} <= SERVED.keys()
    assert set(GRIDS) <= CHOICES["quantization.kind"].keys()


# What contradicts itself, the key of the message, and a cure.
WRONG = """
runtime=vllm | output.runtime | serve=fp8
serve=q4_k_m way=adapter adapter.dora=true | adapter.dora | adapter.dora=false
serve=16bit way=adapter adapter.dora=true | adapter.dora | way=rounded
serve=q4_k_m way=adapter adapter.init=pissa | adapter.init | adapter.init=default
serve=q4_k_m way=adapter adapter.extra_modules=[lm_head] | adapter.extra_modules | adapter.extra_modules=[]
serve=fp8 adapter.extra_modules=[lm_head] | adapter.extra_modules | adapter.extra_modules=[]
serve=q4_k_m data.new_tokens=[<tool>] | data.new_tokens | way=rounded
quantization.kind=q6_k data.new_tokens=[<tool>] | data.new_tokens | quantization.kind=nf4
quantization.kind=q6_k model.vocabulary=99000 | model.vocabulary | quantization.kind=nf4
quantization.kind=q6_k adapter.extra_modules=[embed_tokens] | adapter.extra_modules | quantization.kind=nf4
serve=q4_k_m adapter.kind=none | output.serve | adapter.kind=lora
serve=q4_k_m training.objective=reward | output.serve | training.objective=supervised
serve=q4_k_m output.merge=true | output.merge | output.merge=false
serve=q4_k_m quantization.kind=nf4 | quantization.kind | way=rounded
serve=q4_k_m quantization.kind=none | quantization.kind | way=rounded
serve=q4_k_m quantization.kind=q5_k_m | quantization.kind | quantization.kind=q4_k_m
serve=16bit way=adapter quantization.kind=nf4 | quantization.kind | quantization.kind=none
serve=q4_k_m runtime=ollama quantization.kind=q4_k_m | quantization.kind | quantization.kind=none
serve=q8_0 way=rounded quantization.kind=q4_0 | quantization.kind | quantization.kind=nf4
serve=q4_k_m distributed.kind=fsdp | quantization.kind | distributed.kind=ddp
serve=q4_k_m distributed.kind=deepspeed | quantization.kind | distributed.kind=ddp
serve=fp8 model.vision=frozen | quantization.kind | model.vision=none
serve=q8_0 way=rounded model.vision=frozen | output.serve | model.vision=none
serve=fp8 way=rounded model.vision=frozen | output.serve | serve=16bit
serve=16bit runtime=ollama model.vision=frozen | output.runtime | runtime=vllm
"""
_NOT_READ = [
    [f"output.serve={form} output.runtime={name}", "output.runtime", "output.runtime=vllm"]
    for name, runtime in RUNTIMES.items()
    for form in SERVED
    if form not in runtime.reads
]
_NO_ADAPTERS = [
    [f"output.serve={form} output.runtime={name} output.way=adapter", "output.way", "output.way=rounded"]
    for name, runtime in RUNTIMES.items()
    for form in runtime.reads
    if form not in runtime.adapters and form in ("q4_k_m", "mxfp4", "fp8")
]
assert len(_NOT_READ) >= 5 <= len(_NO_ADAPTERS)


@pytest.mark.parametrize(("broken", "key", "cure"), [*_NOT_READ, *_NO_ADAPTERS, *table(WRONG)])
def test_a_contradiction_names_its_key_and_a_cure_that_works(job: Path, broken: str, key: str, cure: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(job, broken.split())
    said = str(error.value)
    assert f"`{key}`: " in said
    assert error.value.exit_code == 2
    replaced, _, value = cure.partition("=")
    assert re.search(rf"`{re.escape(value)}`|: {re.escape(value)}`|remove it|`{re.escape(replaced)}", said), said
    load_config(job, [*without(broken, replaced), cure])


def without(overrides: str, replaced: str) -> list[str]:
    return [one for one in shlex.split(overrides) if not one.startswith(f"{replaced}=")]


_ADAPTER = ("output.serve=q4_k_m", "output.way=adapter")


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
    rounded = ["output.serve=q4_k_m", "output.way=rounded", wrong]
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
_WIDE = {"hidden_size": 1024, "intermediate_size": 1024}
_QWEN_35 = {"model_type": "qwen3_5_text", "num_hidden_layers": 4}
BASES: dict[str, dict[str, object]] = {
    "llama": {}, "fp8": _FP8, "nvfp4": _NVFP4, "gguf": _GGUF, "wide": _WIDE, "qwen3.5": _QWEN_35, "mixture": _MIXTURE,
    "fp8-mixture": _MIXTURE | _FP8, "gpt-oss": {"model_type": "gpt_oss", "num_local_experts": 4},
    "whole-experts": {"model_type": "granitemoe", "num_local_experts": 4},
    "unknown-experts": {"model_type": "ernie4_5_moe", "moe_num_experts": 4},
    "gpt2": {"model_type": "gpt2", "n_embd": 256, "n_head": 4}, "192 wide": {"hidden_size": 192},
    "heads of 48": {"head_dim": 48}, "500 within": {"intermediate_size": 500}, "olmo2": {"model_type": "olmo2"},
    "gelu": {"hidden_act": "gelu"},
}  # fmt: skip
_BESIDE = "output.way=adapter"

# A base, overrides, the key of the message, and a cure.
NOT_SERVED = """
fp8 | serve=q8_0 way=adapter | output.way | serve=fp8
fp8 | serve=16bit way=adapter | output.way | way=rounded
fp8 | serve=fp8 runtime=sglang | output.way | runtime=vllm
192 wide | serve=fp8 | output.serve | serve=q8_0
192 wide | serve=int4 | output.serve | serve=16bit
heads of 48 | serve=int4 | output.serve | serve=q8_0
heads of 48 | serve=fp8 way=rounded | output.serve | serve=16bit
500 within | serve=mxfp4 | output.serve | serve=q8_0
500 within | serve=nvfp4 | output.serve | serve=q8_0
nvfp4 | serve=nvfp4 way=rounded | output.way | way=adapter
gguf | serve=q4_0 runtime=ollama | output.way | runtime=llama.cpp
gguf | serve=q4_0 way=rounded | output.way | way=adapter
mixture | serve=q4_0 way=adapter | output.way | adapter.expert_rank=0
mixture | serve=q4_0 way=adapter | output.way | way=rounded
mixture | serve=q4_0 way=adapter BY_NAME | output.way | way=rounded
mixture | serve=fp8 way=adapter | output.way | way=rounded
mixture | serve=fp8 way=adapter | output.way | adapter.expert_rank=0
fp8-mixture | serve=fp8 | output.way | adapter.expert_rank=0
qwen3.5 | serve=q4_k_m way=adapter | output.way | way=rounded
llama | serve=nvfp4 way=adapter | output.way | way=rounded
olmo2 | serve=q4_k_m | output.serve | serve=16bit
gelu | serve=q8_0 | output.serve | serve=16bit
gpt-oss | serve=fp8 | output.serve | serve=mxfp4
gpt-oss | serve=nvfp4 way=rounded | output.serve | serve=q8_0
gpt-oss | serve=mxfp4 way=adapter | output.way | way=rounded
whole-experts | serve=int4 | output.serve | serve=fp8
gpt2 | serve=int4 | output.serve | serve=16bit
unknown-experts | serve=16bit way=adapter | output.way | way=rounded
unknown-experts | serve=16bit way=adapter | output.way | adapter.expert_rank=0
mixture | serve=16bit runtime=sglang way=adapter | output.way | adapter.expert_rank=0
mixture | serve=16bit way=adapter adapter.targets=[experts.gate_up_proj] | output.way | way=rounded
mixture | serve=16bit way=adapter adapter.targets=[q_proj,gate.weight] | output.way | way=rounded
wide | serve=fp8 way=adapter adapter.rank=600 | output.way | way=rounded
wide | serve=int4 way=adapter 'adapter.ranks={q_proj: 513}' | output.way | way=rounded
"""


def of_base(job: Path, of: str, *overrides: str) -> tuple[Config, str | None]:
    """The config once its base, one of `BASES`, is known, and what is said of it."""
    folder = job.with_name(f"base {of}")
    named = f"model.name={folder if folder.exists() else base(folder, **BASES[of])}"
    return known(load_config(job, [named, *overrides]))


def known(config: Config) -> tuple[Config, str | None]:
    """The config once its base is known, and what is said of it."""
    job = resolve(config, until="base")
    return job.config, "\n".join(job.notes.values()) or None


@pytest.mark.parametrize(("of", "overrides", "key", "cure"), table(NOT_SERVED))
def test_what_a_base_cannot_be_served_as_is_refused_once_it_is_known(
    of: str, overrides: str, key: str, cure: str, job: Path
) -> None:
    with refusal(ConfigError, f"`{key}`") as error:
        of_base(job, of, *shlex.split(overrides))
    assert error.value.exit_code == 2
    changed, _, value = cure.partition("=")
    assert f"`{value}`" in str(error.value) or f": {value}`" in str(error.value)
    config, note = of_base(job, of, *without(overrides, changed), cure)
    assert note is not None
    assert note.startswith("output.serve: ")
    assert config.output.way != "auto"


# A base, overrides, and the reason.
ROUNDED = """
mixture | serve=fp8 | vLLM computes nonsense with an adapter on experts in FP8
mixture | serve=q4_k_m | llama.cpp has no form for an adapter on experts
mixture | serve=q4_k_m BY_NAME | llama.cpp has no form for an adapter on experts
qwen3.5 | serve=q4_k_m | llama.cpp stores columns of `linear_attn.out_proj`
llama | serve=nvfp4 | vllm computes several weights as one
llama | serve=nvfp4 runtime=vllm | vllm computes several weights as one
fp8 | serve=16bit | is published in FP8, which is not quantized again to 16bit
fp8 | serve=q8_0 | is published in FP8, which is not quantized again to q8_0
gpt-oss | serve=mxfp4 | files for vLLM have MXFP4 of the experts of gpt-oss alone
unknown-experts | serve=16bit | form that vLLM reads for `ernie4_5_moe` is unknown here
mixture | serve=16bit runtime=sglang | by which SGLang finds an adapter on experts
wide | serve=16bit adapter.rank=600 | its rank is 600, and vLLM takes at most 512
"""


@pytest.mark.parametrize(("of", "overrides", "why"), table(ROUNDED))
def test_what_a_base_cannot_have_beside_it_is_rounded_by_itself(of: str, overrides: str, why: str, job: Path) -> None:
    config, note = of_base(job, of, *overrides.split())
    assert config.output.way == "rounded"
    assert "as one file, rounded after training (" in str(note)
    assert why in str(note)
    (saved := job.with_name("saved.yaml")).write_text(dump(config))
    assert known(load_config(saved))[0] == config
    with refusal(ConfigError, "`output.way`"):
        of_base(job, of, *overrides.split(), _BESIDE)


# A base, overrides, and the way and kind that follow.
KEPT = """
mixture | serve=q4_k_m adapter.expert_rank=0 | adapter q4_k_m
mixture | serve=fp8 adapter.targets=[q_proj] | adapter fp8
wide | serve=q8_0 adapter.rank=600 | adapter q8_0
fp8 | serve=fp8 | adapter fp8
fp8 | serve=q4_k_m way=rounded | rounded fp8
qwen3.5 | serve=16bit runtime=llama.cpp | rounded nf4
qwen3.5 | serve=16bit runtime=llama.cpp adapter.targets=[q_proj] | adapter none
"""


@pytest.mark.parametrize(("of", "overrides", "expected"), table(KEPT))
def test_what_a_base_may_have_beside_it_is_served_as_that(of: str, overrides: str, expected: str, job: Path) -> None:
    config, note = of_base(job, of, *overrides.split())
    assert [config.output.way, config.quantization.kind] == expected.split()
    assert ("linear_attn.out_proj" in str(note)) == (of == "qwen3.5" and config.output.way == "rounded")


def test_the_header_of_a_plan_says_it_of_its_base(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_mixture = (_MIXTURE, "(llama.cpp has no form for an adapter on experts)")
    for mixture, said in (of_mixture, ({}, "quantization.kind: q4_0")):
        named = f"model.name={base(tmp_path / str(len(mixture)), **mixture)}"
        announce("plan", load_config(job, [named, "output.serve=q4_0"]))
        title, line = capsys.readouterr().out.splitlines()[:2]
        assert ("q4_0" in title) == (not mixture)
        assert line.startswith("output.serve: q4_0 for llama.cpp as ")
        assert said in line


def test_experts_that_are_published_in_a_form_and_have_no_adapter_are_served_in_it(job: Path, tmp_path: Path) -> None:
    in_mxfp4 = {"model_type": "gpt_oss", "num_local_experts": 4, "quantization_config": {"quant_method": "mxfp4"}}
    serve = [f"model.name={base(tmp_path / 'base', **in_mxfp4)}", "output.serve=mxfp4", "output.runtime=ollama"]
    config, _ = known(load_config(job, [*serve, "adapter.expert_rank=0"]))
    assert config.output.way == "rounded"
    with refusal(ConfigError, "in mxfp4 already, and rounding them to it again undoes most"):
        known(load_config(job, serve))


def test_a_kind_that_rounding_would_undo_is_refused_once_the_base_needs_it(job: Path, tmp_path: Path) -> None:
    named = f"model.name={base(tmp_path / 'base', **_MIXTURE)}"
    config = load_config(job, [named, "output.serve=q4_0", "quantization.kind=q4_0"])
    with refusal(ConfigError, "`quantization.kind`", "q4_0") as error:
        known(config)
    assert "output.way: adapter" not in str(error.value), "from which `auto` has fallen back"


def test_experts_that_files_have_in_one_tensor_are_refused_where_servers_read_them_one_by_one(
    job: Path, tmp_path: Path
) -> None:
    folder = base(tmp_path / "base", **_MIXTURE)

    def resolved_as(serve: str) -> str:
        config, note = known(load_config(job, [f"model.name={folder}", f"output.serve={serve}"]))
        return f"{config.output.way}: {note}"

    assert resolved_as("int4").startswith("adapter: ")
    save_file({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(1)}, folder / "model.safetensors")
    assert "rounded: " in (said := resolved_as("16bit"))
    assert "vLLM reads adapters on experts of `qwen3_moe` one by one" in said
    with refusal(ConfigError, "`output.serve`", "`fp8`"):
        resolved_as("int4")


def test_advice_says_of_which_bases_a_runtime_takes_an_adapter(job: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(job, ["output.serve=nvfp4", "output.runtime=sglang", _BESIDE])
    assert str(error.value).endswith("`output.runtime` to one of `vllm` for a base that is published in nvfp4")


@pytest.mark.parametrize(
    ("of", "serve", "lossy"),
    [("gguf", "q4_k_m", True), ("gguf", "q8_0", False), ("nvfp4", "mxfp4", True), ("fp8", "q4_k_m", False)],
)
def test_rounding_from_one_coarse_form_to_another_is_warned_of(of: str, serve: str, lossy: bool, job: Path) -> None:
    _, note = of_base(job, of, f"output.serve={serve}", "output.way=rounded")
    assert ("a part of a small update is lost" in str(note)) == lossy


def test_random_weights_are_planned_but_not_trained_to_be_served(job: Path) -> None:
    served = ["output.serve=q4_0", "output.way=rounded"]
    with refusal(ConfigError, "`output.serve`") as error:
        check(load_config(job, [*served, "model.weights=random"]), torch.device("cpu"))
    assert error.value.exit_code == 2
    check(load_config(job, served), torch.device("cpu"))


def test_a_file_in_16_bit_is_for_families_that_llama_cpp_has(job: Path) -> None:
    with refusal(ConfigError, "`output.serve`", "output.runtime"):
        of_base(job, "olmo2", "output.serve=16bit", "output.runtime=llama.cpp")


def test_a_trained_run_is_read_though_rules_of_serving_have_changed(tmp_path: Path) -> None:
    values = Config().values()
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
    run.create(known(config)[0])
    folder.rename(tmp_path / "elsewhere")
    provenance.refuse_changes(known(config)[0], run)
