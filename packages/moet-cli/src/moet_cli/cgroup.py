"""The memory limit of this process's control group, as containers set it (versions 1 and 2)."""

from pathlib import Path

__all__ = ["free_memory"]


def free_memory(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return the bytes this control group may still take, None where it has no limit.

    Cached files count as free: the kernel drops them before it ends a process.

    Args:
        root: where the control groups are mounted.
        own: this process's membership file.
    """
    try:
        memberships = own.read_text().splitlines()
    except OSError:
        return None
    for line in memberships:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            folders = [root / group.lstrip("/"), root]
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folders = [root / "memory" / group.lstrip("/"), root / "memory"]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for folder in folders:
            if (folder / names[0]).is_file():
                return _free(folder, *names)
    return None


def _free(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    text = (folder / limit).read_text().strip()
    if text == "max":
        return None
    used = int((folder / usage).read_text())
    for line in (folder / "memory.stat").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == cached:
            used -= int(value)
    return int(text) - used
