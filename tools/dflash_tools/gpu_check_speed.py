"""Stages of a GPU check that are about time: memory bandwidth, Qwen2-7B's shape, PyTorch beside it.

Weights are random, so nothing is accepted: acceptance is scripted. The drafter drafts and the target verifies for
real, then as many tokens are committed as the script says. Sampling, text and the decode loop's bookkeeping are not in
these times.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_runtime.backend import Backend, Cycles
from dflash_tools.gpu_check_device import (
    RandomWeights,
    large_bundle,
    require_modules,
    require_ort_cuda,
    require_torch_cuda,
)

PROMPT_TOKENS = 512
PREFILL_CHUNK_TOKENS = 128
BLOCK_SIZES = (2, 3, 4, 6, 8, 12, 16)
ACCEPTED_TOKENS = (1, 2, 4, 8)
_WARM_UP, _TIMED = 3, 12


def bandwidth(data: dict[str, Any]) -> None:
    """Bytes a second of a copy and of a sum over 8 GB, beside the data sheet's."""
    torch = require_torch_cuda()
    from dflash_tools.device_table import DEVICES

    source = torch.empty(1 << 32, dtype=torch.float16, device="cuda").normal_()
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()

    def per_s(work: Callable[[], object], moved: int) -> float:
        return round(moved / _median_s(work, torch.cuda.synchronize) / 1e9, 1)

    data["bytes"] = size
    data["copy_gb_per_s"] = per_s(lambda: target.copy_(source), 2 * size)
    data["sum_gb_per_s"] = per_s(lambda: source.sum(dtype=torch.float32), size)
    name = str(torch.cuda.get_device_name(0))
    known = [device for device in DEVICES.values() if device.label.lower() in name.lower()]
    data["device"] = name
    data["data_sheet_gb_per_s"] = known[0].bandwidth_gb_per_s if known else None


def qwen2_7b(data: dict[str, Any]) -> None:
    """Plain steps, prefill and cycles of every block size, without CUDA graphs."""
    _time_large(data, cuda_graph=False, block_sizes=BLOCK_SIZES)


def qwen2_7b_cuda_graph(data: dict[str, Any]) -> None:
    """Plain steps and cycles with every session's work recorded as a CUDA graph."""
    _time_large(data, cuda_graph=True, block_sizes=(4, 8, 16))


def _time_large(data: dict[str, Any], *, cuda_graph: bool, block_sizes: tuple[int, ...]) -> None:
    require_ort_cuda()
    bundle = large_bundle()
    from dflash_runtime.cuda_device import open_on_gpu

    started = time.perf_counter()
    weights = RandomWeights()
    backend = open_on_gpu("ort-cuda", bundle, PREFILL_CHUNK_TOKENS, cuda_graphs=cuda_graph, weights=weights)
    data |= {
        "open_s": round(time.perf_counter() - started, 2), "weights": weights.made_by,
        "weight_bytes": weights.bytes_made, "precision": "fp16", "cuda_graph": cuda_graph,
        "prompt_tokens": PROMPT_TOKENS, "prefill_chunk_tokens": PREFILL_CHUNK_TOKENS, "timed_calls": _TIMED,
    }  # fmt: skip
    data["roofline"] = roofline()
    time_pair(data, backend, bundle.manifest.target.vocab_size, block_sizes)
    data["measured_over_predicted"] = over_prediction(data, data["roofline"])
    backend.close()


