"""Parcels: what ranks of one host send each other lies in memory that both have mapped, and nobody's death takes it away or keeps it."""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

import fcntl
import gc
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import zmq
from torch import Tensor
from torch.distributed import FileStore, HashStore, Store
from zmq.utils import z85

from paceline.errors import ClusterError
from paceline.protocol.messages import Message, PeerDied
from paceline.transport import mailbox
from paceline.transport import segments as parcels
from paceline.transport.authenticator import KEYS
from paceline.transport.mailbox import COPY_BELOW, PARCEL_FROM, UNREAD, Mailbox
from paceline.transport.segments import (
    LEAST,
    LINE,
    NAME,
    OPEN,
    READ,
    SEALS,
    SENT,
    Location,
    Receiver,
    Segment,
    Sender,
    Unreadable,
)
from paceline.transport.wire import DTYPES
from tests.dist.test_mailbox import DEADLINE_S, assert_serves, deliver, form, header, job, open_files, stranger, until
from tests.messages import Hello, Note, TheEnd

MB = 2**20


@contextmanager
def child(work: Callable[..., None], *args: object) -> Iterator[BaseProcess]:
    """Another process; it does not outlive the test."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(work, args))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _run(work: Callable[..., None], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)  # A forked child has none of its parent's OpenMP threads.
    work(*args)


def end(process: BaseProcess) -> None:
    process.kill()
    process.join()


@contextmanager
def box_of(
    place: Path | Store, rank: int, size: int = 2, *, is_open: bool = False, timeout_s: float = DEADLINE_S
) -> Iterator[Mailbox]:
    store = FileStore(str(place)) if isinstance(place, Path) else place
    box = Mailbox(store, rank, size, is_open=is_open, timeout_s=timeout_s)
    try:
        yield box
    finally:
        box.close(linger_s=0)


@pytest.fixture
def pair() -> Iterator[list[Mailbox]]:
    with job(2) as boxes:
        yield boxes


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line]


def lent(box: Mailbox) -> int:
    """How many parcels of a mailbox somebody may still read."""
    return sum(house.is_lent(parcel) for house in box._parcels._houses for parcel in house.parcels)


# What arrives


def echo(path: Path) -> None:
    with box_of(path, 1) as box:
        while (message := box.recv().wait()).tag != "the end":
            box.send(0, Note(values=tuple(message.tensors()))).wait()
        del message
        box.close()


def arbitrary(numel: int, dtype: torch.dtype, chance: random.Random) -> Tensor:
    x = torch.frombuffer(bytearray(chance.randbytes(max(1, numel * dtype.itemsize))), dtype=torch.uint8)[
        : numel * dtype.itemsize
    ]
    return x.remainder(2).to(torch.bool) if dtype is torch.bool else x.view(dtype)


@pytest.mark.dist
def test_tensors_of_any_type_and_size_come_back_from_another_process(tmp_path: Path):
    chance = random.Random(0)
    edges = [n // 8 for n in (8, PARCEL_FROM - 8, PARCEL_FROM, PARCEL_FROM + 8, LEAST - LINE, LEAST, 3 * LEAST)]
    with child(echo, tmp_path / "store"), box_of(tmp_path / "store", 0) as box:
        for dtype in DTYPES.values():
            sent = [arbitrary(numel, dtype, chance) for numel in [*edges, *(chance.randrange(MB) for _ in range(5))]]
            sent.append(arbitrary(600 * 400, dtype, chance).view(600, 400).t())
            box.send(1, Note(values=tuple(sent))).wait()
            came = box.recv().wait().tensors()
            assert [(t.dtype, t.shape) for t in came] == [(t.dtype, t.shape) for t in sent]
            assert all(
                torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
                for a, b in zip(came, sent, strict=True)
            )
            assert all(t.data_ptr() % LINE == 0 for t in came if t.nbytes >= PARCEL_FROM)
        box.send(1, TheEnd()).wait()


@pytest.mark.dist
def test_a_message_may_bring_hundreds_of_parcels_among_small_tensors(tmp_path: Path):
    sent = [torch.full((PARCEL_FROM // 4 if i % 3 else 5,), float(i)) for i in range(300)]
    with child(echo, tmp_path / "store"), box_of(tmp_path / "store", 0) as box:
        box.send(1, Note(values=tuple(sent))).wait()
        assert all(map(torch.equal, box.recv().wait().tensors(), sent))


def test_only_large_tensors_for_ranks_of_this_host_are_parcels(monkeypatch: pytest.MonkeyPatch):
    store = HashStore()
    with box_of(store, 0, 3) as a, box_of(store, 1, 3) as b:
        monkeypatch.setattr(mailbox, "here", lambda: "another-host")
        with box_of(store, 2, 3) as c:
            a.send(1, Note(values=(torch.zeros(PARCEL_FROM // 4 - 1),))).wait()
            a.send(2, Note(values=(torch.ones(PARCEL_FROM),))).wait()
            assert lent(a) == 0
            assert bool((c.recv().wait().tensors()[0] == 1).all()) and b.recv().wait().nbytes == PARCEL_FROM - 4
            a.send(1, Note(values=(torch.zeros(PARCEL_FROM // 4),))).wait()
            assert lent(a) == 1 and b.recv().wait().nbytes == PARCEL_FROM


def test_a_sender_without_memory_for_parcels_uses_the_socket(pair: list[Mailbox], monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError("no memory")

    assert_serves(pair[1], pair[0])
    before = open_files()
    monkeypatch.setattr(os, "ftruncate", fail)
    x = pair[0].send_buffer(torch.zeros(PARCEL_FROM)).fill_(3)
    pair[0].send(1, Note(values=(x,))).wait()
    assert bool((pair[1].recv().wait().tensors()[0] == 3).all())
    assert not pair[0].in_use(x) and pair[0]._parcels._houses == []
    assert open_files() == before


# What is read, and what is not


def hold(path: Path) -> None:
    """Keep what was sent, tell its first and last value when asked, and let go of it when told."""
    with box_of(path, 1, is_open=True) as box:
        held: list[Tensor] = []
        while True:
            message = box.recv(src=0).wait()
            assert isinstance(message, Note)
            match message.text:
                case "hold":
                    held += message.values
                case "drop":
                    held.clear()
                case "slice":
                    held = [t[5:10] for t in held]
                case _:
                    pass
            message.values = ()
            ends = tuple(torch.stack([t[0], t[-1]]) for t in held)
            box.send(0, Note(text=message.text, values=ends)).wait()


@contextmanager
def holder(
    path: Path, timeout_s: float = DEADLINE_S
) -> Iterator[tuple[Mailbox, BaseProcess, Callable[..., list[list[float]]]]]:
    with child(hold, path) as process, box_of(path, 0, is_open=True, timeout_s=timeout_s) as box:

        def tell(kind: str, *tensors: Tensor) -> list[list[float]]:
            box.send(1, Note(text=kind, values=tensors)).wait()
            return [t.tolist() for t in box.recv(src=1, types=(Note,)).wait().tensors()]

        yield box, process, tell


@pytest.mark.dist
def test_what_lies_in_room_is_sent_without_a_copy_and_is_lent_until_the_reader_lets_go(tmp_path: Path):
    with holder(tmp_path / "store") as (box, _, tell):
        x = box.send_buffer(torch.zeros(1000, 300)).fill_(1)
        assert not box.in_use(x)
        assert tell("hold", x.view(-1)) == [[1, 1]]
        assert box.in_use(x) and len(box._parcels._houses[0].parcels) == 1
        x.fill_(2)  # Which its owner must not do: the reader sees it, since this is the very memory.
        assert tell("look") == [[2, 2]]
        assert tell("slice") == [[2, 2]] and box.in_use(x)  # A part of it is enough to keep it.
        assert tell("drop") == []
        assert not box.in_use(x)
        assert tell("hold", x.view(-1)) == [[2, 2]] and box.in_use(x)


@pytest.mark.dist
def test_what_a_reader_still_has_is_sent_to_it_again_as_a_copy(tmp_path: Path):
    with holder(tmp_path / "store") as (box, _, tell):
        x = box.send_buffer(torch.zeros(MB)).fill_(1)
        assert tell("hold", x) == [[1, 1]]
        assert tell("hold", x) == [[1, 1]] * 2
        x.fill_(3)
        assert tell("look") == [[3, 3], [1, 1]]
        assert tell("drop") == [] and not box.in_use(x) and lent(box) == 0


def test_parts_of_room_are_sent_without_a_copy_wherever_they_begin(pair: list[Mailbox]):
    a, b = pair
    x = a.send_buffer(torch.zeros(2, MB + 1)).fill_(1)
    a.send(1, Note(values=(x[1],))).wait()
    came = b.recv().wait().tensors()[0]
    x.fill_(2)
    assert bool((came == 2).all()) and came.shape == (MB + 1,) and a.in_use(x) and a.in_use(x[0])
    del came
    assert not a.in_use(x)


def test_one_reader_gets_one_part_of_room_at_a_time_as_it_is_and_others_as_copies(pair: list[Mailbox]):
    a, b = pair
    x = a.send_buffer(torch.zeros(2, MB)).fill_(1)
    a.send(1, Note(values=(x[0], x[1], x.t()))).wait()
    came = b.recv().wait().tensors()
    x.fill_(2)
    assert [float(t[0].max()) for t in came] == [2, 1, 1]
    del came
    assert not a.in_use(x)


def test_what_lies_in_room_goes_to_other_hosts_unwaited_for(pair: list[Mailbox]):
    a, b = pair
    a._near[1], b._near[0] = None, None
    x = a.send_buffer(torch.zeros(MB)).fill_(1)
    began = time.monotonic()
    for i in range(3 * UNREAD):  # More than one who does not read has room for.
        a.send(1, Note(i, values=(x,))).wait()
    assert time.monotonic() - began < DEADLINE_S / 2 and a.in_use(x) and a.in_use(x[7:9])
    for i in range(3 * UNREAD):
        message = b.recv().wait()
        assert message.number == i and bool((message.tensors()[0] == 1).all())
    until(lambda: not a.in_use(x))


def test_room_is_kept_for_as_long_as_its_owner_or_a_reader_has_it(pair: list[Mailbox]):
    a, b = pair
    x = a.send_buffer(torch.zeros(MB // 4)).fill_(7)
    part = x[:3]
    a.send(1, Note(values=(x,))).wait()
    came = b.recv().wait().tensors()[0]
    assert came.data_ptr() != x.data_ptr()  # Mapped twice, even in one process,
    came[0] = 8
    assert x[0] == 8  # but the same memory.
    del x
    filled = [a.send_buffer(torch.zeros(MB // 4)).fill_(i) for i in range(20)]
    assert came[1:].eq(7).all() and part.tolist() == [8, 7, 7]
    del part, came, filled
    a.send_buffer(torch.zeros(PARCEL_FROM))
    assert [len(house.parcels) for house in a._parcels._houses] == [1]


def test_small_or_empty_room_is_ordinary_memory(pair: list[Mailbox]):
    for like in (torch.zeros(0, 3), torch.zeros(5, dtype=torch.int8)):
        x = pair[0].send_buffer(like)
        assert (x.shape, x.dtype) == (like.shape, like.dtype) and not pair[0].in_use(x)
    assert pair[0]._parcels._houses == []


def test_the_end_of_a_forked_childs_copy_is_not_the_end_of_its_parents_reading(pair: list[Mailbox]):
    a, b = pair
    x = a.send_buffer(torch.zeros(MB)).fill_(1)
    a.send(1, Note(values=(x,))).wait()
    came = list(b.recv().wait().tensors())

    def drop() -> None:
        came.clear()
        gc.collect()

    with child(drop) as process:
        process.join(DEADLINE_S)
        assert process.exitcode == 0
    assert a.in_use(x)
    came.clear()
    assert not a.in_use(x)


@pytest.mark.dist
def test_a_killed_readers_parcels_are_taken_back(tmp_path: Path):
    with holder(tmp_path / "store") as (box, process, tell):
        x = box.send_buffer(torch.zeros(MB))
        tell("hold", x, torch.ones(MB))
        os.kill(process.pid or 0, signal.SIGSTOP)
        for _ in range(UNREAD):
            box.send(1, Note(text="hold", values=(torch.ones(MB),))).wait()
        assert box.in_use(x) and lent(box) == 2 + UNREAD
        end(process)
        assert box.in_use(x)  # Until this rank hears of it.
        assert box.recv(types=(PeerDied,)).wait().src == 1
        assert not box.in_use(x) and lent(box) == 0 and box._parcels.unread() == 0
        for _ in range(3 * UNREAD):  # Nobody is there to read it, so it is not even packed.
            box.send(1, Note(text="hold", values=(x,))).wait()
        assert not box.in_use(x) and 1 not in box._outboxes


def pack_and_wait(pipe: int) -> None:
    sender = Sender()
    places = [sender.pack(torch.full((n,), i), reader=0) for i, n in enumerate((MB // 8, MB // 8, 8 * MB))]
    os.write(pipe, json.dumps(places).encode())
    signal.pause()


@pytest.mark.dist
def test_what_was_mapped_outlives_a_killed_sender_and_what_was_not_is_refused():
    pipe, other_end = os.pipe()
    with child(pack_and_wait, other_end) as process:
        os.close(other_end)
        first, second, third = [Location(*p) for p in json.loads(os.read(pipe, 4096))]
        os.close(pipe)
        assert process.pid is not None and first.file == second.file != third.file
        reader = Receiver(process.pid)
        opened = reader.open(first)
        end(process)
        assert bool((opened.view(torch.int64) == 0).all())
        assert bool((reader.open(second).view(torch.int64) == 1).all())  # It lies in the same file.
        with pytest.raises(Unreadable, match=rf"^file {third.file} of process {process.pid} cannot be mapped: "):
            reader.open(third)


def send_and_keep(path: Path, rank: int) -> None:
    """Send to both others at random, keep at random what they send, and look at it before it is dropped."""
    chance, kept, others = random.Random(rank), list[tuple[Tensor, int]](), {0, 1, 2} - {rank}

    def drop() -> None:
        tensor, version = kept.pop(chance.randrange(len(kept)))
        assert bool((tensor == version).all()), f"rank {rank} read something else than {version}"

    with box_of(path, rank, 3) as box:
        rooms = [box.send_buffer(torch.zeros(PARCEL_FROM * n)) for n in (1, 2, 5)]
        for i in range(200):
            x = (
                chance.choice(rooms)
                if chance.random() < 0.4
                else torch.empty(chance.randrange(PARCEL_FROM // 4, 2 * PARCEL_FROM))
            )
            if not box.in_use(x):
                dst, version = chance.choice(sorted(others)), 1000 * rank + i
                box.send(dst, Note(version, values=(x.fill_(version),))).wait()
            with suppress(TimeoutError):
                message = box.recv(types=(Note,), timeout=0).wait()
                kept.append((message.values[0], message.number))
                message.values = ()
            while len(kept) > 10 or (kept and chance.random() < 0.5):
                drop()
        for stage in (Hello, TheEnd):
            for other in others:
                box.send(other, stage()).wait()
            for other in others:
                while isinstance(message := box.recv(src=other, types=(Note, stage)).wait(), Note):
                    kept.append((message.values[0], message.number))
                    message.values = ()
            while kept:
                drop()
        assert lent(box) == 0, f"{lent(box)} parcels of rank {rank} are still lent"
        box.close()


@pytest.mark.dist
def test_three_processes_that_send_and_keep_at_random_read_what_was_sent(tmp_path: Path):
    with ExitStack() as running:
        ranks = [running.enter_context(child(send_and_keep, tmp_path / "store", rank)) for rank in range(3)]
        for process in ranks:
            process.join(3 * DEADLINE_S)
        assert [process.exitcode for process in ranks] == [0, 0, 0]


# How much memory that takes


def test_memory_is_used_again(pair: list[Mailbox]):
    a, b = pair
    x = torch.zeros(MB // 4)
    a.send(1, Note(values=(x,))).wait()
    b.recv().wait()
    before = open_files()
    for i in range(200):
        a.send(1, Note(values=(x.fill_(i),))).wait()
        assert bool((b.recv().wait().tensors()[0] == i).all())
    assert open_files() == before
    (house,) = a._parcels._houses
    assert len(house.memory) == LEAST and os.fstat(house.file).st_blocks * 512 <= MB + 2 * mailbox.PARCEL_FROM


def test_a_warehouse_that_is_too_small_grows_and_the_old_one_goes_when_it_is_empty(pair: list[Mailbox]):
    a, b = pair
    before = open_files()
    kept = a.send_buffer(torch.zeros(MB // 4)).fill_(5)
    old = a._parcels._houses[0].file
    watching = os.dup(old)
    a.send(1, Note(values=(kept,))).wait()
    came = b.recv().wait().tensors()
    for _ in range(2):
        a.send(1, Note(values=(torch.zeros(3 * MB),))).wait()
        assert b.recv().wait().nbytes == 12 * MB
    assert [len(house.memory) for house in a._parcels._houses] == [LEAST, 2 * (12 * MB + LINE)]
    del came
    a.send_buffer(kept)
    assert len(a._parcels._houses) == 2 and bool((kept == 5).all())  # Its owner still has it.
    del kept
    a.send_buffer(torch.zeros(MB // 4))
    assert [len(house.memory) for house in a._parcels._houses] == [2 * (12 * MB + LINE)]
    assert os.fstat(watching).st_blocks == 0  # Given back, though the reader has it mapped.
    os.close(watching)
    with pytest.raises(OSError):
        os.fstat(old)
    for box in pair:
        box.close(linger_s=0)
    assert open_files() < before


def test_parcels_that_come_and_go_in_any_order_keep_what_is_in_them():
    chance, sender = random.Random(1), Sender()
    reader, alive = Receiver(os.getpid()), list[tuple[Tensor, Tensor]]()
    for i in range(1500):
        if alive and (len(alive) > 30 or chance.random() < 0.45):
            came, sent = alive.pop(chance.randrange(len(alive)))
            assert torch.equal(came, sent)
        else:
            sent = torch.full(
                (chance.choice([1, 63, 64, 65, chance.randrange(1, 300_000)]),), i % 256, dtype=torch.uint8
            )
            if chance.random() < 0.3:
                sent = sender.send_buffer(sent.numel()).copy_(sent)
            place = sender.pack(sent, reader=chance.randrange(20))
            assert place is not None
            alive.append((reader.open(place), sent))
    assert all(torch.equal(came, sent) for came, sent in alive)
    assert sum(len(house.memory) for house in sender._houses) <= 64 * MB
    came = sent = None
    alive.clear()
    sender._tidy()
    assert [house.parcels for house in sender._houses] == [[]]
    sender.close()


def test_a_message_beyond_the_bound_goes_and_the_next_one_waits_until_it_was_opened(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mailbox, "UNREAD_NBYTES", MB)
    with job(2, timeout_s=0.3) as (a, b):
        large, small = torch.zeros(MB), torch.zeros(PARCEL_FROM)
        a.send(1, Note(values=(large,))).wait()
        with pytest.raises(ClusterError, match=r"^rank 0 could not send 'note' to rank 1 within 0\.3 s$"):
            a.send(1, Note(values=(small,))).wait()
        a.send(1, Hello()).wait()
        reading = threading.Timer(0.1, lambda: b.recv().wait())
        reading.start()
        op = a.send(1, Note(values=(small,)))
        op.wait()
        reading.join()
        assert [b.recv().wait().tag for _ in range(3)] == ["note", "hello", "note"]


def test_what_a_reader_has_opened_does_not_count_as_unread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mailbox, "UNREAD_NBYTES", MB)
    with job(2, timeout_s=0.3) as (a, b):
        came: list[Message] = []
        for i in range(10):
            a.send(1, Note(values=(torch.full((MB,), i),))).wait()
            came.append(b.recv().wait())
        assert lent(a) == 10 and [int(m.tensors()[0][-1]) for m in came] == list(range(10))


def test_sixty_four_ranks_share_memory_and_the_next_one_is_sent_a_copy():
    with job(66) as (box, *others):
        x = box.send_buffer(torch.zeros(PARCEL_FROM)).fill_(1)
        for other in others:
            box.send(other.rank, Note(values=(x,))).wait()
        came = {other.rank: other.recv().wait().tensors()[0] for other in others}
        x.fill_(2)
        assert [rank for rank, t in came.items() if bool((t == 1).all())] == [65]
        assert lent(box) == 1
        del came[5]
        box._parcels.release(5)  # Its place is free for another.
        box.send(65, Note(values=(x,))).wait()
        came[65] = others[-1].recv().wait().tensors()[0]
        x.fill_(3)
        assert all(bool((t == 3).all()) for t in came.values()) and lent(box) == 1
        came.clear()
        assert not box.in_use(x)


# Closing


def test_closing_waits_until_what_was_sent_has_been_opened():
    with job(2) as (a, b):
        for i in range(UNREAD // 2):
            a.send(1, Note(values=(torch.full((COPY_BELOW,), i),)))
        came: list[Message] = []
        reading = threading.Thread(target=lambda: came.extend(b.recv().wait() for _ in range(UNREAD // 2)))
        reading.start()
        a.close()
        reading.join()
        assert [int(m.tensors()[0][-1]) for m in came] == list(range(UNREAD // 2))


def test_two_ranks_that_close_at_once_do_not_wait_for_each_other():
    with job(2) as boxes:
        for box in boxes:
            box.send(1 - box.rank, Note(values=(torch.zeros(MB),))).wait()
        until(lambda: all(box._inbox.poll(0) for box in boxes))
        start = time.monotonic()
        threads = [threading.Thread(target=box.close, kwargs={"linger_s": 30}) for box in boxes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - start < 5


def test_a_rank_that_closes_has_read_what_came_before():
    with job(2) as (a, b):
        a.send(1, Note(values=(torch.zeros(MB),))).wait()
        until(lambda: b._inbox.poll(0) != 0)
        b.close()
        assert lent(a) == 0
        start = time.monotonic()
        a.close(linger_s=30)
        assert time.monotonic() - start < 5


def test_tensors_of_both_sides_outlive_their_mailboxes_and_take_the_last_file_with_them():
    before = open_files()
    with job(2) as (a, b):
        x = a.send_buffer(torch.zeros(MB)).fill_(4)
        a.send(1, Note(values=(x,))).wait()
        (came,) = b.recv().wait().tensors()
    came += 1
    assert bool((x == 5).all())
    assert open_files() == before + 2  # A mapping of Python's has a file.
    assert len(mappings()) == 2
    del x, came
    assert open_files() == before and mappings() == []


# Places that are none


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[str, int]]:
    """Files that a header may tell of; all have 1 MB, if they have a size."""
    (tmp_path / "file").write_bytes(bytes(MB))
    house = Segment(MB)
    pipe, other_end = os.pipe()
    opened = {
        "good": house.file,
        "ordinary": os.open(tmp_path / "file", os.O_RDWR),
        "pipe": pipe,
        "other end": other_end,
        "device": os.open("/dev/zero", os.O_RDWR),
        "unsealed": os.memfd_create(NAME, os.MFD_ALLOW_SEALING),
        "half sealed": os.memfd_create(NAME, os.MFD_ALLOW_SEALING),
        "foreign": os.memfd_create("another", os.MFD_ALLOW_SEALING),
    }
    for name in ("unsealed", "half sealed", "foreign"):
        os.ftruncate(opened[name], MB)
    fcntl.fcntl(opened["half sealed"], fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    fcntl.fcntl(opened["foreign"], fcntl.F_ADD_SEALS, SEALS)
    yield {**opened, "closed": 10**6, "negative": -1, "huge": 2**64 - 1}
    for file in opened.values():
        os.close(file)


GOOD = {"size": MB, "start": LINE, "nbytes": 256, "mark": 5}


@pytest.mark.parametrize(
    ("file", "lies", "reason"),
    [
        ("ordinary", {}, "is none of 1048576 bytes that parcels come in"),
        ("pipe", {}, "is none of 1048576 bytes"),
        ("device", {}, "is none of 1048576 bytes"),
        ("foreign", {}, "is none of 1048576 bytes"),
        ("unsealed", {}, "is none of 1048576 bytes"),
        ("half sealed", {}, "is none of 1048576 bytes"),
        ("closed", {}, r"cannot be mapped: .*No such file"),
        ("negative", {}, r"cannot be mapped: .*No such file"),
        ("huge", {}, r"cannot be mapped: .*No such file"),
        ("good", {"size": MB + 1}, "is none of 1048577 bytes"),
        ("good", {"size": MB - 1}, "is none of 1048575 bytes"),
        ("good", {"size": 2**63}, "is none of 9223372036854775808 bytes"),
        ("good", {"size": 0}, "are no parcel in a file of 0"),
        ("good", {"size": -1}, "are no parcel in a file of -1"),
        (
            "good",
            {"start": MB - 64, "mark": MB - 65},
            "256 bytes from byte 1048512 on are no parcel in a file of 1048576",
        ),
        ("good", {"start": 2**63, "mark": 2**63 - 1}, "are no parcel"),
        ("good", {"start": 0, "mark": 0}, "are no parcel"),
        ("good", {"start": -64, "mark": -65}, "are no parcel"),
        ("good", {"mark": 64}, "byte 64 is no mark of a parcel at byte 64"),
        ("good", {"mark": -1}, "byte -1 is no mark"),
        ("good", {"mark": 2**64 - 1}, "is no mark"),
        ("good", {"start": 129, "mark": 129}, "byte 129 is no mark of a parcel at byte 129"),
        ("good", {"nbytes": 255}, r"a float32 tensor of shape \(64,\) came with 255 bytes"),
        ("good", {"nbytes": -256}, "came with -256 bytes"),
        ("good", {"nbytes": 2**64 - 1}, "came with 18446744073709551615 bytes"),
    ],
)
def test_a_header_that_tells_of_a_parcel_where_there_is_none_is_refused(
    pair: list[Mailbox], files: dict[str, int], file: str, lies: dict[str, int], reason: str
):
    place = [files[file], *{**GOOD, **lies}.values()]
    assert_serves(*pair)
    before = open_files()
    assert deliver(pair, [[header(tensors=[form("float32", 64, place=place)])]]) == []
    with pytest.raises(ValueError, match=reason):
        raise ValueError(pair[0].last_refusal)
    assert open_files() == before
    (message,) = deliver(pair, [[header(tensors=[form("float32", 64, place=[files["good"], *GOOD.values()])])]])
    assert message.tensors()[0].tolist() == [0.0] * 64


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ([1, 2, 3, 4], "length 5, got 4"),
        ([1, 2, 3, 4, "5"], "Expected `int`"),
        (7, "Expected `array"),
        ([], "length 5"),
    ],
)
def test_a_place_of_another_form_is_refused(pair: list[Mailbox], place: object, reason: str):
    assert deliver(pair, [[header(tensors=[form("float32", 1, place=place)])]]) == []
    assert reason in (pair[0].last_refusal or "")


def test_a_parcel_brings_no_bytes_that_are_no_bool(pair: list[Mailbox]):
    place = pair[1]._parcels.pack(torch.full((64,), 2, dtype=torch.uint8), reader=0)
    assert deliver(pair, [[header(tensors=[form("bool", 64, place=place)])]]) == []
    assert "other than 0 and 1" in (pair[0].last_refusal or "")


def test_a_parcel_of_a_rank_on_another_host_is_refused():
    with job(2, is_far=True) as boxes:
        assert deliver(boxes, [[header(tensors=[form("float32", 64, place=[3, *GOOD.values()])])]]) == []
        assert (boxes[0].last_refusal or "").endswith(
            "it tells of a tensor in memory of its sender, which is not on this host"
        )


def test_a_parcel_beyond_the_limit_is_refused_before_it_is_mapped():
    with job(2, max_nbytes=MB) as (a, b):
        b.max_nbytes = None  # A rank that does not keep to it.
        b.send(0, Note(values=(torch.zeros(MB // 4 + 1),))).wait()
        with pytest.raises(TimeoutError):
            a.recv(timeout=0.2).wait()
        assert (a.last_refusal or "").endswith(
            f"it tells of a tensor of {MB + 4} bytes: this mailbox was made with max_nbytes={MB}"
        )
        reader = a._near[1]
        assert a.refused == 1 and reader is not None and reader._files == {}
        b.send(0, Note(values=(torch.zeros(MB // 4),))).wait()
        assert a.recv().wait().nbytes == MB


EDGES = [
    0,
    1,
    -1,
    63,
    64,
    65,
    128,
    4096,
    MB - 256,
    MB - 1,
    MB,
    MB + 1,
    2**31,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
]


def damaged(chance: random.Random, files: dict[str, int]) -> list[bytes]:
    """A letter with two parcels and a small tensor; the first parcel's place, or any byte of the header, or neither may be wrong."""
    place, sound = [files["good"], *GOOD.values()], [files["good"], MB, 2**19, 64, 2**19 - 1]
    for _ in range(chance.choice([0, 1, 1, 2, 5])):
        i = chance.randrange(5)
        near = [files["good"], *GOOD.values()][i] + chance.randrange(-70, 70)
        place[i] = chance.choice([*files.values(), *range(40)] if i == 0 else [*EDGES, near])
    numel = place[3] if 0 <= place[3] < 2**62 else 256
    head = bytearray(
        header(tensors=[form("uint8", numel, place=place), form("float32", 3), form("bool", 64, place=sound)])
    )
    victim = chance.randrange(len(head))
    match chance.randrange(8):
        case 0:
            head[victim] ^= 1 << chance.randrange(8)
        case 1:
            del head[victim:]
        case 2:
            head.insert(victim, chance.randrange(256))
        case 3:
            head[victim] = chance.randrange(256)
        case _:
            pass
    return [bytes(head), *[bytes(12)] * chance.choice([1] * 8 + [0, 2])]


