"""Whether only this user can write to a file: anything that others could have written is not trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_folder() -> Path:
    """This user's folder for what is kept between starts; it follows `HF_HOME` and `HF_DATASETS_CACHE`, which users of
    a cluster may share. Ask `not_private` before anything in it is used."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / f"finetune-{os.geteuid()}"


def not_private(path: Path) -> str | None:
    """Why others may have written what is at `path`, in words; None where only this user (and root) could.

    A link must be this user's, as must what it leads to. Folders above are not looked at: whoever may write there can
    put another folder in this one's place, but not one that belongs to this user.
    """
    try:
        found = [os.lstat(path), os.stat(path)]
    except OSError as error:
        return f"it cannot be looked at ({error.strerror})"
    if any(one.st_uid != os.geteuid() for one in found):
        return "it belongs to another user"
    if found[-1].st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may write to it (`chmod go-w {path}` ends that)"
    return None
