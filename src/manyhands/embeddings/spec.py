"""The configuration of a table: its rows, its optimizer, admission and eviction of rows. Pure.

A table maps 64-bit ids to rows of `dim` float32. A row is made on its first use from a hash of (seed, name of
the table, id, column), so every process, every server and every run makes the same one.

Memory per row: the row itself, the state of its optimizer, 16 bytes of counters, and at most 24 bytes of
index if ids are not simply 0..rows-1.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from manyhands.embeddings.parsing import number_in, options_of, parse_bytes, show_bytes, split_call
from manyhands.errors import JobError, closest

META_BYTES = 16
"""Counters of a row: its id, how often it was looked up, when it was last used."""
INDEX_BYTES = 24
"""Maximum bytes of index per row, for rows found by hash."""

INITS = ("uniform", "normal", "zeros")
WHEN_FULL = ("share", "evict", "error")
MAX_DIM = 1 << 16
MAX_ROWS = (1 << 32) - 2
"""Slots are 32-bit numbers."""
MAX_COUNT = 1 << 31

_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("weight_decay",),
    "momentum": ("beta", "weight_decay"),
    "adagrad": ("eps", "initial", "weight_decay"),
    "rowwise_adagrad": ("eps", "initial", "weight_decay"),
    "adam": ("betas", "eps", "weight_decay"),
}
OPTIMIZERS = tuple(_OPTIONS)


@dataclass(frozen=True)
class RowOptimizer:
    """The optimizer of a table. It updates one row at a time, without a global step counter."""

    name: str = "adagrad"
    beta: float = 0.9
    """momentum: decay of the velocity."""
    betas: tuple[float, float] = (0.9, 0.999)
    """adam: decay of the mean and of the square. Bias correction uses the row's own number of updates."""
    eps: float = 1e-10
    """adagrad, rowwise_adagrad, adam: added to the square root. Given as text, adam has 1e-8."""
    initial: float = 0.0
    """adagrad, rowwise_adagrad: initial sum of squares."""
    weight_decay: float = 0.0
    """Decoupled: an update first shrinks the row by lr * weight_decay. Rows without updates don't shrink."""

    def __post_init__(self) -> None:
        if self.name not in _OPTIONS:
            raise JobError(
                f"A table has no optimizer {self.name!r}{closest(self.name, OPTIMIZERS)} "
                f"Allowed: {', '.join(OPTIMIZERS)}."
            )
        object.__setattr__(self, "betas", tuple(float(b) for b in self.betas))
        if len(self.betas) != 2:
            raise JobError(f"adam takes two betas, as betas=0.9:0.999; it was given {self.betas}.")
        for what, value in (("beta", self.beta), *(("betas", b) for b in self.betas)):
            number_in(f"{what} of {self.name}", value, 0.0, 1.0, below=True)
        for what in ("eps", "initial", "weight_decay"):
            number_in(f"{what} of {self.name}", getattr(self, what), 0.0, 1e30)

    @classmethod
    def of(cls, text: str) -> RowOptimizer:
        """Parse "adagrad", "momentum(beta=0.9)" or "adam(betas=0.9:0.999,eps=1e-8)"."""
        example = "adam(betas=0.9:0.999,eps=1e-8)"
        name, inside = split_call("optimizer", text, example)
        if name not in _OPTIONS:
            return cls(name)  # raises an error that lists what is allowed
        given: dict[str, Any] = {"eps": 1e-8} if name == "adam" else {}
        for key, value in options_of(f"optimizer {name}", inside, _OPTIONS[name], example).items():
            many = value.split(":") if key == "betas" else [value]
            try:
                numbers = tuple(float(one) for one in many)
            except ValueError:
                raise JobError(
                    f"The optimizer {text!r} of a table: {key} is a number, not {value!r}. "
                    f"Write it like  {example}."
                ) from None
            given[key] = numbers if key == "betas" else numbers[0]
        return cls(name, **given)

    @property
    def slots(self) -> int:
        """State numbers for each number of a row."""
        return {"momentum": 1, "adagrad": 1, "adam": 2}.get(self.name, 0)

    @property
    def scalar(self) -> bool:
        """If true, there is one more state number per row."""
        return self.name in ("rowwise_adagrad", "adam")

    @property
    def first(self) -> float:
        """Initial value of all state numbers."""
        return self.initial if "adagrad" in self.name else 0.0


