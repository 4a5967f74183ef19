"""Every formula of a plan: bytes from sizes, and time from bytes and operations. Numbers in, numbers out.

Bytes of caches are exact, and so are those of weights, which are in `weight_bytes`. The rest predicts: the constants
below say on what ground.

The one published pair of speeds there is to compare with (TensorRT Edge-LLM 0.10.0, AGX Thor, Qwen3-8B in 4 bit,
blocks of 16) needs an acceptance length of 1.71; the formulas give 1.39. Times here lean to the hopeful side.
Letters: V vocabulary, H hidden, T cache capacity, S rows of a pass, b block size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from dflash_tools.device_table import Device
from dflash_tools.model_shape import DrafterShape, ModelShape
from dflash_tools.weight_bytes import (
    ITEM_BYTES,
    Storage,
    context_matrices,
    every_form,
    head_bytes,
    held_bytes,
    held_target_bytes,
    matrix_bytes,
    weight_parts,
)

PREFILL_CHUNK_TOKENS = 128
"""What a session takes unless told otherwise."""

ENGINE_BYTES_PER_LAYER = {"fused": 457_000, "primitive": 650_000}
"""Of a profile, weights as inputs, for target and drafter. TensorRT-RTX 1.7.1, Qwen2-7B's width, 2, 5, 6 and 28 layers,
without a GPU (`python -m dflash_tools.engine_memory`: 96.7 MB for all, the formula gives 96.6); primitive: 2 layers."""
CONTEXT_BYTES_PER_LAYER = 162_000
"""The same for a drafter's context."""
ENGINE_BYTES_PER_PROFILE = {"target": 1_690_000, "drafter": 2_080_000, "context": 411_000, "acceptance": 423_000,
                            "candidates": 805_000}  # fmt: skip
"""What a profile takes whatever the layers: head, embedding, choice of tokens."""
ORT_BYTES_PER_TARGET_LAYER = 5_000
ORT_BYTES_PER_DRAFTER_LAYER = 12_800
"""Graphs for ort-cpu without weights, drafter and context together: 151 kB for SmolLM2's 30 layers, 38 kB for 3."""
RUNTIME_BYTES = {True: 750_000_000, False: 450_000_000}
"""CUDA context, TensorRT, and on unified memory Python too. Assumed: TensorRT's own log of a load on a workstation
(github.com/NVIDIA/TensorRT/issues/2217) has 229 MiB for CUDA and 341 MiB for cuBLAS, host and device."""
SYSTEM_BYTES = {True: 1_000_000_000, False: 500_000_000}
"""Kept for the system. Unified: a Jetson without desktop idles at 0.7 to 1.0 GB (tegrastats); a desktop takes about
0.8 GB more. A card: driver and screen."""
WORKSPACE_BYTES = 32 << 20
"""What a builder is allowed for scratch of its kernels."""

ACHIEVED_BANDWIDTH = 0.8
"""Part of the peak that reading weights reaches. Assumed: published 4-bit decoding speeds of 7B and 8B models on Orin
and Thor come to 0.8 to 0.9 of their memory's bandwidth."""
ACHIEVED_COMPUTE = 0.6
"""Part of the tensor cores' peak that small matrix products reach. Assumed."""
KERNELS_PER_LAYER = 12
"""Two norms, q, k, v, rope, cache update, attention, o, gate and up, activation, down. Assumed."""
KERNELS_PER_PASS = 6
LAUNCH_S = {True: 3e-6, False: 2e-6}
"""Time between two kernels beyond their work, by unified memory or not; less in a CUDA graph. Assumed."""
HOST_TURN_S = {True: 100e-6, False: 40e-6}
"""Starting a pass from the host and reading its ids. Assumed."""


def capacity_tokens(max_context: int, block_sizes: Sequence[int], prefill_chunk: int = PREFILL_CHUNK_TOKENS) -> int:
    """Rows T a cache is allocated with: a call may begin at `max_context` and writes all its rows."""
    return max_context + max([*block_sizes, prefill_chunk])


def kv_bytes(shape: ModelShape, capacity: int, item_bytes: int) -> int:
    """A target's cache; windowed layers keep all rows, so that a rollback is a change of length alone."""
    return sum(layer.row_elements for layer in shape.kv_layers) * capacity * item_bytes


