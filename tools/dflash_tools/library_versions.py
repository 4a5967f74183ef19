"""Asks shared libraries for their versions: `python -I library_versions.py libcuda.so.1 ...` prints JSON.

It runs as a process of its own, so that a library that crashes or hangs while it loads takes nothing with it.
It imports the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

# The function that states a library's version, and whether it returns it or writes it through a pointer.
VERSION_FUNCTIONS = {
    "libcuda": ("cuDriverGetVersion", True),
    "libcudart": ("cudaRuntimeGetVersion", True),
    "libnvinfer": ("getInferLibVersion", False),
}


def library_facts(name: str, load: Callable[[str], Any] = ctypes.CDLL) -> dict[str, str | int]:
    """Loads one library.

    Args:
        name: As the loader knows it, `libnvinfer.so.10`.
        load: Opens a library; raises OSError with the loader's words.

    Returns:
        `version`: the number the library states, 0 where it has no such function; or `error`: the loader's words.
    """
    try:
        library = load(name)
    except OSError as error:
        return {"error": str(error)}
    function, by_pointer = VERSION_FUNCTIONS.get(name.partition(".")[0], ("", False))
    if not function:
        return {"version": 0}
    try:
        ask = getattr(library, function)
    except AttributeError:
        return {"error": f"{name} has no function {function}"}
    if not by_pointer:
        return {"version": int(ask())}
    number = ctypes.c_int(0)
    status = ask(ctypes.byref(number))
    return {"version": number.value} if status == 0 else {"error": f"{function} of {name} failed with status {status}"}


if __name__ == "__main__":
    print(json.dumps({name: library_facts(name) for name in sys.argv[1:]}))
