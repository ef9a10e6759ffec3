"""Architectures unlike Llama: state spaces, mixtures of their own kind, layers whose weight is read past the layer."""

from __future__ import annotations

import functools
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
from transformers.initialization import no_init_weights
from transformers.models.kimi_linear import modeling_kimi_linear

import finetune
from finetune.config import Config
from finetune.data.batching import LargestBatch, MicroBatching
from finetune.errors import ConfigError, FinetuneError, ForecastError, MachineError
from finetune.model import base
from finetune.model.adapters import adapter
from finetune.model.attention import backends, packing
from finetune.model.precision import autocast
from finetune.model.probes import causality, packed_rows
from finetune.model.recompute import checkpointing
from finetune.model.source import catalog
from finetune.model.structure import linear_layers
from finetune.recipe import inputs
from finetune.resolve import planning
from finetune.resolve.planner import check_traceable
from finetune.training.collator import StepCollator

ARCHITECTURES = ("bloom", "mpt", "rwkv", "mamba", "dbrx", "gemma3n_text", "jamba", "falcon_h1")
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
    every_architecture.model(every_architecture.config(name)).bfloat16().save_pretrained(tmp_path)
    return tmp_path


def job(directory: Path, **changes: Any) -> Config:
    return tiny_models.config(model__name=str(directory), **changes).changed({"model.weights": "pretrained"})


def built(config: Config) -> Any:
    """The adapted model of a job, as training builds it."""
    architecture = base.load_architecture(config.model)
    implementation, _ = backends.choose("auto", architecture, "cpu", config.training.precision)
    dtype = base.base_dtype(config.adapter, config.training.precision)
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
        ("falcon_h1", "nf4"),
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
            if not found:
                causality.prove(model)
            model.train()
            ids = torch.arange(40).reshape(2, 20)
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
@pytest.mark.parametrize("name", sampled(ARCHITECTURES, "mamba"), indirect=True)
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


@pytest.mark.long
# In DBRX it ends in the first layer, whose experts look up which tokens they have.
def test_the_search_for_such_weights_reaches_the_last_layer(subtests: pytest.Subtests) -> None:
    """On the meta device, where a plan and a run do it."""
    for known in sorted({*ARCHITECTURES, "llama4_text", "phimoe", *catalog.families()} - {"dbrx"}):
        with subtests.test(known=known):
            if known in catalog.families():
                config = next(found for name in catalog.names() if (found := catalog.config(name)).model_type == known)
                config.num_hidden_layers = min(config.num_hidden_layers, 6)  # the longest pattern of layers
            else:
                config = every_architecture.config(known)
            with torch.device("meta"), no_init_weights():
                model = AutoModelForCausalLM.from_config(config)
            linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
            linear_layers._pass(model, linear, set(), 4)


@pytest.mark.long
def test_a_model_without_experts_has_no_balancing_loss() -> None:
    dense = every_architecture.config("granitemoehybrid")
    dense.num_local_experts = 0
    for config in (dense, every_architecture.config("doge")):
        assert hasattr(config, "output_router_logits")
        check_traceable(tiny_models.config(), config, CPU)


def test_packed_rows_are_refused_from_the_config_alone(subtests: pytest.Subtests) -> None:
    for known in ["bloom", "mpt", "rwkv", "mamba", "jamba", "falcon_h1"]:
        with subtests.test(known=known):
            config = every_architecture.config(known)
            for decide in (backends.choose, backends.planned):
                with refusal(MachineError, "`data.packing`", known, "data.packing"):
                    decide("auto", config, "cpu", "bf16", packed=True)


def test_a_convolution_over_a_few_tokens_is_seen_when_rows_are_packed() -> None:
    """What reaches over the seam between two rows by three tokens moves their logits too little for a coarse bound."""

    class Reaching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            packing.register()
            config = every_architecture.config("llama")
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
    torch.manual_seed(0)
    model = every_architecture.model(every_architecture.config("mamba")).eval()
    rows = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
    batch = StepCollator(MicroBatching(2), 3).micro_batch([{"input_ids": row, "labels": row} for row in rows])
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
@pytest.mark.parametrize("known", sampled(_UNLIKE, "kimi_linear"))
def test_a_model_unlike_others_is_planned_and_trained_and_answers(
    known: str, tmp_path: Path, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kimi Linear's loop over the 64 tokens of a chunk would take most of the time.
    attend = modeling_kimi_linear.chunk_kimi_delta_attention
    monkeypatch.setattr(modeling_kimi_linear, "chunk_kimi_delta_attention", functools.partial(attend, chunk_size=8))
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
    "ctrl, of which no layer can be": (
        every_architecture.config("ctrl").to_dict(),
        {"memory.checkpointing": "all"},
        "`memory.checkpointing`: .*CTRLLMHeadModel does not support it; set it to `none`",
    ),
    "jetmoe, sizes that depend on the data": (
        every_architecture.config("jetmoe").to_dict(),
        {"memory.checkpointing": "none"},
        r"\(jetmoe\).*a training step fails while it is traced: .*`memory\.check: off` trains without a forecast",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", _REFUSED)
def test_what_cannot_be_trained_is_refused_before_data_and_weights(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By `train` and by a plan; the files are not blamed, of which there is nothing but a config here."""
    values, changes, said = _REFUSED[case]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)  # torch's loggers hand nothing on
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = job(tmp_path, model__tokenizer="builtin:tiny-llama", output__dir=str(tmp_path / "run")).changed(changes)
    monkeypatch.setattr(inputs, "prepare", lambda *args: pytest.fail("data were prepared first"))
    with pytest.raises(FinetuneError, match=said) as refused:
        finetune.train(config)
    assert refused.value.exit_code == 2
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("finetune.resolve.steps._at_hand", lambda *args: None)
    with pytest.raises(FinetuneError, match=said) as refused:
        planning.plan(config, "cpu")
    assert refused.value.exit_code == 2
    logger.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.name == logger.name]
    assert not logger.disabled


def test_no_more_tokens_are_tried_than_the_model_has_positions() -> None:
    architecture = every_architecture.config("mpt")
    architecture.max_seq_len = 8
    check_traceable(tiny_models.config(), architecture, CPU)


def test_a_failing_step_is_reported_before_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mpt import modeling_mpt

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(modeling_mpt.MptBlock, "forward", broken)
    architecture = every_architecture.config("mpt")
    config = tiny_models.config()
    with refusal(ForecastError, "no such kernel"):
        check_traceable(config, architecture, CPU)
    check_traceable(config.changed({"memory.check": "off"}), architecture, CPU)
    check_traceable(config.changed({"memory.check": "warn"}), architecture, CPU)
    model = every_architecture.model(architecture)
    with refusal(ConfigError, "MptForCausalLM"):
        causality.prove(model)
