"""Architectures unlike Llama: state spaces, mixtures of their own kind, layers whose weight is read past the layer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import every_architecture
import pytest
import tiny_models
import torch
from jobs import sampled
from messages import refusal
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config import Config
from finetune.data.batching import LargestBatch, MicroBatching
from finetune.errors import ConfigError, FinetuneError, ForecastError, MachineError
from finetune.forecast import planning
from finetune.model import base
from finetune.model.adapters import adapter
from finetune.model.attention import backends, packing
from finetune.model.precision import autocast
from finetune.model.probes import causality, packed_rows
from finetune.model.recompute import checkpointing
from finetune.model.source import catalog
from finetune.model.structure import linear_layers
from finetune.training.collator import MicroBatches

WORDS = 128
_SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 3,
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_STATES: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": WORDS, "hidden_size": 32, "n_head": 4, "n_layer": 2, "pad_token_id": 3},
    "mpt": {"vocab_size": WORDS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "rwkv": {**_SIZES, "attention_hidden_size": 32, "rescale_every": 1, "context_length": 64},
    "mamba": {**_SIZES, "state_size": 8, "time_step_rank": 4},
    "dbrx": {
        "vocab_size": WORDS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "pad_token_id": 3,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {
            "hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2,
            "ffn_act_fn": {"name": "silu"},
        },
    },
    "gemma3n_text": {
        **_SIZES, **_HEADS, "head_dim": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "vocab_size_per_layer_input": WORDS,
        "hidden_size_per_layer_input": 8,
    },
    "jamba": {
        **_SIZES, **_HEADS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "falcon_h1": {**_SIZES, **_HEADS, **_STATES, "head_dim": 8, "mamba_d_ssm": 64, "mamba_chunk_size": 16},
}  # fmt: skip
# Layers whose weight is read past the layer, by the last two parts of their names.
READ: dict[str, set[str]] = {
    "mamba": {"mixer.x_proj", "mixer.dt_proj", "mixer.out_proj"},
    "gemma3n_text": {"altup.prediction_coefs", "altup.correction_coefs"},
    "jamba": {"mamba.dt_proj"},
    "falcon_h1": {"mamba.out_proj"},
}
READS = "whose weights the model's code reads directly"
CPU = torch.device("cpu")


@pytest.fixture(params=ARCHITECTURES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def directory(name: str, tmp_path: Path) -> Path:
    """A model of the architecture as it lies on a disk."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **ARCHITECTURES[name])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def job(directory: Path, **changes: Any) -> Config:
    return tiny_models.config(model__name=str(directory), **changes).changed({"model.weights": "pretrained"})


def built(config: Config) -> Any:
    """The adapted model of a job, as training builds it."""
    architecture = base.load_architecture(config.model)
    implementation, _ = backends.choose("auto", architecture, "cpu", config.training.precision)
    dtype = base.base_dtype(config.adapter, config.training)
    model = base.load_base(
        config.model, config.quantization, architecture, attention=implementation, dtype=dtype, device=CPU
    )
    whole = adapter.attach(model, config.adapter, config.model.name, seed=0)
    checkpointing.apply(model, config.memory, "cpu")
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    # In 8 bit those of whose linear layers some are left as they are.
    sampled(
        [
            *((name, "nf4") for name in ARCHITECTURES),
            *((name, "int8") for name in READ),
            ("rwkv", "none"),
            ("dbrx", "none"),
        ],
        ("bloom", "nf4"),
        ("falcon_h1", "nf4"),
        ("gemma3n_text", "nf4"),
        ("jamba", "int8"),
        ("mamba", "int8"),
        ("rwkv", "none"),
        ("dbrx", "none"),
    ),
    indirect=["name"],
)
def test_each_trains_in_each_kind_of_quantization(directory: Path, kind: str) -> None:
    """Every adapter gets a gradient that is a number, whether layers are checkpointed or not, and these are equal."""
    found = []
    for recomputed in ("all", "none"):
        config = job(directory, quantization__kind=kind, memory__checkpointing=recomputed)
        model = built(config)
        with autocast("bf16", CPU):
            causality.prove(model)
            model.train()
            ids = torch.arange(40).reshape(2, 20) % WORDS
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients = {part: weight.grad for part, weight in model.named_parameters() if "lora_B" in part}
        # Experts that no token went to have none.
        assert all(gradient is not None for part, gradient in gradients.items() if "expert" not in part)
        assert sum(float(gradient.norm()) for gradient in gradients.values() if gradient is not None) > 0
        found.append(gradients)
    for part, gradient in found[0].items():
        if gradient is not None:
            torch.testing.assert_close(gradient, found[1][part], rtol=0.05, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(ARCHITECTURES, "bloom", "rwkv", "mamba", "jamba"), indirect=True)
