"""The job's key, and a store whose values are signed with it.

The key is a secret of all ranks of one job.  Whatever a rank publishes in the job's store, such as the public key of
its mailbox, carries a MAC under the job's key, and a value without a right one is refused.  So a process that can only
reach the store cannot join the job.  Values are signed, not encrypted; counters (`add`) are neither.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from paceline.errors import ClusterError

NBYTES = 32
SIGNED = b"\0signed\1"  # What a signed value begins with; its MAC and the value follow.
HEADER = len(SIGNED) + NBYTES
HEX = re.compile(r"(?:[0-9a-fA-F]{2}){16,}")


class JobKey:
    """A secret of at least 128 bits.  It does not appear in its text."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def fresh(cls) -> JobKey:
        return cls(secrets.token_bytes(NBYTES))

    @classmethod
    def of_text(cls, text: str, source: str) -> JobKey:
        """The key in a text of hexadecimal digits; `source` says in an error where the text was."""
        digits = text.strip()
        if HEX.fullmatch(digits) is None:
            raise ValueError(
                f"{source} holds no job key: a key is 32 or more hexadecimal digits in one line, an even number of "
                "them; `openssl rand -hex 32` prints one"
            )
        return cls(bytes.fromhex(digits))

    def text(self) -> str:
        """The key itself, to be written to a file or pipe that only this user can read."""
        return self._secret.hex()

    def mac(self, *parts: bytes) -> bytes:
        """A MAC of these parts and of where each ends."""
        joined = b"".join(len(part).to_bytes(8) + part for part in parts)
        return hmac.digest(self._secret, joined, "sha256")

    def is_of(self, mac: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(mac, self.mac(*parts))

    def __repr__(self) -> str:
        return "JobKey(...)"


def sign(key: JobKey, scope: str, name: str, value: bytes) -> bytes:
    """A value as a rank with the job's key publishes it under `name`."""
    return SIGNED + key.mac(scope.encode(), name.encode(), value) + value


def is_signed(raw: bytes) -> bool:
    return raw.startswith(SIGNED) and len(raw) >= HEADER


def verified(key: JobKey, scope: str, name: str, raw: bytes) -> bytes | None:
    """The value that was signed; None if it was not signed with this key, for this name."""
    value = raw[HEADER:]
    if is_signed(raw) and key.is_of(raw[len(SIGNED) : HEADER], scope.encode(), name.encode(), value):
        return value
    return None


class ForeignValue(ClusterError):
    """A value in the job's store that no rank with the job's key has written."""


class SignedStore(Store):
    """A store in which only ranks with the job's key can write values.

    `scope` is a name of the job: values of another job that has the same key are refused.
    """

    def __init__(self, store: Store, key: JobKey, scope: str) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._scope = scope

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._signed(key, value))  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        return self._verified(key, self._store.get(key))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        # The store compares what it holds: a value that is to be replaced has been signed too.
        before = self._signed(key, expected_value) if expected_value else b""
        after = self._signed(key, desired_value)
        return self._verified(key, self._store.compare_set(key, before, after))  # pyright: ignore[reportArgumentType]

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        return self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def clone(self) -> SignedStore:
        """Another connection to the same store; torch before 2.8 has none."""
        return SignedStore(getattr(self._store, "clone", lambda: self._store)(), self._key, self._scope)

    def _signed(self, name: str, value: str | bytes) -> bytes:
        return sign(self._key, self._scope, name, value.encode() if isinstance(value, str) else bytes(value))

    def _verified(self, name: str, raw: bytes) -> bytes:
        value = verified(self._key, self._scope, name, raw)
        if value is None:
            raise ForeignValue(
                f"the value of '{name}' in the job's store was not written with this job's key: a process that is no "
                "rank of this job reaches the store"
            )
        return value


def differing(hellos: Sequence[bytes], key: JobKey | None, scope: str, name: str) -> str | None:
    """Why some ranks' first values show another key than this one's; None if all have the same one, or none has any."""
    signed = [is_signed(raw) for raw in hellos]
    if any(signed) and not all(signed):
        return f"rank {signed.index(True)} has a job key and rank {signed.index(False)} has none"
    for rank, raw in enumerate(hellos):
        if key is not None and verified(key, scope, f"{name}/{rank}", raw) is None:
            return f"rank {rank} has another job key than this rank"
    return None
