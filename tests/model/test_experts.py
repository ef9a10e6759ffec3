"""Mixtures of experts: what is held in 4 bit, what gets an adapter, and whole runs of several architectures."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every_architecture
import pytest
import torch
from bases import loaded
from jobs import logits, sampled, save_base
from messages import refusal
from steps import ready
from transformers import AutoModelForCausalLM, MixtralPreTrainedModel

import finetune
from finetune.config import AdapterSection, MemorySection, ModelSection, QuantizationSection
from finetune.errors import ConfigError
from finetune.extras.doctor import run_check as run_directory
from finetune.model.adapters.adapter import attach
from finetune.model.adapters.expert_adapter import ParamWrapper
from finetune.model.attention import backends
from finetune.model.base import load_architecture
from finetune.model.build import Blueprint
from finetune.model.recompute import checkpointing
from finetune.model.structure import experts
from finetune.report import words
from finetune.storage.rundir import RunDirectory

CPU = torch.device("cpu")
IDS = torch.arange(3, 35)[None]
EXPERTS = 4
Bases = Callable[[str], Path]
ARCHITECTURES = ("mixtral", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "deepseek_v3")


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Callable[[str], Path]:
    """A function from an architecture's name to a directory with such a model and the built-in base's tokenizer."""
    root = tmp_path_factory.mktemp("mixtures")

    def make(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(every_architecture.config(name), dtype=torch.bfloat16)
            save_base(model, folder, tiny_base)
        return folder

    return make


def load(folder: Path, kind: str = "nf4", weights: str = "pretrained") -> Any:
    return loaded(kind, folder, weights=weights, attention="eager", dtype=torch.bfloat16)


def whole(model: Any) -> Any:
    """`model` with its experts dequantized once and for all, as a reference."""
    experts.dequantize(model, torch.bfloat16)
    return model


# -- experts in 4 bit --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "weights"),
    sampled(
        [*((name, "pretrained") for name in ARCHITECTURES), ("mixtral", "random"), ("gpt_oss", "random")],
        ("mixtral", "pretrained"),
        ("gpt_oss", "pretrained"),
        ("deepseek_v3", "pretrained"),
        ("gpt_oss", "random"),
    ),
)
def test_experts_take_four_bits_and_compute_what_dequantized_ones_do(name: str, weights: str, base_of: Bases) -> None:
    folder = base_of(name)
    model = load(folder, weights=weights)
    held = {path: getattr(module, part) for path, module, part in experts.weights(model)}
    assert len(held) == (2 if name == "deepseek_v3" else 4)
    for parameter in held.values():
        assert parameter.dtype is torch.uint8
        assert parameter.quant_state.shape[0] == EXPERTS
        assert 2 * parameter.numel() == parameter.quant_state.shape.numel()
    found = logits(model)
    assert torch.equal(found, logits(whole(model)))
    if weights == "pretrained":
        plain = dict(load(folder, "none").named_parameters())
        for path, module, part in experts.weights(model):
            # 4-bit NormalFloat is off by some 9% of a normal variable's standard deviation (arXiv 2305.14314).
            error = getattr(module, part) - plain[path]
            assert error.flatten(1).norm(dim=1).max() < 0.12 * plain[path].flatten(1).norm(dim=1).min()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_routers_are_not_quantized(kind: str, base_of: Bases) -> None:
    """Qwen2's gate of the shared expert is a linear layer, which transformers' own loading would quantize."""
    for name in ("qwen2_moe", "gpt_oss"):
        for weights in ("pretrained", "random"):
            routers = experts.routers(load(base_of(name), kind, weights))
            assert len(routers) == (4 if name == "qwen2_moe" else 2)
            assert {module.weight.dtype for module in routers.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("layers", "kind"),
    [("all", "nf4"), ("none", "nf4"), ("every-2", "nf4"), ("all", "nvfp4"), ("none", "mxfp4"), ("none", "fp8")],
)
def test_gradients_through_packed_experts_are_those_of_dequantized_ones(layers: str, kind: str, base_of: Bases) -> None:
    def gradients(model: Any, chosen: str) -> list[torch.Tensor]:
        adapted = attach(model, AdapterSection(rank=4), "", seed=1)
        checkpointing.apply(model, MemorySection(checkpointing=chosen), "cpu")
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.train()
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        assert all(experts.is_packed(getattr(module, part)) for _, module, part in experts.weights(model)) != (
            model is reference
        )
        return [parameter.grad for parameter in adapted.parameters() if parameter.requires_grad]

    reference = whole(load(base_of("mixtral"), kind))
    expected = gradients(reference, "none")
    found = gradients(load(base_of("mixtral"), kind), layers)
    assert sum(gradient.abs().sum() for gradient in expected) > 0
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_copy_of_a_base_has_hooks_of_its_own_which_checkpointing_sets(base_of: Bases) -> None:
    base = load(base_of("mixtral"))
    copied = copy.deepcopy(base)
    assert experts.are_4_bit(copied)
    checkpointing.apply(copied, MemorySection(checkpointing="all"), "cpu")

    def saved_by_others(model: Any) -> int:
        """The tensors that hooks around those of the experts get to save."""
        saved: list[torch.Tensor] = []
        [_, module, _], *_ = experts.weights(model)
        states = torch.ones(2, 32, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda one: one):
            module(states, torch.zeros(2, 2, dtype=torch.long), torch.ones(2, 2, dtype=torch.bfloat16))
        return len(saved)

    assert saved_by_others(base) == 0
    assert saved_by_others(copied) > 0


@pytest.mark.parametrize("layers", ["all", "none"])
def test_no_dequantized_expert_outlives_the_forward_pass(layers: str, base_of: Bases) -> None:
    model = load(base_of("mixtral"))
    checkpointing.apply(model, MemorySection(checkpointing=layers), "cpu")
    made: list[Any] = []

    def remember(module: Any, *_: Any) -> None:
        made.extend(torch.multiprocessing.reductions.StorageWeakRef(one.untyped_storage()) for one in seen(module))

    def seen(module: Any) -> list[torch.Tensor]:
        return [parameter for parameter in module._parameters.values() if parameter.dtype is torch.bfloat16]

    for module in {module for _, module, _ in experts.weights(model)}:
        module.register_forward_pre_hook(remember)  # after those that dequantize
    model.train()
    model.enable_input_require_grads()
    loss = model(input_ids=IDS, labels=IDS).loss
    assert len(made) == 4
    assert all(reference.expired() for reference in made)
    loss.backward()


def test_a_forward_pass_that_fails_leaves_the_experts_packed(base_of: Bases) -> None:
    model = load(base_of("mixtral"))
    before = logits(model)
    [_, module, _], *_ = experts.weights(model)
    with pytest.raises(RuntimeError):
        module(torch.zeros(2, 7, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 2))
    assert all(experts.is_packed(getattr(one, part)) for _, one, part in experts.weights(model))
    assert torch.equal(logits(model), before)


# -- their low-rank terms ----------------------------------------------------------------------------------------------


def in_float32(folder: Path, section: AdapterSection, implementation: str) -> Any:
    """The model with an adapter whose B is not zero."""
    model = load(folder, "none").float()
    model.set_experts_implementation(implementation)
    peft = attach(model, section, "", seed=1)
    torch.manual_seed(2)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return peft.train()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
def test_losses_and_gradients_are_those_of_peft(name: str, implementation: str, base_of: Bases) -> None:
    """In float32, with a rank that is no multiple of 16 bytes; PEFT adds BA to the weights."""

    def loss_and_gradients(model: Any) -> dict[str, torch.Tensor]:
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return {"loss": loss.detach()} | {
            name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad
        }

    section = AdapterSection(rank=4, expert_rank=3, targets=["q_proj", "experts.gate_up_proj", "experts.down_proj"])
    model = in_float32(base_of(name), section, implementation)
    found = loss_and_gradients(model)
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            module.__class__ = ParamWrapper.__base__
    expected = loss_and_gradients(model)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= 1e-5 * value.abs().max(), key


# -- what is said of them ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen2_moe"])
def test_the_described_mixture_is_the_one_that_is_loaded(name: str, base_of: Bases) -> None:
    section = ModelSection(name=str(base_of(name)))
    loaded = {kind: load(base_of(name), kind) for kind in ("nf4", "int8", "none")}
    said = {}
    for kind, model in loaded.items():
        base = Blueprint(section, QuantizationSection(kind=kind), load_architecture(section), "eager", torch.bfloat16)
        mixture = base.check(AdapterSection(kind="none"))
        assert mixture is not None
        assert mixture.parameters == sum(weight.numel() for weight in loaded["none"].parameters())
        assert mixture.unquantized == sum(
            weight.numel() for weight in model.parameters() if weight.dtype in (torch.bfloat16, torch.float32)
        )
        said[kind] = words.mixture(mixture)
    assert said["nf4"].startswith("4 a layer in nf4; ")
    assert said["int8"].startswith("4 a layer unquantized (bitsandbytes has int8 for linear layers only")
    assert said["none"] == "4 a layer unquantized"


def test_experts_that_cannot_be_quantized_are_described_as_unquantized() -> None:
    """DBRX keeps all experts of a layer in matrices, one below the other."""
    config = every_architecture.config("dbrx")
    section = ModelSection(name="dbrx", weights="random")
    base = Blueprint(section, QuantizationSection(), config, "eager", torch.bfloat16)
    mixture = base.check(AdapterSection(kind="none"))
    assert mixture is not None
    assert words.mixture(mixture).startswith("all unquantized (bitsandbytes has nf4 for no experts kept as")


# -- adapters ----------------------------------------------------------------------------------------------------------


def adapted(model: Any, **section: Any) -> set[str]:
    """The modules with an adapter."""
    peft = attach(model, AdapterSection(rank=2, **section), "", seed=1)
    return {
        name.split(".lora_A")[0] for name, one in peft.named_parameters() if ".lora_A" in name and one.requires_grad
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mixtral", "nf4"),
        ("gpt_oss", "nf4"),
        ("granitemoe", "none"),
        ("deepseek_v3", "nf4"),
        ("qwen2_moe", "int8"),
    ],
)
def test_all_linear_takes_experts_and_linear_layers_but_head_and_routers(name: str, kind: str, base_of: Bases) -> None:
    model = load(base_of(name), kind)
    routers, head = experts.routers(model), model.get_output_embeddings()
    expected = {
        f"base_model.model.{path}"
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and path not in routers and module is not head
    }
    fused = {path.rpartition(".")[0] for path, _, _ in experts.weights(model)}
    of_experts = {f"base_model.model.{path}{end}" for path in fused for end in ("", ".base_layer")}
    assert adapted(model) == expected | of_experts
    assert adapted(load(base_of(name), kind), expert_rank=0) == expected
    names = {path.rpartition(".")[2] for path in expected}
    assert {"gate", "router", "shared_expert_gate"} & names == set()
    assert ("gate_proj" in names) == (name in ("deepseek_v3", "qwen2_moe")), "shared experts and dense layers"


def test_a_router_that_is_named_is_trained(base_of: Bases) -> None:
    assert all("mlp.gate" in name for name in adapted(load(base_of("mixtral")), targets=["gate.weight"]))
    gates = adapted(load(base_of("qwen2_moe")), targets=["shared_expert_gate"])
    assert len(gates) == 2


def test_the_candidates_name_experts_and_routers(base_of: Bases) -> None:
    with refusal(ConfigError, "experts.gate_up_proj", "experts.down_proj", "gate.weight"):
        attach(load(base_of("mixtral"), "none"), AdapterSection(targets=["gate_proj"]), "", seed=1)


# -- whole runs --------------------------------------------------------------------------------------------------------


def use(run: RunDirectory) -> dict[str, float]:
    """Generate, evaluate, merge and examine a run; the held-out losses."""
    assert isinstance(finetune.generate(run, "Say 3", max_new_tokens=2), str)
    losses = finetune.evaluate(run).losses
    assert losses["adapter"] < losses["base"]
    proof = finetune.merge(run)
    assert proof["median"]
    assert proof["error"] <= proof["bound"] < proof["effect"]
    found = run_directory.examine(run.path)
    assert [one for one in found.findings if one.status != "ok"] == []
    return losses


STEPS = ["training.max_steps=2", "training.learning_rate=0.01", "training.warmup=0"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["granitemoe", "gpt_oss", "deepseek_v3", "qwen2_moe"], "gpt_oss"))
def test_what_was_trained_generates_evaluates_merges_and_is_whole(
    name: str, base_of: Bases, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    # At 0.01 rounding sends half of GPT-OSS's tokens to another expert, and the proof refuses its merged model.
    run = finetune.train(quick(f"model.name={base_of(name)}", *STEPS, "training.learning_rate=0.009")).run
    assert "without routers; rank 8 for each expert" in " ".join(capsys.readouterr().out.split())
    said = json.loads((run.adapter / "adapter_config.json").read_text())
    assert said["rank_pattern"] == {"experts.gate_up_proj": 8, "experts.down_proj": 8}
    # Weights of linear layers where PEFT would mistake their names for those of experts.
    mistaken = {name for name in said["target_parameters"] if not name.startswith("experts.")}
    assert bool(mistaken) == (name == "deepseek_v3")
    use(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "targets"),
    sampled(
        [
            ("none", "[q_proj,experts.gate_up_proj,experts.down_proj]"),
            ("nf4", "[q_proj,gate.weight]"),
            _TOGETHER := ("nf4", "[q_proj,experts.gate_up_proj,experts.down_proj,gate.weight]"),
        ],
        _TOGETHER,
    ),
    ids=["experts", "router", "both"],
)
def test_adapters_on_experts_and_routers_load_too(kind: str, targets: str, base_of: Bases, quick: Any) -> None:
    job = [f"model.name={base_of('mixtral')}", f"quantization.kind={kind}", f"adapter.targets={targets}"]
    use(finetune.train(quick(*job, *STEPS)).run)


@pytest.mark.slow
def test_a_mixture_whose_routers_cannot_be_read_says_that_it_trains_without_its_balancing_loss(
    base_of: Bases, quick: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def balanced() -> bool:
        return ready(quick(f"model.name={base_of('mixtral')}", "data.eval=none")).step.model.config.output_router_logits

    assert balanced()
    assert "balancing" not in capsys.readouterr().out
    monkeypatch.setattr(MixtralPreTrainedModel, "_can_record_outputs", {})
    assert not balanced()
    assert "trains without its load-balancing loss" in " ".join(capsys.readouterr().out.split())


@pytest.mark.long
def test_a_mixture_resumes_where_it_stopped(base_of: Bases, quick: Any) -> None:
    job = [f"model.name={base_of('olmoe')}", "data.eval=none", *STEPS]
    finetune.train(quick(*job, "training.max_steps=1", "training.schedule=constant"))
    resumed = finetune.train(quick(*job, "training.schedule=constant")).run
    at_once = finetune.train(quick(*job, "training.schedule=constant", run="other")).run
    assert [event["event"] for event in resumed.events()].count("resumed") == 1
    one, other = ((run.adapter / "adapter_model.safetensors").read_bytes() for run in (resumed, at_once))
    assert one == other


@pytest.mark.slow
def test_a_run_from_before_ranks_of_experts_goes_on_without_them(base_of: Bases, quick: Any) -> None:
    job = [f"model.name={base_of('mixtral')}", "data.eval=none", *STEPS, "training.schedule=constant"]
    run = finetune.train(quick(*job, "training.max_steps=1", "adapter.expert_rank=0")).run
    for file in (run.config_file, *run.checkpoints.glob("*/manifest.json")):
        if file.suffix == ".yaml":  # as versions without the key wrote it
            file.write_text(file.read_text().replace("  expert_rank: 0\n", ""))
        else:
            manifest = json.loads(file.read_text())
            del manifest["made_with"]["config"]["adapter"]["expert_rank"], manifest["sha256"]
            content = json.dumps(manifest, sort_keys=True, indent=1).encode()
            file.write_text(json.dumps({**manifest, "sha256": hashlib.sha256(content).hexdigest()}))
    assert run.config().adapter.expert_rank == 0
    resumed = finetune.train(quick(*job)).run
    assert [event["event"] for event in resumed.events()].count("resumed") == 1
    assert "experts" not in str(json.loads((run.adapter / "adapter_config.json").read_text())["target_parameters"])


# -- what mixtures brought to light ------------------------------------------------------------------------------------


def test_a_model_without_sdpa_gets_plain_attention(base_of: Bases) -> None:
    architecture = load_architecture(ModelSection(name=str(base_of("gpt_oss"))))
    implementation, reason = backends.choose("auto", architecture, "cpu", "bf16")
    assert implementation == backends.planned("auto", architecture, "cpu", "bf16") == "eager"
    assert "no sdpa: this model has no SDPA in transformers" in reason


@pytest.mark.parametrize("stored", ["gate_up_proj", "gate_up_proj_q4_k"])
def test_experts_that_files_hold_together_are_whole_also_where_they_are_packed(stored: str) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert experts.is_whole(name, {f"model.layers.0.mlp.experts.{stored}"})
    assert not experts.is_whole(name, {"model.layers.0.mlp.experts.3.gate_proj.weight"})
