"""Files of every kind that paceline reads, each with its loader, and ways to damage them."""

from __future__ import annotations

import hashlib
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.checkpoint import Checkpoint
from paceline.checkpoint.manifest import FORMAT, NAME, File, Manifest, Model
from paceline.checkpoint.part import Part, tensor_file, tree_file
from paceline.data.fashion_mnist import read_idx
from paceline.engines.joining import KEY, KEY_FILE, given_key
from paceline.engines.supervisor import read_report, write_report
from paceline.settings.read import load as load_settings
from paceline.settings.template import TEMPLATE
from paceline.study.outcome_file import OutcomeFile, TornLine
from paceline.study.trials import Key, Outcome
from paceline.trace import Trace

NUMBERS = [b"-1", b"0", b"1e308", b"NaN", b"Infinity", b"99999999999999999999", b"null", b"true", b'""', b"[]", b"{}"]
NAMES = [b"../../etc/passwd", b"/etc/passwd", b"..", b"\\u0000", b"x" * 5000]
PICKLE = b"\x80\x04cposix\nsystem\n\x94\x8c\x05touchx\x94\x85\x94R\x94."


@dataclass
class Loader:
    """A file that is damaged, what it was, and the call that reads it."""

    name: str
    path: Path
    load: Callable[[], object]
    forge: Callable[[], None] | None = None  # What a forger changes beside it.

    def __post_init__(self) -> None:
        self.sound = self.path.read_bytes()
        self.load()

    def damage(self, chance: random.Random) -> Path:
        self.path.unlink()
        if chance.random() < 0.02:
            self.path.symlink_to(chance.choice(["/etc/passwd", "/nowhere", str(self.path.parent), str(self.path)]))
        elif chance.random() >= 0.02:  # Otherwise it is missing.
            self.path.write_bytes(damaged(self.sound, chance))
            self.path.chmod(0o600)
            if self.forge is not None:
                self.forge()
        return self.path

    def restore(self) -> None:
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(self.sound)
        self.path.chmod(0o600)
        if self.forge is not None:
            self.forge()


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The data with one to four mutations; of text also of its numbers, words and structure."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(10):
            case 0:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = chance.randbytes(chance.choice([1, 8, 100]))
            case 3:
                del changed[at : at + chance.choice([1, 4, 50])]
            case 4:
                changed[at:at] = changed[: chance.randrange(len(changed) + 1)]
            case 5:
                changed[:] = _replaced(changed, chance, b"0123456789", NUMBERS)
            case 6:
                changed[:] = _replaced(changed, chance, b"abcdefghijklmnopqrstuvwxyz", [*NAMES, *NUMBERS])
            case 7:
                changed[at:at] = b"[" * chance.choice([1, 100, 20_000])
            case 8:
                changed[:] = chance.choice([b"", PICKLE, b"null", b"[]", b"{}", b"7", b'"x"', b"\xff\xfe"])
            case _:
                changed[:8] = chance.choice(
                    [(2**63).to_bytes(8, "little"), (2**64 - 1).to_bytes(8, "little"), bytes(8)]
                )
    return bytes(changed)


def _replaced(data: bytearray, chance: random.Random, letters: bytes, others: list[bytes]) -> bytes:
    """One run of these letters is replaced."""
    places = [i for i, b in enumerate(data) if b in letters]
    if not places:
        return bytes(data)
    start = stop = chance.choice(places)
    while start and data[start - 1] in letters:
        start -= 1
    while stop < len(data) and data[stop] in letters:
        stop += 1
    return bytes(data[:start]) + chance.choice(others) + bytes(data[stop:])


class Loaders:
    """All loaders, with sound files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all = [*self._checkpoint(), self._settings(), self._trace(), self._idx(), self._report(), self._key()]
        self.all.append(self._tune())

    def _checkpoint(self) -> list[Loader]:
        """A checkpoint's files; the tree also with its right hash in the manifest, as a forger would write it."""
        path = self.folder / "step-000000000003"
        path.mkdir()
        model = torch.nn.Linear(3, 2)
        state = {"momentum": torch.ones(8), "rng": [1, 2, (3, 4)], "names": {"a": 1.5, 2: None}, "step": 3}
        names = [name for name, _ in model.named_parameters()]
        part = Part(
            0,
            {"state": state, "more": {}, "published": None, "frozen": {}, "trained": names, "buffers": []},
        )
        files = part.write(path, {})
        manifest = Manifest(FORMAT, 1, "now", "0", "2", "AllReduceSGD", 3, 1, Model.of(model, names), files=files)
        manifest.write(path)

        def whole() -> object:
            checkpoint = Checkpoint(path)
            checkpoint.verify()
            return checkpoint.states()

        def forge() -> None:
            data = tree.read_bytes()
            forged = File(len(data), hashlib.sha256(data).hexdigest())
            replace(manifest, files={**files, tree.name: forged}).write(path)

        tree, tensors = path / tree_file(0), path / tensor_file(0)
        return [
            Loader("checkpoint manifest", path / NAME, whole),
            Loader("checkpoint tree", tree, whole),
            Loader("checkpoint tree, forged with its hash", tree, whole, forge),
            Loader("checkpoint tensors (safetensors)", tensors, whole),
        ]

    def _settings(self) -> Loader:
        path = self.folder / "settings.toml"
        path.write_text(TEMPLATE)
        return Loader("settings TOML", path, lambda: load_settings(path))

    def _trace(self) -> Loader:
        trace = Trace()
        trace.point(1.5, 0, 9, 90, 0.4)
        trace.span(0, "gradient", 0.0, 1.0, 5)
        trace.evaluation(1.0, 90, {"accuracy": 1.0})
        path = self.folder / "trace.json"
        trace.save(path)
        return Loader("trace JSON", path, lambda: Trace.loads(path.read_text()))

    def _idx(self) -> Loader:
        path = self.folder / "images-idx3-ubyte"
        path.write_bytes(bytes.fromhex("00000803000000020000000300000004") + bytes(24))
        return Loader("IDX data", path, lambda: read_idx(path, dimensions=3))

    def _report(self) -> Loader:
        path = self.folder / "error-0-0.json"
        write_report(path, ValueError("a mistake"))
        return Loader("error report of a worker", path, lambda: read_report(path))

    def _key(self) -> Loader:
        path = self.folder / "job.key"
        path.write_text("ab" * 32)
        path.chmod(0o600)
        os.environ.pop(KEY, None)
        os.environ[KEY_FILE] = str(path)
        return Loader("job key", path, given_key)

    def _tune(self) -> Loader:
        path = self.folder / "trials.jsonl"
        settings = [("strategy", "'AllReduceSGD'"), ("seed", "0")]
        OutcomeFile(path, settings).add(Key(0.1, 0, 10), Outcome(1.5, None), 0)

        def load() -> object:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TornLine)
                return OutcomeFile(path, settings)

        return Loader("outcomes of tune", path, load)
