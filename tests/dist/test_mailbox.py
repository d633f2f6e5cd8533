"""The mailbox: messages arrive unchanged and in order, none from strangers; through the socket or through segments."""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import FileStore, HashStore, PrefixStore, Store

from paceline.errors import ClusterError
from paceline.op import drive
from paceline.protocol.messages import Message
from paceline.transport import mailbox, outbox, strangers
from paceline.transport.authenticator import PeerAddress
from paceline.transport.connections import COPY_BELOW, UNREAD
from paceline.transport.mailbox import Mailbox
from paceline.transport.wire import DTYPES
from tests.messages import Goodbye, Hello, Note, TheEnd

DEADLINE_S = 10.0
both_ways = pytest.mark.parametrize("is_far", [False, True], ids=["segments", "socket"])


@contextmanager
def job(
    size: int, store: Store | None = None, is_far: bool = False, timeout_s: float = DEADLINE_S, **settings: object
) -> Iterator[list[Mailbox]]:
    """The mailboxes of a job; `is_far`: each takes the others to be on other hosts, so all goes through sockets."""
    store = store or HashStore()
    with pytest.MonkeyPatch.context() as patch:
        if is_far:
            patch.setattr(mailbox, "memory_domain", lambda: "")
        boxes = [Mailbox(store, rank, size, timeout_s=timeout_s, **settings) for rank in range(size)]  # pyright: ignore
    try:
        yield boxes
    finally:
        for box in boxes:
            box.close(linger_s=0)


