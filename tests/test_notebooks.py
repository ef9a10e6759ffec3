"""Every notebook runs from top to bottom, and the quickstart shows what it promises."""

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert "quickstart" in [path.stem for path in NOTEBOOKS]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_loss_memory_answers_and_proof(path: Path, tmp_path: Path, monkeypatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(path.parent.parent))
    notebook = nbformat.read(path, as_version=4)
    setup = next(cell for cell in notebook.cells if cell.cell_type == "code")
    # The notebook looks for the checkout above its folder; here it runs in an empty one.
    setup.source = setup.source.replace("[Path.cwd(), *Path.cwd().parents]", f"[Path({str(path.parent.parent)!r})]")
    setup.source = setup.source.replace("runs/quickstart", str(tmp_path / "run"))
    # And with fewer and smaller steps and fewer held-out rows.
    setup.source = setup.source.replace("max_steps=60", "max_steps=10").replace(
        '"training.eval_every=20"',
        '"training.eval_every=5", "data.eval_share=0.002", "data.max_length=128", "training.batch_size=8"',
    )
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = nbformat.writes(notebook)
    for expected in ("image/png", "eval loss", "backward", "adapter: ", "agreement"):
        assert expected in shown, expected
