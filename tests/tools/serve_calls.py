"""Servers for the tests: in a thread of this process, or as a process of their own."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai

from dflash_tools.serve_app import ServeApp
from dflash_tools.serve_bundles import ServedBundle, find_bundles
from dflash_tools.serve_limits import Limits
from dflash_tools.serve_metrics import ServeMetrics
from dflash_tools.serve_pool import BundlePool
from dflash_tools.serve_process import DrainingServer, listen
from dflash_tools.serve_requests import Defaults
from dflash_tools.serve_session import LoadedBundle, SessionOptions


@dataclasses.dataclass
class Running:
    """A server in a thread."""

    url: str
    app: ServeApp
    drain: Callable[[], None]

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.get(self.url + path, **options)

    def post(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, **options)

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))


@contextmanager
def serving(
    folders: Sequence[Path | str], limits: Limits | None = None, *, budget_bytes: int | None = None,
    max_waiting: int = 64, options: SessionOptions | None = None, drain_timeout_s: float = 10,
    slow_s: float = 0, defaults: Defaults | None = None,
) -> Iterator[Running]:
    """Serves on a free port; `slow_s` passes before every answer."""
    from dflash_runtime import Session

    wanted = options or SessionOptions(threads=1)
    metrics, bundles = ServeMetrics(), find_bundles(
        [str(f) for f in folders], "ort-cpu", budget_bytes, wanted.config()
    )

    def load(facts: ServedBundle) -> LoadedBundle:
        loaded = LoadedBundle(facts.name, Session.open(facts.path, threads=1), wanted, metrics)
        if slow_s:
            run = loaded.run
            loaded.run = lambda job: (time.sleep(slow_s), run(job))[1]  # type: ignore[method-assign,func-returns-value]
        return loaded

    pool = BundlePool(bundles, load, budget_bytes, max_waiting)
    metrics.watch(pool.waiting, pool.running, lambda: len(pool.loaded()), pool.loaded_bytes)
    app = ServeApp(bundles, pool, limits or Limits(), metrics, defaults or Defaults())
    listener = listen("127.0.0.1", 0)
    server = DrainingServer(app, drain_timeout_s)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", app, server.drain)
    finally:
        server.drain()
        thread.join(timeout=30)
        assert not thread.is_alive()
        pool.close()


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "onnx", "onnx_ir", "safetensors", "huggingface_hub"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


@contextmanager
def served_apart(place: Path, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`dflash-export serve` as a process, where torch and the exporter's packages are absent, and its address."""
    (place / "sitecustomize.py").write_text(BLOCK)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])}
    argv = [sys.executable, "-m", "dflash_tools.cli", "serve", *map(str, arguments), "--port", "0", "--threads", "1"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    try:
        lines = []
        while not (lines and lines[-1].startswith("Serving at ")):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        yield process, lines[-1].split()[-1].removesuffix("/v1")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30)
        process.stderr.close()


def wait_until(true: Callable[[], bool], limit_s: float = 20) -> None:
    """Looks again and again; a fault where it does not come true."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)
