"""TensorRT's kernel timings, kept for each kind of GPU from build to build; a broken or foreign file is set aside."""

from __future__ import annotations

from pathlib import Path

from dflash_runtime.bundle import cache_root, sha256_of, write_atomically


class TimingCache:
    """The timings of one TensorRT on one kind of GPU.

    TensorRT itself checks that timings are of the very device, but takes a damaged file for an error of the build.
    So a file counts only if it is, byte for byte, what the last build left.

    Attributes:
        path: The file to load from and save to; None where nothing can be written.
        warning: What the user should know about the file that was found, if anything.
    """

    def __init__(self, backend: str, tensorrt_version: str, compute_capability: str) -> None:
        name = f"{backend}-{tensorrt_version}-sm{compute_capability.replace('.', '')}.cache"
        path = cache_root() / "built-engines" / "timing" / name
        self.path: Path | None = path
        self.warning: str | None = None
        self._seal = path.with_suffix(".sha256")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and self._sealed() != sha256_of(path):
                path.unlink()
                self.warning = f"The timing cache {path} is not what the last build left; it is made anew."
        except OSError as error:
            self.path, self.warning = None, f"Kernel timings are not kept: {error}"

    def keep(self) -> None:
        """Says that what the build saved is whole."""
        if self.path is not None and self.path.exists():
            write_atomically(self._seal, sha256_of(self.path))

    def _sealed(self) -> str | None:
        return self._seal.read_text(encoding="ascii").strip() if self._seal.exists() else None
