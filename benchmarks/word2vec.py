"""word2vec in words per second: manyhands, its kernels alone, gensim and fastText.

All have the same text (in lines of 1,000 words), settings and number of workers. Each repeat runs every
contender once, in rotating order, so that other load on the machine affects all; ratios are taken within a
repeat. Words are those in the vocabulary, before subsampling. Counting words and starting up are not
included.

    python benchmarks/word2vec.py text8.gz                          skip-gram, 100 dimensions
    python benchmarks/word2vec.py text8.gz --judge word_eval/       with the quality of the vectors
    python benchmarks/word2vec.py text8.gz --only manyhands --against COMMIT
    python benchmarks/word2vec.py text8.gz --model cbow --dim 200 --window 8 --negative 25 --epochs 15

`kernels` are threads on one pair of matrices (word2vec_driver.py); `limit` are threads with a pair of
matrices each, which learn nothing together: the limit of the machine. `manyhands` is the command `manyhands
train examples/word2vec.py`, with workers that share the tables, or over sockets: with TLS (`:tcp`), or only
authenticated (`:trusted`, with --trust-network). Peers are installed into benchmarks/.venvs at the first
run; a peer that can't be installed is listed with the reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import against
import numpy as np
from against import Tree
from ps import describe_machine
from ps_peers import VENVS, Package, Peer, python_of
from ps_watch import Failed, become_reaper, run
from word2vec_driver import Settings, Training, scores

from manyhands.data.corpus_files import prepare
from manyhands.data.text import Corpus, Vocabulary
from manyhands.word2vec.model import MAX_COPIES, MIN_WRITERS, WORDS_PER_COPY
from manyhands.word2vec.vectors import Vectors

HERE = Path(__file__).parent
LINE_WORDS = 1_000
DEADLINE_S = 3_600.0
PEERS = {
    "gensim": Peer("word2vec_peer_gensim.py", "", Package("gensim", ["gensim==4.4.*"], False)),
    "fasttext": Peer(
        "word2vec_peer_fasttext.py", "", Package("fasttext", ["fasttext-wheel", "numpy<2"], False)
    ),
}


@dataclass(frozen=True)
class Load:
    """One measurement, as the peers' scripts read it."""

    corpus: str
    model: str
    dim: int
    window: int
    negative: int
    sample: float
    lr: float
    epochs: int
    min_count: int
    workers: int = 1
    seed: int = 1
    save: str = ""


def ours(load: Load, folder: Path, *, transport: str, tree: Tree) -> float:
    """Words a second of `manyhands train`, as its run's summary.json says."""
    fields = {
        "text": load.corpus,
        "cbow": str(load.model == "cbow").lower(),
        **{
            name: getattr(load, name)
            for name in ("dim", "window", "negative", "sample", "lr", "epochs")
        },
        "min_count": load.min_count,
        "seed": load.seed,
    }
    where = folder / "run"
    spec = "ps:async" if transport == "shm" else "ps:async(transport=tcp)"
    job, env = tree.root / "examples" / "word2vec.py", os.environ | tree.environ()
    command = [sys.executable, "-m", "manyhands.cli.main", "train", str(job), "--strategy", spec]
    command += ["--workers", str(load.workers), "--run-dir", str(where)]
    if transport == "trusted":
        command += ["--trust-network"]
    for name, value in fields.items():
        command += ["--set", f"{name}={value}"]
    run(command, env=env, deadline_s=DEADLINE_S)
    summary = json.loads((where / "summary.json").read_text())
    if load.save:
        save = [
            sys.executable,
            "-m",
            "manyhands.cli.main",
            "words",
            str(where),
            "--save",
            load.save,
        ]
        run(save, env=env, deadline_s=DEADLINE_S)
    return float(summary["units_per_s"])


def kernels(load: Load, vocabulary: Vocabulary, ids: Path, *, apart: bool) -> float:
    """Words a second of threads on one pair of matrices, or on one pair each."""
    names = ("model", "dim", "window", "negative", "sample", "lr", "epochs", "seed")
    chosen = {name: getattr(load, name) for name in names}
    if load.workers >= MIN_WRITERS and not apart:
        chosen |= {"copied": MAX_COPIES, "chunk": MAX_COPIES * WORDS_PER_COPY}  # as workers do
    training = Training(vocabulary, ids, Settings(**chosen, threads=load.workers, apart=apart))
    seconds = training.run()
    if load.save:
        training.vectors().save(load.save, binary=True)
    return vocabulary.total * load.epochs / seconds


