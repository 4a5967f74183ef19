"""One graph on the device: an engine with a context for each of its profiles, bound once."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_runtime.device import Buffer, Engine
from dflash_runtime.device_engine import EngineProfile, GraphEngine
from dflash_runtime.errors import EngineError


class DeviceGraph:
    """Opens every profile; `remedy` is the command that rebuilds the engines, for messages."""

    def __init__(self, facts: GraphEngine, engine: Engine, scratch: Buffer, remedy: str) -> None:
        self.facts = facts
        self._remedy = remedy
        self.contexts = {profile: engine.open_context(i, scratch) for i, profile in enumerate(facts.profiles)}

    def sizes_bytes(self) -> dict[str, int]:
        """I/O tensor -> its size in the largest profile."""
        sizes = [context.sizes_bytes for context in self.contexts.values()]
        return {name: max(of_profile[name] for of_profile in sizes) for name in sizes[0]}

    def bind(self, profile: EngineProfile, buffers: Mapping[str, Buffer]) -> None:
        """Binds the I/O tensors of a profile.

        Raises:
            EngineError: a tensor has no buffer, or one that is too small.
        """
        context = self.contexts[profile]
        for name, size in context.sizes_bytes.items():
            room = buffers[name].size_bytes if name in buffers else 0
            if room < size:
                raise EngineError(
                    f"The {self.facts.kind} engine wants {size} bytes for {name} with {profile.rows} rows, the bundle "
                    f"gives {room}. {self._remedy}"
                )
        context.bind({name: buffers[name].address for name in context.sizes_bytes})

    def pick(self, rows: int, logit_rows: int, layout_rows: int) -> EngineProfile:
        """The smallest profile for a call of `rows` over caches of `layout_rows`.

        Raises:
            EngineError: the engine was not built for so many.
        """
        scoring = [profile for profile in self.facts.profiles if profile.logit_rows >= logit_rows]
        for profile in scoring:
            if profile.rows >= rows and profile.capacity_rows in (0, layout_rows):
                return profile
        built = sorted({profile.rows for profile in scoring})
        raise EngineError(
            f"The {self.facts.kind} engine takes {built} tokens a call over caches of {layout_rows} rows, and {rows} "
            f"are asked for. Ask for a smaller block, or build for this one. {self._remedy} --block-size {rows}"
        )
