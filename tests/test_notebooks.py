"""Every notebook runs from top to bottom, shows what it promises, and is committed as it was executed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import sampled

nbformat = pytest.importorskip("nbformat", reason="needs the package nbformat")
pytest.importorskip("nbclient", reason="needs the package nbclient")

from execute import PATH, Kernel  # noqa: E402

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))

# Fewer and smaller steps, fewer rows, and of the forecasts along a row of levers the ends.
FEWER = {
    "choosing": {
        "range(12)": "range(6)",
        '"max_steps": 12': '"max_steps": 2',
        "(1e-3, 3e-3, 1e-2, 3e-2)": "(1e-3, 3e-3)",
    },
    "quickstart": {
        '"max_steps": 60': '"max_steps": 2',
        '"eval_every": 20': '"eval_every": 2',
        '"batch_size": 16': '"batch_size": 8',
        '"builtin:python_docs"': '[{"source": "builtin:python_docs", "weight": 0.02}]',
        '"max_length": 256}': '"max_length": 64, "eval_share": 0.05}, "kernels": {"fused": "off"}',
        '"output": {': '"memory": {"check": "off"}, "output": {',
        "max_new_tokens=48": "max_new_tokens=4",
    },
    "seeing": {"range(2000)": "range(48)", "range(200)": "range(12)", '"max_steps": 200': '"max_steps": 2'},
    "small_card": {"(512, 2048)": "(2048,)"},
    "sweep": {"[3e-4, 1e-3, 3e-3, 1e-2]": "[3e-4, 3e-3]", '"max_steps": 16': '"max_steps": 2'},
    "will_it_fit": {
        "    forecasts[lever] = ": "    if lever not in [*levers][::9]:\n        continue\n    forecasts[lever] = ",
        '"max_steps": 3': '"max_steps": 1',
    },
    "your_data": {'"max_steps": 12': '"max_steps": 4'},
}
# As conftest.py has it: short answers, and a garbage collector that leaves out what imports made.
HURRIED = """
import gc
from finetune.runtime import libraries
gc.collect()
with libraries.importing():
    from finetune import recipe
    from finetune.training import sample_answers
sample_answers.TOKENS = 2
"""

SHOWN = {
    "choosing": ["image/png", "attention alone"],
    "export_and_serve": ["agreement", "7 in words: seven", "llama-server"],
    "quickstart": ["image/png", "eval loss", "backward", "adapter: ", "agreement"],
    "resume_and_extend": ["image/png", "Step 6 is saved", "resuming from", "batch_size (8 → 16)", "schedule_changed"],
    "seeing": ["image/png", "exact_match", "tokens"],
    "small_card": ["fits", "2048 tokens", "no GPU here"],
    "sweep": ["from the best", "training.learning_rate", "difference.low", "rank=2,seed=1"],
    "where_memory_goes": ["image/png", "backward", "keeps growing", "no GPU here"],
    "will_it_fit": ["image/png", "base in 4 bit", "RTX 4090", "difference"],
    "your_data": ["set `data.columns: {instruction: question, output: answer}`", "data.train[14 to 21]", "image/png"],
}


def test_what_each_notebook_shows_is_stated() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(SHOWN)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_outputs_and_without_paths_of_a_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    cells = [cell for cell in nbformat.reads(text, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not PATH.search(text)
    assert [shown for shown in SHOWN[path.stem] if shown not in text] == []


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        yield kernel


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sampled(SHOWN, "quickstart"))
def test_a_notebook_runs_and_shows_what_it_promises(name: str, kernel: Kernel, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS[0].with_stem(name), as_version=4)
    for cell in notebook.cells:
        cell.pop("outputs", None)
        for before, after in FEWER.get(name, {}).items():
            cell.source = cell.source.replace(before, after)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(HURRIED))
    kernel.run(notebook, tmp_path)
    shown = nbformat.writes(notebook)
    assert [expected for expected in SHOWN[name] if expected not in shown] == []
