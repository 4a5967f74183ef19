"""`dflash-export serve`: bundles behind an OpenAI-compatible API."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_runtime.errors import DFlashError
from dflash_runtime.generation import PROPOSALS
from dflash_runtime.session import Session
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.option_values import BLOCK_SIZE, MEMORY_SIZE
from dflash_tools.serve_bundles import ServedBundle, find_bundles
from dflash_tools.sizes import bytes_text

if TYPE_CHECKING:
    from dflash_tools.serve_app import ServeApp
    from dflash_tools.serve_limits import Limits
    from dflash_tools.serve_session import LoadedBundle, SessionOptions

KEY_VARIABLE = "DFLASH_API_KEY"
_OF_SESSIONS = ("backend", "threads", "block_size", "plain", "max_new_tokens")
_SECONDS = click.FloatRange(min=0.001)


@click.command("serve", cls=DFlashCommand, short_help="Serve bundles behind an OpenAI-compatible API.")
@click.argument("bundles", nargs=-1, required=True, metavar="BUNDLE...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--api-key-file", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help=f"Keys that clients must send, one a line. [default: the one in {KEY_VARIABLE}, else none]")
@click.option("--allowed-host", "hosts", multiple=True, metavar="NAME",
              help="Name clients may call the server by; repeatable. [default: any; bound to loopback: localhost only]")
@click.option("--backend", default="ort-cpu", show_default=True, help="What executes the graphs.")
@click.option("--threads", type=click.IntRange(1), metavar="N",
              help="CPU threads of a bundle. [default: the backend chooses]")
@click.option("--block-size", type=BLOCK_SIZE, metavar="N|auto",
              help="Tokens in a block, anchor included; auto: what pays, round by round. [default: as `run`]")
@click.option("--plain", is_flag=True, help="Decode without the drafter.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=1.0, show_default=True,
              help="Where a request says none. OpenAI's is 1; 0 takes the likeliest token.")
@click.option("--proposals", type=click.Choice(PROPOSALS), default=PROPOSALS[0], show_default=True,
              help="What the drafter proposes above temperature 0 where a request does not say; see `run`.")
@click.option("--max-new-tokens", type=click.IntRange(1), metavar="N",
              help="Longest answer. [default: what the context has room for]")
@click.option("--memory-budget", type=MEMORY_SIZE,
              help="Most memory of loaded bundles, as 8GB; the least recently used leaves. [default: no limit]")
@click.option("--preload", is_flag=True, help="Load every bundle before the first request, not at it.")
@click.option("--max-queue", type=click.IntRange(1), default=64, show_default=True, help="Answers that may wait.")
@click.option("--max-body", type=MEMORY_SIZE, default="4MB", show_default=True, help="Largest request.")
@click.option("--queue-timeout", type=_SECONDS, default=120.0, show_default=True, help="Longest wait, in seconds.")
@click.option("--request-timeout", type=_SECONDS, default=600.0, show_default=True,
              help="Longest time for an answer once its turn has come, in seconds.")
@click.option("--drain-timeout", type=_SECONDS, default=60.0, show_default=True,
              help="Longest wait for answers under way after SIGTERM, in seconds.")
def command(bundles: tuple[str, ...], host: str, port: int, **options: Any) -> None:
    """Serves each BUNDLE, a folder or NAME=FOLDER, at /v1 of an address: chat completions, completions, models.

    One answer is generated at a time for each bundle. Clients take turns; a client is an API key where there are
    several, else an address. SIGTERM refuses new requests, finishes those that run or wait, and ends.

    /health says whether requests are taken, /metrics speaks to Prometheus.
    """  # fmt: skip
    with needs_extra("serve"):
        from dflash_tools.serve_limits import allowed_hosts, is_loopback
        from dflash_tools.serve_process import DrainingServer, listen
        from dflash_tools.serve_session import SessionOptions
    keys = _read_keys(options["api_key_file"])
    wanted = SessionOptions(**{name: options[name] for name in _OF_SESSIONS})
    strictest = dataclasses.replace(wanted.config(), temperature=1.0, proposals=options["proposals"])
    served = find_bundles(bundles, wanted.backend, options["memory_budget"], strictest)
    app = _app(served, wanted, _limits(options, keys, allowed_hosts(host, options["hosts"])), options)
    listener = listen(host, port)
    try:
        if options["preload"]:
            app.pool.preload()
        if not keys and not is_loopback(host):
            click.echo(f"Warning: there is no API key, so whoever reaches {host} may ask: --api-key-file.", err=True)
        ready = functools.partial(_tell, served, host, listener.getsockname()[1])
        DrainingServer(app, options["drain_timeout"], ready).run(sockets=[listener])
    finally:
        app.pool.close()
        listener.close()


def _app(served: list[ServedBundle], wanted: SessionOptions, limits: Limits, options: dict[str, Any]) -> ServeApp:
    from dflash_tools.serve_app import ServeApp
    from dflash_tools.serve_metrics import ServeMetrics
    from dflash_tools.serve_pool import BundlePool
    from dflash_tools.serve_requests import Defaults
    from dflash_tools.serve_session import LoadedBundle

    metrics = ServeMetrics()

    def load(facts: ServedBundle) -> LoadedBundle:
        session = Session.open(facts.path, backend=wanted.backend, threads=wanted.threads)
        try:
            return LoadedBundle(facts.name, session, wanted, metrics)
        except BaseException:
            session.close()
            raise

    pool = BundlePool(served, load, options["memory_budget"], options["max_queue"])
    metrics.watch(pool.waiting, pool.running, lambda: len(pool.loaded()), pool.loaded_bytes)
    return ServeApp(served, pool, limits, metrics, Defaults(options["temperature"], options["proposals"]))


def _limits(options: dict[str, Any], keys: list[str], hosts: list[str]) -> Limits:
    from dflash_tools.serve_limits import Limits

    return Limits(
        max_body_bytes=options["max_body"], queue_timeout_s=options["queue_timeout"],
        request_timeout_s=options["request_timeout"], api_keys=keys, allowed_hosts=hosts,
    )  # fmt: skip


def _read_keys(path: Path | None) -> list[str]:
    """Keys of a file, or the one of the environment."""
    if path is None:
        return [key] if (key := os.environ.get(KEY_VARIABLE, "").strip()) else []
    keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not keys:
        raise DFlashError(f"{path} holds no API key. Write one in each line.")
    return keys


def _tell(served: list[ServedBundle], host: str, port: int) -> None:
    for facts in served:
        click.echo(f"{facts.name}  {facts.path}, about {bytes_text(facts.memory_bytes)}", err=True)
    place = f"[{host}]" if ":" in host else host
    click.echo(f"Serving at http://{place}:{port}/v1", err=True)
