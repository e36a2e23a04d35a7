"""Small data of the kinds that the scripts read; the same each time."""

import json
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

NUM_CLASSES, PER_CLASS = 4, 32


def sentence(number: int, num_words: int) -> str:
    """Return words of a chain in which each has three successors."""
    chance, word, found = random.Random(number), number % 60, list[str]()
    for _ in range(num_words):
        word = (7 * word + chance.randrange(3)) % 60
        found.append(f"w{word}")
    return " ".join(found)


def text(path: Path, num_words: str) -> None:
    """Write lines of ten words; the end of a line counts as a word of ``num_words``."""
    lines = int(num_words) // 11
    path.write_text("".join(f"{sentence(number, 10)}\n" for number in range(lines)))


def texts(path: Path, _: str) -> None:
    """Write JSON lines for a fine-tuning."""
    rows = [json.dumps({"text": sentence(number, 40)}) for number in range(600)]
    path.write_text("\n".join(rows) + "\n")


def preferences(path: Path, _: str) -> None:
    """Write JSON lines of two answers to a prompt, of which the first is the better one."""
    rows = [
        {"prompt": sentence(n, 8), "chosen": sentence(n + 1, 20), "rejected": sentence(n + 2, 20)}
        for n in range(600)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokens(path: Path, _: str) -> None:
    """Write characters as nanoGPT prepares them."""
    path.mkdir()
    ids = np.frombuffer(" ".join(sentence(n, 50) for n in range(400)).encode(), np.uint8)
    for name, part in (("train", ids[:-5000]), ("val", ids[-5000:])):
        part.astype(np.uint16).tofile(path / f"{name}.bin")
    (path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 128}))


def digits(path: Path, _: str) -> None:
    """Write MNIST's four files: the class shows by where the image is bright."""
    for name, number in (("train", 2000), ("t10k", 400)):
        chance = np.random.default_rng(number)
        classes = chance.integers(0, 10, number, dtype=np.uint8)
        drawn = chance.integers(0, 80, (number, 28, 28), dtype=np.uint8)
        for image, label in zip(drawn, classes, strict=True):
            image[2 * label : 2 * label + 8, 6:20] += 160
        for kind, magic, array in (("images", 2051, drawn), ("labels", 2049, classes)):
            header = struct.pack(f">{1 + array.ndim}i", magic, *array.shape)
            file = path / f"{name}-{kind}-idx{array.ndim}-ubyte"
            file.write_bytes(header + array.tobytes())


def images(path: Path, _: str) -> None:
    """Write PNG files, a folder a class, each class of its own colour."""
    from PIL import Image

    chance = np.random.default_rng(0)
    for label in range(NUM_CLASSES):
        (path / f"c{label}").mkdir(parents=True)
        for number in range(PER_CLASS):
            pixels = chance.integers(0, 128, (64, 64, 3), dtype=np.uint8)
            pixels[..., label % 3] += np.uint8(30 + 20 * label)
            Image.fromarray(pixels).save(path / f"c{label}" / f"{number}.png")


def pairs(path: Path, _: str) -> None:
    """Write images, and a table that has a caption for each."""
    images(path.parent / "images", "")
    rows = [
        f"{image}\t{sentence(number, 6)} of {image.parent.name}"
        for number, image in enumerate(sorted(path.parent.glob("images/*/*.png")))
    ]
    path.write_text("\n".join(["filepath\ttitle", *rows]) + "\n")


def shards(path: Path, _: str) -> None:
    """Write Parquet files of texts, of which the last is for validation."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.mkdir(parents=True)
    for shard in range(2):
        rows = [sentence(1000 * shard + number, 40) for number in range(600)]
        pq.write_table(pa.table({"text": rows}), path / f"{shard}.parquet", row_group_size=100)


def model(path: Path, _: str) -> None:
    """Write a small language model of Hugging Face's, with a tokenizer of words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "<pad>", *(f"w{number}" for number in range(60))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=128, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)


KINDS: dict[str, Callable[[Path, str], None]] = {
    each.__name__: each
    for each in (text, texts, preferences, tokens, digits, images, pairs, shards, model)
}


def make(path: Path, kind: str) -> None:
    """Make data of a kind, ``text`` with its number of words: ``text:1000``."""
    name, _, amount = kind.partition(":")
    (path if name == "digits" else path.parent).mkdir(parents=True, exist_ok=True)
    KINDS[name](path, amount)
