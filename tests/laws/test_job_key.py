"""The job's key: who can write values in the job's store, and what a file with a key must be like."""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store
from zmq.utils import z85

from paceline.engines import joining
from paceline.engines.joining import given_key, write_key
from paceline.errors import ClusterError
from paceline.transport.job_key import HEADER, SIGNED, ForeignValue, JobKey, SignedStore
from paceline.transport.mailbox import Mailbox
from tests.dist.test_mailbox import stranger
from tests.in_turn import in_turn
from tests.messages import Hello

TEXT = "0123456789abcdef" * 4


def pair(scope: str = "job") -> tuple[Store, SignedStore]:
    plain = HashStore()
    return plain, SignedStore(plain, JobKey.of_text(TEXT, "a test"), scope)


@pytest.mark.parametrize("prefixed", [False, True])
def test_ranks_with_the_same_key_read_what_they_write(prefixed: bool, tmp_path: Path):
    base = FileStore(str(tmp_path / "store"))
    stores = [SignedStore(base, JobKey.of_text(TEXT, "a test"), "job") for _ in range(2)]
    one, two = [PrefixStore("stage/0", store) for store in stores] if prefixed else stores
    one.set("a", "text")
    one.set("b", b"\0\xff")
    assert (two.get("a"), two.get("b")) == (b"text", b"\0\xff")
    assert (one.add("n", 2), two.add("n", 3)) == (2, 5)
    assert two.compare_set("c", "", "first") == one.compare_set("c", "", "second") == b"first"
    assert one.compare_set("c", "first", "third") == two.get("c") == b"third"
    assert two.check(["a", "b", "c"]) and not two.check(["d"])


FORGERIES = {
    "not signed": lambda store: store.set("a", "1"),
    "half a MAC": lambda store: store.set("a", SIGNED + bytes(7)),
    "another key": lambda store: SignedStore(store, JobKey.fresh(), "job").set("a", "1"),
    "another job with the same key": lambda store: SignedStore(store, JobKey.of_text(TEXT, ""), "other").set("a", "1"),
    "the value of another name": lambda store: store.set("a", store.get("b")),
    "another value": lambda store: store.set("a", store.get("b")[:HEADER] + b"2"),
    "the bytes of a name and a value, cut elsewhere": lambda store: store.set("a", store.get("ab")[:HEADER] + b"b1"),
}


@in_turn(name=list(FORGERIES))
def test_a_value_that_no_rank_of_the_job_has_written_is_refused(name: str):
    plain, signed = pair()
    signed.set("b", "1")
    signed.set("ab", "1")
    FORGERIES[name](plain)
    for read in (lambda: signed.get("a"), lambda: signed.compare_set("a", "", "mine")):
        with pytest.raises(ForeignValue, match="'a' in the job's store was not written with this job's key"):
            read()
    assert signed.get("b") == b"1"


def test_the_key_is_not_in_its_text_nor_in_what_is_published():
    plain, signed = pair()
    signed.set("a", "1")
    key = JobKey.of_text(TEXT, "a test")
    assert TEXT not in repr(key) + str(key) and key.text() == TEXT
    assert bytes.fromhex(TEXT) not in plain.get("a") and TEXT.encode() not in plain.get("a")


def with_rogue(rank: int) -> tuple[Store, Mailbox, Mailbox]:
    """A store that anybody writes to, a mailbox with the job's key, and one of a rank without."""
    plain, signed = pair()
    box = Mailbox(signed, 0, 3, is_open=True)
    rogue = Mailbox(plain, rank, 3, is_open=True)
    return plain, box, rogue


def knock(rogue: Mailbox, box: Mailbox) -> None:
    """Push to a mailbox with the keys of another one, until it has refused that."""
    keys = rogue._connections
    stranger(
        box,
        curve_publickey=keys.public_key,
        curve_secretkey=keys.secret_key,
        curve_serverkey=box._connections.public_key,
    )


def test_a_process_that_only_reaches_the_store_cannot_join():
    _, box, rogue = with_rogue(1)
    keys = rogue._connections
    stranger(
        box,
        curve_publickey=keys.public_key,
        curve_secretkey=keys.secret_key,
        curve_serverkey=box._connections.public_key,
    )
    assert "was not written with this job's key" in (box.last_refusal or "")
    with pytest.raises(ClusterError, match="found no mailbox of rank 1 in the store: the value of 'mail/1'"):
        box.send(1, Hello())
    rogue.close(linger_s=0)
    box.close(linger_s=0)


def test_a_key_that_a_rank_has_published_for_itself_admits_no_other_key():
    """The rogue replays the rank number that a correct rank has signed, under its own key's name and as its own."""
    plain, signed = pair()
    box, friend = Mailbox(signed, 0, 3, is_open=True), Mailbox(signed, 1, 3, is_open=True)
    rogue = Mailbox(PrefixStore("rogue", plain), 1, 3, is_open=True)
    name = "mail/key/" + z85.decode(rogue._connections.public_key).hex()
    plain.set(name, plain.get("mail/key/" + z85.decode(friend._connections.public_key).hex()))
    keys = rogue._connections
    stranger(
        box,
        curve_publickey=keys.public_key,
        curve_secretkey=keys.secret_key,
        curve_serverkey=box._connections.public_key,
    )
    friend.send(0, Hello()).wait()
    assert box.recv(timeout=10).wait().src == 1
    for one in (box, friend, rogue):
        one.close(linger_s=0)


BAD_TEXTS = ["", "secret", TEXT[:30], TEXT[:33], TEXT + "x", f"{TEXT}\n{TEXT}", "é" * 40]


@in_turn(text=BAD_TEXTS, by_file=[False, True])
def test_a_text_that_is_no_key_is_refused_without_being_shown(
    text: str, by_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    monkeypatch.delenv(joining.KEY, raising=False)
    monkeypatch.delenv(joining.KEY_FILE, raising=False)
    monkeypatch.setenv(joining.KEY_FILE if by_file else joining.KEY, str(path) if by_file else text)
    if not text and not by_file:
        assert given_key() is None  # As an unset variable.
        return
    with pytest.raises(ValueError, match="holds no job key: a key is 32 or more hexadecimal digits") as caught:
        given_key()
    assert not text or text not in str(caught.value)


def test_a_key_file_must_be_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "key"
    write_key(JobKey.of_text(TEXT, "a test"), path)
    assert path.stat().st_mode & 0o777 == 0o600
    monkeypatch.delenv(joining.KEY, raising=False)
    monkeypatch.setenv(joining.KEY_FILE, str(path))
    found = given_key()
    assert found is not None and found.text() == TEXT
    for mode in (0o644, 0o640, 0o602):
        path.chmod(mode)
        with pytest.raises(ValueError, match=f"other users can read or write the file; run `chmod 600 {path}`"):
            given_key()
    for wrong in (tmp_path, tmp_path / "none"):
        monkeypatch.setenv(joining.KEY_FILE, str(wrong))
        with pytest.raises(ValueError, match="the job's key cannot be read: "):
            given_key()
    monkeypatch.setenv(joining.KEY, TEXT)
    with pytest.raises(ValueError, match="PACELINE_JOB_KEY and PACELINE_JOB_KEY_FILE are both set"):
        given_key()
    if os.geteuid() == 0:
        monkeypatch.delenv(joining.KEY)
        path.chmod(0o600)
        os.chown(path, 12345, -1)
        monkeypatch.setenv(joining.KEY_FILE, str(path))
        with pytest.raises(ValueError, match="belongs to another user"):
            given_key()
