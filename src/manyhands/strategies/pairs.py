"""The one table of what works together: strategies with codecs, precisions and features of a run.

The rows are declared in the files of the strategies and codecs (pairs.py has the words for it). A run is
checked against them on the command line, before any process starts, and again once the facts of its job are
known. The table in docs/strategies/pairs.md is made from them, and so are the cases of its tests. Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from manyhands.codecs.codec import PLAIN, Codec
from manyhands.contract import Strategy, Traits
from manyhands.errors import SpecError
from manyhands.pairs import CODEC, KINDS, OWN_LOOP, WORKERS, Feature, Unsupported, features
from manyhands.strategies.registry import STRATEGIES, codec_of, spec_of, takes_codec, with_codec

Given = Mapping[Feature, str]
"""The features of a run, each as it was given: `--scale-batch linear`, `the table users of the model`."""


def check_pairs(config: Strategy, given: Given, *, workers: int) -> None:
    """Raise SpecError if the strategy, with its codec, can't be combined with what is given. The error names
    the nearest strategy that can, and what to type."""
    codec = codec_of(config)
    if workers > 1:
        given = {WORKERS: f"--workers {workers}", **given}
    if codec.feature is not None:
        given = {codec.feature: codec.name, **given}
    refusal = refusal_of(config, given)
    if refusal is not None:
        raise _error(config, codec, given, refusal, workers=workers)


def nearest_with(config: Strategy, codec: Codec) -> str | None:
    """Return the spec of this strategy with the codec, or of the one most like it that works with it."""
    if takes_codec(type(config)):
        return spec_of(with_codec(config, codec))
    given = [] if codec.feature is None else [codec.feature]
    return nearest(config, given, workers=config.traits.default_workers, codec=codec)


def refused_codec(config: Strategy, codec: Codec) -> SpecError:
    """Return the error of a strategy that takes no codec."""
    assert codec.feature is not None, codec
    given = {codec.feature: codec.name}
    refusal = refusal_of(config, given)
    assert refusal is not None, f"{config} takes no codec, and {codec.name} works with it"
    return _error(config, codec, given, refusal, workers=config.traits.default_workers)


def _error(
    config: Strategy, codec: Codec, given: Given, refusal: Unsupported, *, workers: int
) -> SpecError:
    feature, typed = refusal.feature, given[refusal.feature]
    plain = with_codec(config, PLAIN)
    without = (
        f"--strategy {shlex.quote(spec_of(plain))}" if feature.kind == CODEC else feature.without
    )
    ways = [without] if without else []
    if near := nearest(config, given, workers=workers, first=refusal.instead, codec=codec):
        flag = f" {typed}" if typed.startswith("--") else ""
        own_loop = OWN_LOOP in given
        ways.insert(
            0, f'mh.join("{near}")' if own_loop else f"--strategy {shlex.quote(near)}{flag}"
        )
    use = f" Use  {'  or  '.join(ways)}." if ways else ""
    subject = spec_of(plain if feature.kind == CODEC else config)
    return SpecError(f"{typed} does not work with {subject}: {refusal.why}.{use}")


def refusal_of(config: Strategy, given: Collection[Feature]) -> Unsupported | None:
    """Return the first reason why a strategy can't be combined with these features, if there is one."""
    of_strategy = config.unsupported
    for feature in features():
        if feature not in given:
            continue
        if feature.works_with is not None and config.name not in feature.works_with:
            works = ", ".join(feature.works_with)
            return Unsupported(feature, f"it was tested only with {works}")
        for refusal in (*of_strategy, *(r for other in given for r in other.unsupported)):
            along = refusal.along_with
            if refusal.feature == feature and (along is None or along in given):
                return refusal
    return None


def nearest(
    config: Strategy,
    given: Collection[Feature],
    *,
    workers: int,
    first: str = "",
    codec: Codec = PLAIN,
) -> str | None:
    """Return the spec of the strategy most like this one that can be combined with the features, with the
    codec; the strategy `first` if it can."""
    for candidate in sorted(
        _candidates(config, codec), key=lambda it: (it.name != first, _distance(config, it))
    ):
        try:
            candidate.check(workers)
        except SpecError:
            continue
        if refusal_of(candidate, given) is None:
            return spec_of(candidate)
    return None


