"""Gives memory that is no longer used back to the system, so that one stage's peak is not the next one's floor."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import sys


def release_memory() -> None:
    """Collects cycles, and has glibc hand its free pages back; other C libraries do so by themselves or not at all."""
    gc.collect()
    if sys.platform == "linux":
        library = ctypes.CDLL(ctypes.util.find_library("c") or None)
        trim = getattr(library, "malloc_trim", None)
        if trim is not None:
            trim(0)
