"""word2vec by fastText without its subwords, run by benchmarks/word2vec.py in fastText's own environment.

fastText's training call first reads the vocabulary, so the time of a call that trains on nothing is
subtracted.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from typing import Any

import fasttext


def train(load: dict[str, Any], epochs: int) -> tuple[Any, float]:
    began = time.perf_counter()
    model = fasttext.train_unsupervised(
        load["corpus"],
        model="skipgram" if load["model"] == "skip-gram" else "cbow",
        dim=load["dim"],
        ws=load["window"],
        neg=load["negative"],
        t=load["sample"],
        lr=load["lr"],
        minCount=load["min_count"],
        thread=load["workers"],
        epoch=epochs,
        minn=0,
        maxn=0,
        bucket=0,
        loss="ns",
        verbose=0,
    )
    return model, time.perf_counter() - began


def main() -> None:
    load = json.loads(sys.argv[1])
    _, reading = train(load, 0)
    model, seconds = train(load, load["epochs"])
    if load["save"]:
        words = [word for word in model.words if word != "</s>"]
        with open(load["save"], "wb") as file:
            file.write(f"{len(words)} {load['dim']}\n".encode())
            for word in words:
                row = model.get_word_vector(word)
                file.write(word.encode() + b" " + struct.pack(f"<{len(row)}f", *row) + b"\n")
    print(json.dumps({"seconds": seconds - reading}))


if __name__ == "__main__":
    main()