def test_each_has_a_forecast(directory: Path) -> None:
    config = job(directory)
    architecture = base.load_architecture(config.model)
    implementation = backends.planned("auto", architecture, "cpu", "bf16")
    batch = LargestBatch(rows=1, tokens=8, padded=False, trained_tokens=7)
    trace = tiny_models.trace(config, architecture, batch=batch, attention=implementation)
    assert {"base_weights", "adapter", "activations", "loss"} <= {block.category for block in trace.blocks}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(ARCHITECTURES, *READ, "bloom", "rwkv"), indirect=True)
def test_a_weight_that_the_code_reads_directly_is_not_quantized_and_has_no_adapter(name: str, directory: Path) -> None:
    model = built(job(directory))
    linear = {
        part.removeprefix("base_model.model."): module
        for part, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    read = {part for part in linear if ".".join(part.split(".")[-2:]) in READ.get(name, set())}
    assert linear_layers.read_directly(model.get_base_model()) == read
    section = tiny_models.config().adapter
    assert adapter.left_out(model.get_base_model(), section) == ({READS: len(read)} if read else {})
    assert adapter.left_out(model.get_base_model(), section.model_copy(update={"targets": ["q_proj"]})) == {}
    for part in read:
        assert type(linear[part]) is torch.nn.Linear
        assert linear[part].weight.dtype is torch.bfloat16
    named = {target for target in READ.get(name, set()) if target.endswith("_proj")}
    for target in named:
        config = job(directory, adapter__targets=[target.rpartition(".")[2]])
        with refusal(ConfigError, "outside the layer"):
            built(config)


_ROUTERS = {
    "llama4_text": {**_SIZES, **_HEADS, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4},
    "phimoe": {**_SIZES, **_HEADS, "num_local_experts": 4},
}


@pytest.mark.slow
# In DBRX it ends in the first layer, whose experts look up which tokens they have.
def test_the_search_for_such_weights_reaches_the_last_layer(subtests: pytest.Subtests) -> None:
    """On the meta device, where a plan and a run do it."""
    for known in sorted({*ARCHITECTURES, *_ROUTERS, *catalog.families()} - {"dbrx"}):
        with subtests.test(known=known):
            if known in catalog.families():
                config = next(found for name in catalog.names() if (found := catalog.config(name)).model_type == known)
                config.num_hidden_layers = min(config.num_hidden_layers, 8)  # more than any pattern of layers
            else:
                config = AutoConfig.for_model(known, **{**ARCHITECTURES, **_ROUTERS}[known])
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
            linear_layers._pass(model, linear, set(), 4)


# Dense models of a kind that can be a mixture, too.
_DENSE: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        **_STATES, "num_local_experts": 0, "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 48, "mamba_chunk_size": 16,
    },
    "doge": {},
}  # fmt: skip


@pytest.mark.long
def test_a_model_without_experts_has_no_balancing_loss(subtests: pytest.Subtests) -> None:
    for known in _DENSE:
        with subtests.test(known=known):
            config = AutoConfig.for_model(known, **{**_SIZES, **_HEADS, **_DENSE[known]})
            assert hasattr(config, "output_router_logits")
            planning.check_traceable(tiny_models.config(), config, CPU)


