"""Peak resident memory, of this process at its end or of a process tree while it runs.

Resident memory counts pages of mapped files (`file`), which the kernel may drop and read again, and anonymous
pages, which it cannot. Both are reported, because a build that streams from mapped weights shows them as resident.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

SAMPLE_INTERVAL_S = 0.05


def own_peak_bytes() -> int:
    """Largest resident size this process has had so far, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def resident_bytes() -> int:
    """Resident size of this process now, mapped files included (Linux)."""
    sizes = _status_bytes(os.getpid())
    return sizes.get("RssAnon", 0) + sizes.get("RssFile", 0) + sizes.get("RssShmem", 0)


@dataclasses.dataclass
class TreePeak:
    """Largest sums seen over a process and its descendants; sampled, so shorter peaks can be missed."""

    resident_bytes: int = 0
    anonymous_bytes: int = 0
    samples: int = 0

    def sample(self, root_pid: int) -> None:
        """Takes one sample of the tree below `root_pid`; a process that has just ended counts as nothing."""
        resident = anonymous = 0
        for pid in _tree(root_pid):
            sizes = _status_bytes(pid)
            anonymous += sizes.get("RssAnon", 0)
            resident += sizes.get("RssAnon", 0) + sizes.get("RssFile", 0) + sizes.get("RssShmem", 0)
        self.resident_bytes = max(self.resident_bytes, resident)
        self.anonymous_bytes = max(self.anonymous_bytes, anonymous)
        self.samples += 1


def run_and_watch(argv: Sequence[str]) -> tuple[int, str, TreePeak]:
    """Runs a command to its end, sampling the memory of its process tree (Linux).

    Returns:
        Exit code, standard output, and peaks.
    """
    peak, ended = TreePeak(), threading.Event()
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

    def watch() -> None:
        while not ended.wait(SAMPLE_INTERVAL_S):
            peak.sample(process.pid)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        output, _ = process.communicate()
    finally:
        ended.set()
        watcher.join()
    return process.returncode, output, peak


def _tree(root_pid: int) -> list[int]:
    found = [root_pid]
    for pid in found:  # grows while it is walked
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(child) for child in _read(children).split()]
    return found


def _status_bytes(pid: int) -> dict[str, int]:
    sizes = {}
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        name, _, value = line.partition(":")
        if name.startswith("Rss"):
            sizes[name] = int(value.split()[0]) * 1024
    return sizes


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # the process ended between listing and reading