def test_twenty_thousand_damaged_places_do_not_stop_it(pair: list[Mailbox], files: dict[str, int]):
    chance, came = random.Random(2), 0
    assert len(deliver(pair, [[header(tensors=[form("uint8", 64, place=[files["good"], MB, 64, 64, 0])])]])) == 1
    before = open_files()
    for _ in range(40):
        for message in deliver(pair, [damaged(chance, files) for _ in range(500)]):
            came += 1
            for tensor in message.tensors():  # All of it can be read.
                int(tensor.view(-1).view(torch.uint8).max())
    assert 1000 < came < 5000
    reader = pair[0]._near[1]
    assert (
        reader is not None and open_files() == before + len(reader._files) - 1
    )  # A damaged number may be that of the same file again.
    pair[1].send(0, Note(values=(torch.ones(MB),))).wait()
    assert bool((pair[0].recv().wait().tensors()[0] == 1).all())


# Who comes and who goes


def say_and_die(path: Path, rank: int, count: int, numel: int) -> None:
    with box_of(path, rank, is_open=True) as box:
        for i in range(count):
            box.send(0, Note(i, values=(torch.zeros(numel),))).wait()
        box.close()  # What was flushed has left this process, but nobody may have read it.
        os.kill(os.getpid(), signal.SIGKILL)


