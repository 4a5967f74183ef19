"""Gives memory that is no longer used back to the system, so that one stage's peak is not the next one's floor.

Only glibc needs it: it keeps freed blocks of up to 32 MiB for later, and a build frees many of just that size.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

_M_MMAP_THRESHOLD = -3
_OWN_MAPPING_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Has every block of a megabyte or more mapped by itself from now on, so that freeing it returns it."""
    _call("mallopt", _M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)


def release_memory() -> None:
    """Collects cycles and returns free pages."""
    gc.collect()
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    if sys.platform == "linux":
        # Of this process: searching for the library would start another one, which for a moment counts twice.
        function: Any = getattr(ctypes.CDLL(None), name, None)
        if function is not None:  # another C library
            function(*arguments)
