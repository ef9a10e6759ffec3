"""What is installed elsewhere is whole: the wheel builds and carries the built-in base."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert "finetune/_builtin/tiny-llama/model.safetensors" in names
    assert {"finetune/model/catalog.json", "finetune/model/templates/chatml.jinja"} <= names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)
    script = (
        "import finetune, sys; from finetune.model.locate import locate; "
        "assert finetune.__file__.startswith(sys.argv[1]); print(locate('builtin:tiny-llama'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "site")],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(tmp_path / "site" / "finetune" / "_builtin" / "tiny-llama")
