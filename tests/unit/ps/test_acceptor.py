"""Invalid messages to a server are refused with a reason, change nothing, and disturb no other worker."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_group import (
    BAD,
    BUFFERS,
    DATA_LINK,
    ENTER,
    GOOD,
    LONG_S,
    LR,
    PLAIN,
    PUSH,
    SERVER,
    SPAN,
    STATISTICS,
    VIEW,
    WHO,
    WORDS,
    entered,
    last_words,
    mutated,
    mutated_pushes,
    push_of,
    running_server,
)
from torch import nn

from manyhands.errors import LinkClosed, LinkError, ManyhandsError, WeightsLost
from manyhands.ps.acceptor import MAX_UNIDENTIFIED, Acceptor, Admission
from manyhands.ps.block_store import FlatTensors
from manyhands.ps.client import PushOutcome
from manyhands.ps.model_layout import layout_of
from manyhands.ps.policies import MAX_UNDER_WAY
from manyhands.ps.sessions import MAX_UNHANDLED
from manyhands.threads import fail_process
from manyhands.transport import Link, Listener, connect


@pytest.mark.parametrize("head", WORDS, ids=lambda head: head["kind"])
def test_every_field_of_every_message_is_checked(head: dict[str, Any], tmp_path: Path) -> None:
    payload = STATISTICS if head is BUFFERS else None
    with running_server("proof", tmp_path) as at:
        for wrong in mutated(head):
            assert at.say(ENTER, wrong, payload=payload), f"{wrong} was taken"
        for other in (
            SPAN,
            DATA_LINK,
            ENTER,
            {"kind": "Decide"},
            {"kind": "Go"},
            {"kind": "PushReceived"},
            {"kind": "PeerHello"},
        ):
            assert at.say(ENTER, other), f"{other} was taken"
        at.train()


def test_every_field_of_the_first_message_is_checked(tmp_path: Path) -> None:
    with running_server("proof", tmp_path) as at:
        for head in (ENTER, DATA_LINK):
            for wrong in mutated(head):
                assert at.say(wrong), f"{wrong} was taken"
        for wrong in ({**ENTER, "view": VIEW + 1}, {**ENTER, "sender": "nobody"}, *WORDS, SPAN, {}):
            assert at.say(wrong), f"{wrong} was taken"
        assert at.say(ENTER, payload=b"more")
        at.train()


def test_every_field_of_a_span_is_checked(tmp_path: Path) -> None:
    with running_server("proof", tmp_path) as at:
        (span,) = at.client.spans[SERVER]
        payload = bytes(span.numel * 4)
        wrongs = [
            *mutated(SPAN),
            {**SPAN, "span": 1},
            {**SPAN, "slot": 2},
            {**SPAN, "span": 1 << 40},
            *WORDS,
        ]
        for wrong in wrongs:
            assert at.on_data_link(wrong, payload), f"{wrong} was taken"
        for size in (0, 1, len(payload) - 1, len(payload) + 1, 1 << 15):
            assert at.on_data_link(SPAN, bytes(size)), f"{size} bytes were taken"
        assert at.on_data_link(SPAN, None)
        at.train()


def test_row_messages_without_tables_are_refused(tmp_path: Path) -> None:
    rows = {"kind": "RowsRequest", "tag": 1, "table": "t", "bytes": 8}
    row_grads = {"kind": "RowGradients", "seq": 1, "slot": 0, "bytes": 8}
    with running_server("proof", tmp_path) as at:
        for head in (rows, row_grads):
            assert "without tables" in at.say(ENTER, head, payload=bytes(8))
            for wrong in mutated(head):
                assert at.say(ENTER, wrong, payload=bytes(8)), f"{wrong} was taken"
            for size in (0, 7, 16):
                assert at.say(ENTER, head, payload=bytes(size)), f"{size} bytes were taken"
            assert at.say(ENTER, {**head, "bytes": 1 << 40}, payload=bytes(8))
        assert "without tables" in at.say(ENTER, {"kind": "TableStateRequest", "since": 0})
        at.train()


def test_unexpected_payloads_are_refused(tmp_path: Path) -> None:
    with running_server("proof", tmp_path) as at:
        for head in (PUSH, WHO, *PLAIN):
            assert at.say(ENTER, head, payload=b"")
            assert at.say(ENTER, head, payload=bytes(1 << 15))
        for size in (0, len(STATISTICS) - 8, len(STATISTICS) + 8):
            assert at.say(ENTER, BUFFERS, payload=bytes(size))
        assert at.say(ENTER, BUFFERS)
        at.train()


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
_fields = (
    "sender",
    "view",
    "slots",
    "seen",
    "seq",
    "push",
    "began",
    "after",
    "slot",
    "span",
    "tag",
    "version",
)
_heads = st.dictionaries(st.sampled_from(_fields), _json).flatmap(
    lambda fields: st.sampled_from(
        [
            "push",
            "span",
            "ask_missing",
            "buffers",
            "enter",
            "data_link",
            "peer",
            "decide",
            "commit",
            "tensor",
        ]
    ).map(lambda kind: {"kind": kind, **fields})
)


def test_random_messages_are_refused(tmp_path: Path) -> None:
    with running_server("proof", tmp_path) as at:

        @settings(max_examples=120)
        @given(
            _heads, st.none() | st.binary(max_size=100), st.sampled_from(["", "enter", "data_link"])
        )
        def holds(head: dict[str, Any], payload: bytes | None, first: str) -> None:
            if first == "data_link":
                at.on_data_link(head, payload)
            else:
                assert at.say(*([ENTER] if first else []), head, payload=payload)
            at.check()

        holds()
        at.train()


@pytest.mark.parametrize("kind", ["tls", "proof"])
def test_members_can_only_act_as_themselves(kind: str, tmp_path: Path) -> None:
    with running_server(kind, tmp_path) as at:
        peer = {"kind": "PeerHello", "view": VIEW, "sums": [], "undo": []}
        assert "has the key of" in at.say({**ENTER, "sender": GOOD})
        assert "has the key of" in at.say({**DATA_LINK, "sender": GOOD})
        assert "an unexpected" in at.say({**peer, "sender": SERVER})
        assert "an unexpected" in at.say({**peer, "sender": BAD})
        with at.dial(SERVER) as link:
            assert "an unexpected" in last_words(link, {**ENTER, "sender": SERVER})
        at.train()


def test_on_a_unix_socket_a_name_belongs_to_the_first_process_that_uses_it(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from manyhands.transport import connect\n"
        "with connect(sys.argv[1], timeout_s=20) as link:\n"
        "    link.send(json.loads(sys.argv[2]))\n"
        "    print(link.recv(timeout_s=20).message)\n"
    )
    enter = '{"kind": "EnterView", "sender": "worker-1", "view": 7, "slots": [], "row_grads": [], "seen": 0}'
    with running_server("unix", tmp_path) as at:
        at.train()
        stranger = subprocess.run(
            [sys.executable, "-c", code, at.server.address, enter],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "is connected already" in stranger.stdout, stranger.stderr
        at.train()


def test_missing_shared_memory_is_refused(tmp_path: Path) -> None:
    with running_server("unix", tmp_path) as at:
        good = [slot.segment.address for slot in at.slots[GOOD] if slot.segment is not None]
        _, pid, number, nbytes = good[0].split(":")
        small = FlatTensors.shared(layout_of(*_tiny()), label="test-small")
        assert small.segment is not None
        wrongs = [
            [],
            good[:1],
            [*good, good[0]],
            [good[0], "here"],
            [good[0], small.segment.address],
            [good[0], f"shm:{pid}:{number}:0"],
            [good[0], f"shm:{pid}:{number}:{int(nbytes) + 1}"],
            [good[0], f"shm:{pid}:99999:{nbytes}"],
            [good[0], "shm:" + "9" * 50 + ":1:1"],
            [good[0], f"shm:{pid}:0:{nbytes}"],
        ]
        for slots in wrongs:
            assert at.say({**ENTER, "slots": slots}), f"{slots} were taken"
        at.train()
        small.close()


def _tiny() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def test_a_network_link_cannot_attach_memory(tmp_path: Path) -> None:
    with running_server("proof", tmp_path) as at:
        flat = FlatTensors.shared(at.layout, label="test-gradients")
        assert flat.segment is not None
        assert at.say({**ENTER, "slots": [flat.segment.address] * 2})
        at.train()
        flat.close()


def test_a_push_in_two_slots_is_refused(tmp_path: Path) -> None:
    with running_server("proof", tmp_path) as at:
        with entered(at) as (words, channel, gradient):
            words.send({**PUSH, "push": push_of(BAD, 1, 1)})
            words.send({"kind": "PullRequest"})
            assert words.recv(timeout_s=LONG_S).message["kind"] == "NewVersion"
            assert "in slot 1, and in 0" in last_words(channel[0], SPAN, payload=gradient)
        at.train()


def test_an_unexpected_step_is_refused(tmp_path: Path) -> None:
    with running_server("proof", tmp_path) as at:
        for seq in (5, 6):
            with entered(at) as (words, channel, gradient):
                channel[1].send({**SPAN, "seq": seq}, gradient)
                push = {**PUSH, "push": push_of(BAD, seq, 0)}
                assert f"step {seq} where step 1 is due" in last_words(words, push)
            at.train()


def test_a_future_version_is_refused(tmp_path: Path) -> None:
    with running_server("proof", tmp_path) as at:
        with entered(at) as (words, _, _):
            assert "which does not exist yet" in last_words(words, {**PUSH, "began": 1})
        at.train()


def test_incomplete_pushes_are_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_server("proof", tmp_path) as at:
        with entered(at) as (_, channel, gradient):
            runs = [{**SPAN, "seq": seq} for seq in range(2, 40)]
            with contextlib.suppress(LinkError):
                for head in runs:
                    channel[0].send(head, gradient)
            told = last_words(channel[0], runs[-1], payload=gradient)
            # The last message of a connection may be lost with it if the other side is still sending.
            assert "others have not ended" in told + caplog.text
        at.train()


def test_pushes_after_a_missing_one_are_limited(tmp_path: Path) -> None:
    """They are held until the one before them arrives, up to a limit."""
    with running_server("unix", tmp_path) as at:
        addresses = [slot.segment.address for slot in at.slots[GOOD] if slot.segment is not None]
        pushes = [
            {**PUSH, "push": push_of(BAD, seq, 0), "after": seq - 1}
            for seq in range(2, 2 + MAX_UNDER_WAY + 1)
        ]
        assert "wait for one before" in at.say({**ENTER, "slots": addresses}, *pushes)
        at.train()


def test_a_push_that_is_sent_twice_counts_once(tmp_path: Path) -> None:
    with running_server("proof", tmp_path) as at:
        with entered(at) as (words, channel, gradient):
            for _ in range(3):
                words.send(PUSH)
                channel[1].send(SPAN, gradient)
            words.send({"kind": "PullRequest"})
            while at.server.server_state.ledger.counts[BAD] == 0:
                assert words.recv(timeout_s=LONG_S).message["kind"] != "Refused"
            words.send(PUSH)
        at.push(at.client, GOOD)
        at.client.drain()
        at.check()
        assert at.server.server_state.ledger.counts == {BAD: 1, GOOD: 1}


def test_data_links_without_a_session_and_excess_data_links_are_refused(tmp_path: Path) -> None:
    with running_server("proof", tmp_path) as at:
        assert "has not entered" in at.say(DATA_LINK)
        with entered(at):
            assert "needs no more data links" in at.say(DATA_LINK)
        at.train()


def test_a_refused_client_gets_the_reason_and_does_not_retry(tmp_path: Path) -> None:
    with running_server("proof", tmp_path) as at:
        for wrong in ({"samples": math.nan}, {"slot": 7}, {"step": -1}):
            client = at.enter(BAD)
            try:
                at.push(client, BAD, **wrong)
                with pytest.raises(ManyhandsError, match=f"{SERVER} refused {BAD}"):
                    client.drain()
            finally:
                client.close()
            at.train()


def test_a_worker_gets_the_learning_rate_of_its_push(tmp_path: Path) -> None:
    with running_server("proof", tmp_path, lr_rule="inverse") as at:
        other = at.enter(BAD)
        try:
            at.push(other, BAD)
            other.drain()
            at.push(at.client, GOOD)  # computed on weights that the other worker has changed since
            at.client.drain()
            assert at.outcomes == [
                PushOutcome(staleness=0, lr=LR),
                PushOutcome(staleness=1, lr=pytest.approx(LR / 1.5)),  # by half a batch
            ]
        finally:
            other.close()


def test_weights_newer_than_those_of_any_server_are_lost(tmp_path: Path) -> None:
    """All servers that held them died: the run restarts from its checkpoint."""
    with (
        running_server("proof", tmp_path) as at,
        pytest.raises(WeightsLost, match="has seen version 3"),
    ):
        at.enter(BAD, seen=3)


@pytest.mark.parametrize("kind", ["tls", "unix"])
def test_broken_connections_are_not_protocol_errors(kind: str, tmp_path: Path) -> None:
    with running_server(kind, tmp_path) as at:
        at.train()
        for _ in range(5):
            for link in at.links:
                link.close()
            at.train()


def test_after_refused_messages_a_round_has_only_valid_pushes(tmp_path: Path) -> None:
    """In rounds the others wait for the refused worker; when it pushes a valid gradient, it counts."""
    with running_server("proof", tmp_path, rounds=True) as at:
        first = at.push(at.client, GOOD, rounds=True)
        for wrong in mutated_pushes(push_of(BAD, 1, 0)):
            assert at.say(ENTER, {**PUSH, "push": wrong}), f"{wrong} was taken"
        assert at.server.server_state.ledger.version == 0
        client = at.enter(BAD)
        try:
            at.push(client, BAD, rounds=True)
            client.finish(first)
            at.client.finish(first)
        finally:
            client.close()
        at.check()
        for now, before in zip(at.server.server_state.params.buffers, at.before, strict=True):
            torch.testing.assert_close(now, before - LR)  # the mean of two times one
        assert at.server.server_state.ledger.counts == {BAD: 1, GOOD: 1}


def test_silent_connections_do_not_block_others(tmp_path: Path) -> None:
    with running_server("unix", tmp_path) as at, contextlib.ExitStack() as stack:
        threads = threading.active_count()
        silent = [stack.enter_context(at.dial(BAD)) for _ in range(3 * MAX_UNIDENTIFIED)]
        with pytest.raises(LinkClosed):
            silent[0].recv(timeout_s=LONG_S)
        at.train()
        deadline = time.monotonic() + LONG_S
        while threading.active_count() > threads:  # no thread per connection
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_refused_links_are_freed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # caplog keeps each record, with the frames of its exception and everything that they refer to.
    caplog.set_level(logging.CRITICAL, "manyhands.ps")

    def links() -> int:
        gc.collect()
        return sum(type(thing) is Link for thing in gc.get_objects())

    with running_server("unix", tmp_path) as at:
        before = links()
        for _ in range(50):
            assert at.say({**ENTER, "view": 0})
        deadline = time.monotonic() + LONG_S
        while links() > before + 5:
            assert time.monotonic() < deadline, f"{links() - before} links are kept"
            time.sleep(0.05)


def test_reading_stops_while_the_inbox_is_full(tmp_path: Path) -> None:
    acceptor = Acceptor(
        SERVER,
        Listener(f"unix:{tmp_path}/s"),
        Admission(SERVER, view=VIEW, servers=[SERVER], workers=[BAD], identified=False),
        place=lambda who, head: None,
        on_error=fail_process,
    )
    try:
        with connect(f"unix:{tmp_path}/s", timeout_s=LONG_S) as link:
            link.send(ENTER)
            for _ in range(3 * MAX_UNHANDLED):
                link.send({"kind": "Rest"})
            deadline = time.monotonic() + LONG_S
            while acceptor.inbox.qsize() < 1 + MAX_UNHANDLED:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.2)
            assert acceptor.inbox.qsize() == 1 + MAX_UNHANDLED
            for _ in range(1 + 3 * MAX_UNHANDLED):
                item = acceptor.inbox.get(timeout=LONG_S)
                assert item is not None
                item.handled()
    finally:
        acceptor.close()
