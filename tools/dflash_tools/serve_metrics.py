"""What the server counts, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from dflash_runtime.generation import GenerationResult

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LARGEST_BLOCK = 16


class ServeMetrics:
    """Counters of one server; its methods may be called from any thread."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("dflash_requests", "Answered HTTP requests.", ["path", "status"], registry=registry)
        self._waiting = Gauge("dflash_queue_length", "Answers that wait for their turn.", registry=registry)
        self._running = Gauge("dflash_running", "Answers that are being generated.", registry=registry)
        self._loaded = Gauge("dflash_loaded_bundles", "Bundles in memory.", registry=registry)
        self._loaded_bytes = Gauge("dflash_loaded_bytes", "Their estimated memory.", registry=registry)
        self._prompt = Counter("dflash_prompt_tokens", "Tokens of prompts.", ["model"], registry=registry)
        self._reused = Counter("dflash_reused_tokens", "Prompt tokens whose cache rows were there already.", ["model"],
                               registry=registry)  # fmt: skip
        self._answered = Counter("dflash_completion_tokens", "Tokens of answers.", ["model"], registry=registry)
        self._finished = Counter("dflash_answers", "Answers by their ending.", ["model", "ending"], registry=registry)
        self._acceptance = Histogram("dflash_acceptance_length", "Tokens committed by a round of draft and verify.",
                                     ["model"], buckets=range(1, _LARGEST_BLOCK + 1), registry=registry)  # fmt: skip
        self._rounds = Counter("dflash_rounds", "Rounds behind the first token, by block size; 1 is plain decoding.",
                               ["model", "block_size"], registry=registry)  # fmt: skip
        self._wait = Histogram("dflash_queue_wait_seconds", "From arrival to the answer's turn.", ["model"],
                               buckets=_SECONDS, registry=registry)  # fmt: skip
        self._first = Histogram("dflash_time_to_first_token_seconds", "From arrival to the first token.", ["model"],
                                buckets=_SECONDS, registry=registry)  # fmt: skip
        self._token = Histogram("dflash_time_per_token_seconds", "Of the tokens after the first, mean of an answer.",
                                ["model"], buckets=_TOKEN_SECONDS, registry=registry)  # fmt: skip

    def watch(self, waiting: Callable[[], int], running: Callable[[], int], loaded: Callable[[], int],
              loaded_bytes: Callable[[], int]) -> None:
        """Says where the gauges are read; each is asked whenever metrics are."""
        for gauge, ask in ((self._waiting, waiting), (self._running, running), (self._loaded, loaded),
                           (self._loaded_bytes, loaded_bytes)):  # fmt: skip
            gauge.set_function(ask)

    def count_request(self, path: str, status: int) -> None:
        """An HTTP request has ended; 499 where the client left before."""
        self._requests.labels(path, str(status)).inc()

    def count_ending(self, model: str, ending: str) -> None:
        """An answer has ended without a result: `cancelled`, `refused`, `failed`."""
        self._finished.labels(model, ending).inc()

    def count_result(self, model: str, result: GenerationResult, waited_s: float) -> None:
        """An answer is complete; it had waited so long for its turn."""
        self._finished.labels(model, result.finish_reason).inc()
        self._prompt.labels(model).inc(result.prompt_token_count)
        self._reused.labels(model).inc(result.reused_token_count)
        self._answered.labels(model).inc(len(result.token_ids))
        for length in result.acceptance_lengths:
            self._acceptance.labels(model).observe(length)
        for size, rounds in result.rounds_by_block_size.items():
            self._rounds.labels(model, str(size)).inc(rounds)
        self._wait.labels(model).observe(waited_s)
        self._first.labels(model).observe(waited_s + result.time_to_first_token_ms / 1000)
        if result.tokens_per_s > 0:
            self._token.labels(model).observe(1 / result.tokens_per_s)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)
