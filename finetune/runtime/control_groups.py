"""What the control groups of this process, those of its container or batch job, leave it of the host's memory."""

from __future__ import annotations

import math
from pathlib import Path


def left_bytes(process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that a container or a batch system still lets this process take; infinity without a limit.

    In control groups of version 2, every group above sets a limit too, and the page cache can be reclaimed
    (kernel documentation, admin-guide/cgroup-v2, `memory.max`, `memory.current`, `memory.stat`).
    """

    def left_by(group: Path) -> float:
        try:
            limit = int((group / "memory.max").read_text())
            taken = int((group / "memory.current").read_text())
            parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            return math.inf  # no limit: the word "max", or no such file
        return limit - taken + int(parts["inactive_file"])

    try:
        own = next(line[4:] for line in process.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        return math.inf
    group = root / own
    return min(left_by(folder) for folder in (group, *group.parents) if folder.is_relative_to(root))