def test_packed_rows_are_refused_from_the_config_alone(subtests: pytest.Subtests) -> None:
    for known in ["bloom", "mpt", "rwkv", "mamba", "jamba", "falcon_h1"]:
        with subtests.test(known=known):
            config = AutoConfig.for_model(known, **ARCHITECTURES[known])
            for decide in (backends.choose, backends.planned):
                with refusal(MachineError, "`data.packing`", known, "data.packing"):
                    decide("auto", config, "cpu", "bf16", packed=True)


def test_a_convolution_over_a_few_tokens_is_seen_when_rows_are_packed() -> None:
    """What reaches over the seam between two rows by three tokens moves their logits too little for a coarse bound."""

    class Reaching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            packing.register()
            shape = {**_SIZES, **_HEADS}
            config = AutoConfig.for_model("llama", **shape)
            torch.manual_seed(0)
            self.inner = AutoModelForCausalLM.from_config(config, attn_implementation=packing.EACH)
            self.config, self.device = self.inner.config, CPU

        def forward(self, input_ids: torch.Tensor, **given: Any) -> Any:
            words = self.inner.get_input_embeddings()(input_ids)
            return self.inner(inputs_embeds=words + self.reach * words.roll(1, dims=1), **given)

    model = Reaching().eval()
    model.reach = 0.0
    packed_rows.prove(model)
    model.reach = 0.05
    with refusal(MachineError, "packed rows influence each other"):
        packed_rows.prove(model)


