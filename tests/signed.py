"""Checkpoints whose manifest agrees with whatever was made of them, as whoever forges one would leave it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.storage import checkpoint


def sign(folder: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Write sizes and hashes of the files as they are into a checkpoint's manifest, then `change` it, then its hash."""
    file = folder / checkpoint.MANIFEST
    manifest = json.loads(file.read_bytes())
    manifest.pop("sha256", None)
    for name, line in manifest["files"].items():
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            line.update(bytes=len(content), sha256=checkpoint._sha256(content))
    change(manifest)
    file.write_bytes(checkpoint._json({**manifest, "sha256": checkpoint._sha256(checkpoint._json(manifest))}))
