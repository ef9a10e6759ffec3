"""What is no sweep is refused before anything is trained, with what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import QUICK, TINY
from typer.testing import CliRunner

from finetune.cli import app

_RATES = "training.learning_rate=1e-3,3e-3"

# The arguments of a command, and what its message must say.
WRONG: list[tuple[list[str], str]] = [
    ([], "training.learning_rate=1e-4,2e-4,4e-4"),
    (["training.learning_rate=1e-3"], "a key with several values"),
    (["training.learning_rate=[1e-4,3e-4]"], "a key with several values"),
    (["training.learning_rat=1e-3,3e-3"], "learning_rate"),
    (["lr=1e-3,3e-3"], "write `training.learning_rate`"),
    (["training.learning_rate=1e-3,fast"], "expected 'auto' or a number"),
    (["training.learning_rate=1e-3,-1"], "greater than 0"),
    (["training.learning_rate=1e-3,1e-3"], "has a value twice"),
    (["training.learning_rate=1e-3,0.001"], "are the same job"),
    (["training.learning_rate=1e-3,"], "empty value"),
    ([_RATES, "training.learning_rate=1e-2"], "leave out `training.learning_rate=1e-2`"),
    ([_RATES, "training.learning_rate=1e-4,1e-2"], "given twice"),
    (["training.seed=1,2"], "sweep another key as well"),
    (["model.name=a,b"], "members are trained on one base"),
    (["quantization.kind=nf4,none"], "members are trained on one base"),
    ([_RATES, "quantization.kind=auto"], "the kind that `finetune plan` names"),
    (["training.micro_batch_tokens=512,1024"], "it changes no loss"),
    (["data.max_length=128,256"], "on the same rows"),
    (["training.max_steps=10,20"], "a run of the same length"),
    (["training.epochs=1,2"], "a run of the same length"),
    (["training.objective=supervised,dpo"], "what the loss means"),
    (["adapter.kind=lora,none"], "one frozen base"),
    (["memory.checkpointing=all,none"], "finetune fit"),
    (["kernels.fused=on,off"], "it changes no loss"),
    (["training.eval_every=1,2"], "it changes no loss; set one value"),
    (["training.deterministic=true,false"], "it changes no loss; set one value"),
    (["training.batch_size=2,4"], "set training.max_steps=null and training.epochs=1"),
    (["training.learning_rate=auto,3e-3"], "are the same job"),
    (["optimizer.kind=adamw_8bit,paged_adamw_8bit"], "are the same job"),
    (["output.dir=a,b"], "a run directory of its own"),
    (["output.way=adapter,rounded", "output.serve=q4_0"], "it decides how the base is held"),
    ([_RATES, "data.eval=none"], "set `auto` or a file"),
    ([_RATES, "training.objective=dpo"], "only sweeps of `supervised` are built"),
    ([_RATES, "adapter.kind=none", "quantization.kind=none"], "set `lora`"),
    (["adapter.init=default,pissa", "quantization.kind=none"], "changes the base"),
    (["adapter.rank=4,4096"], "more than the smaller side of each layer"),
    ([f"training.seed={','.join(map(str, range(200)))}", _RATES], "more than 256"),
    ([_RATES, "--html", "nowhere/sweep.html"], "nowhere is not a folder that can be written"),
    ([_RATES, "--html", "."], "give the name of a file in it"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(arguments)[:60] for arguments, _ in WRONG])
def test_it_is_refused_with_its_cure(arguments: list[str], said: str, tmp_path: Path) -> None:
    where = f"output.dir={tmp_path / 'sweep'}"
    places = [] if any(each.startswith("output.dir") for each in arguments) else [where]
    ended = CliRunner().invoke(app, ["sweep", str(TINY), *QUICK[2:-2], *places, *arguments])
    assert ended.exit_code == 2, ended.output
    assert said in ended.output.replace("\n", " ")
    assert "Traceback" not in ended.output
    assert not (tmp_path / "sweep").exists()