def drafter_kv_bytes(
    shape: ModelShape, max_context: int, block_sizes: Sequence[int], item_bytes: int, *,
    prefill_chunk: int | None = None, draft_window: int | None = None,
) -> int:
    """A drafter's cache, in which windowed layers keep rings.

    Args:
        shape: The drafter's body.
        max_context: Most rows of a request.
        block_sizes: Those that are built.
        item_bytes: Of a number.
        prefill_chunk: Most prompt tokens of a call, for a device, where it counts for the size of a ring; None for the
            CPU.
        draft_window: Window of layers that have none.
    """
    from dflash_engines.ring_sizes import ring_rows

    windows = [layer.window_tokens or draft_window for layer in shape.kv_layers]
    call_rows = None if prefill_chunk is None else max(prefill_chunk, *block_sizes)
    capacity = capacity_tokens(max_context, block_sizes, prefill_chunk or PREFILL_CHUNK_TOKENS)
    rows = ring_rows(windows, max(block_sizes), max_context, call_rows)
    sizes = zip(shape.kv_layers, rows, strict=True)
    return sum(layer.row_elements * (size or capacity) for layer, size in sizes) * item_bytes


def scratch_bytes(
    target: ModelShape, drafter: DrafterShape, storage: Storage, capacity: int, largest_block: int
) -> int:
    """Activations of the largest pass, one layer at a time, as without a fused attention kernel.

    Residual stream, queries, keys, values and both halves of the MLP in the graph's precision; attention scores and
    probabilities in fp32 and in the graph's precision; logits in fp32; taps; for quantised weights one dequantised
    matrix, since a kernel for many rows may write it out.
    """
    rows = max(largest_block, PREFILL_CHUNK_TOKENS)
    item = storage.item_bytes
    kv_width = 2 * target.num_kv_heads * target.head_dim
    widths = 3 * target.hidden_size + 2 * target.num_heads * target.head_dim + kv_width + 3 * target.intermediate_size
    scores = rows * target.num_heads * capacity * (4 + item)
    logits = 2 * largest_block * target.vocab_size * 4
    taps = rows * drafter.num_taps * target.hidden_size * item
    forms = ((matrix, storage.form(matrix, storage.matrices)) for matrix in target.matrices)
    quantised = [matrix.rows * matrix.columns for matrix, form in forms if form.kind not in ITEM_BYTES]
    dequantised = max(quantised, default=0) * item
    return rows * widths * item + scores + logits + taps + dequantised + WORKSPACE_BYTES


def engine_bytes(
    target: ModelShape, drafter: DrafterShape | None, block_sizes: Sequence[int], layouts: Sequence[int] = ()
) -> int:
    """Engines that take their weights as inputs.

    Args:
        target: Has a profile for plain steps, for prefill and for each block size.
        drafter: One for each block size; its context has as many as the target. None: there is none.
        block_sizes: Anchor included.
        layouts: Of the primitive form, where each profile comes once for every one; empty in the fused form.
    """
    blocks = 0 if drafter is None else len(block_sizes)
    fixed, per_layer = ENGINE_BYTES_PER_PROFILE, ENGINE_BYTES_PER_LAYER["primitive" if layouts else "fused"]
    total = (2 + blocks) * (fixed["target"] + per_layer * target.num_layers)
    if drafter is not None:
        total += blocks * (fixed["drafter"] + per_layer * drafter.body.num_layers)
        total += (2 + blocks) * (fixed["context"] + CONTEXT_BYTES_PER_LAYER * drafter.body.num_layers)
    return total * max(1, len(layouts)) + (1 + blocks) * (fixed["acceptance"] + fixed["candidates"])


def ort_engine_bytes(target: ModelShape, drafter: DrafterShape | None) -> int:
    """Lowered graphs of ort-cpu; weights lie apart."""
    other = 0 if drafter is None else drafter.body.num_layers * ORT_BYTES_PER_DRAFTER_LAYER
    return target.num_layers * ORT_BYTES_PER_TARGET_LAYER + other


def host_builder_bytes(
    target: ModelShape, drafter: DrafterShape, storage: Storage, drafter_storage: Storage, block_sizes: Sequence[int],
    layouts: Sequence[int] = (),
) -> int:
    """Peak of the process that builds the largest engine, which it holds several times where weights are in it."""
    from dflash_engines.builder_memory import builder_peak_bytes

    blocks, num_layouts = len(block_sizes), max(1, len(layouts))
    own = held_target_bytes(target, storage)
    once, again = held_bytes(target, drafter, storage, drafter_storage)
    return max(
        builder_peak_bytes(target.num_layers, (2 + blocks) * num_layouts, int4_weight_bytes=own),
        builder_peak_bytes(drafter.body.num_layers, blocks * num_layouts, int4_weight_bytes=once - own + again),
    )