def _candidates(config: Strategy, codec: Codec) -> Iterator[Strategy]:
    """Yield this strategy with other options, then all others with their defaults; those that take the
    codec."""
    for candidate in _plain_candidates(config):
        if codec == PLAIN or takes_codec(type(candidate)):
            yield with_codec(candidate, codec)


def _plain_candidates(config: Strategy) -> Iterator[Strategy]:
    cls = type(config)
    defaults = {field.name: field.default for field in fields(cls)}
    for variant in cls.variants:
        yield replace(config, **{name: defaults[name] for name in variant})
        yield replace(config, **variant)
    for other in STRATEGIES.values():
        if other is not cls:
            yield from (made for _, made in _rows_of(other))


def _distance(config: Strategy, other: Strategy) -> int:
    """Count in how many facts two strategies differ. Another family (`ps:`) counts as many, and so do options
    of another strategy that are not its defaults."""
    families = {each.name.partition(":")[0] for each in (config, other)}
    ours, theirs = config.traits, other.traits
    differ = sum(getattr(ours, f.name) != getattr(theirs, f.name) for f in fields(Traits))
    if type(config) is type(other):
        return differ - 100
    has_options = with_codec(other, PLAIN) != type(other)()
    return differ + 20 * (len(families) - 1) + 10 * has_options


# The table ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StrategyRow:
    """A strategy, with its defaults or in a variant, and the features that it refuses."""

    spec: str
    config: Strategy
    refused: Mapping[Feature, Unsupported]
    """By feature, with several workers if need be."""


def rows() -> list[StrategyRow]:
    """Return the whole table: each strategy with its defaults, followed by its variants."""
    return [
        StrategyRow(spec, config, _refused(config))
        for cls in STRATEGIES.values()
        for spec, config in _rows_of(cls)
    ]


def _rows_of(cls: type[Strategy]) -> Iterator[tuple[str, Strategy]]:
    for variant in ({}, *cls.variants):
        config = cls(**variant)
        yield spec_of(config), config


def _refused(config: Strategy) -> dict[Feature, Unsupported]:
    alone = {f: r for f in features() if (r := refusal_of(config, [f])) is not None}
    pairs = {r.feature: r for r in config.unsupported if r.along_with is not None}
    return {**pairs, **alone}


def markdown() -> str:
    """Return the table for the documentation, then each reason."""
    table = rows()
    plain = [row for row in table if row.config == type(row.config)()]
    names = [f"`{row.spec}`" for row in plain]
    lines = [f"| | {' | '.join(names)} |", f"|{' --- |' * (len(names) + 1)}"]
    notes: dict[str, int] = {}
    for feature in sorted(features(), key=lambda feature: KINDS.index(feature.kind)):
        cells = [_cell(row.refused.get(feature), notes) for row in plain]
        lines.append(f"| {feature.title} ({feature.means}) | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {text}" for text, number in notes.items()), ""]
    lines += ["With other options:", ""]
    specs: dict[str, list[str]] = {}
    for row in table:
        if row not in plain:
            base = next(p for p in plain if type(p.config) is type(row.config))
            for text in _differences(base, row):
                specs.setdefault(text, []).append(f"`{row.spec}`")
    lines += [f"- {', '.join(of)}: {text}." for text, of in specs.items()]
    return "\n".join(lines) + "\n"


def _cell(refusal: Unsupported | None, notes: dict[str, int]) -> str:
    if refusal is None:
        return "yes"
    number = notes.setdefault(_sentence(refusal), len(notes) + 1)
    return f"{'no' if refusal.along_with is None else 'partly'} ({number})"


def _sentence(refusal: Unsupported) -> str:
    why = refusal.why[0].upper() + refusal.why[1:]
    return (
        f"{why}."
        if refusal.along_with is None
        else f"With {refusal.along_with.title}: {refusal.why}."
    )


def _differences(base: StrategyRow, row: StrategyRow) -> Iterator[str]:
    """Yield the differences of a variant to its strategy, in both directions."""
    for feature in features():
        before, after = base.refused.get(feature), row.refused.get(feature)
        if before == after:
            continue
        if after is None:
            yield f"works with {feature.title}, too"
        else:
            with_ = f" along with {after.along_with.title}" if after.along_with else ""
            yield f"not with {feature.title}{with_}, because {after.why}"