def time_pair(data: dict[str, Any], backend: Backend, vocab_size: int, block_sizes: Sequence[int],
              prompt_tokens: int = PROMPT_TOKENS) -> None:
    """Prefill, plain steps behind the prompt, then cycles for every block size and scripted acceptance."""
    ids, chunk = [(31 * n + 7) % vocab_size for n in range(prompt_tokens)], backend.prefill_chunk_tokens
    for _ in range(3):  # the first ones prepare, or are recorded where CUDA graphs are on
        started = time.perf_counter()
        for start in range(0, prompt_tokens, chunk):
            rows = len(ids[start : start + chunk])
            backend.prefill(ids[start : start + chunk], start)
            backend.append_context(rows, start)
        data["prefill_ms"] = round((time.perf_counter() - started) * 1000, 2)

    def step_with_append() -> None:
        backend.verify([1], prompt_tokens)
        backend.append_context(1, prompt_tokens)

    data["plain_ms"] = _ms(lambda: backend.verify([1], prompt_tokens))
    data["plain_with_append_ms"] = _ms(step_with_append)
    data["plain_cycle_ms"] = _device_cycle_ms(backend, 1, prompt_tokens)
    data["cycles"] = [
        _cycles(backend, block_size, accepted, data["plain_ms"], prompt_tokens)
        for block_size in block_sizes
        for accepted in ACCEPTED_TOKENS
        if accepted <= block_size
    ]


def _cycles(backend: Backend, block_size: int, accepted: int, plain_ms: float, position: int) -> dict[str, Any]:
    """Rounds that each commit `accepted` tokens, whatever the target says."""
    times: list[dict[str, float]] = []
    for _ in range(_WARM_UP + _TIMED):
        marks = [time.perf_counter()]
        proposed = backend.draft(1, block_size, position)
        marks.append(time.perf_counter())
        backend.verify([1, *proposed], position)
        marks.append(time.perf_counter())
        backend.append_context(block_size, position)
        marks.append(time.perf_counter())
        parts = dict(zip(("draft_ms", "verify_ms", "append_ms"), itertools.pairwise(marks), strict=True))
        times.append({name: (end - start) * 1000 for name, (start, end) in parts.items()})
        position += accepted
    medians = {name: round(statistics.median(row[name] for row in times[_WARM_UP:]), 3) for name in times[0]}
    cycle_ms = statistics.median(sum(row.values()) for row in times[_WARM_UP:])
    return {
        "block_size": block_size, "committed_per_cycle": accepted, **medians, "cycle_ms": round(cycle_ms, 3),
        "tokens_per_s": round(accepted / cycle_ms * 1000, 1), "speed_up": round(accepted * plain_ms / cycle_ms, 3),
        "device_cycle_ms": _device_cycle_ms(backend, block_size, position),
    }  # fmt: skip


def _device_cycle_ms(backend: Backend, block_size: int, position: int) -> float | None:
    """Of cycles that follow each other on the device and are read late, as in decoding; None for other backends."""
    if not isinstance(backend, Cycles):
        return None
    backend.reset()
    backend.start_cycles(1, position, position + (_WARM_UP + _TIMED + 2) * block_size, ())
    backend.enqueue_cycle(block_size)
    times = []
    for _ in range(_WARM_UP + _TIMED):
        started = time.perf_counter()
        backend.enqueue_cycle(block_size)
        backend.read_cycle()
        times.append((time.perf_counter() - started) * 1000)
    backend.read_cycle()
    return round(statistics.median(times[_WARM_UP:]), 3)


def roofline() -> dict[str, Any]:
    """What `dflash-export plan` predicts for an H200, in milliseconds."""
    from dflash_tools import plan_formulas as plan
    from dflash_tools.decoder_families import read_model_shape
    from dflash_tools.device_table import DEVICES
    from dflash_tools.drafter_shape import read_drafter_shape
    from dflash_tools.engine_memory import DRAFTER_7B, QWEN2_7B
    from dflash_tools.weight_bytes import Storage

    device, storage = DEVICES["h200"], Storage("fp16", "fp16")
    target = read_model_shape(QWEN2_7B, "Qwen2-7B")
    drafter = read_drafter_shape(DRAFTER_7B, target, "five layers")
    told: dict[str, Any] = {"device": device.name}
    told["plain_ms"] = round(plan.verify_s(device, target, storage, 1, PROMPT_TOKENS) * 1000, 3)
    for size in (4, 8, 16):
        parts = (plan.draft_s(device, target, drafter, storage, storage, size, PROMPT_TOKENS),
                 plan.verify_s(device, target, storage, size, PROMPT_TOKENS),
                 plan.append_s(device, drafter, storage, size))  # fmt: skip
        told[f"cycle_{size}_ms"] = round(sum(parts) * 1000, 3)
    return told


