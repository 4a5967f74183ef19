"""Weights that stay in the checkpoint's own files: cloned where the file system can, else linked.

Graphs refer to a clone as to any other file. A linked file has several names, and onnx.checker, onnx.load and onnx_ir
refuse to follow a path to one; so weights in linked files are inputs of the graph files, and whoever opens a graph
takes them by name from the index in bundle.json.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dflash_export.tensor_files import ITEM_BYTES, TensorPlace
from dflash_runtime.errors import OutputError

AUTO, LINK, COPY, CLONE = "auto", "link", "copy", "clone"
WEIGHTS_COPY = (AUTO, LINK, COPY)
_FICLONE = 0x40049409
_ATTENTION = re.compile(r"^(.*)\b(q|k|v)_proj\.weight$")


def settle_weights(wanted: str, places: Mapping[str, TensorPlace], dtype: str, out: Path) -> tuple[str, str]:
    """Decides before any work how a checkpoint's weights come into the bundle.

    Args:
        wanted: `auto`, `link` or `copy`.
        places: The checkpoint's tensors.
        dtype: Dtype of the bundle's weights.
        out: Where the bundle shall lie.

    Returns:
        `clone`, `link` or `copy`, and why it is not what a user may expect, empty where it is.

    Raises:
        OutputError: links are asked for and cannot be made.
    """
    matching = [place for place in places.values() if refers(place, dtype)]
    if wanted == COPY:
        return COPY, ""
    if sum(p.length_bytes for p in matching) * 2 < sum(p.length_bytes for p in places.values()):
        return COPY, f"weights are converted to {dtype}, so they are copied" if wanted == LINK else ""
    if wanted == AUTO and dtype == "F32" and _attention_apart(places):
        return COPY, (
            "weights are copied: ort-cpu computes queries, keys and values as one product where they lie side by side, "
            "and this checkpoint stores them apart (--weights-copy link saves the room)"
        )
    file = matching[0].file.resolve()
    parent = out.absolute().parent
    while not parent.is_dir():
        parent = parent.parent
    with tempfile.TemporaryDirectory(dir=parent, prefix=".dflash-") as folder:
        if wanted == AUTO and clone_file(file, Path(folder) / "clone"):
            return CLONE, ""
        try:
            os.link(file, Path(folder) / "link")
        except OSError as error:
            if wanted == LINK:
                raise OutputError(
                    f"{file} cannot be linked into {parent}: {error.strerror}. Choose an --out on the disk of the "
                    "checkpoint, or --weights-copy copy."
                ) from error
            return COPY, ""
    return LINK, ""


def refers(place: TensorPlace, dtype: str) -> bool:
    """Whether a tensor can be used where it lies: a plain one of the wanted dtype, at a place its items allow."""
    return type(place) is TensorPlace and place.dtype == dtype and place.offset_bytes % ITEM_BYTES[dtype] == 0


def _attention_apart(places: Mapping[str, TensorPlace]) -> bool:
    """Whether there are query, key and value matrices that do not follow each other in a file."""
    layers: dict[str, dict[str, TensorPlace]] = {}
    for name, place in places.items():
        match = _ATTENTION.match(name)
        if match is not None:
            layers.setdefault(match[1], {})[match[2]] = place
    for parts in layers.values():
        order = [parts.get(letter) for letter in "qkv"]
        for one, two in itertools.pairwise(order):
            if one is None or two is None or one.file != two.file:
                return True
            if one.offset_bytes + one.length_bytes != two.offset_bytes:
                return True
    return False


def files_to_refer(places: Mapping[str, TensorPlace], dtypes: Mapping[str, str], stem: str) -> dict[Path, str]:
    """The checkpoint files of which the bundle uses at least half as they are.

    Args:
        places: Bundle name -> source tensor.
        dtypes: Bundle name -> dtype in the bundle.
        stem: `target` or `drafter`.

    Returns:
        Resolved file -> its name below the bundle.
    """
    used: dict[Path, int] = {}
    for name, place in places.items():
        if refers(place, dtypes[name]):
            file = place.file.resolve()
            used[file] = used.get(file, 0) + place.length_bytes
    files = sorted(file for file, size in used.items() if 2 * size >= file.stat().st_size)
    if len(files) == 1:
        return {files[0]: f"weights/{stem}.safetensors"}
    return {file: f"weights/{stem}-{i:05}-of-{len(files):05}.safetensors" for i, file in enumerate(files, 1)}


def bring_file(source: Path, copy: Path, mode: str) -> None:
    """Gives a checkpoint file a name in the bundle.

    Args:
        source: The file itself, not a link to it.
        copy: The new name; whatever has it is replaced.
        mode: `clone` or `link`.

    Raises:
        OutputError: it cannot be done, though it could when the build began.
    """
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.unlink(missing_ok=True)
    if mode == CLONE:
        if clone_file(source, copy):
            return
        raise OutputError(f"{source} cannot be cloned to {copy}. Build with --weights-copy copy.")
    try:
        os.link(source, copy)
    except OSError as error:
        raise OutputError(
            f"{source} cannot be linked to {copy}: {error.strerror}. Build with --weights-copy copy."
        ) from error


def clone_file(source: Path, copy: Path) -> bool:
    """Makes a copy that shares the blocks of its source (Btrfs, XFS, bcachefs; Linux).

    Returns:
        False where the file systems cannot; nothing is left then.
    """
    if sys.platform != "linux":
        return False
    import fcntl

    with source.open("rb") as one, copy.open("wb") as two:
        try:
            fcntl.ioctl(two.fileno(), _FICLONE, one.fileno())
        except OSError as error:
            copy.unlink()
            if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM):
                return False
            raise
    return True
