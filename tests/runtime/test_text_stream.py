from __future__ import annotations

import random

import pytest
from tiny_bundle import write_tokenizer

from dflash_runtime.bundle import TextFacts
from dflash_runtime.text_stream import TextStream
from dflash_runtime.tokenizer import Tokenizer

TEXT = "né 中🙂"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tk")
    write_tokenizer(folder)
    return Tokenizer(folder, TextFacts([], None, False, {}, {}))


def pieces_of(tokenizer: Tokenizer, ids: list[int], commit: int = 1, stops: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(tokenizer.decode, stops)
    pieces = []
    for at in range(0, len(ids), commit):
        pieces.append("".join(stream.push(token) for token in ids[at : at + commit]))
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("commit", [1, 2, 3, 4])
def test_characters_over_several_tokens(tokenizer: Tokenizer, commit: int) -> None:
    ids = tokenizer.encode_text(TEXT)
    assert len(ids) == 11
    pieces = pieces_of(tokenizer, ids, commit)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_end_inside_a_character(tokenizer: Tokenizer, cut: int) -> None:
    ids = tokenizer.encode_text(TEXT)[:-cut]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces).count("\ufffd") == 1
    assert pieces[-1] == "\ufffd"


@pytest.mark.parametrize("seed", range(5))
def test_long_and_random_streams_equal_one_decode(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("aé中🙂 \n") for _ in range(400))
    ids = tokenizer.encode_text(text)
    assert "".join(pieces_of(tokenizer, ids)) == text
    noise = [rng.randrange(259) for _ in range(500)]
    assert "".join(pieces_of(tokenizer, noise)) == tokenizer.decode(noise)
    broken = [rng.randrange(128, 256) for _ in range(500)]
    assert "".join(pieces_of(tokenizer, broken)) == tokenizer.decode(broken)


def test_spaces_of_a_sentencepiece_tokenizer() -> None:
    import tokenizers

    vocab = {"<unk>": 0, "▁hello": 1, "▁world": 2, "<s>": 3, **{f"<0x{b:02X}>": 4 + b for b in range(256)}}
    tk = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tk.add_special_tokens(["<s>"])
    tk.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    smile = [4 + b for b in "🙂é".encode()]
    ids = ([1, 2, *smile, 2, 3, 1] * 20)[:-1]
    stream = TextStream(tk.decode)
    assert "".join([*map(stream.push, ids), stream.finish()]) == tk.decode(ids)


def test_cost_does_not_grow_with_the_length(tokenizer: Tokenizer) -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    stream = TextStream(decode)
    for _ in range(2000):
        stream.push(240)  # the first byte of a character that never comes
    assert longest < 100


@pytest.mark.parametrize("commit", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one STOP two", ("STOP",), "one "),
        ("one STO", ("STOP",), "one STO"),
        ("aab", ("ab",), "a"),
        ("xyz", ("yz", "xyz"), ""),
        ("no stop", (), "no stop"),
        ("SSTOP", ("STOP",), "S"),
        ("é中🙂!", ("🙂",), "é中"),
    ],
)
def test_stop_strings(tokenizer: Tokenizer, text: str, stops: tuple[str, ...], expected: str, commit: int) -> None:
    pieces = pieces_of(tokenizer, tokenizer.encode_text(text), commit, stops)
    assert "".join(pieces) == expected


def test_text_is_held_back_while_it_may_become_a_stop_string(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer.decode, ("</end>",))
    shown = [stream.push(token) for token in tokenizer.encode_text("a</en b")]
    assert shown == ["a", "", "", "", "", "</en ", "b"]