@dataclass(frozen=True)
class Table:
    """A sparse table of a job. `Table(64)` has a row for any 64-bit id."""

    dim: int
    """Numbers in a row."""
    _: KW_ONLY
    rows: int | None = None
    """None: any 64-bit id, a row is made on first use. N: ids 0..N-1, found without an index."""
    optimizer: str | RowOptimizer = "adagrad"
    """sgd, momentum, adagrad, rowwise_adagrad, adam; with options as adam(betas=0.9:0.999,eps=1e-8)."""
    lr: float | None = None
    """None: the job's own learning rate. A number: this table's, scaled by the job's schedule."""
    init: str = "uniform"
    """uniform (between ±1/(2*dim)), uniform(0.05), normal(0.01), zeros."""
    admit_after: int = 1
    """An id gets a row of its own at this lookup. Before that it reads the initial row and learns nothing."""
    evict_unused: int | None = None
    """Evict rows that were not used for this many steps."""
    evict_below: int | None = None
    """Evict rows that were looked up fewer times than this."""
    max_bytes: int | str | None = None
    """Limit for rows, optimizer and index together: a number, or "2GiB". None: the memory of the host."""
    when_full: str = "share"
    """share: new ids share one row. evict: the same until the least recently used rows are evicted. error:
    fail."""

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, str):
            object.__setattr__(self, "optimizer", RowOptimizer.of(self.optimizer))
        if not isinstance(self.optimizer, RowOptimizer):
            raise JobError(
                f"Table(optimizer={self.optimizer!r}) is not allowed: give a name such as "
                f"{OPTIMIZERS[0]!r}, or a RowOptimizer. The job's own optimizer is for the model."
            )
        if self.max_bytes is not None:
            object.__setattr__(
                self, "max_bytes", parse_bytes("Table(max_bytes=...)", self.max_bytes)
            )
        _whole("dim", self.dim, MAX_DIM)
        _whole("rows", self.rows, MAX_ROWS, none="any 64-bit id")
        _whole("admit_after", self.admit_after, MAX_COUNT)
        _whole("evict_unused", self.evict_unused, MAX_COUNT, none="never")
        _whole("evict_below", self.evict_below, MAX_COUNT, none="never")
        if self.lr is not None:
            number_in("lr of a table", self.lr, 0.0, 1e30)
        if self.when_full not in WHEN_FULL:
            raise JobError(
                f"Table(when_full={self.when_full!r}) is not allowed{closest(self.when_full, WHEN_FULL)} "
                f"Allowed: {', '.join(WHEN_FULL)}."
            )
        self.initial_scale()  # raises if init does not parse
        needed = (self.rows or 0) * self.bytes_per_row()
        if self.limit is not None and needed > self.limit:
            raise JobError(
                f"Table(rows={self.rows}, max_bytes={self.max_bytes}) does not fit: {self.rows:,} rows of "
                f"{self.bytes_per_row()} bytes are {show_bytes(needed)}. Give more bytes, "
                "or leave rows out: then only the rows in use take memory."
            )

    @property
    def row_optimizer(self) -> RowOptimizer:
        assert isinstance(self.optimizer, RowOptimizer)
        return self.optimizer

    @property
    def limit(self) -> int | None:
        """`max_bytes` as a number."""
        assert not isinstance(self.max_bytes, str)
        return self.max_bytes

    @property
    def width(self) -> int:
        """float32 numbers per record: the row, the state of its optimizer, and padding.

        They are adjacent because an update touches both: one page, adjacent cache lines. Records are aligned
        to cache lines, or to the largest fraction of one that wastes no more than an eighth.
        """
        used = self.dim * (1 + self.row_optimizer.slots)
        for unit in (16, 8, 4, 2):
            padded = -(-used // unit) * unit
            if 8 * (padded - used) <= used:
                return padded
        return used

    def initial_scale(self) -> tuple[str, float]:
        """Return the kind of the initial numbers, and their bound (uniform) or deviation (normal)."""
        example = "uniform, uniform(0.05), normal(0.01) or zeros"
        name, inside = split_call("init", self.init, example)
        if name not in INITS:
            raise JobError(f"A table has no init {name!r}{closest(name, INITS)} Write  {example}.")
        if name == "zeros" and not inside:
            return name, 0.0
        if name == "uniform" and not inside:
            return name, 0.5 / self.dim
        try:
            scale = float(inside)
        except ValueError:
            raise JobError(f"Table(init={self.init!r}) does not parse. Write  {example}.") from None
        if name == "zeros":
            raise JobError(f"Table(init={self.init!r}) is not allowed: zeros take no number.")
        return name, number_in(f"the number of init {name}", scale, 0.0, 1e30)

    def bytes_per_row(self) -> int:
        """Return the maximum memory per row: row, optimizer, counters, index."""
        index = INDEX_BYTES if self.rows is None else 0
        return 4 * self.width + 4 * self.row_optimizer.scalar + META_BYTES + index

    def describe(self) -> str:
        """Describe the table in one line."""
        ids = "any id" if self.rows is None else f"ids 0..{self.rows - 1:,}"
        numbers = "1 number" if self.dim == 1 else f"{self.dim} numbers"
        parts = [f"{numbers} a row, {ids}", str(self.row_optimizer.name)]
        if self.lr is not None:
            parts.append(f"lr {self.lr:g}")
        parts.append(f"{self.bytes_per_row()} bytes a row")
        if self.admit_after > 1:
            parts.append(f"a row after {self.admit_after} lookups")
        if self.evict_unused is not None:
            parts.append(f"evicted when unused for {self.evict_unused:,} steps")
        if self.evict_below is not None:
            parts.append(f"evicted below {self.evict_below:,} lookups")
        if self.limit is not None:
            parts.append(f"at most {show_bytes(self.limit)}, then {self.when_full}")
        return ", ".join(parts)

    @property
    def digest(self) -> int:
        """63 bits that are equal only for tables with the same layout and options."""
        text = json.dumps(asdict(self), sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def salt_of(name: str, seed: int) -> int:
    """Return 64 bits from which the initial rows of a table follow, besides the id."""
    text = f"{seed}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def check_name(name: str) -> str:
    """Check the name of a table, which is part of paths, labels and messages."""
    if not re.fullmatch(r"\w[\w.-]{0,199}", name):
        raise JobError(
            f"{name!r} can't be the name of a table, which is the path of its module: use letters, digits, "
            "'_', '-' and '.', 200 at most, such as  users  or  item_tags."
        )
    return name


def _whole(what: str, value: Any, most: int, *, none: str = "") -> None:
    if value is None and none:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        extra = f", or None ({none})" if none else ""
        raise JobError(
            f"Table({what}={value!r}) is not allowed: {what} is a whole number from 1 to {most:,}{extra}."
        )