def heard(box: Mailbox) -> list[tuple[str, int, int]]:
    """All that comes until a peer is dead."""
    said: list[tuple[str, int, int]] = []
    while not said or said[-1][0] != "peer died":
        message = box.recv().wait()
        said.append((message.tag, message.src, message.number if isinstance(message, Note) else 0))
    return said


@pytest.mark.dist
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    ("count", "numel"), [(0, 0), (1, 0), (2000, 0), (100, PARCEL_FROM // 4 - 1), (10, PARCEL_FROM)]
)
def test_a_process_is_gone_once_and_after_its_last_word(tmp_path: Path, count: int, numel: int, is_known: bool):
    with (
        box_of(tmp_path / "store", 0, is_open=True) as box,
        child(say_and_die, tmp_path / "store", 1, count, numel) as process,
    ):
        assert process.pid is not None
        if is_known or count == 0:
            box.watch(1, process.pid)
        words = [("note", 1, i) for i in range(count)]
        if (
            numel == 0
        ):  # So little that all of it waits in the kernel, and ZeroMQ takes in the last of it while the first is read.
            process.join(DEADLINE_S)
            assert process.exitcode == -signal.SIGKILL
        assert heard(box) == [*words, ("peer died", 1, 0)]
        box.watch(1, process.pid)
        with pytest.raises(TimeoutError):
            box.recv(timeout=0.05).wait()
        assert box.refused == 0


def be_killed_speaking(path: Path) -> None:
    with box_of(path, 1, is_open=True) as box:
        for i in range(10**9):
            box.send(0, Note(i, values=(torch.full((PARCEL_FROM,), i),))).wait()


@pytest.mark.dist
def test_nothing_is_heard_of_a_process_after_it_is_gone(tmp_path: Path):
    chance = random.Random(3)
    for life in range(5):
        path = tmp_path / f"store-{life}"
        with box_of(path, 0, is_open=True) as box, child(be_killed_speaking, path) as process:
            count = chance.randrange(1, 60)
            for i in range(count):
                message = box.recv(src=1).wait()
                assert message.number == i and bool((message.tensors()[0] == i).all())
            process.kill()
            said = heard(box)
            assert [version for _, _, version in said[:-1]] == list(range(count, count + len(said) - 1))
            with pytest.raises(TimeoutError):
                box.recv(timeout=0.02).wait()


def test_what_claims_to_be_of_one_who_is_gone_is_refused():
    with job(2, is_open=True) as boxes:
        boxes[0]._gone.add(1)
        boxes[1].send(0, Note()).wait()
        until(lambda: boxes[0]._inbox.poll(0) != 0)
        with pytest.raises(TimeoutError):
            boxes[0].recv(timeout=0.02).wait()
        assert (boxes[0].last_refusal or "").endswith("it came after the end of its sender")


@pytest.mark.dist
def test_a_process_that_was_never_a_rank_is_missed_too():
    with box_of(HashStore(), 0, is_open=True) as box, child(signal.pause) as process:
        assert process.pid is not None
        box.watch(3, process.pid)
        box.watch(3, process.pid)
        with pytest.raises(TimeoutError):
            box.recv(timeout=0.05).wait()
        end(process)
        assert heard(box) == [("peer died", 3, 0)]
        box.watch(4, process.pid)  # It has been buried, and has not even a number any more.
        assert heard(box) == [("peer died", 4, 0)]


@pytest.mark.dist
def test_an_awaited_send_ends_with_the_reader_that_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mailbox, "UNREAD_NBYTES", MB)
    with holder(tmp_path / "store", timeout_s=60) as (box, process, tell):
        tell("hold", torch.zeros(MB))
        os.kill(process.pid or 0, signal.SIGSTOP)
        box.send(1, Note(text="hold", values=(torch.zeros(MB),))).wait()
        op = box.send(1, Note(text="hold", values=(torch.zeros(MB),)))
        threading.Timer(0.2, process.kill).start()
        start = time.monotonic()
        op.wait()
        assert time.monotonic() - start < 20 and lent(box) == 0
        assert heard(box) == [("peer died", 1, 0)]


