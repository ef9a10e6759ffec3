"""`output.serve`, `.runtime` and `.way`: what follows from them, and that each contradiction is told with its cure."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from finetune.config import Config, dump
from finetune.config.serving import EXACT, GGUF, GRIDS, RUNTIMES, SERVED, WAYS, resolved
from finetune.errors import ConfigError
from finetune.model import bounds
from finetune.settings import CHOICES, load_config


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("data: {train: builtin:python_docs}\n")
    return path


def chosen(config: Config) -> tuple[str | None, str, str, bool]:
    config, _ = resolved(config)
    return config.output.runtime, config.output.way, config.quantization.kind, config.quantization.snap


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (None, "auto", "nf4", False)),
        (["output.serve=q4_k_m"], ("llama.cpp", "adapter", "q4_k_m", False)),
        (["output.serve=q4_k_m", "quantization.kind=auto"], ("llama.cpp", "adapter", "q4_k_m", False)),
        (["output.serve=q4_k_m", "output.runtime=ollama"], ("ollama", "rounded", "nf4", False)),
        (["output.serve=q4_k_m", "output.runtime=vllm"], ("vllm", "rounded", "nf4", False)),
        (["output.serve=fp8"], ("vllm", "adapter", "fp8", False)),
        (["output.serve=fp8", "output.runtime=sglang"], ("sglang", "rounded", "nf4", False)),
        (["output.serve=16bit", "output.runtime=sglang"], ("sglang", "adapter", "none", False)),
        (["output.serve=16bit", "output.runtime=ollama"], ("ollama", "rounded", "nf4", False)),
        (["output.serve=q5_k_m", "output.way=exact"], ("llama.cpp", "exact", "q5_k_m", True)),
        (["output.serve=nvfp4", "output.way=exact"], ("vllm", "exact", "nvfp4", True)),
        (["output.serve=nvfp4", "output.runtime=llama.cpp"], ("llama.cpp", "rounded", "nf4", False)),
        (["output.serve=q5_k_m", "output.way=rounded"], ("llama.cpp", "rounded", "nf4", False)),
    ],
    ids=str,
)
def test_runtime_way_and_kind_follow_from_what_is_served(
    job: Path, overrides: list[str], expected: tuple[str | None, str, str, bool]
) -> None:
    config = load_config(job, overrides)
    assert chosen(config) == expected
    again, _ = resolved(config)
    job.write_text(dump(again))
    assert chosen(load_config(job)) == expected, "a run's own config says the same"


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
_EXACT = ("output.serve=q4_k_m", "output.way=exact")
_ADAPTER = ("output.serve=q4_k_m", "output.way=adapter")
_AUTO = ("output.serve=q4_k_m",)
WRONG: list[tuple[tuple[str, ...], str, tuple[str, ...]]] = [
    *((broken, "output.runtime", ("output.runtime=vllm",)) for broken in _NOT_READ),
    *((broken, "output.way", ("output.way=rounded",)) for broken in _NO_ADAPTERS),
    (("output.runtime=vllm",), "output.runtime", ("output.serve=fp8",)),
    (("output.way=exact",), "output.way", ("output.serve=q4_0",)),
    (("output.serve=16bit", "output.way=exact"), "output.way", ("output.way=rounded",)),
    ((*_EXACT, "adapter.dora=true"), "adapter.dora", ("adapter.dora=false",)),
    ((*_EXACT, "adapter.dropout=0.1"), "adapter.dropout", ("adapter.dropout=0.0",)),
    ((*_EXACT, "adapter.init=loftq"), "adapter.init", ("adapter.init=default",)),
    ((*_EXACT, "output.merge=true"), "output.merge", ("output.merge=false",)),
    ((*_EXACT, "adapter.extra_modules=[lm_head]"), "adapter.extra_modules", ("adapter.extra_modules=[]",)),
    ((*_EXACT, "kernels.compile=layers"), "kernels.compile", ("kernels.compile=none",)),
    (("output.serve=fp8", "output.way=exact"), "output.way", ("output.way=rounded",)),
    (("quantization.snap=true",), "quantization.kind", ("quantization.kind=q4_0",)),
    ((*_ADAPTER, "quantization.snap=true"), "quantization.snap", ("quantization.snap=false",)),
    (("quantization.kind=q4_0", "quantization.snap=true", "training.objective=classification"), "quantization.snap",
     ("quantization.snap=false",)),
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
]  # fmt: skip


def test_there_are_many_wrong_combinations() -> None:
    assert len(WRONG) >= 40
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


@pytest.mark.parametrize("way", [_ADAPTER, _EXACT], ids=str)
@pytest.mark.parametrize(
    "wrong",
    [
        "adapter.dora=true", "adapter.init=loftq", "adapter.init=pissa", "adapter.extra_modules=[lm_head]",
        "adapter.extra_modules=[norm]", "data.new_tokens=[<tool>]", "model.vocabulary=99000",
    ],
)  # fmt: skip
def test_what_a_way_excludes_is_told_once_with_cures_that_leave_the_kind_to_it(
    job: Path, way: tuple[str, ...], wrong: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(job, [*way, wrong])
    (said,) = str(error.value).splitlines()
    assert "`output.way: rounded`" in said
    assert "quantization.kind" not in said
    rounded = [*way[:1], "output.way=rounded", wrong]
    load_config(job, [*rounded, *["quantization.kind=none"] * ("pissa" in wrong)])


@pytest.mark.parametrize("objective", ["reward", "classification"])
def test_a_head_for_scores_is_told_once_whatever_is_served(job: Path, objective: str) -> None:
    for way in ([], ["output.way=adapter"], ["output.way=rounded"], ["output.way=exact"]):
        with pytest.raises(ConfigError) as error:
            load_config(job, ["output.serve=q4_0", *way, f"training.objective={objective}"])
        (said,) = str(error.value).splitlines()
        assert "`output.serve`: a model with a head for scores is served as it is; remove it" in said
    load_config(job, ["quantization.kind=q4_0", f"training.objective={objective}"])


def test_exact_is_advised_only_for_forms_that_training_rounds_to(job: Path) -> None:
    for broken in _NO_ADAPTERS:
        with pytest.raises(ConfigError) as error:
            load_config(job, broken)
        assert ("`exact`" in str(error.value)) == (broken[0].partition("=")[2] in EXACT)


def test_the_way_and_its_table_are_all_tried() -> None:
    assert WAYS.keys() == {"auto", "adapter", "rounded", "exact"}
    assert {"adapter", "exact"} == {
        one.split("=")[1] for broken, _, _ in WRONG for one in broken if "way=a" in one or "way=e" in one
    }


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


@pytest.mark.parametrize(
    ("of_base", "overrides", "key", "cure"),
    [
        (_FP8, ["output.serve=q8_0"], "output.serve", "output.serve=fp8"),
        (_FP8, ["output.serve=16bit"], "output.serve", "output.way=rounded"),
        ({"hidden_size": 192}, ["output.serve=fp8"], "output.serve", "output.serve=q8_0"),
        ({"hidden_size": 192}, ["output.serve=int4"], "output.serve", "output.serve=16bit"),
        ({"intermediate_size": 500}, ["output.serve=mxfp4"], "output.serve", "output.serve=q8_0"),
        ({"intermediate_size": 500}, ["output.serve=nvfp4"], "output.serve", "output.serve=q8_0"),
        (
            {"intermediate_size": 528}, ["output.serve=nvfp4", "output.way=exact", "output.runtime=llama.cpp"],
            "output.serve", "output.serve=q8_0",
        ),
        (_NVFP4, ["output.serve=nvfp4", "output.way=exact"], "output.way", "output.way=adapter"),
        (_MIXTURE, ["output.serve=q4_0"], "output.way", "adapter.expert_rank=0"),
        (_MIXTURE, ["output.serve=q4_0"], "output.way", "output.way=rounded"),
        (
            {"model_type": "qwen3_5_text", "num_hidden_layers": 4}, ["output.serve=q4_k_m"], "output.way",
            "output.way=rounded",
        ),
        ({}, ["output.serve=nvfp4"], "output.way", "output.way=rounded"),
        ({"model_type": "olmo2"}, ["output.serve=q4_k_m"], "output.serve", "output.serve=16bit"),
        ({"hidden_act": "gelu"}, ["output.serve=q8_0"], "output.serve", "output.serve=16bit"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_base_cannot_be_served_as_is_refused_once_it_is_known(
    job: Path, of_base: dict[str, object], overrides: list[str], key: str, cure: str, tmp_path: Path
) -> None:
    named = f"model.name={base(tmp_path / 'base', **of_base)}"
    with pytest.raises(ConfigError) as error:
        bounds.as_known_base_allows(load_config(job, [named, *overrides]))
    assert f"`{key}`: " in str(error.value)
    assert error.value.exit_code == 2
    changed, _, value = cure.partition("=")
    assert f"`{value}`" in str(error.value) or f": {value}`" in str(error.value)
    kept = [one for one in overrides if not one.startswith(f"{changed}=")]
    config, note = bounds.as_known_base_allows(load_config(job, [named, *kept, cure]))
    assert note is not None
    assert note.startswith("output.serve: ")
    assert config.output.way != "auto"


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