def test_the_padding_of_a_recurrent_model_changes_no_token_before_it() -> None:
    """Rows are padded on the right, and no mask is given: the state that padding changes is no row's."""
    config = AutoConfig.for_model("mamba", **ARCHITECTURES["mamba"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    rows = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
    batch = MicroBatches(MicroBatching(2), 3).micro_batch([{"input_ids": row, "labels": row} for row in rows])
    with torch.no_grad():
        together = model(input_ids=batch["input_ids"]).logits
        for number, row in enumerate(rows):
            alone = model(input_ids=torch.tensor([row])).logits[0]
            torch.testing.assert_close(together[number, : len(row)], alone)


# Of which a layer's sizes, the layers' place or the experts' number have other names than elsewhere, or without a layer
# that tells how long a KV cache is.
_UNLIKE: dict[str, dict[str, Any]] = {
    "gemma4": {}, "llama4": {}, "deepseek_v4": {}, "jamba": {},
    "kimi_linear": {
        "num_hidden_layers": 1, "layer_types": ["linear_attention"], "mlp_layer_types": ["sparse"],
        "linear_num_heads": 2, "linear_head_dim": 16,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("known", sampled(_UNLIKE, "gemma4", "kimi_linear"))
def test_a_model_unlike_others_is_planned_and_trained_and_answers(known: str, tmp_path: Path, quick: Any) -> None:
    import finetune

    config = every_architecture.config(known)
    for key, value in _UNLIKE[known].items():
        setattr(config, key, value)
    every_architecture.model(config).save_pretrained(tmp_path / "base")
    job = quick(
        f"model.name={tmp_path / 'base'}", "model.tokenizer=builtin:tiny-llama", "memory.check=refuse",
        "memory.checkpointing=all", "training.max_steps=1", "training.batch_size=2", "quantization.kind=nf4",
        "data.eval=none",
    )  # fmt: skip
    run = finetune.train(job).run
    assert json.loads(run.forecast_file.read_text())["fits"]
    assert len([line for line in run.metrics() if "loss" in line]) == 1
    assert isinstance(finetune.generate(run, "x", max_new_tokens=2), str)


def test_a_config_attribute_in_which_layers_differ_is_read_per_layer() -> None:
    """The kernel for packed rows has heads of up to 256; of Gemma 4's only those of the full layers are larger."""
    config = AutoConfig.for_model("gemma4_text", head_dim=256, global_head_dim=512)
    assert {*catalog.values(config, "head_dim")} == {256, 512}
    assert packing.variant("sdpa", config, varlen=True) == packing.EACH
    same = AutoConfig.for_model("gemma4_text", head_dim=256, global_head_dim=256)
    assert packing.variant("sdpa", same, varlen=True) == packing.VARLEN
    assert catalog.values(config, "no such value") == [None] * config.num_hidden_layers
    assert backends.shares_keys(config)


# -- refused -----------------------------------------------------------------------------------------------------------

_REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "jetmoe, checkpointed": (
        {**_SIZES, **_HEADS, "model_type": "jetmoe", "num_key_value_heads": 2, "kv_channels": 8,
         "num_local_experts": 4, "num_experts_per_tok": 2},
        {"memory.checkpointing": "all"},
        "`memory.checkpointing`: .*JetMoeForCausalLM does not support it; set it to `none`",
    ),
    "ctrl, of which no layer can be": (
        {"model_type": "ctrl", "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48},
        {"memory.checkpointing": "all"},
        "`memory.checkpointing`: .*CTRLLMHeadModel does not support it; set it to `none`",
    ),
    "jetmoe, sizes that depend on the data": (
        {**_SIZES, **_HEADS, "model_type": "jetmoe", "num_key_value_heads": 2, "kv_channels": 8,
         "num_local_experts": 4, "num_experts_per_tok": 2},
        {"memory.checkpointing": "none"},
        r"\(jetmoe\).*a training step fails while it is traced: .*`memory\.check: off` trains without a forecast",
    ),
    "an encoder and decoder": (
        {"model_type": "t5", "d_model": 32, "num_layers": 2, "num_heads": 4},
        {},
        "no causal language model of type `t5`",
    ),
    "a composite model without a language model of its own": (
        {"model_type": "qwen2_audio"},
        {"memory.check": "off"},
        "type `qwen2_audio`, which is for more than text, and its text model, of type `qwen2`, .* for text alone$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", _REFUSED)
def test_what_cannot_be_trained_is_refused_before_data_and_weights(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By `train` and by a plan; the files are not blamed, of which there is nothing but a config here."""
    import finetune
    from finetune.lifecycle import preparation

    values, changes, said = _REFUSED[case]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)  # torch's loggers hand nothing on
    (tmp_path / "config.json").write_text(json.dumps({**values, "vocab_size": 4096}))
    config = job(tmp_path, model__tokenizer="builtin:tiny-llama", output__dir=str(tmp_path / "run")).changed(changes)
    monkeypatch.setattr(preparation, "prepare", lambda *args: pytest.fail("data were prepared first"))
    with pytest.raises(FinetuneError, match=said) as refused:
        finetune.train(config)
    assert refused.value.exit_code == 2
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(planning, "_data", lambda *args: None)
    with pytest.raises(FinetuneError, match=said) as refused:
        planning.plan(config, "cpu")
    assert refused.value.exit_code == 2
    logger.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.name == logger.name]
    assert not logger.disabled


def test_no_more_tokens_are_tried_than_the_model_has_positions() -> None:
    architecture = AutoConfig.for_model("mpt", **{**ARCHITECTURES["mpt"], "max_seq_len": 8})
    planning.check_traceable(tiny_models.config(), architecture, CPU)


def test_a_step_that_fails_is_reported_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.mpt import modeling_mpt

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(modeling_mpt.MptBlock, "forward", broken)
    architecture = AutoConfig.for_model("mpt", **ARCHITECTURES["mpt"])
    config = tiny_models.config()
    with refusal(ForecastError, "no such kernel"):
        planning.check_traceable(config, architecture, CPU)
    planning.check_traceable(config.changed({"memory.check": "off"}), architecture, CPU)
    planning.check_traceable(config.changed({"memory.check": "warn"}), architecture, CPU)
    model = AutoModelForCausalLM.from_config(architecture)
    with refusal(ConfigError, "MptForCausalLM"):
        causality.prove(model)
