"""A conversation with a bundle: messages go in, answers stream out, and no mistake loses what was said."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dflash_runtime.backend import Round
from dflash_runtime.errors import DFlashError, PromptError
from dflash_runtime.generation import GenerationConfig
from dflash_runtime.session import Session, TextPieces
from dflash_runtime.tokenizer import Tokenizer
from dflash_tools.chat_blocks import BlockPainter
from dflash_tools.chat_screen import ChatScreen, Interruption
from dflash_tools.chat_statistics import ChatStatistics
from dflash_tools.conversation import Message, with_system_prompt
from dflash_tools.error_lines import one_line
from dflash_tools.prompt_progress import PromptProgress
from dflash_tools.run_block_size import chosen_words
from dflash_tools.run_command import statistics_line
from dflash_tools.sizes import counted


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came of a message."""

    text: str
    rounds: Sequence[Round]
    finish_reason: str | None
    """None where the user stopped it."""
    words: str
    """What it cost."""


class Chat:
    """The messages so far, and the session that answers them.

    Args:
        session: Its rows are kept from turn to turn by the session itself.
        config: Of every answer.
        screen: Where answers go.
        show_blocks: Paint what the drafter said.

    Raises:
        PromptError: the bundle has no chat template.
    """

    def __init__(
        self, session: Session, config: GenerationConfig, screen: ChatScreen, *, show_blocks: bool = False
    ) -> None:
        if session.tokenizer is None or not session.tokenizer.has_chat_template:
            lacking = "tokenizer" if session.tokenizer is None else "chat template"
            raise PromptError(f"The bundle has no {lacking}, so it cannot chat. Use: dflash-export run")
        self.session, self.config, self.screen, self.show_blocks = session, config, screen, show_blocks
        self.tokenizer: Tokenizer = session.tokenizer
        self.context_tokens = session.bundle.manifest.max_context_tokens
        self.messages: list[Message] = []
        self.statistics = ChatStatistics()
        self.failed = False
        """Whether a message could not be answered."""

    def token_ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that messages become; PromptError where the template refuses them."""
        return self.tokenizer.encode_messages(messages, self.config.template_args)

    def set_system_prompt(self, text: str | None) -> None:
        """Another system prompt for what was said and what comes; PromptError where the template takes none."""
        changed = with_system_prompt(self.messages, text)
        if text is not None:
            self.token_ids([changed[0], {"role": "user", "content": "?"}])
        self.messages = changed

    def say(self, text: str) -> None:
        """Answers a message. Where that fails, the message is taken back and the conversation is as before."""
        with self.screen.interruption() as interruption:
            self._say(text, interruption)

    def _say(self, text: str, interruption: Interruption) -> None:
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self._answer(interruption)
        except DFlashError as error:
            self.messages.pop()
            self.failed = True
            self.screen.note(f"Error: {one_line(str(error))} The message was taken back; all before it is still there.")
            return
        if answer.finish_reason is None and not answer.text:
            self.messages.pop()
            self.screen.note("[stopped before the first word: the message was taken back]")
            return
        self.messages.append({"role": "assistant", "content": answer.text})
        self._tell(answer)

    def _answer(self, interruption: Interruption) -> Answer:
        ids = self.token_ids(self.messages)
        if len(ids) > self.context_tokens:
            raise PromptError(
                f"With this message the conversation has {len(ids)} tokens, and the context holds "
                f"{self.context_tokens}. /reset begins a new one, and /save FILE keeps this one before."
            )
        reading = PromptProgress()

        def progress(done: int, total: int) -> None:
            if interruption.asked:
                reading.clear()
                raise KeyboardInterrupt  # between two pieces nothing is half written, and what was read is kept
            reading(done, total)

        stream = self.session.stream(ids, dataclasses.replace(self.config, progress=progress))
        painter = BlockPainter(self.tokenizer.decode) if self.show_blocks else None
        text = show_answer(stream, self.screen, painter, interruption)
        reason = stream.rounds[-1].finish_reason if stream.rounds else None
        count = sum(len(done.committed) for done in stream.rounds)
        words, sizes, adaptive = f"{counted(count, 'token')}, then stopped", "", self.config.block_size == "auto"
        if reason is not None:
            words = statistics_line(stream.result, adaptive=adaptive).strip("[]")
            sizes = f"\n{chosen_words(self.session.controller, stream.result)}" if adaptive else ""
        self.statistics.add(len(ids), stream.rounds, words + sizes)
        return Answer(text, stream.rounds, reason, words)

    def _tell(self, answer: Answer) -> None:
        if answer.finish_reason is None:
            self.screen.note("[stopped: what was said so far stays in the conversation]")
        elif answer.finish_reason == "length":
            self.screen.note(f"[cut at --max-new-tokens {self.config.max_new_tokens}]")
        elif answer.finish_reason == "context":
            self.screen.note(f"[cut: the context of {self.context_tokens} tokens is full. /reset begins a new "
                             "conversation, and /save FILE keeps this one before]")
        if self.show_blocks and self.screen.interactive:
            self.screen.note(f"[{answer.words}]")


def show_answer(
    stream: TextPieces, screen: ChatScreen, painter: BlockPainter | None, interruption: Interruption
) -> str:  # fmt: skip
    """Writes an answer as it comes, until its end or the user's Ctrl-C, and returns its text.

    The first Ctrl-C lets the pass that runs come to its end, so that the session keeps its rows, those of a prompt that
    is being read too; the second does not, and the session forgets them.
    """
    pieces, painted = list[str](), 0
    interruption.may_break = True
    try:
        for piece in stream:
            pieces.append(piece)
            if shown := piece if painter is None else painter.paint(stream.rounds[painted:]):
                screen.write(shown)
            painted = len(stream.rounds)
            if interruption.asked:
                break
        else:
            screen.write("" if painter is None else painter.paint(stream.rounds[painted:]) + painter.finish())
    except KeyboardInterrupt:
        if not screen.interactive:
            raise
    finally:
        interruption.may_break = False
        stream.close()
        screen.write("\n")
    return "".join(pieces)
