"""Keys that an objective does not have, or that a job of it cannot have."""

import pytest
from messages import refusal

from finetune.choices import load_config
from finetune.errors import ConfigError

OF_SEQUENCES = ["adapter.kind=none", "adapter.init=pissa", "distributed.kind=fsdp", "memory.loss_tokens=64",
                "preference.beta=0.1"]  # fmt: skip
REFUSED = {
    "classification": [*OF_SEQUENCES, "data.loss_on=last", "data.separator=x", "model.labels=[red, blue]"],
    "reward": [*OF_SEQUENCES, "model.labels=[good]"],
    "distillation": ["distributed.kind=deepspeed", "data.loss_on=last", "preference.beta=0.1"],
    "kto": ["preference.nll_weight=1", "data.loss_on=all"],
    "dpo": ["preference.desirable_weight=2", "model.labels=[good]"],
    "supervised": ["data.labels=[red, blue]", "data.teacher_tokens=8"],
}


@pytest.mark.parametrize("objective", REFUSED)
def test_what_an_objective_does_not_have_is_refused_by_its_key(objective: str) -> None:
    for key in REFUSED[objective]:
        with refusal(ConfigError, key.partition("=")[0]):
            load_config({}, [f"training.objective={objective}", key])
