"""word2vec by gensim, run by benchmarks/word2vec.py in gensim's own environment.

    python word2vec_peer_gensim.py '{"corpus": ..., "model": "skip-gram", "dim": 100, ...}'

Each thread reads the file by itself (corpus_file), which is gensim's fastest way.
"""

from __future__ import annotations

import json
import sys
import time

from gensim.models import Word2Vec


def main() -> None:
    load = json.loads(sys.argv[1])
    model = Word2Vec(
        sg=int(load["model"] == "skip-gram"),
        vector_size=load["dim"],
        window=load["window"],
        negative=load["negative"],
        sample=load["sample"],
        alpha=load["lr"],
        min_alpha=load["lr"] * 1e-4,
        min_count=load["min_count"],
        workers=load["workers"],
        epochs=load["epochs"],
        seed=load["seed"],
    )
    model.build_vocab(corpus_file=load["corpus"])
    began = time.perf_counter()
    model.train(
        corpus_file=load["corpus"],
        total_examples=model.corpus_count,
        total_words=model.corpus_total_words,
        epochs=load["epochs"],
    )
    seconds = time.perf_counter() - began
    if load["save"]:
        model.wv.save_word2vec_format(load["save"], binary=True)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
