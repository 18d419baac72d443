"""Which processes run, and who descends from whom: asks `ps`, which Linux and macOS have, or else /proc."""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    pid: int
    parent: int
    command: str


def processes() -> list[Process]:
    try:
        ps = ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="]
        lines = subprocess.run(ps, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    except FileNotFoundError:
        return [process for stat in Path("/proc").glob("[0-9]*/stat") if (process := from_proc(stat))]
    rows = ([*line.split(maxsplit=2), ""] for line in lines)
    return [Process(int(pid), int(parent), command) for pid, parent, command, *_ in rows]


def from_proc(stat: Path) -> Process | None:
    try:
        # "pid (name) state parent ...", and a name may contain blanks and brackets.
        parent = stat.read_text().rpartition(")")[2].split()[1]
        command = stat.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None  # it has ended meanwhile
    return Process(int(stat.parent.name), int(parent), command.strip())


def descendants(pid: int, generation: int) -> list[int]:
    """Return the pids of the children (1), grandchildren (2), ... of a process, lowest first."""
    found = {pid}
    everybody = processes()
    for _ in range(generation):
        found = {process.pid for process in everybody if process.parent in found}
    return sorted(found)
