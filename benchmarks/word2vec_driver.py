"""word2vec with threads on one pair of matrices: only the kernels.

    python benchmarks/word2vec_driver.py CORPUS --model skip-gram --threads 2 --epochs 5 --judge FOLDER

Prints one JSON line: words (before subsampling) per second, loss, and with --judge the scores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.data.corpus_files import prepare
from manyhands.data.text import Corpus, Vocabulary
from manyhands.word2vec import copies, kernels
from manyhands.word2vec.vectors import Vectors

LAST_LR = 1e-4
"""The learning rate falls in a line to this part of itself."""


@dataclass(frozen=True)
class Settings:
    model: str = "skip-gram"
    dim: int = 100
    window: int = 5
    negative: int = 5
    sample: float = 1e-4
    lr: float = 0.05
    epochs: int = 5
    threads: int = 2
    seed: int = 1
    chunk: int = 1_000
    copied: int = 0
    """Common words of whose rows each thread has copies."""
    apart: bool = False
    """Each thread has matrices of its own: nothing is learnt together, and nobody is in the way."""


class Training:
    """The matrices, and threads that take chunks of the corpus in turn."""

    def __init__(self, vocabulary: Vocabulary, file: Path, settings: Settings) -> None:
        self.vocabulary, self.settings = vocabulary, settings
        self.ids = np.array(Corpus(file).ids)
        shape = len(vocabulary), settings.dim
        random = np.random.default_rng(settings.seed)
        self.inputs = (random.random(shape, np.float32) - np.float32(0.5)) / np.float32(
            settings.dim
        )
        self.outputs = np.zeros(shape, np.float32)
        self.rows = np.arange(len(vocabulary))
        self.keep = vocabulary.keep_probability(settings.sample)
        self.noise = vocabulary.noise()
        self.train = kernels.skip_gram if settings.model == "skip-gram" else kernels.cbow
        self.loss = self.pairs = 0.0
        self._lock = threading.Lock()

    def run(self) -> float:
        """Seconds for all epochs."""
        none = copies.allocate(0, self.settings.dim)
        self._call((self.inputs, self.outputs), self.ids[:0], 0.0, 0, none)  # compiled before
        chunk = self.settings.chunk
        starts = np.arange(0, len(self.ids), chunk)
        work = iter([(epoch, int(s)) for epoch in range(self.settings.epochs) for s in starts])
        both = (self.inputs, self.outputs)
        threads = [
            threading.Thread(
                target=self._take,
                args=(work, tuple(m.copy() for m in both) if self.settings.apart else both),
            )
            for _ in range(self.settings.threads)
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    def _take(self, work: Any, matrices: Any) -> None:
        size, epochs = len(self.ids), self.settings.epochs
        own = copies.allocate(self.settings.copied, self.settings.dim)
        while True:
            with self._lock:
                epoch, start = next(work, (None, 0))
            if epoch is None:
                return
            done = (epoch + start / size) / epochs
            lr = self.settings.lr * max(1.0 - done, LAST_LR)
            seed = hash((self.settings.seed, epoch, start)) & (2**62 - 1)
            tokens = self.ids[start : start + self.settings.chunk]
            loss, pairs, _ = self._call(matrices, tokens, lr, seed, own)
            if epoch == epochs - 1:
                with self._lock:
                    self.loss += loss
                    self.pairs += pairs

    def _call(self, matrices: Any, tokens: Any, lr: float, seed: int, own: Any) -> Any:
        where = (*matrices, self.rows, self.rows, self.keep, self.noise)
        s = self.settings
        return self.train(tokens, *where, s.window, s.negative, lr, seed, own)

    def vectors(self) -> Vectors:
        return Vectors(self.vocabulary.words, self.inputs)


def scores(vectors: Vectors, folder: Path) -> dict[str, float]:
    from manyhands.word2vec.evaluation import analogies, pairs

    found = analogies(vectors, folder / "questions-words.txt")
    result = {
        "analogies": found.accuracy,
        "semantic": found.semantic.accuracy,
        "syntactic": found.syntactic.accuracy,
    }
    files = {"ws353": "wordsim353.tsv", "men": "EN-MEN-TR-3k.txt", "simlex": "simlex999.txt"}
    for name, file in files.items():
        result[name] = pairs(vectors, folder / file)[0]
    return {name: round(value, 4) for name, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus")
    parser.add_argument("--cache", default=Path(tempfile.gettempdir()) / "manyhands-word2vec")
    parser.add_argument("--judge", type=Path, help="folder with questions-words.txt and the pairs")
    parser.add_argument("--words", type=int, help="use only this many words of the text")
    parser.add_argument("--save", help="file for the vectors")
    for name, kind in Settings.__annotations__.items():
        make = {"int": int, "float": float, "str": str, "bool": "true".__eq__}[kind]
        parser.add_argument(f"--{name}", type=make, default=getattr(Settings, name))
    given = parser.parse_args()
    settings = Settings(**{name: getattr(given, name) for name in Settings.__annotations__})
    began = time.perf_counter()
    vocabulary, file = prepare(given.corpus, given.cache, min_count=5)
    prepare_s = time.perf_counter() - began
    training = Training(vocabulary, file, settings)
    if given.words:
        training.ids = training.ids[: given.words]
    seconds = training.run()
    num_words = int(np.count_nonzero(training.ids >= 0)) * settings.epochs
    line: dict[str, Any] = {
        "words_per_s": round(num_words / seconds),
        "seconds": round(seconds, 2),
        "prepare_s": round(prepare_s, 2),
        "loss": round(training.loss / max(training.pairs, 1), 4),
    }
    if given.judge:
        line |= scores(training.vectors(), given.judge)
    if given.save:
        training.vectors().save(given.save)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