def peer(name: str, load: Load, num_words: int) -> float:
    python = python_of(PEERS[name], reinstall=False)
    script = str(HERE / PEERS[name].script)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = run([python, script, json.dumps(asdict(load))], env=env, deadline_s=DEADLINE_S)
    seconds = float(json.loads(ran.output.splitlines()[-1])["seconds"])
    return num_words * load.epochs / seconds


class Bench:
    def __init__(self, given: argparse.Namespace, folder: Path, trees: list[Tree]) -> None:
        self.given, self.folder, self.trees = given, folder, trees
        lines = in_lines(Path(given.corpus), folder / "corpus.txt", given.words, folder)
        self.vocabulary, self.ids = prepare(lines, folder, min_count=given.min_count)
        chosen = {
            name: getattr(given, name) for name in Load.__annotations__ if hasattr(given, name)
        }
        self.load = Load(**{**chosen, "corpus": str(lines), "workers": 1})
        self.failed: dict[str, str] = {}

    def measure(
        self, name: str, tree: Tree, workers: int, repeat: int
    ) -> tuple[float, dict[str, float]]:
        judged = self.given.judge and name != "limit"
        save = self.folder / f"{name.replace(':', '-')}.bin" if judged else None
        load = replace(self.load, workers=workers, seed=repeat + 1, save=str(save or ""))
        if name in ("kernels", "limit"):
            speed = kernels(load, self.vocabulary, self.ids, apart=name == "limit")
        elif name.startswith("manyhands"):
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                speed = ours(
                    load, Path(folder), transport=name.partition(":")[2] or "shm", tree=tree
                )
        else:
            speed = peer(name, load, self.vocabulary.total)
        return speed, scores(Vectors.load(save), self.given.judge) if save else {}

    def row(self, workers: int) -> dict[str, list[tuple[float, dict[str, float]]]]:
        """All contenders in turns; one that fails is left out from then on."""
        contenders = [
            (name, tree)
            for name in self.given.only
            for tree in self.trees
            if name.startswith("manyhands") or tree is self.trees[0]
        ]
        runs: dict[str, list[tuple[float, dict[str, float]]]] = {
            tree.label(name): [] for name, tree in contenders
        }
        for name, tree in contenders:
            if (
                tree is not self.trees[0]
            ):  # compiles its kernels, which are not cached in a new worktree
                self.measure(name, tree, workers, 0)
        for repeat in range(self.given.repeats):
            for name, tree in against.in_turn(contenders, repeat):
                label = tree.label(name)
                if label in self.failed:
                    continue
                try:
                    speed, found = self.measure(name, tree, workers, repeat)
                except Failed as error:
                    self.failed[label] = str(error)
                    print(f"  {label}: left out: {error}", flush=True)
                    continue
                runs[label].append((speed, found))
                told = "".join(f", {key} {value:.3f}" for key, value in found.items())
                print(
                    f"  {workers} worker(s), {repeat + 1}/{self.given.repeats}, {label}: "
                    f"{speed:,.0f} words/s{told}",
                    flush=True,
                )
        return {name: found for name, found in runs.items() if name not in self.failed}


def in_lines(corpus: Path, target: Path, limit: int | None, folder: Path) -> Path:
    """The text in lines of 1,000 words: gensim's threads take lines."""
    from manyhands.data.text_files import pieces

    words: list[bytes] = []
    with open(target, "wb") as file:
        for piece, at, _, ended in pieces(corpus, 0, None):
            block = piece.bytes[at:].tobytes()
            edge = len(block) if ended else max(block.rfind(b" "), block.rfind(b"\n")) + 1
            piece.done = at + edge
            words += block[:edge].split()
            if limit and len(words) > limit:
                break
            whole = len(words) // LINE_WORDS * LINE_WORDS if not limit else 0
            write_lines(file, words[:whole])
            words = words[whole:]
        write_lines(file, words[:limit])
    return target


def write_lines(file: Any, words: list[bytes]) -> None:
    for start in range(0, len(words), LINE_WORDS):
        file.write(b" ".join(words[start : start + LINE_WORDS]) + b"\n")