def test_a_mailbox_that_is_not_open_watches_nobody(pair: list[Mailbox]):
    pair[1].send(0, Hello()).wait()
    pair[0].recv().wait()
    assert pair[0]._watched == {}


def test_watching_leaves_no_file_behind():
    before = open_files()
    with job(2, is_open=True) as boxes:
        for box in boxes:
            box.send(1 - box.rank, Hello()).wait()
        for box in boxes:
            box.recv().wait()
        assert [list(box._watched.values()) for box in boxes] == [[1], [0]]
    assert open_files() == before


def test_a_late_rank_beyond_the_size_is_admitted_to_an_open_mailbox_alone():
    store = HashStore()
    with box_of(store, 0, is_open=True) as box, box_of(store, 7, is_open=True) as late:
        late.send(0, Note(values=(torch.ones(MB),))).wait()
        message = box.recv().wait()
        assert message.src == 7 and bool((message.tensors()[0] == 1).all())
        box.send(7, Hello()).wait()
        assert late.recv().wait().src == 0
        public, secret = zmq.curve_keypair()
        stranger(box, curve_publickey=public, curve_secretkey=secret, curve_serverkey=box._public)
        assert box.last_refusal == "a stranger at 127.0.0.1: no rank of this job has published its key"
        assert_serves(box, late)
    with pytest.raises(ValueError, match=r"Mailbox\(rank=7, size=2\)"):
        Mailbox(HashStore(), 7, 2)