def over_prediction(data: Mapping[str, Any], predicted: Mapping[str, Any]) -> dict[str, float]:
    """Measured time by predicted time, of plain steps and of each block size the plan has."""
    found = {"plain": round(data["plain_ms"] / predicted["plain_ms"], 3)}
    for row in data["cycles"]:
        wanted = predicted.get(f"cycle_{row['block_size']}_ms")
        if wanted is not None:
            measured = row["device_cycle_ms"] or row["cycle_ms"]
            found.setdefault(f"block {row['block_size']}", round(measured / wanted, 3))
    return found


def pytorch(data: dict[str, Any]) -> None:
    """Transformers on the same shape and GPU: plain steps, one pass over 16 rows, the authors' loop if it is here."""
    torch = require_torch_cuda()
    require_modules("transformers")
    from dflash_tools.engine_memory import DRAFTER_7B, QWEN2_7B

    time_pytorch(data, torch, "cuda", QWEN2_7B, DRAFTER_7B, PROMPT_TOKENS)


def time_pytorch(data: dict[str, Any], torch: Any, device: str, target_settings: Mapping[str, Any],
                 drafter_settings: Mapping[str, Any], prompt_tokens: int) -> None:
    """Passes of Transformers' model behind a prompt, with the argmax brought to the host as a loop would."""
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        config = AutoConfig.for_model(**{k: v for k, v in target_settings.items() if k != "architectures"})
        target = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
        ids = torch.randint(0, config.vocab_size, (1, prompt_tokens))

        def passes(rows: int) -> float:
            cache = DynamicCache(config=config)
            target(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

            def once() -> None:
                target(ids[:, :rows], past_key_values=cache, use_cache=True).logits.argmax(-1).cpu()
                cache.crop(-rows)

            return round(_median_s(once, wait) * 1000, 3)

        data |= {"precision": "fp16", "attention": config._attn_implementation, "prompt_tokens": prompt_tokens}
        data["plain_ms"], data["rows_16_ms"] = passes(1), passes(16)
        data["authors"] = _authors(torch, device, target, drafter_settings, ids)


def _authors(torch: Any, device: str, target: Any, settings: Mapping[str, Any], ids: Any) -> dict[str, Any]:
    """A request of the authors' own loop; random weights accept nothing, so a round commits its bonus token alone."""
    if importlib.util.find_spec("dflash") is None:
        return {"status": "skipped", "reason": "the authors' package `dflash` is not installed here"}
    from transformers import AutoConfig

    try:
        import dflash.model

        if device != "cuda":
            dflash.model._cuda_time = time.perf_counter
        config = AutoConfig.for_model(**{k: v for k, v in settings.items() if k != "architectures"})
        drafter = dflash.model.DFlashDraftModel(config).to(torch.float16).to(device).eval()
        found: Any = None
        for _ in range(2):  # the first request prepares
            found = dflash.model.dflash_generate(drafter, target, ids, 16, None, return_stats=True)
        lengths = [int(length) for length in found.acceptance_lengths]
        per_token_ms = float(found.time_per_output_token) * 1000
        return {"status": "done", "acceptance_lengths": lengths, "time_per_output_token_ms": round(per_token_ms, 3),
                "round_ms": round(per_token_ms * sum(lengths) / len(lengths), 3)}
    except Exception as error:  # its interface is not ours to keep
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:600]}


def _ms(work: Callable[[], object]) -> float:
    return round(_median_s(work, lambda: None) * 1000, 3)


def _median_s(work: Callable[[], object], wait: Callable[[], object]) -> float:
    """Median of timed calls after a few that are not; `wait` returns once the device is done."""
    times = []
    for number in range(_WARM_UP + _TIMED):
        wait()
        started = time.perf_counter()
        work()
        wait()
        if number >= _WARM_UP:
            times.append(time.perf_counter() - started)
    return statistics.median(times)
