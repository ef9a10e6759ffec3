"""Every config in configs/ works: it parses, its architecture builds, its adapter has the size worked out by hand."""

from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from finetune.choices import load_config
from finetune.model.adapters.adapter import lora_config
from finetune.model.base import load_architecture
from finetune.model.source import catalog

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))

# Rank 16 on every linear layer but the head: 16 x (inputs + outputs), summed over the layers of each model's card.
TRAINED_PARAMETERS = {
    "gemma2_9b_qlora": 54_018_048,
    "gpt_oss_20b_mxfp4": 52_199_424,  # rank 4 on each of 32 experts
    "llama2_13b_qlora": 62_586_880,
    "llama3_8b_131k": 83_886_080,  # rank 32
    "llama3_8b_q4_k_m": 41_943_040,
    "llama3_8b_qlora": 41_943_040,
    "llama70b_qlora": 207_093_760,
    "llama7b_dpo": 39_976_960,
    "llama7b_kto": 39_976_960,
    "llama7b_lora_16bit": 39_976_960,
    "llama7b_qlora": 39_976_960,
    "mistral7b_qlora": 41_943_040,
    "phi4_qlora": 55_705_600,
    "qwen3_5_9b_qlora": 43_278_336,
    "qwen3_8b_qlora": 43_646_976,
    "tiny_cpu": 217_088,
    "tiny_dpo": 217_088,
    "tiny_kto": 217_088,
}


def test_every_config_has_a_stated_size() -> None:
    assert [path.stem for path in CONFIGS] == sorted(TRAINED_PARAMETERS)
    assert len(CONFIGS) == 18


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")  # they are parameters, not modules
def test_config_builds_its_architecture_and_adapter(subtests: pytest.Subtests) -> None:
    for path in CONFIGS:
        with subtests.test(path=path):
            config = load_config(path)
            overrides = ["model.weights=random"] if catalog.find(config.model.name) else []
            config = load_config(path, overrides)
            architecture = load_architecture(config.model)
            tried = 4 if path.stem.startswith("qwen3_5") else 1  # in which one in four differs
            layers, architecture.num_hidden_layers = architecture.num_hidden_layers, tried
            with torch.device("meta"):
                base = AutoModelForCausalLM.from_config(architecture)
                model = get_peft_model(base, lora_config(base, config.adapter))
            trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
            assert trained * layers == tried * TRAINED_PARAMETERS[path.stem]


def test_config_states_its_batch_and_saves(subtests: pytest.Subtests) -> None:
    for path in CONFIGS:
        with subtests.test(path=path):
            config = load_config(path)
            assert config.training.micro_batch == "auto" or config.training.batch_size % config.training.rows == 0
            assert config.data.max_length <= load_architecture_length(config.model)


def load_architecture_length(section) -> int:
    entry = catalog.find(section.name)
    return entry.facts["max_position_embeddings"] if entry else 1024
