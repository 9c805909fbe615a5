"""Train and read the tokenizer: byte-level BPE whose digits are single tokens."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tinymoe.chat import SPECIAL, TAGS, TEMPLATE, Part

__all__ = ["encode_parts", "read_tokenizer", "train_tokenizer", "write_tokenizer"]


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn merges from `texts`; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(text, special=True) for text in (*SPECIAL, *TAGS)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Tags are text to whoever reads an answer, so they must survive skip_special_tokens.
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(data))


def write_tokenizer(tokenizer: Tokenizer, folder: Path, positions: int) -> None:
    """Write tokenizer.json, its settings for transformers and the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read what `write_tokenizer` wrote."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_parts(
    tokenizer: Tokenizer, documents: list[list[Part]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Encode rendered conversations: uint16 tokens and bool `answer` of each.

    Parts that meet without a special token between them are encoded as one text would be only if
    a special token starts or ends the seam; `chat.render` makes such parts.
    """
    texts = [part.text for document in documents for part in document]
    encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    found = []
    for document in documents:
        ids = [next(encoded).ids for _ in document]
        answers = [
            np.full(len(part), mark.answer) for part, mark in zip(ids, document, strict=True)
        ]
        tokens = np.concatenate([np.asarray(part, np.uint16) for part in ids])
        found.append((tokens, np.concatenate(answers)))
    return found
