"""Blocks and their placement: nothing is lost or overlaps, loads are even, and few bytes move."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import ManyhandsError, UsageError
from manyhands.ps.blocks import (
    ALIGN,
    BLOCKS_PER_SERVER,
    MAX_SHARDS,
    MIN_BLOCK_BYTES,
    BlockLayout,
    FlatParameter,
    order_needed,
)
from manyhands.ps.placement import (
    GAIN,
    SLACK,
    STRIPES,
    TOLERANCE,
    Placement,
    PlacementRecord,
    place,
)
from manyhands.transport.fields import read, write

KINDS = [("float32", 4), ("bfloat16", 2), ("float16", 2), ("float64", 8)]


@st.composite
def models(draw: st.DrawFn, *, largest: int = 3_000) -> list[FlatParameter]:
    """Tiny biases, layers, and now and then an embedding that dwarfs all else."""
    numel = st.one_of(st.integers(0, 40), st.integers(1, largest), st.just(20 * largest))
    rows = draw(st.lists(st.tuples(numel, st.sampled_from(KINDS), st.integers(0, 2)), max_size=20))
    return [
        FlatParameter(f"p{number}", numel, itemsize, group, dtype)
        for number, (numel, (dtype, itemsize), group) in enumerate(rows)
    ]


layouts = st.builds(
    BlockLayout.of,
    models(),
    block_bytes=st.sampled_from([512, 2048, 65_536, 4 << 20]),
    whole_tensors=st.booleans(),
    min_blocks=st.sampled_from([1, 7, 64]),
)
crowds = st.integers(1, 8).map(lambda count: [f"s{number}" for number in range(count)])


def linears(*pairs: tuple[int, int]) -> list[FlatParameter]:
    return [
        piece
        for number, (a, b) in enumerate(pairs)
        for piece in (
            FlatParameter(f"{number}.weight", a * b, 4),
            FlatParameter(f"{number}.bias", b, 4),
        )
    ]


def transformer() -> list[FlatParameter]:
    """25 M parameters, with weight decay on the matrices only: two groups."""
    width, words, depth = 512, 12_000, 6
    matrices = {"embedding": words * width}
    vectors = {}
    for layer in range(depth):
        matrices[f"{layer}.qkv"], matrices[f"{layer}.out"] = 3 * width**2, width**2
        matrices[f"{layer}.up"] = matrices[f"{layer}.down"] = 4 * width**2
        for name in ("norm1", "norm2", "qkv_bias", "out_bias", "up_bias", "down_bias"):
            vectors[f"{layer}.{name}"] = width
    return [FlatParameter(name, numel, 4, 0) for name, numel in matrices.items()] + [
        FlatParameter(name, numel, 4, 1) for name, numel in vectors.items()
    ]


CHANNELS = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
REAL = {
    "perceptron": linears((784, 1024), (1024, 1024), (1024, 10)),
    "transformer": transformer(),
    "vgg16": linears(
        *((9 * a, b) for a, b in pairwise(CHANNELS)), (25_088, 4096), (4096, 4096), (4096, 1000)
    ),
}


def new_servers(new: Placement, old: Placement) -> dict[int, str]:
    """The shards that have another server than before, and which."""
    numbers = range(len(new.layout.shards))
    return {n: new.holders(n)[0] for n in numbers if new.holders(n)[0] != old.holders(n)[0]}


def moved(new: Placement, old: Placement) -> int:
    """Bytes that must travel for servers to have their shards: none where a replica is promoted."""
    sizes = new.layout.shard_bytes
    return sum(
        sizes[n] for n, server in new_servers(new, old).items() if server not in old.holders(n)
    )


def even(layout: BlockLayout, servers: list[str] | tuple[str, ...]) -> float:
    return layout.num_bytes / len(servers)


@given(layouts)
def test_pieces_and_blocks_fill_the_buffers(layout: BlockLayout) -> None:
    for buffer in layout.buffers:
        mine = [(layout.slots[p.name], p) for p in layout.pieces]
        mine = [(slot, piece) for slot, piece in mine if slot.buffer == buffer.number]
        for slot, piece in mine:
            assert slot.start % ALIGN == 0
            assert slot.stop - slot.start == piece.numel
            kind = (piece.group, piece.itemsize, piece.dtype)
            assert kind == (buffer.group, buffer.itemsize, buffer.dtype)
        assert mine[0][0].start == 0
        assert mine[-1][0].stop == buffer.numel
        assert all(0 <= b.start - a.stop < ALIGN for (a, _), (b, _) in pairwise(mine))

        blocks = [block for block in layout.blocks if block.buffer == buffer.number]
        assert all(block.start % ALIGN == 0 and block.numel > 0 for block in blocks)
        if layout.whole_tensors:
            spans = {(block.start, block.stop) for block in blocks}
            assert spans == {(s.start, s.stop) for s, piece in mine if piece.numel}
        elif blocks:
            assert (blocks[0].start, blocks[-1].stop) == (0, buffer.numel)
            assert all(a.stop == b.start for a, b in pairwise(blocks))
    assert [block.number for block in layout.blocks] == list(range(len(layout.blocks)))


@given(models(), st.sampled_from([1000, 65_536, 4 << 20]), st.sampled_from([1, 7, 64]))
def test_blocks_have_the_requested_size(
    pieces: list[FlatParameter], block_bytes: int, min_blocks: int
) -> None:
    layout = BlockLayout.of(pieces, block_bytes=block_bytes, min_blocks=min_blocks)
    for buffer in layout.buffers:
        sizes = [b.num_bytes for b in layout.blocks if b.buffer == buffer.number]
        unit = ALIGN * buffer.itemsize
        assert all(size <= max(block_bytes, unit) for size in sizes)
        if len(sizes) > 1:
            assert max(sizes) - min(sizes) < 2 * unit
            assert min(sizes) > min(MIN_BLOCK_BYTES, block_bytes // 2) - 2 * unit
    if layout.num_bytes >= 2 * min_blocks * MIN_BLOCK_BYTES and len(layout.buffers) == 1:
        assert len(layout.blocks) >= min_blocks


def test_one_tensor_spreads_over_four_servers_if_asked() -> None:
    pieces = [FlatParameter("w", 1 << 20, 4)]
    assert len(BlockLayout.of(pieces).blocks) == 1
    layout = BlockLayout.of(pieces, min_blocks=4)
    assert [block.num_bytes for block in layout.blocks] == [1 << 20] * 4
    assert len(BlockLayout.of(pieces, min_blocks=10_000).blocks) == 64  # 64 KiB each


@given(layouts)
def test_pieces_and_blocks_find_each_other(layout: BlockLayout) -> None:
    overlaps = {
        (block.number, piece.name)
        for block in layout.blocks
        for piece in layout.pieces
        if (slot := layout.slots[piece.name]).buffer == block.buffer
        and max(slot.start, block.start) < min(slot.stop, block.stop)
    }
    assert overlaps == {(b.number, p.name) for b in layout.blocks for p in layout.pieces_in(b)}
    assert overlaps == {
        (b.number, p.name) for p in layout.pieces for b in layout.blocks_with(p.name)
    }


@pytest.mark.parametrize("whole", [False, True])
def test_shards_are_runs_of_blocks_of_bounded_size(whole: bool) -> None:
    pieces = [
        FlatParameter("huge", 3_000_000, 4),
        *(FlatParameter(f"b{n}", 1 + n % 99, 4) for n in range(3000)),
    ]
    layout = BlockLayout.of(pieces, block_bytes=1024, whole_tensors=whole)
    assert len(layout.blocks) > MAX_SHARDS >= len(layout.shards) > 1
    found = [layout.shard_of(block) for block in layout.blocks]
    assert found == [s for s in range(len(layout.shards)) for _ in layout.blocks_in(s)]
    largest = max(block.num_bytes for block in layout.blocks)
    assert max(layout.shard_bytes) <= layout.num_bytes / MAX_SHARDS + largest
    assert sum(layout.shard_bytes) == layout.num_bytes


def test_blocks_are_ordered_by_first_use() -> None:
    layout = BlockLayout.of(transformer())
    names = sorted((p.name for p in layout.pieces), key=lambda name: (name != "embedding", name))
    ordered = order_needed(layout, names)
    assert sorted(b.number for b in ordered) == list(range(len(layout.blocks)))
    first = [min(names.index(p.name) for p in layout.pieces_in(block)) for block in ordered]
    assert first == sorted(first)
    vectors = layout.blocks_with("0.norm1")[0]
    assert ordered.index(vectors) < len(ordered) / 2
    assert order_needed(layout)[-1] == vectors  # the optimizer has the vectors in its last group


@settings(max_examples=20)
@given(layouts, crowds, st.data())
def test_loads_are_within_one_shard_of_their_share(
    layout: BlockLayout, servers: list[str], data: st.DataObject
) -> None:
    weights = dict(zip(servers, data.draw(st.lists(
        st.sampled_from([1.0, 1.0, 2.0, 0.5]), min_size=len(servers), max_size=len(servers)
    )), strict=True))  # fmt: skip
    largest = max(layout.shard_bytes, default=0)
    placement = place(layout, servers, weights=weights)
    joined = place(layout, [*servers, "new"], previous=placement)
    for made in (placement, joined):
        assert sum(map(made.bytes_of, made.servers)) == layout.num_bytes
        for server, share in zip(made.servers, made.shares, strict=True):
            target = share * layout.num_bytes
            assert abs(made.bytes_of(server) - target) <= max(
                SLACK * target, largest + 1 + GAIN * target
            )
        told = made.describe()
        if "too little to spread" in told:
            assert len(layout.blocks) < len(made.servers)
        else:
            assert (made.imbalance > TOLERANCE) == ("uneven" in told)
    numbers = [b.number for server in servers for b in placement.blocks_of(server)]
    assert sorted(numbers) == list(range(len(layout.blocks)))
    assert all(b in placement.blocks_of(placement.server_of(b)) for b in layout.blocks)


@given(models(largest=100_000), st.integers(1, 8))
def test_cut_tensors_are_within_a_tenth_of_even(pieces: list[FlatParameter], count: int) -> None:
    layout = BlockLayout.of(pieces, block_bytes=32_768)
    servers = [f"s{number}" for number in range(count)]
    placement = place(layout, servers)
    if max(layout.shard_bytes, default=0) < 0.09 * even(layout, servers):
        for server in servers:
            assert placement.bytes_of(server) == pytest.approx(even(layout, servers), rel=0.1)


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("one_host", [True, False])
def test_real_models_are_even(name: str, count: int, one_host: bool) -> None:
    layout = BlockLayout.of(REAL[name], min_blocks=BLOCKS_PER_SERVER * count)
    servers = tuple(f"s{number}" for number in range(count))
    placement = place(layout, servers, hosts=dict.fromkeys(servers, "here") if one_host else None)
    for server in servers:
        assert placement.bytes_of(server) == pytest.approx(even(layout, servers), rel=0.1)
        runs = [b.number - i for i, b in enumerate(placement.blocks_of(server))]
        assert len(list(groupby(runs))) <= (1 if one_host else STRIPES + 2)
        if count > 1:
            copies = sum(block.num_bytes for block in placement.replicas_of(server))
            assert copies == pytest.approx(even(layout, servers), rel=0.1)


@pytest.mark.parametrize("count", range(2, 8))
@pytest.mark.parametrize("name", REAL)
def test_few_bytes_move_when_servers_join_or_leave(name: str, count: int) -> None:
    layout = BlockLayout.of(REAL[name], min_blocks=BLOCKS_PER_SERVER * 8)
    block = max(layout.shard_bytes)
    servers = tuple(f"s{number}" for number in range(count))
    before = place(layout, servers, replicas=0)

    more = place(layout, (*servers, "new"), previous=before, replicas=0)
    assert more.imbalance <= TOLERANCE
    assert set(new_servers(more, before).values()) == {"new"}
    assert moved(more, before) <= even(layout, more.servers) + block

    fewer = place(layout, servers[1:], previous=before, replicas=0)
    assert fewer.imbalance <= TOLERANCE
    assert moved(fewer, before) <= before.bytes_of("s0") + block * (count - 1)

    assert place(layout, servers, previous=before, replicas=0) == before


@pytest.mark.parametrize("count", range(2, 8))
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("hosts", [1, 8])
def test_a_death_promotes_replicas(name: str, count: int, hosts: int) -> None:
    layout = BlockLayout.of(REAL[name], min_blocks=BLOCKS_PER_SERVER * 8)
    servers = [f"s{number}" for number in range(count)]
    where = {server: f"h{number % hosts}" for number, server in enumerate(servers)}
    before = place(layout, servers, hosts=where)
    assert before.imbalance <= TOLERANCE
    for number, server in enumerate(servers):
        holders = {before.replica_of(block) for block in before.blocks_of(server)}
        assert holders == {servers[(number + 1) % count]}
    after = place(layout, servers[1:], previous=before, hosts=where)
    assert after.imbalance <= TOLERANCE
    # Without replicas the dead server's whole share would have to travel; now what is over the holder's.
    assert moved(after, before) <= before.bytes_of("s0")
    assert (after.seconds is None) == (count == 2)


def test_servers_that_share_hosts_keep_equally_many_replicas() -> None:
    layout = BlockLayout.of(REAL["perceptron"], min_blocks=BLOCKS_PER_SERVER * 8)
    servers = tuple(f"s{number}" for number in range(4))
    placement = place(layout, servers, hosts=dict(zip(servers, "aabb", strict=True)))
    for server in servers:
        copies = sum(block.num_bytes for block in placement.replicas_of(server))
        assert copies == pytest.approx(even(layout, servers), rel=0.1)


@settings(max_examples=40)
@given(layouts, crowds, st.sets(st.integers(0, 7), max_size=5))
def test_replicas_stay_on_other_servers_after_any_deaths(
    layout: BlockLayout, servers: list[str], dead: set[int]
) -> None:
    hosts = {server: f"host{number % 3}" for number, server in enumerate([*servers, "new"])}
    placement = place(layout, servers, hosts=hosts)
    left = [server for number, server in enumerate(servers) if number not in dead]
    after = place(layout, [*left, "new"], previous=placement, hosts=hosts)
    for made in (placement, after):
        choice = len({hosts[server] for server in made.servers}) > 1
        for block in layout.blocks:
            server, replica = made.server_of(block), made.replica_of(block)
            assert (replica is None) == (len(made.servers) == 1)
            assert replica != server
            assert replica is None or not choice or hosts[replica] != hosts[server]
        copies = {s: set(made.replicas_of(s)) for s in made.servers}
        assert all(b in copies[r] for b in layout.blocks if (r := made.replica_of(b)))


@given(layouts, crowds)
def test_placements_are_deterministic_and_survive_json(
    layout: BlockLayout, servers: list[str]
) -> None:
    placement = place(layout, servers)
    assert place(layout, servers) == placement
    record = read(PlacementRecord, json.loads(json.dumps(write(placement.to_record()))))
    assert Placement.from_record(record, layout=layout) == placement
    other = BlockLayout.of([*layout.pieces, FlatParameter("one more", 1, 4)])
    with pytest.raises(ManyhandsError, match="same job file"):
        Placement.from_record(record, layout=other)
    count = len(layout.shards)
    for firsts in ((0,) * (count + 1), (99,) * (count or 1)):
        with pytest.raises(ManyhandsError, match="Invalid placement"):
            Placement.from_record(replace(record, firsts=firsts), layout=layout)


def test_describe() -> None:
    perceptron = REAL["perceptron"]
    two = place(BlockLayout.of(perceptron, min_blocks=8), ["a", "b"])
    assert two.describe() == "2 servers, 3.7 MB each (4 blocks and 4), replicas on the other"
    one = place(BlockLayout.of(perceptron), ["a"])
    assert one.describe() == "1 server, 7.5 MB (2 blocks), no replicas"
    whole = place(BlockLayout.of(REAL["vgg16"], whole_tensors=True), ["a", "b", "c"])
    assert "uneven: the optimizer needs whole tensors, and 13.weight alone is 411.0 MB" in (
        whole.describe()
    )
    small = place(
        BlockLayout.of([FlatParameter("w", 100, 4)]), [f"s{n}" for n in range(5)], replicas=0
    )
    assert small.describe() == ("5 servers, 400 B in 1 block, too little to spread, no replicas")


def test_invalid_arguments_are_refused() -> None:
    layout = BlockLayout.of(REAL["perceptron"])
    for servers in ([], ["a", "a"]):
        with pytest.raises(UsageError, match="each name once"):
            place(layout, servers)
    with pytest.raises(UsageError, match="a, b needs"):
        place(layout, ["a", "b"], weights={"a": 1.0})
    with pytest.raises(UsageError, match="0 or 1"):
        place(layout, ["a"], replicas=2)
    with pytest.raises(UsageError, match="block_bytes=0"):
        BlockLayout.of([], block_bytes=0)
    with pytest.raises(ManyhandsError, match="one model"):
        place(layout, ["a"], previous=place(BlockLayout.of([]), ["a"]))
