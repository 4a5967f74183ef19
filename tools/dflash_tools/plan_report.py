"""A plan told to a person, and as one JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from dflash_tools.model_shape import ModelShape
from dflash_tools.plan_proposals import Proposal
from dflash_tools.resource_plan import MemoryItem, Plan, builder_bytes
from dflash_tools.sizes import bytes_text, count_text

PREDICTION = "prediction from bandwidth and compute, not measured; real cycles tend to cost more"
_LABEL = 30


def plan_lines(plan: Plan, proposals: list[Proposal]) -> Iterator[str]:
    """The plan in about thirty lines."""
    device, options = plan.place.device, plan.options
    target, drafter = plan.pair.target, plan.pair.drafter
    yield f"target   {target.name}, {target.family}, {count_text(target.num_parameters)} parameters"
    kind = ", assumed" if drafter.assumed else ""
    own = f"{count_text(drafter.num_parameters)} parameters of its own, embedding and head are the target's"
    yield f"drafter  {drafter.body.name}{kind}, {own}"
    yield (
        f"device   {device.label}: {bytes_text(plan.place.available_bytes)} by {plan.place.available_from}, "
        f"{device.bandwidth_gb_per_s:g} GB/s, {device.fp16_tflops:g} TFLOPS fp16, SM {device.sm}"
    )
    yield (
        f"stored   {_stored(plan)}; "
        f"context {options.max_context_tokens} tokens, block sizes {', '.join(map(str, options.block_sizes))}"
    )
    if options.form == "primitive":
        layouts = ", ".join(map(str, options.layouts))
        yield f"engines  in primitive operators for TensorRT {options.tensorrt}; a call reads {layouts} rows of cache"
    for note in plan.pair.notes:
        yield f"note     {note}"
    yield "\nmemory while running"
    yield from _item_lines(plan.run_items, plan.run_bytes)
    yield "\nmemory while building engines on the device"
    yield from _item_lines(plan.build_items, plan.build_bytes)
    if not device.unified:
        yield f"  and {bytes_text(builder_bytes(plan.pair, options))} of the machine's own memory, predicted"
    if "int4" in plan.kinds:
        yield "  engines hold int4 weights, and are built by TensorRT 10.15 (JetPack 7.2), TensorRT-RTX, or later"
    yield f"\n{verdict(plan)}"
    for proposal in proposals:
        yield f"  fits with {proposal.what}: {bytes_text(proposal.needed_bytes)} of " + (
            f"{bytes_text(proposal.available_bytes)} ({proposal.arguments})"
        )
    if not (plan.fits or proposals or plan.obstacles):
        yield "  nothing in the device table holds this pair, in no precision"
    yield from _time_lines(plan)


def verdict(plan: Plan) -> str:
    """Fits or not, with both numbers."""
    needed, available = plan.needed_bytes, plan.place.available_bytes
    if plan.obstacles:
        return "CANNOT BE BUILT: " + "; ".join(plan.obstacles)
    numbers = f"needs {bytes_text(needed)}, {plan.place.device.label} has {bytes_text(available)}"
    if plan.fits:
        return f"FITS: {numbers}; {bytes_text(available - needed)} to spare"
    return f"DOES NOT FIT: {numbers}; {bytes_text(needed - available)} too much"


def _stored(plan: Plan) -> str:
    """How the weights are stored, in the words of the options, or as the checkpoints bring them."""
    options, target, body = plan.options, plan.pair.target, plan.pair.drafter.body
    group = f" in groups of {options.group_size}{'' if options.symmetric else ' with zero points'}"

    def asked(kind: str) -> str:
        return kind + group if kind == "int4" else kind

    def said(shape: ModelShape, kind: str) -> str:
        own = ", ".join(shape.quantised_as)
        return f"{own} as {shape.name} brings it" if own else asked(kind)

    head = "" if target.head_form is not None else f", head {asked(options.storage.tables)}"
    return f"{said(target, options.precision)}{head}, drafter {said(body, options.drafter_storage.matrices)}"


def plan_facts(plan: Plan, proposals: list[Proposal]) -> dict[str, Any]:
    """The plan as JSON data."""
    target, drafter = plan.pair.target, plan.pair.drafter
    return {
        "target": {**_shape_facts(target), "num_parameters": target.num_parameters},
        "drafter": {
            **_shape_facts(drafter.body),
            "num_parameters": drafter.num_parameters,
            "block_size": drafter.block_size,
            "num_taps": drafter.num_taps,
            "assumed": drafter.assumed,
        },
        "device": dataclasses.asdict(plan.place.device),
        "options": dataclasses.asdict(plan.options),
        "memory": {
            "run": [dataclasses.asdict(item) for item in plan.run_items],
            "run_bytes": plan.run_bytes,
            "build": [dataclasses.asdict(item) for item in plan.build_items],
            "build_bytes": plan.build_bytes,
            "available_bytes": plan.place.available_bytes,
            "available_from": plan.place.available_from,
        },
        "fits": plan.fits,
        "obstacles": list(plan.obstacles),
        "stored": _stored(plan),
        "times": {
            "basis": PREDICTION,
            "context_depth_tokens": plan.context_depth_tokens,
            "plain_step_ms": plan.plain_ms,
            "blocks": [{**dataclasses.asdict(block), "can_pay_off": block.can_pay_off} for block in plan.blocks],
        },
        "proposals": [dataclasses.asdict(proposal) for proposal in proposals],
        "notes": list(plan.pair.notes),
    }


def _shape_facts(shape: ModelShape) -> dict[str, object]:
    return {"name": shape.name, "family": shape.family, "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size}  # fmt: skip


def _item_lines(items: tuple[MemoryItem, ...], total: int) -> Iterator[str]:
    for item in items:
        yield f"  {item.name:<{_LABEL}}{bytes_text(item.size_bytes):>9}  {item.basis}"
    yield f"  {'sum':<{_LABEL}}{bytes_text(total):>9}"


def _time_lines(plan: Plan) -> Iterator[str]:
    yield f"\ntime at {plan.context_depth_tokens} tokens of context ({PREDICTION})"
    yield f"  plain step {plan.plain_ms:.1f} ms: {1000 / plan.plain_ms:.1f} tokens/s"
    yield "  block   draft  verify  append   cycle ms   acceptance length needed to pay off"
    for block in plan.blocks:
        needed = f"{block.needed_acceptance_length:.2f} of {block.block_size}"
        needed += "" if block.can_pay_off else ": cannot pay off"
        times = f"{block.draft_ms:>8.1f}{block.verify_ms:>8.1f}{block.append_ms:>8.1f}{block.cycle_ms:>11.1f}"
        yield f"  {block.block_size:>5}{times}   {needed}"