@pytest.mark.parametrize("rank", ["2", "7", "-1"])
def test_a_key_of_a_rank_that_cannot_be_opens_no_door(rank: str):
    store = HashStore()
    with job(2, store) as boxes:
        public, secret = zmq.curve_keypair()
        store.set(KEYS + z85.decode(public).hex(), rank)
        store.set(f"mail/{rank}", f"tcp://127.0.0.1:1 {public.decode()} {os.getpid()} ")
        stranger(boxes[0], curve_publickey=public, curve_secretkey=secret, curve_serverkey=boxes[0]._public)
        assert_serves(*boxes)


def test_a_key_without_a_mailbox_opens_no_door():
    store = HashStore()
    with job(2, store, is_open=True) as boxes:
        public, secret = zmq.curve_keypair()
        store.set(KEYS + z85.decode(public).hex(), "5")
        stranger(boxes[0], curve_publickey=public, curve_secretkey=secret, curve_serverkey=boxes[0]._public)
        assert_serves(*boxes)


# Who may map whose memory


def test_processes_of_one_user_are_at_the_same_place():
    with job(2) as boxes:
        assert boxes[0]._here and boxes[0]._here == boxes[1]._here == parcels.here()


def change_user() -> None:
    os.setgid(65534)
    os.setuid(65534)
    os._exit(0 if parcels.here() == "" else 1)