def kernel_trial_bytes(target: ModelShape, storage: Storage, scratch: int) -> int:
    """What building takes of the device's memory: kernels are tried on the largest weight and scratch."""
    return scratch + max(
        weight_parts(dataclasses.replace(matrix, count=1), form, storage.item_bytes).stored
        for matrix, form in every_form(target, storage)
    )


def roofline_s(device: Device, moved_bytes: float, operations: float) -> float:
    """Time of kernels that move bytes and compute at once: the slower of the two (Williams et al., CACM 52(4), 2009).

    Weights in int8 or int4 alone are widened in the kernel, so all operations are at the fp16 rate.
    """
    memory = moved_bytes / (device.bandwidth_gb_per_s * 1e9 * ACHIEVED_BANDWIDTH)
    return max(memory, operations / (device.fp16_tflops * 1e12 * ACHIEVED_COMPUTE))


def overhead_s(device: Device, layers: int) -> float:
    """Launches of a pass and the host's turn."""
    kernels = KERNELS_PER_LAYER * layers + KERNELS_PER_PASS
    return kernels * LAUNCH_S[device.unified] + HOST_TURN_S[device.unified]


def head_s(device: Device, target: ModelShape, storage: Storage, rows: int) -> float:
    """The output head on `rows` rows; a tied one reads the embedding table."""
    elements = target.head_elements or target.embedding_elements
    return roofline_s(device, head_bytes(target, storage) + rows * target.vocab_size * 4, 2 * elements * rows)


def rows_read(depth_tokens: int, rows: int, window_tokens: int | None, layouts: Sequence[int]) -> int:
    """Rows of a cache that a call reads: the valid ones, of a window its own, in the primitive form a whole layout."""
    if layouts:
        return next((size for size in layouts if size >= depth_tokens + rows), layouts[-1])
    return min(depth_tokens, window_tokens or depth_tokens) + rows


def attention_s(
    device: Device, shape: ModelShape, item_bytes: int, rows: int, depth_tokens: int, layouts: Sequence[int] = ()
) -> float:
    """Attention of `rows` queries over a cache of `depth_tokens`, all layers; see `rows_read`."""
    total = 0.0
    for layer in shape.kv_layers:
        seen = rows_read(depth_tokens, rows, layer.window_tokens, layouts)
        operations = 4 * rows * seen * shape.num_heads * shape.head_dim
        total += roofline_s(device, seen * layer.row_elements * item_bytes, operations)
    return total


def body_s(
    device: Device, shape: ModelShape, storage: Storage, rows: int, depth_tokens: int, layouts: Sequence[int] = ()
) -> float:
    """All decoder layers of a pass of `rows` rows, launches included."""
    stored = sum(matrix_bytes(matrix, storage) for matrix in shape.matrices)
    linear = roofline_s(device, stored + shape.vector_elements * storage.item_bytes, 2 * shape.matrix_elements * rows)
    attention = attention_s(device, shape, storage.item_bytes, rows, depth_tokens, layouts)
    return linear + attention + overhead_s(device, shape.num_layers)


def verify_s(
    device: Device, target: ModelShape, storage: Storage, rows: int, depth_tokens: int, layouts: Sequence[int] = ()
) -> float:
    """One pass of the target with logits of every row; `rows` is 1 for a plain step, b for a block."""
    return body_s(device, target, storage, rows, depth_tokens, layouts) + head_s(device, target, storage, rows)


def draft_s(
    device: Device, target: ModelShape, drafter: DrafterShape, storage: Storage, drafter_storage: Storage,
    block_size: int, depth_tokens: int, layouts: Sequence[int] = (),
) -> float:
    """One pass of the drafter: all b rows through its layers, b - 1 through the target's head."""
    body = body_s(device, drafter.body, drafter_storage, block_size, depth_tokens, layouts)
    return body + head_s(device, target, storage, block_size - 1)


def append_s(device: Device, drafter: DrafterShape, storage: Storage, rows: int) -> float:
    """Tap rows into the drafter's context: the fusing matrix, then keys and values of every layer."""
    body, read = drafter.body, [drafter.fuse, *context_matrices(drafter)]
    stored = sum(matrix_bytes(matrix, storage) for matrix in read)
    linear = roofline_s(device, stored, 2 * sum(matrix.elements for matrix in read) * rows)
    # A layer here is two products, a norm, a rotation and two writes: half of a decoder layer's kernels.
    return linear + overhead_s(device, math.ceil(body.num_layers / 2))


def needed_acceptance_length(cycle_s: float, plain_s: float) -> float:
    """Tokens a cycle must commit on average, the target's own included, to be as fast as plain decoding.

    A cycle commits the acceptance length, a plain step one token: equal speed is cycle / length = plain.
    """
    return cycle_s / plain_s
