"""Files that come with the package, which models, rows and configs name as `builtin:NAME`."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def file(name: str) -> Path:
    """A file or folder by its path in a checkout, such as `data/tiny-llama`; the wheel has it in the package."""
    installed = _PACKAGE / "_builtin"
    return (installed if installed.exists() else _PACKAGE.parent) / name


def configs() -> dict[str, Path]:
    """The files of `configs/` by name, such as `builtin:tiny_cpu`."""
    return {f"builtin:{path.stem}": path for path in sorted(file("configs").glob("*.yaml"))}
