"""How far a trace is, for whoever waits for it."""

from __future__ import annotations

from dflash_export.weight_store import Progress


class TraceShare:
    """How far a trace is, in layers: about half of its time passes in the layers, a third in translating them."""

    def __init__(self, progress: Progress | None, num_layers: int) -> None:
        """Tells `progress` that the trace begins; None for nobody to tell."""
        self._tell, self._layers, self._passed = progress or (lambda *_: None), num_layers, 0
        self._tell("trace target", 0, 6 * num_layers)

    def layer_passed(self) -> None:
        """The tracer may run the model several times."""
        self._passed = min(self._passed + 1, 3 * self._layers)
        self._tell("trace target", self._passed, 6 * self._layers)

    def captured(self) -> None:
        """The graph is there and is to be tidied."""
        self._tell("trace target", 5 * self._layers, 6 * self._layers)

    def finished(self) -> None:
        """The graph is tidy."""
        self._tell("trace target", 6 * self._layers, 6 * self._layers)
