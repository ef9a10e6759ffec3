"""Checks that only this user can write to a file: anything that others could have written is not trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_folder() -> Path:
    """This user's cache folder, below `HF_HOME` or `HF_DATASETS_CACHE`, which users of a cluster may share. Check it
    with `not_private` before using anything in it."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / f"finetune-{os.geteuid()}"


def not_private(path: Path) -> str | None:
    """The reason why other users could have written `path`; None if only this user (and root) could.

    A link and its target must both belong to this user. Parent folders are not checked: whoever can write there can
    replace this folder, but not by one that belongs to this user.
    """
    try:
        statuses = [os.lstat(path), os.stat(path)]
    except OSError as error:
        return f"it cannot be accessed ({error.strerror})"
    if any(one.st_uid != os.geteuid() for one in statuses):
        return "it belongs to another user"
    if statuses[-1].st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write to it (fix with `chmod go-w {path}`)"
    return None
