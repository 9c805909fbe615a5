"""Batches: rows of text and of conversations, made on the fly, each a function of (seed, step)."""

import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from tinymoe.about import chat
from tinymoe.calls import tool_calls
from tinymoe.chat import END, render
from tinymoe.skills import Conversation, arithmetic, needle
from tinymoe.tokenizer import encode_parts, read_tokenizer

__all__ = ["Batch", "Batches", "Plan", "Streams", "encode_texts", "generator", "held_out_rows"]

# Loss weights: a conversation's prompt is there to be read, its answers to be learned.
PROMPT_WEIGHT, ANSWER_WEIGHT = 0.1, 3.0
CHARACTERS_PER_TOKEN = 2.2  # of the retrieval filler at its densest, so that rows never overflow


class Plan(NamedTuple):
    """What a training step consists of; shares are of rows, weights of documents."""

    tokens: int = 131072
    text_share: float = 0.5
    docs_share: float = 0.12
    arithmetic: float = 10.0
    needle: float = 1.2
    tools: float = 2.0
    chat: float = 0.8


class Streams:
    """The token streams of a work folder: `streams["train.python"]` is a uint16 array."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def __getitem__(self, name: str) -> np.ndarray:
        return np.frombuffer(lzma.open(self.work / f"{name}.xz").read(), np.uint16)

    def write(self, name: str, stream: np.ndarray) -> None:
        """Store a stream."""
        with lzma.open(self.work / f"{name}.xz", "wb", preset=1) as file:
            file.write(stream.tobytes())


class Batch(NamedTuple):
    """`tokens` int64 `[B, L]`, `weights` float32 `[B, L]`: how much predicting a token counts."""

    tokens: np.ndarray
    weights: np.ndarray


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return all files as one uint16 stream, the end token before each."""
    end = tokenizer.token_to_id(END)
    pieces = []
    for start in range(0, len(texts), 256):
        chunk = tokenizer.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)
        pieces += [np.asarray([end, *item.ids], np.uint16) for item in chunk]
    return np.concatenate(pieces)


def generator(kind: str, filler: list[str], characters: int) -> Callable[..., Conversation]:
    """Return the function `(random, evaluation=False) -> Conversation` of a skill."""
    if kind == "needle":
        return lambda random, evaluation=False: needle(
            random, filler, characters if evaluation else random.randint(80, characters), evaluation
        )
    return {"arithmetic": arithmetic, "tools": tool_calls, "chat": chat}[kind]


class Batches(torch.utils.data.Dataset[Batch]):
    """All training batches, by step."""

    def __init__(
        self, folder: Path, streams: dict[str, np.ndarray], filler: list[str], plan: Plan, seed: int
    ) -> None:
        self.folder, self.streams, self.filler = folder, streams, filler
        self.plan, self.seed = plan, seed
        self.tokenizer: Tokenizer | None = None
        self.lengths: list[int] = []

    def schedule(self, lengths: list[int]) -> "Batches":
        """Set the row length of every step."""
        self.lengths = lengths
        return self

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, step: int) -> Batch:
        if self.tokenizer is None:
            self.tokenizer = read_tokenizer(self.folder)
        random = Random(f"{self.seed}:{step}")
        length = self.lengths[step]
        rows = self.plan.tokens // length
        text_rows = round(rows * self.plan.text_share)
        tokens = np.zeros((rows, length), np.int64)
        weights = np.zeros((rows, length), np.float32)
        for row in range(text_rows):
            kind = "docs" if random.random() < self.plan.docs_share else "python"
            stream = self.streams[kind]
            start = random.randrange(len(stream) - length)
            tokens[row], weights[row] = stream[start : start + length], 1.0
        documents = self._documents(random, length)
        pending = next(documents)
        for row in range(text_rows, rows):
            used = 0
            while used + len(pending[0]) <= length:
                size = len(pending[0])
                tokens[row, used : used + size] = pending[0]
                weights[row, used : used + size] = np.where(
                    pending[1], ANSWER_WEIGHT, PROMPT_WEIGHT
                )
                weights[row, used] = 0.0
                used += size
                pending = next(documents)
        return Batch(tokens, weights)

    def _documents(self, random: Random, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless conversations that fit into a row."""
        assert self.tokenizer is not None
        kinds = ("arithmetic", "needle", "tools", "chat")
        shares = [getattr(self.plan, kind) for kind in kinds]
        characters = int(length * CHARACTERS_PER_TOKEN)
        makers = {kind: generator(kind, self.filler, characters) for kind in kinds}
        while True:
            chosen = random.choices(kinds, shares, k=64)
            found = [makers[kind](random) for kind in chosen]
            parts = [render(item["messages"], item.get("tools")) for item in found]
            for tokens, answers in encode_parts(self.tokenizer, parts):
                if len(tokens) <= length:
                    yield tokens, answers


def held_out_rows(
    tokenizer: Tokenizer, make: Callable[..., Conversation], count: int, length: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` held-out conversations, one a row: tokens and the mask of the last answer."""
    random = Random(f"held out:{seed}")
    tokens = np.zeros((count, length), np.int64)
    answers = np.zeros((count, length), bool)
    row = 0
    while row < count:
        item = make(random, evaluation=True)
        ((found, mask),) = encode_parts(tokenizer, [render(item["messages"], item.get("tools"))])
        if len(found) <= length:
            tokens[row, : len(found)], answers[row, : len(found)] = found, mask
            row += 1
    return tokens, answers
