"""Commands that compare a bundle with its checkpoint's own weights do not take one that holds others."""

from __future__ import annotations

from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import BundleError


def refuse_quantized(bundle: Bundle, command: str) -> None:
    """Ends a command for bundles with quantised weights.

    Raises:
        BundleError: the bundle has some.
    """
    if bundle.manifest.quantized:
        raise BundleError(
            f"{bundle.path} has quantised weights, and {command} compares with the checkpoint's own. Its build "
            f"compared it with the dequantised PyTorch module: dflash-export inspect {bundle.path}"
        )
