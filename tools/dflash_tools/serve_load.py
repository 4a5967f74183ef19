"""Many clients at once against a running server: `python -m dflash_tools.serve_load URL`."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import click

from dflash_runtime.errors import DFlashError
from dflash_tools.error_lines import EXIT_REFUSED, DFlashCommand
from dflash_tools.serve_load_clients import Load, Question, ServerAddress
from dflash_tools.sizes import bytes_text

_SAMPLE_S = 2.0
_UNEVEN = 1.5
"""Times as many answers as the client with the fewest, and two more, that a client may have."""
_GROWN_SHARE, _GROWN_BYTES = 0.02, 8_000_000
"""What memory may gain from half way to the end; a request's own takes some."""
_TEXTS = (
    "Why is the sky blue?", "Tell me a story about a fox.", "What is 17 + 25?", "Write a list of three fruits.",
    "Who wrote Faust?", "Say hello in French.", "How does a lock work?", "What comes after Tuesday?",
)  # fmt: skip


@click.command(cls=DFlashCommand)
@click.argument("url")
@click.option("--clients", type=click.IntRange(1), default=32, show_default=True, help="How many ask at once.")
@click.option("--seconds", type=click.IntRange(1), default=120, show_default=True, help="For how long.")
@click.option("--tokens", type=click.IntRange(1), default=48, show_default=True, help="Longest answer.")
@click.option("--model", help="[default: the server's first]")
@click.option("--api-key", default="none", help="What the server wants to be told.")
@click.option("--bundle", type=click.Path(path_type=Path, exists=True),
              help="Take the right answers from a session of this bundle. [default: ask for each alone, before]")
@click.option("--terminate", type=int, metavar="PID",
              help="At the end, while all are asking, send SIGTERM to the server and see that nothing is lost.")
def main(url: str, clients: int, seconds: int, tokens: int, model: str | None, api_key: str, bundle: Path | None,
         terminate: int | None) -> None:
    """Asks the server at URL from many connections, half of them streaming, and compares every answer.

    Prints requests, errors, how even the clients were served, and the server's memory. Exit code 1 where an answer
    was wrong or lost, a client had far fewer than another, or memory grew.
    """  # fmt: skip
    server = ServerAddress(url.removesuffix("/").removesuffix("/v1"), api_key)
    model = model or server.first_model()
    questions = [
        Question(model, text, tokens, seed, temperature)
        for seed, text in enumerate(_TEXTS) for temperature in (0.0, 0.8)
    ]  # fmt: skip
    load = Load(server, _expected(server, questions, bundle))
    threads = [threading.Thread(target=load.ask_on, args=(number,)) for number in range(clients)]
    memory = [_resident_bytes(server)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    while time.monotonic() < started + seconds:
        time.sleep(min(_SAMPLE_S, seconds))
        memory.append(_resident_bytes(server))
    if terminate is not None:
        os.kill(terminate, signal.SIGTERM)
    else:
        load.stop()
    for thread in threads:
        thread.join()
    faults = find_faults([load.answered.get(number, 0) for number in range(clients)], memory)
    _report(load, memory, clients, time.monotonic() - started)
    for line in faults:
        click.echo(line)
    if load.wrong or load.lost or faults:
        sys.exit(EXIT_REFUSED)


def find_faults(counts: Sequence[int], memory: Sequence[int]) -> list[str]:
    """What is not as it should be in the clients' answers and in the server's memory over time."""
    found = []
    if max(counts) > _UNEVEN * min(counts) + 2:
        found.append(f"uneven      one client has {max(counts)} answers and another {min(counts)}")
    half, last = memory[len(memory) // 2], memory[-1]
    if last - half > _GROWN_SHARE * half + _GROWN_BYTES:
        found.append(f"growing     {bytes_text(last - half)} more memory at the end than half way")
    return found


def _expected(server: ServerAddress, questions: list[Question], bundle: Path | None) -> dict[Question, str]:
    if bundle is None:
        return {question: server.ask(question, stream=False) for question in questions}
    from dflash_runtime.generation import GenerationConfig
    from dflash_runtime.session import Session

    with Session.open(bundle) as session:
        return {
            q: session.generate(
                q.messages, GenerationConfig(max_new_tokens=q.max_tokens, temperature=q.temperature, seed=q.seed)
            ).text
            for q in questions
        }  # fmt: skip


def _resident_bytes(server: ServerAddress) -> int:
    found = re.search(r"^process_resident_memory_bytes (\S+)$", server.text("/metrics"), re.MULTILINE)
    if found is None:
        raise DFlashError("The server's metrics state no process_resident_memory_bytes; it does not run on Linux.")
    return int(float(found.group(1)))


def _report(load: Load, memory: list[int], clients: int, seconds: float) -> None:
    counts = [load.answered.get(number, 0) for number in range(clients)]
    total = sum(counts)
    click.echo(f"answered    {total} requests of {clients} clients in {seconds:.1f} s, {len(load.wrong)} wrong, "
               f"{len(load.lost)} lost, {load.refused} refused")  # fmt: skip
    click.echo(f"per client  {min(counts)} to {max(counts)}")
    first, half, last = bytes_text(memory[0]), bytes_text(memory[len(memory) // 2]), bytes_text(memory[-1])
    click.echo(f"memory      {first} before, {half} half way, {last} at the end, {bytes_text(max(memory))} at most")
    for line in (load.wrong + load.lost)[:5]:
        click.echo(f"  {line}")


if __name__ == "__main__":
    main()
