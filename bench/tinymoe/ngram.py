"""A 5-gram model over tokens, the yardstick for the trained one.

    python -m tinymoe.ngram WORK --rows 256 --length 2048

Interpolated Kneser-Ney with one discount an order, estimated from counts of counts, on the same
training tokens; it is asked for the same held-out tokens as the model.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tinymoe.data import Streams
from tinymoe.tokenizer import read_tokenizer

__all__ = ["KneserNey"]

Grams = NDArray[np.uint64]
BITS = 12  # a token, so that five fit into 64 bits


def _grams(stream: NDArray[np.uint16], order: int) -> Grams:
    """Return all n-grams of a stream as numbers, the oldest token in the highest bits."""
    count = len(stream) - order + 1
    packed = np.zeros(count, np.uint64)
    for offset in range(order):
        packed = (packed << np.uint64(BITS)) | stream[offset : offset + count].astype(np.uint64)
    return packed


class _Order:
    """Counts of one order: distinct n-grams with their counts, and totals of their contexts."""

    def __init__(self, grams: Grams, counts: NDArray[np.int64]) -> None:
        self.grams, self.counts = grams, counts
        contexts = grams >> np.uint64(BITS)
        starts = np.flatnonzero(np.r_[True, contexts[1:] != contexts[:-1]])
        self.contexts = contexts[starts]
        self.totals = np.add.reduceat(counts, starts)
        self.kinds = np.diff(np.r_[starts, len(grams)])
        ones, twos = (counts == 1).sum(), (counts == 2).sum()
        self.discount = ones / max(1, ones + 2 * twos)

    def interpolate(self, asked: Grams, lower: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability of each n-gram's last token, given that of the order below."""
        counts = _look_up(self.grams, self.counts, asked)
        contexts = asked >> np.uint64(BITS)
        totals = _look_up(self.contexts, self.totals, contexts)
        kinds = _look_up(self.contexts, self.kinds, contexts)
        seen = totals > 0
        safe = np.where(seen, totals, 1)
        direct = np.maximum(counts - self.discount, 0) / safe
        return np.where(seen, direct + self.discount * kinds / safe * lower, lower)


def _look_up(keys: Grams, values: NDArray[np.int64], asked: Grams) -> NDArray[np.int64]:
    index = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[index] == asked, values[index], 0)


class KneserNey:
    """A model of a token stream (tokens below 4096)."""

    def __init__(self, stream: NDArray[np.uint16], vocabulary: int, order: int = 5) -> None:
        self.order, self.vocabulary = order, vocabulary
        grams, counts = np.unique(_grams(stream, order), return_counts=True)
        self.orders = [_Order(grams, counts)]
        for length in range(order - 1, 0, -1):
            # Below the highest order, an n-gram counts once for each token seen before it.
            mask = np.uint64((1 << (BITS * length)) - 1)
            grams, counts = np.unique(grams & mask, return_counts=True)
            self.orders.insert(0, _Order(grams, counts))

    def log2(self, stream: NDArray[np.uint16]) -> NDArray[np.float64]:
        """Return the log2-probability of each token from the fifth on, given the four before."""
        asked = _grams(stream, self.order)
        probability = np.full(len(asked), 1 / self.vocabulary)
        for length, order in enumerate(self.orders, 1):
            mask = np.uint64((1 << (BITS * length)) - 1)
            probability = order.interpolate(asked & mask, probability)
        return np.log2(probability)


def main() -> None:
    """Print the bits per byte of the held-out Python text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--length", type=int, default=2048)
    args = parser.parse_args()
    tokenizer = read_tokenizer(args.work)
    streams = Streams(args.work)
    model = KneserNey(streams["train.python"], tokenizer.get_vocab_size())
    held_out = streams["held_out.python"]
    held_out = held_out[: min(len(held_out), args.rows * args.length)]
    bits = -model.log2(held_out)
    text = len(tokenizer.decode(held_out[4:].tolist()).encode())
    found = {
        "order": 5,
        "bits_per_byte": bits.sum() / text,
        "tokens": len(bits),
        "bytes": text,
        "perplexity": 2 ** float(bits.mean()),
        "nats": float(bits.mean()) * math.log(2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