def table(runs: dict[str, list[tuple[float, dict[str, float]]]], workers: int) -> list[str]:
    """Median words a second, and ours over each peer's: median and spread of the repeats' ratios."""
    peers = [name for name in runs if name in PEERS]
    head = f"{workers} worker(s)".ljust(18) + "words/s".rjust(12) + "  lowest to highest".ljust(26)
    lines = [head + "".join(f"/ {name}".ljust(24) for name in peers)]
    for name, found in runs.items():
        speeds = [speed for speed, _ in found]
        spread = f"  {min(speeds):,.0f} to {max(speeds):,.0f}"
        line = name.ljust(18) + f"{statistics.median(speeds):,.0f}".rjust(12) + spread.ljust(26)
        for other in peers:
            ratios = [a / b for (a, _), (b, _) in zip(found, runs[other], strict=False)]
            told = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            line += told.ljust(24)
        lines.append(line.rstrip())
    return lines


def quality(runs: dict[str, list[tuple[float, dict[str, float]]]]) -> list[str]:
    lines = []
    for name, found in runs.items():
        means = {key: np.mean([scored[key] for _, scored in found]) for key in found[0][1]}
        if means:
            lines.append(name.ljust(18) + "  ".join(f"{k} {v:.3f}" for k, v in means.items()))
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", help="a text: plain, .gz, .bz2 or .xz")
    parser.add_argument("--only", type=lambda text: text.split(","), default=None)
    parser.add_argument(
        "--workers", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2]
    )
    parser.add_argument("--repeats", type=int, help="default: 3, or 7 with --against")
    against.add_flag(parser)
    parser.add_argument("--words", type=int, help="use only this many words of the text")
    parser.add_argument("--judge", type=Path, help="folder with questions-words.txt and the pairs")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--model", choices=["skip-gram", "cbow"], default="skip-gram")
    for name, value in (
        ("dim", 100),
        ("window", 5),
        ("negative", 5),
        ("epochs", 1),
        ("min_count", 5),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--sample", type=float, default=1e-4)
    parser.add_argument("--lr", type=float, default=0.05)
    given = parser.parse_args()
    given.repeats = given.repeats or (against.PAIRS if given.against else 3)
    ours = ["manyhands", "manyhands:tcp", "manyhands:trusted", "kernels", "limit"]
    given.only = given.only or [*ours, "gensim", "fasttext"]
    known = {*ours, *PEERS}
    if wrong := set(given.only) - known:
        parser.error(f"--only {','.join(wrong)}: there are {', '.join(sorted(known))}")
    return given


def describe() -> dict[str, Any]:
    """The machine, and what runs on it here."""
    machine = describe_machine()
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "numba")}
    for name in PEERS:
        for found in (VENVS / name).glob("lib/python*/site-packages/*.dist-info"):
            package, _, version = found.name.removesuffix(".dist-info").partition("-")
            if package.startswith(name):
                versions[name] = version
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB"
    words = f"{hardware}, load before {machine['load_before']:.1f}; {told}"
    return {**machine, "versions": versions, "words": words}


def main() -> None:
    given = parse()
    become_reaper()
    # Ended as by Ctrl-C: what runs is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    machine = describe()
    print(machine["words"])
    with (
        tempfile.TemporaryDirectory(prefix="word2vec-") as folder,
        against.trees(given.against) as trees,
    ):
        bench = Bench(given, Path(folder), trees)
        told = ", ".join(f"{key} {value}" for key, value in asdict(bench.load).items() if key in (
            "model", "dim", "window", "negative", "sample", "lr", "epochs"))  # fmt: skip
        size = f"{Corpus(bench.ids).num_words:,} words, {len(bench.vocabulary):,} distinct"
        print(f"{Path(given.corpus).name}: {size}; {told}; {given.repeats} repeat(s)", flush=True)
        results = {}
        for workers in given.workers:
            runs = results[workers] = bench.row(workers)
            print("", *table(runs, workers), *quality(runs), "", sep="\n", flush=True)
            for tree in trees[1:]:
                ratios = {
                    name: [a / b for (a, _), (b, _) in zip(runs[name], other, strict=True)]
                    for name in runs
                    if (other := runs.get(tree.label(name)))
                }
                print(*against.comparison(ratios, tree.commit), "", sep="\n", flush=True)
    for name, reason in bench.failed.items():
        print(f"left out: {name}: {reason}")
    if given.json:
        given.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
