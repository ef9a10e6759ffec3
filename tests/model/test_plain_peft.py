"""What is published is what PEFT reads without this program: every tensor, on the same layers, with the same logits."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import every_architecture
import pytest
import test_architectures
import test_experts
import torch
from messages import refusal
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from finetune.config import AdapterSection
from finetune.errors import ArtifactError, ConfigError
from finetune.model.adapters import adapter, adapter_files, peft_format, plain_peft

IDS = torch.arange(3, 23)[None]
# Mixtures with dense layers or shared experts, and those whose files have other names than the model that is trained.
_OTHERS = (
    "glm4_moe", "glm_moe_dsa", "ernie4_5_moe", "hunyuan_v1_moe", "qwen2_moe", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text", "llama", "qwen2", "mistral", "phi3", "gemma2", "gemma3_text", "gpt2",
)  # fmt: skip
ARCHITECTURES = {*_OTHERS, *test_experts.ARCHITECTURES, *test_architectures.ARCHITECTURES}
"""Every architecture that the tests build."""
MISTAKEN = {"deepseek_v3", "glm4_moe", "glm_moe_dsa", "ernie4_5_moe", "hunyuan_v1_moe", "qwen3_next"}


OFTEN = {"deepseek_v3", "hunyuan_v1_moe", "qwen3_next", "qwen3_5_moe_text", "gpt2", "mixtral"}
"""Those that are tried often; the others, and reading without this program in the process, in the long tests."""


def config_of(name: str) -> Any:
    config = every_architecture.config(name)
    if name == "hunyuan_v1_moe":
        config.num_experts, config.moe_topk = 4, 2
    return config


def base_of(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    return model.eval()


def trained(base: Any, section: AdapterSection) -> Any:
    """`base` with an adapter of ours that changes a lot."""
    model = adapter.attach(base, section, "base", seed=0).eval()
    with torch.no_grad():
        for weight in adapter_files.weights(model).values():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS, use_cache=False).logits


def read_by_peft(folder: Path) -> dict[str, Any]:
    """What is read of an adapter and its base: the adapter's tensors, and the logits."""
    read, tensors = {}, {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for way in ("peft", "transformers"):
            base = model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
            if way == "peft":
                model = PeftModel.from_pretrained(base, str(folder))
                tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
            else:
                base.load_adapter(str(folder))
            with torch.inference_mode():
                read[way] = model.eval()(input_ids=torch.arange(3, 23)[None], use_cache=False).logits
    stored = load_file(folder / "adapter_model.safetensors")
    different = [
        name
        for name in stored.keys() | tensors.keys()
        if name not in stored or name not in tensors or not torch.equal(stored[name], tensors[name])
    ]
    about = [str(each.message) for each in said if "adapter" in str(each.message) or "matched" in str(each.message)]
    save_file(read, folder / "read.safetensors")
    return {"tensors": len(tensors), "different": different, "said": about}


_READ = f"""
import json, sys, warnings
from pathlib import Path
from typing import Any
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

{inspect.getsource(read_by_peft)}

found = {{folder.name: read_by_peft(folder) for folder in map(Path, sys.argv[1:])}}
assert not [name for name in sys.modules if name.split(".")[0] == "finetune"]
print(json.dumps(found))
"""


def read_without_us(*folders: Path) -> dict[str, dict[str, Any]]:
    """What a process without this program reads in each folder."""
    done = subprocess.run(
        [sys.executable, "-c", _READ, *map(str, folders)], capture_output=True, text=True, check=True, timeout=300
    )
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # PEFT sets it for GPT-2's layers
@pytest.mark.parametrize("names", [OFTEN, pytest.param(ARCHITECTURES, marks=pytest.mark.long)], ids=len)
def test_peft_alone_reads_every_tensor_of_every_architecture(
    names: set[str], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    expected = {}
    for name in sorted(names):
        folder = tmp_path / name
        base = base_of(name)
        base.save_pretrained(folder / "base")
        model = trained(base, AdapterSection(rank=4, dropout=0.1))
        expected[name] = len(adapter_files.weights(model)), logits(model)
        write(model, folder)
        prove(name, folder, model)
    folders = [tmp_path / name for name in expected]
    found = {each.name: read_by_peft(each) for each in folders} if names == OFTEN else read_without_us(*folders)
    for name, (count, ours) in expected.items():
        with subtests.test(name=name):
            assert found[name] == {"tensors": count, "different": [], "said": []}
            for theirs in load_file(tmp_path / name / "read.safetensors").values():
                torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
            said = json.loads((tmp_path / name / "adapter_config.json").read_text())
            by_weight = {target for target in said["target_parameters"] or [] if not target.startswith("experts.")}
            assert bool(by_weight) == (name in MISTAKEN)
            assert said["lora_dropout"] == (0.0 if said["target_parameters"] else 0.1)


def write(model: Any, folder: Path) -> None:
    peft_format.write(adapter_files.weights(model), plain_peft.settings(model), folder)


def skeleton(name: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(name))


def prove(name: str, folder: Path, model: Any) -> None:
    peft_format.prove(skeleton(name), folder, adapter_files.weights(model), adapter_files.scales(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"extra_modules": ["embed_tokens", "norm", "lm_head"]}),
        ("qwen2", {"dora": True, "extra_modules": ["embed_tokens"], "rslora": True, "ranks": {"q_proj": 2}}),
        ("mixtral", {"targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}),
        ("qwen3_moe", {"targets": ["q_proj", "gate.weight"]}),
        ("deepseek_v3", {"targets": ["q_b_proj", "down_proj", "experts.gate_up_proj"]}),
        ("deepseek_v3", {"targets": [r".*layers[.]1[.].*(up_proj|o_proj)"], "rslora": True}),
        ("deepseek_v3", {"extra_modules": ["norm"], "ranks": {"o_proj": 2}}),
    ],
)  # fmt: skip
def test_every_kind_of_adapter_is_proven_and_one_tensor_that_is_lost_is_seen(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = trained(base_of(name), AdapterSection(rank=4, **changes))
    write(model, tmp_path)
    prove(name, tmp_path, model)
    file = tmp_path / adapter_files.WEIGHTS
    whole = load_file(file)
    for lost in sorted(whole)[:: len(whole) // 2]:
        for wrong in ({key: value for key, value in whole.items() if key != lost}, {**whole, lost: whole[lost] + 1}):
            save_file(wrong, file, {"format": "pt"})
            with refusal(ArtifactError, "adapter/ is not what was trained: PEFT"):
                prove(name, tmp_path, model)
    save_file(whole, file, {"format": "pt"})
    said = json.loads((tmp_path / adapter_files.CONFIG).read_text())
    (tmp_path / adapter_files.CONFIG).write_text(json.dumps({**said, "lora_alpha": 7}))
    with refusal(ArtifactError, "scales its layers otherwise"):
        prove(name, tmp_path, model)


def test_peft_puts_such_an_adapter_on_a_4_bit_base_too(tmp_path: Path) -> None:
    sizes = dict.fromkeys(("hidden_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "v_head_dim"), 64)
    heads = dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 32)
    values = config_of("deepseek_v3").to_dict() | sizes | heads | {"intermediate_size": 128}
    for derived in ("model_type", "head_dim", "qk_head_dim"):
        del values[derived]
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **values), dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    section = AdapterSection(rank=4, expert_rank=0)  # PEFT warns that a rank of its own matches no module
    write(trained(base, section), tmp_path)
    assert json.loads((tmp_path / adapter_files.CONFIG).read_text())["target_parameters"]

    def quantized() -> Any:
        kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=kind, dtype=torch.float32)

    ours = logits(adapter_files.load_adapter(quantized(), tmp_path, section))
    assert torch.equal(logits(PeftModel.from_pretrained(quantized(), str(tmp_path))), ours)
    assert not torch.allclose(logits(quantized()), ours, rtol=0.1)


def refuse(name: str, section: AdapterSection) -> None:
    peft_format.check(skeleton(name), lambda: skeleton(name), section)


def test_what_peft_cannot_read_is_refused_before_weights_are_loaded() -> None:
    for changes, said in (
        ({"dora": True}, r"`adapter\.dora`: PEFT takes `down_proj`, `gate_proj`, `up_proj` of deepseek_v3 for its"),
        ({"ranks": {"up_proj": 2}}, r"`adapter\.ranks`: .*cannot read another rank than `adapter\.rank` there"),
    ):
        with pytest.raises(ConfigError, match=said):
            refuse("deepseek_v3", AdapterSection(rank=4, expert_rank=0, **changes))
    refuse("deepseek_v3", AdapterSection(dora=True, targets=["o_proj"], extra_modules=["norm", "embed_tokens"]))
    refuse("deepseek_v3", AdapterSection(rank=4, ranks={"o_proj": 2, "up_proj": 4}))


def test_layers_whose_tensors_peft_would_rename_are_refused_before_weights_are_loaded() -> None:
    with refusal(ConfigError, "shared_experts", "down_proj"):
        refuse("laguna", AdapterSection())
    refuse("laguna", AdapterSection(targets=["q_proj"]))