def until(condition: Callable[[], bool]) -> None:
    """Poll: ZeroMQ does not report that it has refused a connection."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).remainder(2 if dtype is torch.bool else 100).to(dtype).reshape(shape)


@pytest.fixture(scope="module", params=[False, True], ids=["segments", "socket"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Mailbox]]:
    with job(2, is_far=request.param) as boxes:
        yield boxes


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5), (1024, 1031)], ids=str)
def test_a_tensor_of_any_type_and_shape_arrives_as_it_was_sent(
    pair: list[Mailbox], dtype: torch.dtype, shape: tuple[int, ...]
):
    sent = numbers(*shape, dtype=dtype)
    pair[1].send(0, Note(values=(sent,))).wait()
    (came,) = pair[0].recv().wait().tensors()
    assert came.dtype == dtype and came.shape == sent.shape and torch.equal(came, sent)
    assert came.data_ptr() % dtype.itemsize == 0


def test_a_message_arrives_with_all_its_fields(pair: list[Mailbox]):
    small = numbers(3), numbers(2, 2, dtype=torch.bfloat16), torch.tensor(7)
    sent = Note(2**62, -1, "seven", (*small, numbers(2**16), torch.tensor(8)))
    pair[0].send(1, sent).wait()
    came = pair[1].recv().wait()
    assert isinstance(came, Note)
    assert (came.number, came.other, came.text, came.src, sent.src) == (2**62, -1, "seven", 0, -1)
    assert [t.tolist() for t in came.tensors()] == [t.tolist() for t in sent.tensors()]


def test_a_message_needs_no_tensors(pair: list[Mailbox]):
    pair[0].send(1, Hello()).wait()
    assert isinstance(pair[1].recv().wait(), Hello)


def test_tensors_with_gaps_or_gradients_arrive(pair: list[Mailbox]):
    tensors = (numbers(6, 4).t(), numbers(10)[::3], torch.ones(3, requires_grad=True), numbers(2000, 1000).t())
    pair[0].send(1, Note(values=tensors)).wait()
    assert all(map(torch.equal, pair[1].recv().wait().tensors(), tensors))


@both_ways
def test_a_received_tensor_may_be_written_to_and_outlives_its_mailbox(is_far: bool):
    with job(2, is_far=is_far) as (a, b):
        a.send(1, Note(values=(numbers(5), numbers(COPY_BELOW)))).wait()
        small, large = b.recv().wait().tensors()
    small += 1
    large += 1
    assert small.tolist() == [1, 2, 3, 4, 5] and torch.equal(large, numbers(COPY_BELOW) + 1)


def test_a_rank_may_send_to_itself(pair: list[Mailbox]):
    pair[0].send(0, Note()).wait()
    assert pair[0].recv(src=0).wait().src == 0


def test_messages_of_one_rank_keep_their_order():
    with job(3) as boxes:
        for i in range(100):
            for box in boxes[1:]:
                box.send(0, Note(i, values=(numbers(i % 7),)))
        came = [boxes[0].recv().wait() for _ in range(200)]
        assert [m.number for m in came if m.src == 1] == [m.number for m in came if m.src == 2] == list(range(100))


def test_receiving_from_one_rank_keeps_the_others_in_order():
    with job(3) as (a, b, c):
        for i in range(3):
            b.send(0, Note(i)).wait()
        assert a.recv(src=1).wait().number == 0
        c.send(0, Hello()).wait()
        assert isinstance(a.recv(src=2).wait(), Hello)
        assert [a.recv().wait().number for _ in range(2)] == [1, 2]


def test_receiving_some_types_keeps_the_others_in_order(pair: list[Mailbox]):
    for cls in (Note, TheEnd, Hello, Goodbye):
        pair[1].send(0, cls()).wait()
    wanted = ((Hello,), (Hello, Goodbye), None, (TheEnd,))
    came = [type(pair[0].recv(types=types).wait()) for types in wanted]
    assert came == [Hello, Goodbye, Note, TheEnd]
    pair[1].send(0, Note()).wait()
    with pytest.raises(TimeoutError):
        pair[0].recv(types=(Hello,), timeout=0.05).wait()
    assert isinstance(pair[0].recv(src=1, types=(Note,)).wait(), Note)


def test_an_op_gives_the_same_message_each_time_it_is_waited_for(pair: list[Mailbox]):
    op = pair[0].recv()
    pair[1].send(0, Hello()).wait()
    assert op.wait() is op.wait()


def test_a_strategy_can_await_both_ends(pair: list[Mailbox]):
    async def echo() -> str:
        await pair[0].send(1, Hello())
        return (await pair[1].recv(src=0)).tag

    assert drive(echo()) == "hello"


@pytest.mark.parametrize(("src", "whom"), [(None, "any rank"), (1, "rank 1")])
def test_a_receive_that_times_out_names_the_sender_and_the_time(pair: list[Mailbox], src: int | None, whom: str):
    with pytest.raises(TimeoutError, match=rf"^rank 0 waited 0\.05 s for a message from {whom}$"):
        pair[0].recv(src=src, timeout=0.05).wait()


def test_a_message_that_has_arrived_is_returned_even_after_the_timeout(pair: list[Mailbox]):
    pair[1].send(0, Hello()).wait()
    pair[1].send(0, Goodbye()).wait()
    assert isinstance(pair[0].recv().wait(), Hello)
    until(lambda: pair[0]._inbox.poll(0) != 0)
    assert isinstance(pair[0].recv(timeout=-1).wait(), Goodbye)


@pytest.mark.parametrize("numel", [10, COPY_BELOW // 4 - 1, COPY_BELOW // 4, 6_000_000])
def test_overwriting_a_tensor_after_an_awaited_send_changes_nothing(pair: list[Mailbox], numel: int):
    x = torch.ones(numel)
    for i in range(3):
        x.fill_(i)
        pair[0].send(1, Note(values=(x, x))).wait()
        x.fill_(-1)
    for i in range(3):
        assert all(bool((t == i).all()) for t in pair[1].recv().wait().tensors())


@both_ways
def test_two_ranks_that_both_send_before_they_read_do_not_wait_for_each_other(
    is_far: bool, monkeypatch: pytest.MonkeyPatch
):
    x = torch.zeros(COPY_BELOW)
    monkeypatch.setattr(outbox, "UNREAD_NBYTES", 4 * x.nbytes)
    with job(2, is_far=is_far) as (a, b), ThreadPoolExecutor(2) as threads:

        def exchange(box: Mailbox) -> list[int]:
            for i in range(2 * UNREAD):
                box.send(1 - box.rank, Note(i, values=(x,))).wait()
            return [box.recv().wait().number for _ in range(2 * UNREAD)]

        assert list(threads.map(exchange, (a, b))) == [list(range(2 * UNREAD))] * 2


@both_ways
def test_an_awaited_send_waits_for_a_reader_that_cannot_keep_up(is_far: bool, monkeypatch: pytest.MonkeyPatch):
    x = torch.zeros(COPY_BELOW)
    monkeypatch.setattr(outbox, "UNREAD_NBYTES", UNREAD * x.nbytes)
    with job(2, is_far=is_far, timeout_s=0.3) as (a, b):
        sent = 0
        with pytest.raises(ClusterError, match=r"^rank 0 could not send 'note' to rank 1 within 0\.3 s$"):
            while sent < 10 * UNREAD:
                sent += 1
                a.send(1, Note(sent, values=(x,))).wait()
        assert sent > UNREAD
        assert [b.recv().wait().number for _ in range(sent)] == list(range(1, sent + 1))
        a.send(1, Note(values=(x,))).wait()


def test_a_rank_that_never_joins_is_named():
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    a = Mailbox(store, 0, 2)
    with pytest.raises(ClusterError, match="rank 0 found no mailbox of rank 1 in the store"):
        a.send(1, Note())
    a.close()


def test_the_callers_mistakes_are_named(pair: list[Mailbox]):
    with pytest.raises(ValueError, match=r"Mailbox\(rank=2, size=2\)"):
        Mailbox(HashStore(), 2, 2)
    with pytest.raises(ValueError, match="send: rank 2 is not in this job, whose ranks are 0 to 1"):
        pair[0].send(2, Note())
    with pytest.raises(ValueError, match="recv: rank -1 is not in this job"):
        pair[0].recv(src=-1)
    with pytest.raises(ValueError, match=r"send of a torch\.complex64 tensor: a mailbox carries float32, "):
        pair[0].send(1, Note(values=(torch.zeros(2, dtype=torch.complex64),)))
    for bind in ("0.0.0.0", "*", "::"):
        with pytest.raises(ValueError, match="name the one address"):
            Mailbox(HashStore(), 0, 1, bind=bind)
    with pytest.raises(zmq.ZMQError, match="no_such_interface"):
        Mailbox(HashStore(), 0, 1, bind="no_such_interface")


def test_a_rank_has_one_mailbox_in_a_store():
    store = HashStore()
    first = Mailbox(PrefixStore("job", store), 0, 1)
    with pytest.raises(ValueError, match="the store has a mailbox of this rank"):
        Mailbox(PrefixStore("job", store), 0, 1)
    Mailbox(PrefixStore("other job", store), 0, 1).close()
    first.send(0, Hello()).wait()
    assert isinstance(first.recv().wait(), Hello)
    first.close()


@pytest.mark.skipif(
    not os.path.exists("/proc/net/if_inet6") or not Path("/proc/net/if_inet6").read_text(), reason="no IPv6 here"
)
def test_a_mailbox_can_have_an_ipv6_address():
    with job(2, bind="::1") as (a, b):
        assert a.address.startswith("tcp://[::1]:")
        b.send(0, Hello()).wait()
        assert a.recv().wait().src == 1


def test_a_rank_that_publishes_later_is_admitted():
    store = HashStore()
    a = Mailbox(store, 0, 3)
    for rank in (2, 1):
        late = Mailbox(store, rank, 3)
        late.send(0, Hello()).wait()
        assert a.recv(timeout=DEADLINE_S).wait().src == rank
        late.close()
    assert a.refused == 0
    a.close()


@both_ways
def test_a_tensor_beyond_the_limit_is_not_sent_and_one_at_the_limit_arrives(is_far: bool):
    with job(2, is_far=is_far, max_nbytes=4_000_000) as (a, b):
        with pytest.raises(
            ValueError, match="send of a tensor of 4000004 bytes: this mailbox was made with max_nbytes=4000000"
        ):
            a.send(1, Note(values=(torch.zeros(1_000_001),)))
        a.send(1, Note(values=(torch.zeros(1_000_000),))).wait()
        assert b.recv().wait().nbytes == 4_000_000


def test_a_frame_beyond_the_limit_is_not_read_into_memory():
    with job(2, is_far=True, max_nbytes=1000) as (a, b):
        b.max_nbytes = None  # A rank that ignores the limit.
        b.send(0, Note(values=(torch.zeros(1_000_000),)))
        with pytest.raises(TimeoutError):
            a.recv(timeout=0.2).wait()
        b._outbox._sockets.pop(0).close(linger=0)
        assert_serves(a, b)


def send_much(store: Store) -> None:
    torch.set_num_threads(1)
    mailbox.memory_domain = lambda: ""
    Mailbox(store, 1, 3).send(0, Note(values=(torch.zeros(50_000_000),) * 2)).wait()


@pytest.mark.dist
def test_a_rank_killed_within_a_message_does_not_stop_the_others(tmp_path: Path):
    store = FileStore(str(tmp_path / "store"))
    a, c = Mailbox(store, 0, 3, timeout_s=DEADLINE_S), Mailbox(store, 2, 3)
    child = multiprocessing.get_context("fork").Process(target=send_much, args=(store,))
    child.start()
    until(lambda: len(a._connections.authenticator._admitted) == 1)  # Two tensors of 200 MB take long enough.
    child.kill()
    child.join()
    with pytest.raises(TimeoutError):
        a.recv(timeout=0.2).wait()
    assert_serves(a, c)
    a.close()
    c.close()


# Strangers


def stranger(box: Mailbox, **options: bytes) -> None:
    """Push to `box` until it has refused it."""
    before = box.refused
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.linger = 0
        for name, value in options.items():
            setattr(push, name, value)
        push.connect(box.address)
        push.send(header())
        until(lambda: box.refused > before)
    with pytest.raises(TimeoutError):
        box.recv(timeout=0.02).wait()


def assert_serves(box: Mailbox, peer: Mailbox) -> None:
    peer.send(box.rank, Hello()).wait()
    assert isinstance(box.recv().wait(), Hello)


def test_a_stranger_without_a_key_is_refused(pair: list[Mailbox]):
    stranger(pair[0])
    assert "it has no key" in (pair[0].last_refusal or "")
    assert_serves(*pair)


def test_a_stranger_with_an_unpublished_key_is_refused(pair: list[Mailbox]):
    for boxes in (pair, None):  # Once where all ranks are known, and once where the store must be read.
        with job(2) as fresh:
            box, peer = boxes or fresh
            public, secret = zmq.curve_keypair()
            stranger(box, curve_publickey=public, curve_secretkey=secret, curve_serverkey=box._connections.public_key)
            assert box.last_refusal == "a stranger at 127.0.0.1: no rank of this job has published its key"
            assert_serves(box, peer)


def test_a_stranger_with_a_ranks_public_key_but_not_its_secret_is_refused(pair: list[Mailbox]):
    _, secret = zmq.curve_keypair()
    stranger(
        pair[0],
        curve_publickey=pair[1]._connections.public_key,
        curve_secretkey=secret,
        curve_serverkey=pair[0]._connections.public_key,
    )
    assert_serves(*pair)


def test_a_stranger_that_expects_another_rank_is_refused(pair: list[Mailbox]):
    wrong, _ = zmq.curve_keypair()
    stranger(
        pair[0],
        curve_publickey=pair[1]._connections.public_key,
        curve_secretkey=pair[1]._connections.secret_key,
        curve_serverkey=wrong,
    )
    assert_serves(*pair)


def test_a_rank_of_another_job_is_refused():
    store = HashStore()
    with job(2, PrefixStore("a", store)) as ours, job(2, PrefixStore("b", store)) as theirs:
        stranger(
            ours[0],
            curve_publickey=theirs[1]._connections.public_key,
            curve_secretkey=theirs[1]._connections.secret_key,
            curve_serverkey=ours[0]._connections.public_key,
        )
        assert_serves(*ours)


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n" * 20, b"\xff" + bytes(8) + b"\x7f\x03", os.urandom(4096)]
)
def test_other_protocols_on_its_port_do_not_stop_the_mailbox(pair: list[Mailbox], said: bytes):
    host, port = pair[0].address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(said)
        assert_serves(*pair)


def test_of_connections_that_say_nothing_the_oldest_are_closed_and_ranks_are_served(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(strangers, "MOST", 8)
    with job(3, is_far=True) as (a, b, c):
        assert_serves(a, b)
        host, port = a.address.removeprefix("tcp://").split(":")
        files = open_files()
        silent = [socket.create_connection((host, int(port))) for _ in range(20)]
        silent[-1].sendall(b"\xff")  # Not enough to be anyone's.
        until(lambda: a.refused >= 12)
        until(lambda: open_files() <= files + 20 + 9)
        assert_serves(a, b)  # It was connected before,
        assert_serves(a, c)  # and this rank was not.
        for one in silent:
            one.close()


def test_connections_of_one_address_do_not_close_those_of_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(strangers, "MOST", 8)
    with job(2, is_far=True) as (a, b):
        host, port = a.address.removeprefix("tcp://").split(":")
        slow = socket.create_connection((host, int(port)))  # The oldest of all, and as silent as they.
        flood = [socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0)) for _ in range(20)]
        until(lambda: a.refused >= 12)
        slow.settimeout(0.1)
        with pytest.raises(TimeoutError):
            while slow.recv(64):  # ZeroMQ's greeting.
                pass
        assert_serves(a, b)
        for one in (slow, *flood):
            one.close()


@pytest.mark.parametrize("n", range(5))
def test_the_address_with_the_most_connections_loses_its_oldest(n: int):
    """By any order of what is accepted and closed; the connections of other addresses stay."""
    chance = random.Random(n)
    mine, theirs = [], []
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        kept = strangers.Strangers()
        kept.most, kept.port = 6, server.getsockname()[1]
        for _ in range(30):
            is_mine = len(mine) < 3 and chance.random() < 0.2
            source = ("127.0.0.1" if is_mine else "127.0.0.2", 0)
            client = socket.create_connection(server.getsockname(), source_address=source)
            accepted = server.accept()[0]
            (mine if is_mine else theirs).append((client, accepted))
            kept.accepted(accepted.fileno())
        for client, _ in mine:
            client.settimeout(0.01)
            with pytest.raises(TimeoutError):
                client.recv(1)
        lost = [client.recv(1) for client, _ in theirs[: len(theirs) + len(mine) - 6]]
        assert lost == [b""] * 24
        for client, accepted in (*mine, *theirs):
            kept.closed(accepted.fileno())
            client.close()
            accepted.close()
        assert not kept._files and not kept._origins


def test_what_ranks_send_is_not_on_the_wire_in_plain():
    """A canary passes through a proxy between two ranks, and is not in the bytes that the proxy has seen."""
    canary = torch.tensor(list(b"canary in a coal mine, 32 bytes!") * 1000, dtype=torch.uint8)
    seen = bytearray()
    store = HashStore()
    with job(2, store, is_far=True) as (a, b), socket.create_server(("127.0.0.1", 0)) as proxy:
        real = PeerAddress.of(store, 0)
        host, port = a.address.removeprefix("tcp://").split(":")
        store.set("mail/0", str(real._replace(address=f"tcp://127.0.0.1:{proxy.getsockname()[1]}")))

        def forward(source: socket.socket, sink: socket.socket) -> None:
            while part := source.recv(65536):
                seen.extend(part)
                sink.sendall(part)

        def serve() -> None:
            outer = proxy.accept()[0]
            inner = socket.create_connection((host, int(port)))
            with outer, inner, ThreadPoolExecutor(2) as threads:
                list(threads.map(forward, (outer, inner), (inner, outer)))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        b.send(0, Note(text="a secret word", values=(canary,))).wait()
        came = a.recv().wait()
        assert isinstance(came, Note) and torch.equal(came.tensors()[0], canary)
    thread.join(DEADLINE_S)
    assert len(seen) > 32_000
    assert b"canary" not in seen and b"secret" not in seen and b"note" not in seen


# Malformed messages of ranks that were admitted


def deliver(pair: list[Mailbox], raw: list[list[bytes]]) -> list[Message]:
    """Send raw frames as rank 1; the messages that rank 0 received.  The others must have been counted as refused."""
    a, b = pair
    before = a.refused
    for frames in raw:
        b._outbox.socket(0).send_multipart(frames)
    b.send(0, TheEnd()).wait()
    came: list[Message] = []
    while not isinstance(message := a.recv().wait(), TheEnd):
        came.append(message)
    assert a.refused - before == len(raw) - len(came)
    return came


def header(tensors: object = (), values: object = None, tag: object = "note", **fields: object) -> bytes:
    """The first frame of a note with these tensors, and with any fields."""
    count = len(tensors) if isinstance(tensors, (list, tuple)) else 0
    if values is None:
        values = list(range(count))
    return msgspec.msgpack.encode([tensors, {"type": tag, "values": values, **fields}])


def form(name: str, *shape: int, location: object = None) -> object:
    return [name, shape, location]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b""], "truncated"),
        ([b"\xc1"], "malformed"),
        ([header() + b"x"], "trailing"),
        ([msgspec.msgpack.encode([[]])], "length 2, got 1"),
        ([msgspec.msgpack.encode([[], {"type": "note"}, 0])], "length 2, got 3|at most length 2"),
        ([msgspec.msgpack.encode([[], 7])], "Expected `object`"),
        ([msgspec.msgpack.encode([[], {}])], "missing required field `type`"),
        ([header(tag=b"note")], "Expected `str`"),
        ([header(tag="x" * 65)], "length <= 64"),
        ([header(tag="waltz")], "there is no message type 'waltz'"),
        ([header(tag="peer died")], "'peer died' is an event, which each rank finds out by itself"),
        ([header(tag="peer suspected")], "'peer suspected' is an event"),
        ([header(number=1.5)], "Expected `int`"),
        ([header(number=True)], "Expected `int`"),
        ([header(number=None)], "Expected `int`"),
        ([header(src=0)], "it says itself that it is from rank 0"),
        ([header(src=2)], "it says itself that it is from rank 2"),
        ([header(what=1)], "unknown field `what`"),
        (
            [header([form("float32", 1)], values=[1]), bytes(4)],
            "a tensor field holds 1 and should hold 0, of 1 tensors",
        ),
        ([header([form("float32", 1)], values=["0"]), bytes(4)], "a tensor field holds '0' and should hold 0"),
        (
            [header([form("float32", 1)], values=[0, 1]), bytes(4)],
            "a tensor field holds 1 and should hold 1, of 1 tensors",
        ),
        ([header([form("float32", 1)], values=[]), bytes(4)], "its fields hold 0 tensors and 1 came"),
        ([msgspec.msgpack.encode([[], {"type": "dance"}])], "a 'dance' must have a request_id of at least 1"),
        ([msgspec.msgpack.encode([[], {"type": "dance", "request_id": -1}])], ">= 0"),
        ([msgspec.msgpack.encode([[], {"type": "dance", "request_id": 1, "incarnation": 2**40}])], "<= 2147483648"),
        ([header(), b""], "announces 0 tensors and 1 came"),
        ([header(tensors=[form("float32", 1)])], "announces 1 tensors and 0 came"),
        ([header(tensors=[["float32", [1]]]), bytes(4)], "length 3, got 2"),
        ([header(tensors=[form("float32", 2)]), bytes(7)], r"a float32 tensor of shape \(2,\) came with 7 bytes"),
        ([header(tensors=[form("float32", 2)]), bytes(12)], "came with 12 bytes"),
        ([header(tensors=[form("float32")]), b""], r"a float32 tensor of shape \(\) came with 0 bytes"),
        ([header(tensors=[form("float32", 2**62, 4)]), b""], "came with 0 bytes"),
        ([header(tensors=[form("float32", 2**63)]), b""], "Expected `int`"),
        ([header(tensors=[form("float32", -1, -4)]), bytes(16)], ">= 0"),
        ([header(tensors=[form("float32", *[1] * 65)]), bytes(4)], "length <= 64"),
        ([header(tensors=[form("uint8", 0, 2**62, 2**62)]), b""], "has no strides"),
        ([header(tensors=[form("object", 1)]), bytes(8)], "'object'"),
        ([header(tensors=[form("complex64", 1)]), bytes(8)], "'complex64'"),
        ([header(tensors=[form("bool", 2)]), b"\x01\x02"], "other than 0 and 1"),
    ],
)
def test_a_malformed_message_is_dropped_and_the_reason_kept(pair: list[Mailbox], frames: list[bytes], reason: str):
    assert deliver(pair, [frames]) == []
    pair_refusal = pair[0].last_refusal or ""
    assert pair_refusal.startswith("a message from rank 1: ")
    with pytest.raises(ValueError, match=f"(?i){reason}"):
        raise ValueError(pair_refusal)


def test_an_empty_tensor_with_huge_sides_is_allowed(pair: list[Mailbox]):
    (message,) = deliver(pair, [[header(tensors=[form("float64", 0, 2**62)]), b""]])
    assert message.tensors()[0].shape == (0, 2**62)


sides = st.one_of(st.integers(0, 5), st.integers(-(2**63), 2**64 - 1))
locations = st.one_of(st.none(), st.lists(sides, min_size=4, max_size=6))
entries = st.tuples(st.sampled_from([*DTYPES, "complex64", "", "object"]), st.lists(sides, max_size=4), locations)
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
    st.integers(-(2**63), 2**64 - 1),
    st.lists(st.integers(0, 9)),
)
lies = st.builds(
    header,
    tensors=st.one_of(st.lists(entries, max_size=3), odd),
    values=st.one_of(st.none(), odd),
    tag=st.one_of(st.just("note"), st.text(max_size=5), odd),
    src=st.one_of(st.just(-1), odd),
    number=st.one_of(st.integers(0, 9), odd),
    text=st.one_of(st.text(max_size=3), odd),
)
raw_messages = st.builds(
    lambda head, rest: [head, *rest],
    st.one_of(lies, st.binary(max_size=60)),
    st.lists(st.binary(max_size=40), max_size=3),
)


@given(batch=st.lists(raw_messages, min_size=1, max_size=20))
@settings(max_examples=150, deadline=None)
def test_frames_of_any_bytes_are_a_message_or_counted(pair: list[Mailbox], batch: list[list[bytes]]):
    for message in deliver(pair, batch):
        assert message.src == 1 and all(t.dtype in DTYPES.values() for t in message.tensors())


def test_two_thousand_damaged_messages_do_not_stop_the_mailbox(pair: list[Mailbox]):
    noise = torch.Generator().manual_seed(0)

    def pick(below: int) -> int:
        return int(torch.randint(below, (), generator=noise))

    damaged: list[list[bytes]] = []
    for _ in range(2000):
        frames = [bytearray(header(tensors=[form("float32", 2, 3), form("bool", 4)])), bytearray(24), bytearray(4)]
        victim = frames[pick(3)]
        match pick(4):
            case 0:
                victim[pick(len(victim))] ^= 1 << pick(8)
            case 1:
                del victim[pick(len(victim)) :]
            case 2:
                victim.insert(pick(len(victim)), pick(256))
            case _:
                del frames[pick(3)]
        damaged.append([bytes(frame) for frame in frames] or [b""])
    came = deliver(pair, damaged)
    # A flipped bit in a number, or in a text, makes a different message and not a malformed one.
    assert len(came) < 600
    assert all(t.nbytes in (24, 4) for m in came for t in m.tensors())


# Opening and closing


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def one_job(is_far: bool) -> list[str]:
    with job(3, is_far=is_far) as boxes:
        for box in boxes:
            box.send((box.rank + 1) % 3, Note(values=(torch.zeros(COPY_BELOW),))).wait()
        for box in boxes:
            box.recv().wait()
        return [box.address for box in boxes]


@both_ways
def test_closing_leaves_no_thread_no_port_and_no_file(is_far: bool):
    one_job(is_far)  # pyzmq keeps one thread for all buffers in flight, and torch its own.
    before, natives = (set(threading.enumerate()), open_files()), native_threads()
    addresses = one_job(is_far)
    assert (set(threading.enumerate()), open_files()) == before
    until(lambda: native_threads() <= natives)  # A joined thread may be listed for a moment longer.
    for address in addresses:
        host, port = address.removeprefix("tcp://").split(":")
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0


def test_closing_flushes_what_was_sent():
    with job(2, is_far=True) as (a, b):
        for i in range(UNREAD // 2):
            a.send(1, Note(values=(torch.full((COPY_BELOW,), i),)))
        a.close()
        assert [int(b.recv().wait().tensors()[0][-1]) for _ in range(UNREAD // 2)] == list(range(UNREAD // 2))


@both_ways
def test_closing_does_not_wait_longer_than_linger_s_for_a_closed_rank(is_far: bool):
    with job(2, is_far=is_far) as (a, b):
        b.close()
        a.send(1, Note(values=(torch.zeros(COPY_BELOW),)))
        start = time.monotonic()
        a.close(linger_s=0.2)
        assert 0.1 < time.monotonic() - start < 2


def test_a_closed_mailbox_says_so_and_may_be_closed_again():
    box = Mailbox(HashStore(), 0, 1)
    op = box.recv()
    box.close()
    box.close()
    x = torch.zeros(3)
    for use in (
        op.wait,
        box.recv,
        lambda: box.send(0, Note()),
        lambda: box.send_buffer(x),
        lambda: box.in_use(x),
    ):
        with pytest.raises(RuntimeError, match="rank 0's mailbox is closed"):
            use()


def pass_round(path: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)  # A forked child has none of its parent's OpenMP threads.
    box = Mailbox(PrefixStore("job", FileStore(path, size)), rank, size, timeout_s=DEADLINE_S)
    before, after = (rank - 1) % size, (rank + 1) % size
    x = torch.zeros(COPY_BELOW)
    for _ in range(3):
        if rank == 0:
            box.send(after, Note(values=(x,))).wait()
        x = box.recv(src=before).wait().tensors()[0]
        x += rank
        if rank != 0:
            box.send(after, Note(values=(x,))).wait()
    assert rank != 0 or bool((x == 3 * sum(range(size))).all())
    box.close()


@pytest.mark.dist
def test_three_processes_pass_a_tensor_around(tmp_path: Path):
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=pass_round, args=(str(tmp_path / "store"), rank, 3)) for rank in range(3)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(2 * DEADLINE_S)
        assert [process.exitcode for process in ranks] == [0, 0, 0]
    finally:
        for process in ranks:
            process.kill()


def use_inherited(box: Mailbox) -> None:
    try:
        box.send(0, Note())
    except RuntimeError as error:
        os._exit(0 if "belongs to another process" in str(error) else 1)
    os._exit(2)


@pytest.mark.dist
def test_a_forked_child_may_not_use_its_parents_mailbox():
    with job(1) as (box,):
        child = multiprocessing.get_context("fork").Process(target=use_inherited, args=(box,))
        child.start()
        child.join(DEADLINE_S)
        assert child.exitcode == 0
        assert_serves(box, box)
