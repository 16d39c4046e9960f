"""Use word vectors: nearest words, evaluations, a picture, export to other formats.

WHERE is a run of examples/word2vec.py, or a file in the text or binary format of word2vec.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.errors import UsageError

if TYPE_CHECKING:
    from manyhands.word2vec.vectors import Vectors

HELP = "use word vectors: nearest words, evaluations, a picture, export"
EXAMPLES = """\
examples:
  manyhands words runs/word2vec-20260101-120000 --similar king
  manyhands words vectors.bin --similar king,woman,-man        king - man + woman
  manyhands words runs/word2vec-... --analogies questions-words.txt --pairs wordsim353.tsv
  manyhands words runs/word2vec-... --picture paris,river,music --save vectors.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="WHERE", type=Path, help="a run, or a file of vectors")
    parser.add_argument(
        "--similar",
        metavar="WORDS",
        help="print the words nearest to WORDS, separated by commas: their sum, minus each -WORD",
    )
    parser.add_argument(
        "--count",
        type=int,
        default=10,
        metavar="N",
        help="with --similar: number of words to print (default: 10)",
    )
    parser.add_argument(
        "--analogies",
        type=Path,
        metavar="FILE",
        help="print the accuracy on a file of analogies, such as questions-words.txt",
    )
    parser.add_argument(
        "--restrict",
        type=int,
        default=30_000,
        metavar="N",
        help="with --analogies: use only the N most frequent words (default: 30000)",
    )
    parser.add_argument(
        "--pairs",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="print the correlation with human ratings of similarity, such as wordsim353.tsv; may be "
        "repeated",
    )
    parser.add_argument(
        "--picture",
        metavar="WORDS",
        help="draw these words, separated by commas, and their neighbours, to the file of --out",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("words.svg"),
        metavar="FILE",
        help="with --picture: the SVG to write (default: words.svg)",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="save the vectors in word2vec's format: binary if the name ends in .bin, else text",
    )


def run(arguments: argparse.Namespace) -> int:
    actions = (arguments.similar, arguments.analogies, arguments.picture, arguments.save)
    if not any(actions) and not arguments.pairs:
        raise UsageError(
            "Choose what to do with the vectors: --similar, --analogies, --pairs, --picture or --save. "
            "See  manyhands words --help."
        )
    vectors = _load(arguments.where)
    print(f"{len(vectors.words):,} words, {vectors.matrix.shape[1]} dimensions")
    if arguments.similar:
        _similar(vectors, arguments.similar, arguments.count)
    if arguments.analogies:
        _analogies(vectors, arguments.analogies, arguments.restrict)
    for file in arguments.pairs:
        from manyhands.word2vec.evaluation import pairs

        spearman, found, total = pairs(vectors, file)
        print(f"{file.name}: {spearman:.3f} (Spearman, {found} of {total} pairs)")
    if arguments.picture:
        from manyhands.word2vec.picture import neighbourhood

        arguments.out.write_text(neighbourhood(vectors, _split(arguments.picture)))
        print(f"picture: {arguments.out}")
    if arguments.save:
        vectors.save(arguments.save, binary=arguments.save.suffix == ".bin")
        print(f"saved: {arguments.save}")
    return 0


def _load(where: Path) -> Vectors:
    from manyhands.word2vec.vectors import Vectors

    if where.is_dir():
        from manyhands.word2vec.runs import vectors_of_run

        return vectors_of_run(where)
    return Vectors.load(where)


def _similar(vectors: Vectors, words: str, count: int) -> None:
    terms = _split(words)
    positive = [word for word in terms if not word.startswith("-")]
    negative = [word[1:] for word in terms if word.startswith("-")]
    for word, likeness in vectors.most_similar(positive, negative, count):
        print(f"  {likeness:.3f}  {word}")


def _analogies(vectors: Vectors, file: Path, restrict: int) -> None:
    from manyhands.word2vec.evaluation import analogies

    score = analogies(vectors, file, restrict=restrict)
    print(
        f"{file.name}: {score.accuracy:.1%} correct (semantic {score.semantic.accuracy:.1%}, syntactic "
        f"{score.syntactic.accuracy:.1%}; {score.total.asked:,} questions among the {restrict:,} "
        "most frequent words)"
    )


def _split(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]
