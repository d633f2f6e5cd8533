"""Segments: ranks of one host send tensors through memory that both map; a death neither frees nor keeps it."""

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
from paceline.transport import mailbox, outbox, segments
from paceline.transport.authenticator import KEYS
from paceline.transport.connections import COPY_BELOW, UNREAD
from paceline.transport.mailbox import Mailbox
from paceline.transport.memory import CACHE_LINE
from paceline.transport.outbox import SHARED_FROM
from paceline.transport.segments import (
    FIRST_NBYTES,
    NAME,
    OPEN,
    READ,
    SEALS,
    SENT,
    Location,
    Segment,
    SegmentReader,
    SegmentWriter,
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
    location: Path | Store, rank: int, size: int = 2, *, is_open: bool = False, timeout_s: float = DEADLINE_S
) -> Iterator[Mailbox]:
    store = FileStore(str(location)) if isinstance(location, Path) else location
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


def unread(box: Mailbox) -> int:
    """How many allocations of a mailbox another rank may still read."""
    return sum(segment.is_unread(a) for segment in box._outbox._segments._segments for a in segment.allocations)


# Delivery


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
    edges = [
        n // 8
        for n in (
            8,
            SHARED_FROM - 8,
            SHARED_FROM,
            SHARED_FROM + 8,
            FIRST_NBYTES - CACHE_LINE,
            FIRST_NBYTES,
            3 * FIRST_NBYTES,
        )
    ]
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
            assert all(t.data_ptr() % CACHE_LINE == 0 for t in came if t.nbytes >= SHARED_FROM)
        box.send(1, TheEnd()).wait()