@pytest.mark.dist
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_whose_memory_is_hidden_is_near_nobody():
    with child(change_user) as process:
        process.join(DEADLINE_S)
        assert process.exitcode == 0


def test_of_a_part_of_room_only_what_was_told_is_unread():
    sender = Sender()
    x = sender.send_buffer(1 << 20)
    assert sender.pack(x[:300], 3) and sender.pack(x[300:1000], 9)
    assert (sender.unread(), sender.unread(3), sender.unread(9)) == (1000, 300, 700)
    sender.close()


def test_a_parcel_that_does_not_begin_where_its_type_would_is_copied(pair: list[Mailbox], files: dict[str, int]):
    place = [files["good"], *{**GOOD, "start": LINE + 1}.values()]
    (message,) = deliver(pair, [[header(tensors=[form("float32", 64, place=place)])]])
    assert message.tensors()[0].data_ptr() % 4 == 0 and message.tensors()[0].tolist() == [0.0] * 64


def test_marks_tell_who_was_told_who_reads_and_who_is_done():
    sender, reader = Sender(), Receiver(os.getpid())
    x = torch.zeros(5000)
    places = [sender.pack(x, rank) for rank in (3, 9)]
    assert all(p is not None and p.nbytes == x.nbytes for p in places)
    house = sender._houses[0]
    marks = [p.mark for p in places if p is not None]
    assert [house.memory[m] for m in marks] == [SENT, SENT]
    assert (sender.unread(), sender.unread(3), sender.unread(9), sender.unread(4)) == (
        2 * x.nbytes,
        x.nbytes,
        x.nbytes,
        0,
    )
    opened = [reader.open(p) for p in places if p is not None]
    assert [house.memory[m] for m in marks] == [OPEN, OPEN] and sender.unread() == 0
    opened.pop()
    assert [house.memory[m] for m in marks] == [OPEN, READ]
    sender.close()
    assert bool((opened[0] == 0).all())
