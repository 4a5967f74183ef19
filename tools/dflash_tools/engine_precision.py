"""What an engine of this host computes in, as a reference names it."""

from __future__ import annotations

from dflash_runtime.bundle import Bundle
from dflash_runtime.engine_record import HostEngineRecord
from dflash_tools.reference_record import INT8_PRODUCTS


def computes_in(bundle: Bundle, record: HostEngineRecord) -> str:
    """fp32, fp16, bf16, or `int8 products`, which is how engines treat weights held as integers unless asked not to."""
    weights = bundle.manifest.weights
    integers = any(weights[name].dtype != "F8_E4M3" for name in bundle.manifest.quantized)  # FP8 is widened when opened
    if integers and record.versions.get("activations") != "fp32":
        return INT8_PRODUCTS
    return record.execution_precision