@pytest.mark.dist
def test_a_message_may_have_hundreds_of_shared_tensors_among_small_ones(tmp_path: Path):
    sent = [torch.full((SHARED_FROM // 4 if i % 3 else 5,), float(i)) for i in range(300)]
    with child(echo, tmp_path / "store"), box_of(tmp_path / "store", 0) as box:
        box.send(1, Note(values=tuple(sent))).wait()
        assert all(map(torch.equal, box.recv().wait().tensors(), sent))


def test_only_large_tensors_for_ranks_of_this_host_go_through_segments(monkeypatch: pytest.MonkeyPatch):
    store = HashStore()
    with box_of(store, 0, 3) as a, box_of(store, 1, 3) as b:
        monkeypatch.setattr(mailbox, "memory_domain", lambda: "another-host")
        with box_of(store, 2, 3) as c:
            a.send(1, Note(values=(torch.zeros(SHARED_FROM // 4 - 1),))).wait()
            a.send(2, Note(values=(torch.ones(SHARED_FROM),))).wait()
            assert unread(a) == 0
            assert bool((c.recv().wait().tensors()[0] == 1).all()) and b.recv().wait().nbytes == SHARED_FROM - 4
            a.send(1, Note(values=(torch.zeros(SHARED_FROM // 4),))).wait()
            assert unread(a) == 1 and b.recv().wait().nbytes == SHARED_FROM


def test_a_sender_without_memory_for_segments_uses_the_socket(pair: list[Mailbox], monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError("no memory")

    assert_serves(pair[1], pair[0])
    before = open_files()
    monkeypatch.setattr(os, "ftruncate", fail)
    x = pair[0].send_buffer(torch.zeros(SHARED_FROM)).fill_(3)
    pair[0].send(1, Note(values=(x,))).wait()
    assert bool((pair[1].recv().wait().tensors()[0] == 3).all())
    assert not pair[0].in_use(x) and pair[0]._outbox._segments._segments == []
    assert open_files() == before


# Which memory is still in use


def hold(path: Path) -> None:
    """Keep the tensors that were sent, reply with their first and last values, and drop them when asked."""
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

        def ask(kind: str, *tensors: Tensor) -> list[list[float]]:
            box.send(1, Note(text=kind, values=tensors)).wait()
            return [t.tolist() for t in box.recv(src=1, types=(Note,)).wait().tensors()]

        yield box, process, ask


@pytest.mark.dist
def test_a_send_buffer_is_sent_without_a_copy_and_in_use_until_the_reader_releases_it(tmp_path: Path):
    with holder(tmp_path / "store") as (box, _, ask):
        x = box.send_buffer(torch.zeros(1000, 300)).fill_(1)
        assert not box.in_use(x)
        assert ask("hold", x.view(-1)) == [[1, 1]]
        assert box.in_use(x) and len(box._outbox._segments._segments[0].allocations) == 1
        x.fill_(2)  # Which its owner must not do: the reader sees it, because it is the same memory.
        assert ask("look") == [[2, 2]]
        assert ask("slice") == [[2, 2]] and box.in_use(x)  # A part of it is enough to keep it.
        assert ask("drop") == []
        assert not box.in_use(x)
        assert ask("hold", x.view(-1)) == [[2, 2]] and box.in_use(x)


@pytest.mark.dist
def test_a_send_buffer_that_a_reader_still_has_is_sent_to_it_again_as_a_copy(tmp_path: Path):
    with holder(tmp_path / "store") as (box, _, ask):
        x = box.send_buffer(torch.zeros(MB)).fill_(1)
        assert ask("hold", x) == [[1, 1]]
        assert ask("hold", x) == [[1, 1]] * 2
        x.fill_(3)
        assert ask("look") == [[3, 3], [1, 1]]
        assert ask("drop") == [] and not box.in_use(x) and unread(box) == 0


def test_parts_of_a_send_buffer_are_sent_without_a_copy_wherever_they_begin(pair: list[Mailbox]):
    a, b = pair
    x = a.send_buffer(torch.zeros(2, MB + 1)).fill_(1)
    a.send(1, Note(values=(x[1],))).wait()
    came = b.recv().wait().tensors()[0]
    x.fill_(2)
    assert bool((came == 2).all()) and came.shape == (MB + 1,) and a.in_use(x) and a.in_use(x[0])
    del came
    assert not a.in_use(x)


def test_one_reader_gets_one_part_of_a_send_buffer_without_a_copy_and_further_parts_as_copies(pair: list[Mailbox]):
    a, b = pair
    x = a.send_buffer(torch.zeros(2, MB)).fill_(1)
    a.send(1, Note(values=(x[0], x[1], x.t()))).wait()
    came = b.recv().wait().tensors()
    x.fill_(2)
    assert [float(t[0].max()) for t in came] == [2, 1, 1]
    del came
    assert not a.in_use(x)


def test_a_send_buffer_goes_to_other_hosts_without_waiting(pair: list[Mailbox]):
    a, b = pair
    a._readers[1], b._readers[0] = None, None
    x = a.send_buffer(torch.zeros(MB)).fill_(1)
    began = time.monotonic()
    for i in range(3 * UNREAD):  # More than a receiver queues that does not read.
        a.send(1, Note(i, values=(x,))).wait()
    assert time.monotonic() - began < DEADLINE_S / 2 and a.in_use(x) and a.in_use(x[7:9])
    for i in range(3 * UNREAD):
        message = b.recv().wait()
        assert message.number == i and bool((message.tensors()[0] == 1).all())
    until(lambda: not a.in_use(x))


def test_a_send_buffer_is_kept_while_its_owner_or_a_reader_has_it(pair: list[Mailbox]):
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
    a.send_buffer(torch.zeros(SHARED_FROM))
    assert [len(segment.allocations) for segment in a._outbox._segments._segments] == [1]


def test_a_small_or_empty_send_buffer_is_ordinary_memory(pair: list[Mailbox]):
    for like in (torch.zeros(0, 3), torch.zeros(5, dtype=torch.int8)):
        x = pair[0].send_buffer(like)
        assert (x.shape, x.dtype) == (like.shape, like.dtype) and not pair[0].in_use(x)
    assert pair[0]._outbox._segments._segments == []


def test_a_forked_child_that_drops_its_copy_does_not_release_its_parents_tensor(pair: list[Mailbox]):
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
def test_memory_sent_to_a_killed_reader_is_freed(tmp_path: Path):
    with holder(tmp_path / "store") as (box, process, ask):
        x = box.send_buffer(torch.zeros(MB))
        ask("hold", x, torch.ones(MB))
        os.kill(process.pid or 0, signal.SIGSTOP)
        for _ in range(UNREAD):
            box.send(1, Note(text="hold", values=(torch.ones(MB),))).wait()
        assert box.in_use(x) and unread(box) == 2 + UNREAD
        end(process)
        assert box.in_use(x)  # Until this rank has noticed the death.
        assert box.recv(types=(PeerDied,)).wait().src == 1
        assert not box.in_use(x) and unread(box) == 0 and box._outbox._segments.unread_nbytes() == 0
        for _ in range(3 * UNREAD):  # There is no reader, so it is not even copied.
            box.send(1, Note(text="hold", values=(x,))).wait()
        assert not box.in_use(x) and 1 not in box._outbox._sockets


def pack_and_wait(pipe: int) -> None:
    sender = SegmentWriter()
    locations = [sender.write(torch.full((n,), i), reader=0) for i, n in enumerate((MB // 8, MB // 8, 8 * MB))]
    os.write(pipe, json.dumps(locations).encode())
    signal.pause()


@pytest.mark.dist
def test_what_was_mapped_outlives_a_killed_sender_and_what_was_not_is_refused():
    pipe, other_end = os.pipe()
    with child(pack_and_wait, other_end) as process:
        os.close(other_end)
        first, second, third = [Location(*p) for p in json.loads(os.read(pipe, 4096))]
        os.close(pipe)
        assert process.pid is not None and first.file == second.file != third.file
        reader = SegmentReader(process.pid)
        opened = reader.open(first)
        end(process)
        assert bool((opened.view(torch.int64) == 0).all())
        assert bool((reader.open(second).view(torch.int64) == 1).all())  # It is in the same file.
        with pytest.raises(Unreadable, match=rf"^file {third.file} of process {process.pid} cannot be mapped: "):
            reader.open(third)


def send_and_keep(path: Path, rank: int) -> None:
    """Send to both others at random, keep received tensors at random, and check each before it is dropped."""
    chance, kept, others = random.Random(rank), list[tuple[Tensor, int]](), {0, 1, 2} - {rank}

    def drop() -> None:
        tensor, version = kept.pop(chance.randrange(len(kept)))
        assert bool((tensor == version).all()), f"rank {rank} read something else than {version}"

    with box_of(path, rank, 3) as box:
        buffers = [box.send_buffer(torch.zeros(SHARED_FROM * n)) for n in (1, 2, 5)]
        for i in range(200):
            x = (
                chance.choice(buffers)
                if chance.random() < 0.4
                else torch.empty(chance.randrange(SHARED_FROM // 4, 2 * SHARED_FROM))
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
        assert unread(box) == 0, f"{unread(box)} allocations of rank {rank} are still unread"
        box.close()


@pytest.mark.dist
def test_three_processes_that_send_and_keep_at_random_read_what_was_sent(tmp_path: Path):
    with ExitStack() as running:
        ranks = [running.enter_context(child(send_and_keep, tmp_path / "store", rank)) for rank in range(3)]
        for process in ranks:
            process.join(3 * DEADLINE_S)
        assert [process.exitcode for process in ranks] == [0, 0, 0]


# How much memory is used


def test_memory_is_reused(pair: list[Mailbox]):
    a, b = pair
    x = torch.zeros(MB // 4)
    a.send(1, Note(values=(x,))).wait()
    b.recv().wait()
    before = open_files()
    for i in range(200):
        a.send(1, Note(values=(x.fill_(i),))).wait()
        assert bool((b.recv().wait().tensors()[0] == i).all())
    assert open_files() == before
    (segment,) = a._outbox._segments._segments
    assert len(segment.memory) == FIRST_NBYTES and os.fstat(segment.file).st_blocks * 512 <= MB + 2 * SHARED_FROM


def test_a_full_segment_is_followed_by_a_larger_one_and_closed_when_it_is_empty(pair: list[Mailbox]):
    a, b = pair
    before = open_files()
    kept = a.send_buffer(torch.zeros(MB // 4)).fill_(5)
    old = a._outbox._segments._segments[0].file
    watching = os.dup(old)
    a.send(1, Note(values=(kept,))).wait()
    came = b.recv().wait().tensors()
    for _ in range(2):
        a.send(1, Note(values=(torch.zeros(3 * MB),))).wait()
        assert b.recv().wait().nbytes == 12 * MB
    assert [len(segment.memory) for segment in a._outbox._segments._segments] == [
        FIRST_NBYTES,
        2 * (12 * MB + CACHE_LINE),
    ]
    del came
    a.send_buffer(kept)
    assert len(a._outbox._segments._segments) == 2 and bool((kept == 5).all())  # Its owner still has it.
    del kept
    a.send_buffer(torch.zeros(MB // 4))
    assert [len(segment.memory) for segment in a._outbox._segments._segments] == [2 * (12 * MB + CACHE_LINE)]
    assert os.fstat(watching).st_blocks == 0  # Given back, though the reader has it mapped.
    os.close(watching)
    with pytest.raises(OSError):
        os.fstat(old)
    for box in pair:
        box.close(linger_s=0)
    assert open_files() < before


def test_allocations_freed_in_any_order_keep_their_values():
    chance, sender = random.Random(1), SegmentWriter()
    reader, alive = SegmentReader(os.getpid()), list[tuple[Tensor, Tensor]]()
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
            location = sender.write(sent, reader=chance.randrange(20))
            assert location is not None
            alive.append((reader.open(location), sent))
    assert all(torch.equal(came, sent) for came, sent in alive)
    assert sum(len(segment.memory) for segment in sender._segments) <= 64 * MB
    came = sent = None
    alive.clear()
    sender._free_unused()
    assert [segment.allocations for segment in sender._segments] == [[]]
    sender.close()


def test_a_message_beyond_the_bound_goes_and_the_next_one_waits_until_it_was_opened(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbox, "UNREAD_NBYTES", MB)
    with job(2, timeout_s=0.3) as (a, b):
        large, small = torch.zeros(MB), torch.zeros(SHARED_FROM)
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
    monkeypatch.setattr(outbox, "UNREAD_NBYTES", MB)
    with job(2, timeout_s=0.3) as (a, b):
        came: list[Message] = []
        for i in range(10):
            a.send(1, Note(values=(torch.full((MB,), i),))).wait()
            came.append(b.recv().wait())
        assert unread(a) == 10 and [int(m.tensors()[0][-1]) for m in came] == list(range(10))


def test_sixty_four_ranks_share_memory_and_the_next_one_is_sent_a_copy():
    with job(66) as (box, *others):
        x = box.send_buffer(torch.zeros(SHARED_FROM)).fill_(1)
        for other in others:
            box.send(other.rank, Note(values=(x,))).wait()
        came = {other.rank: other.recv().wait().tensors()[0] for other in others}
        x.fill_(2)
        assert [rank for rank, t in came.items() if bool((t == 1).all())] == [65]
        assert unread(box) == 1
        del came[5]
        box._outbox._segments.release(5)  # Its status byte is free for another reader.
        box.send(65, Note(values=(x,))).wait()
        came[65] = others[-1].recv().wait().tensors()[0]
        x.fill_(3)
        assert all(bool((t == 3).all()) for t in came.values()) and unread(box) == 1
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
        assert unread(a) == 0
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
    assert open_files() == before + 2  # Each of Python's mappings has a file.
    assert len(mappings()) == 2
    del x, came
    assert open_files() == before and mappings() == []


# Locations without a tensor


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[str, int]]:
    """Files that a location may name; all have 1 MB, if they have a size."""
    (tmp_path / "file").write_bytes(bytes(MB))
    segment = Segment(MB)
    pipe, other_end = os.pipe()
    opened = {
        "good": segment.file,
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


GOOD = {"size": MB, "start": CACHE_LINE, "nbytes": 256, "status": 5}


@pytest.mark.parametrize(
    ("file", "lies", "reason"),
    [
        ("ordinary", {}, "is not a sealed segment of 1048576 bytes"),
        ("pipe", {}, "is not a sealed segment of 1048576 bytes"),
        ("device", {}, "is not a sealed segment of 1048576 bytes"),
        ("foreign", {}, "is not a sealed segment of 1048576 bytes"),
        ("unsealed", {}, "is not a sealed segment of 1048576 bytes"),
        ("half sealed", {}, "is not a sealed segment of 1048576 bytes"),
        ("closed", {}, r"cannot be mapped: .*No such file"),
        ("negative", {}, r"cannot be mapped: .*No such file"),
        ("huge", {}, r"cannot be mapped: .*No such file"),
        ("good", {"size": MB + 1}, "is not a sealed segment of 1048577 bytes"),
        ("good", {"size": MB - 1}, "is not a sealed segment of 1048575 bytes"),
        ("good", {"size": 2**63}, "is not a sealed segment of 9223372036854775808 bytes"),
        ("good", {"size": 0}, "are not within a segment of 0 bytes"),
        ("good", {"size": -1}, "are not within a segment of -1 bytes"),
        (
            "good",
            {"start": MB - 64, "status": MB - 65},
            "256 bytes from byte 1048512 on are not within a segment of 1048576 bytes",
        ),
        ("good", {"start": 2**63, "status": 2**63 - 1}, "are not within a segment"),
        ("good", {"start": 0, "status": 0}, "are not within a segment"),
        ("good", {"start": -64, "status": -65}, "are not within a segment"),
        ("good", {"status": 64}, "byte 64 cannot be a status byte of data at byte 64"),
        ("good", {"status": -1}, "byte -1 cannot be a status byte"),
        ("good", {"status": 2**64 - 1}, "cannot be a status byte"),
        ("good", {"start": 129, "status": 129}, "byte 129 cannot be a status byte of data at byte 129"),
        ("good", {"nbytes": 255}, r"a float32 tensor of shape \(64,\) came with 255 bytes"),
        ("good", {"nbytes": -256}, "came with -256 bytes"),
        ("good", {"nbytes": 2**64 - 1}, "came with 18446744073709551615 bytes"),
    ],
)
def test_a_header_with_a_location_that_has_no_tensor_is_refused(
    pair: list[Mailbox], files: dict[str, int], file: str, lies: dict[str, int], reason: str
):
    location = [files[file], *{**GOOD, **lies}.values()]
    assert_serves(*pair)
    before = open_files()
    assert deliver(pair, [[header(tensors=[form("float32", 64, location=location)])]]) == []
    with pytest.raises(ValueError, match=reason):
        raise ValueError(pair[0].last_refusal)
    assert open_files() == before
    (message,) = deliver(pair, [[header(tensors=[form("float32", 64, location=[files["good"], *GOOD.values()])])]])
    assert message.tensors()[0].tolist() == [0.0] * 64


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ([1, 2, 3, 4], "length 5, got 4"),
        ([1, 2, 3, 4, "5"], "Expected `int`"),
        (7, "Expected `array"),
        ([], "length 5"),
    ],
)
def test_a_location_of_another_form_is_refused(pair: list[Mailbox], location: object, reason: str):
    assert deliver(pair, [[header(tensors=[form("float32", 1, location=location)])]]) == []
    assert reason in (pair[0].last_refusal or "")


def test_a_shared_bool_tensor_with_other_bytes_is_refused(pair: list[Mailbox]):
    location = pair[1]._outbox._segments.write(torch.full((64,), 2, dtype=torch.uint8), reader=0)
    assert deliver(pair, [[header(tensors=[form("bool", 64, location=location)])]]) == []
    assert "other than 0 and 1" in (pair[0].last_refusal or "")


def test_a_location_from_a_rank_on_another_host_is_refused():
    with job(2, is_far=True) as boxes:
        assert deliver(boxes, [[header(tensors=[form("float32", 64, location=[3, *GOOD.values()])])]]) == []
        assert (boxes[0].last_refusal or "").endswith(
            "its tensor is in memory of its sender, which is not on this host"
        )


def test_a_shared_tensor_beyond_the_limit_is_refused_before_it_is_mapped():
    with job(2, max_nbytes=MB) as (a, b):
        b.max_nbytes = None  # A rank that ignores the limit.
        b.send(0, Note(values=(torch.zeros(MB // 4 + 1),))).wait()
        with pytest.raises(TimeoutError):
            a.recv(timeout=0.2).wait()
        assert (a.last_refusal or "").endswith(
            f"its tensor has {MB + 4} bytes: this mailbox was made with max_nbytes={MB}"
        )
        reader = a._readers[1]
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
    """A message with two shared tensors and a small one; its first location or a byte of its header may be wrong."""
    location, sound = [files["good"], *GOOD.values()], [files["good"], MB, 2**19, 64, 2**19 - 1]
    for _ in range(chance.choice([0, 1, 1, 2, 5])):
        i = chance.randrange(5)
        near = [files["good"], *GOOD.values()][i] + chance.randrange(-70, 70)
        location[i] = chance.choice([*files.values(), *range(40)] if i == 0 else [*EDGES, near])
    numel = location[3] if 0 <= location[3] < 2**62 else 256
    head = bytearray(
        header(tensors=[form("uint8", numel, location=location), form("float32", 3), form("bool", 64, location=sound)])
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


def test_twenty_thousand_damaged_locations_do_not_stop_the_mailbox(pair: list[Mailbox], files: dict[str, int]):
    chance, came = random.Random(2), 0
    assert len(deliver(pair, [[header(tensors=[form("uint8", 64, location=[files["good"], MB, 64, 64, 0])])]])) == 1
    before = open_files()
    for _ in range(40):
        for message in deliver(pair, [damaged(chance, files) for _ in range(500)]):
            came += 1
            for tensor in message.tensors():  # All of it can be read.
                int(tensor.view(-1).view(torch.uint8).max())
    assert 1000 < came < 5000
    reader = pair[0]._readers[1]
    assert (
        reader is not None and open_files() == before + len(reader._files) - 1
    )  # A damaged number may be that of the same file again.
    pair[1].send(0, Note(values=(torch.ones(MB),))).wait()
    assert bool((pair[0].recv().wait().tensors()[0] == 1).all())


# Joining and dying


def say_and_die(path: Path, rank: int, count: int, numel: int) -> None:
    with box_of(path, rank, is_open=True) as box:
        for i in range(count):
            box.send(0, Note(i, values=(torch.zeros(numel),))).wait()
        box.close()  # What was flushed has left this process, but may not have been read.
        os.kill(os.getpid(), signal.SIGKILL)


def until_death(box: Mailbox) -> list[tuple[str, int, int]]:
    """All messages until the report of a death."""
    said: list[tuple[str, int, int]] = []
    while not said or said[-1][0] != "peer died":
        message = box.recv().wait()
        said.append((message.tag, message.src, message.number if isinstance(message, Note) else 0))
    return said


@pytest.mark.dist
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    ("count", "numel"), [(0, 0), (1, 0), (2000, 0), (100, SHARED_FROM // 4 - 1), (10, SHARED_FROM)]
)
def test_a_death_is_reported_once_and_after_the_last_message(tmp_path: Path, count: int, numel: int, is_known: bool):
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
        assert until_death(box) == [*words, ("peer died", 1, 0)]
        box.watch(1, process.pid)
        with pytest.raises(TimeoutError):
            box.recv(timeout=0.05).wait()
        assert box.refused == 0


def be_killed_speaking(path: Path) -> None:
    with box_of(path, 1, is_open=True) as box:
        for i in range(10**9):
            box.send(0, Note(i, values=(torch.full((SHARED_FROM,), i),))).wait()


@pytest.mark.dist
def test_nothing_is_received_from_a_process_after_its_death_was_reported(tmp_path: Path):
    chance = random.Random(3)
    for life in range(5):
        path = tmp_path / f"store-{life}"
        with box_of(path, 0, is_open=True) as box, child(be_killed_speaking, path) as process:
            count = chance.randrange(1, 60)
            for i in range(count):
                message = box.recv(src=1).wait()
                assert message.number == i and bool((message.tensors()[0] == i).all())
            process.kill()
            said = until_death(box)
            assert [version for _, _, version in said[:-1]] == list(range(count, count + len(said) - 1))
            with pytest.raises(TimeoutError):
                box.recv(timeout=0.02).wait()


def test_a_message_from_a_dead_rank_is_refused():
    with job(2, is_open=True) as boxes:
        boxes[0]._monitor.dead.add(1)
        boxes[1].send(0, Note()).wait()
        until(lambda: boxes[0]._inbox.poll(0) != 0)
        with pytest.raises(TimeoutError):
            boxes[0].recv(timeout=0.02).wait()
        assert (boxes[0].last_refusal or "").endswith("it arrived after the death of its sender was reported")


@pytest.mark.dist
def test_the_death_of_a_process_that_was_never_a_rank_is_reported_too():
    with box_of(HashStore(), 0, is_open=True) as box, child(signal.pause) as process:
        assert process.pid is not None
        box.watch(3, process.pid)
        box.watch(3, process.pid)
        with pytest.raises(TimeoutError):
            box.recv(timeout=0.05).wait()
        end(process)
        assert until_death(box) == [("peer died", 3, 0)]
        box.watch(4, process.pid)  # The process was reaped, so its pid is free again.
        assert until_death(box) == [("peer died", 4, 0)]


@pytest.mark.dist
def test_an_awaited_send_ends_when_its_reader_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbox, "UNREAD_NBYTES", MB)
    with holder(tmp_path / "store", timeout_s=60) as (box, process, ask):
        ask("hold", torch.zeros(MB))
        os.kill(process.pid or 0, signal.SIGSTOP)
        box.send(1, Note(text="hold", values=(torch.zeros(MB),))).wait()
        op = box.send(1, Note(text="hold", values=(torch.zeros(MB),)))
        threading.Timer(0.2, process.kill).start()
        start = time.monotonic()
        op.wait()
        assert time.monotonic() - start < 20 and unread(box) == 0
        assert until_death(box) == [("peer died", 1, 0)]


def test_a_mailbox_that_is_not_open_watches_no_process(pair: list[Mailbox]):
    pair[1].send(0, Hello()).wait()
    pair[0].recv().wait()
    assert pair[0]._monitor._watched == {}


def test_watching_leaves_no_file_behind():
    before = open_files()
    with job(2, is_open=True) as boxes:
        for box in boxes:
            box.send(1 - box.rank, Hello()).wait()
        for box in boxes:
            box.recv().wait()
        assert [list(box._monitor._watched.values()) for box in boxes] == [[1], [0]]
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
        stranger(box, curve_publickey=public, curve_secretkey=secret, curve_serverkey=box._connections.public_key)
        assert box.last_refusal == "a stranger at 127.0.0.1: no rank of this job has published its key"
        assert_serves(box, late)
    with pytest.raises(ValueError, match=r"Mailbox\(rank=7, size=2\)"):
        Mailbox(HashStore(), 7, 2)


@pytest.mark.parametrize("rank", ["2", "7", "-1"])
def test_a_key_of_an_impossible_rank_is_refused(rank: str):
    store = HashStore()
    with job(2, store) as boxes:
        public, secret = zmq.curve_keypair()
        store.set(KEYS + z85.decode(public).hex(), rank)
        store.set(f"mail/{rank}", f"tcp://127.0.0.1:1 {public.decode()} {os.getpid()} ")
        stranger(
            boxes[0], curve_publickey=public, curve_secretkey=secret, curve_serverkey=boxes[0]._connections.public_key
        )
        assert_serves(*boxes)


def test_a_key_without_a_mailbox_is_refused():
    store = HashStore()
    with job(2, store, is_open=True) as boxes:
        public, secret = zmq.curve_keypair()
        store.set(KEYS + z85.decode(public).hex(), "5")
        stranger(
            boxes[0], curve_publickey=public, curve_secretkey=secret, curve_serverkey=boxes[0]._connections.public_key
        )
        assert_serves(*boxes)


# Which process may map which memory


def test_processes_of_one_user_may_map_each_others_memory():
    with job(2) as boxes:
        assert boxes[0]._domain and boxes[0]._domain == boxes[1]._domain == segments.memory_domain()


def change_user() -> None:
    os.setgid(65534)
    os.setuid(65534)
    os._exit(0 if segments.memory_domain() == "" else 1)


@pytest.mark.dist
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_whose_memory_is_hidden_shares_none():
    with child(change_user) as process:
        process.join(DEADLINE_S)
        assert process.exitcode == 0


def test_of_a_send_buffer_only_the_parts_that_were_sent_are_unread():
    sender = SegmentWriter()
    x = sender.send_buffer(1 << 20)
    assert sender.write(x[:300], 3) and sender.write(x[300:1000], 9)
    assert (sender.unread_nbytes(), sender.unread_nbytes(3), sender.unread_nbytes(9)) == (1000, 300, 700)
    sender.close()


def test_a_shared_tensor_that_is_not_aligned_for_its_type_is_copied(pair: list[Mailbox], files: dict[str, int]):
    location = [files["good"], *{**GOOD, "start": CACHE_LINE + 1}.values()]
    (message,) = deliver(pair, [[header(tensors=[form("float32", 64, location=location)])]])
    assert message.tensors()[0].data_ptr() % 4 == 0 and message.tensors()[0].tolist() == [0.0] * 64


def test_status_bytes_show_which_reader_was_sent_it_has_it_open_or_has_read_it():
    sender, reader = SegmentWriter(), SegmentReader(os.getpid())
    x = torch.zeros(5000)
    locations = [sender.write(x, rank) for rank in (3, 9)]
    assert all(p is not None and p.nbytes == x.nbytes for p in locations)
    segment = sender._segments[0]
    status_bytes = [p.status for p in locations if p is not None]
    assert [segment.memory[m] for m in status_bytes] == [SENT, SENT]
    assert (sender.unread_nbytes(), sender.unread_nbytes(3), sender.unread_nbytes(9), sender.unread_nbytes(4)) == (
        2 * x.nbytes,
        x.nbytes,
        x.nbytes,
        0,
    )
    opened = [reader.open(p) for p in locations if p is not None]
    assert [segment.memory[m] for m in status_bytes] == [OPEN, OPEN] and sender.unread_nbytes() == 0
    opened.pop()
    assert [segment.memory[m] for m in status_bytes] == [OPEN, READ]
    sender.close()
    assert bool((opened[0] == 0).all())
