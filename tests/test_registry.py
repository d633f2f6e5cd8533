"""Names: spellings, names of papers and other libraries, and what a wrong name is told."""

from __future__ import annotations

import re

import pytest

import paceline as pl
from paceline import aliases, registry
from paceline.codecs import CODECS
from paceline.registry import KINDS


@pytest.mark.parametrize(
    ("kind", "name", "cls"),
    [
        ("strategy", "local-sgd", pl.PeriodicAveraging),
        ("strategy", "fedavg", pl.PeriodicAveraging),
        ("strategy", "bmuf", pl.BlockMomentum),
        ("strategy", "BMUF", pl.BlockMomentum),
        ("strategy", "ps", pl.ParameterServer),
        ("strategy", "ssp", pl.StaleSynchronous),
        ("strategy", "dc-asgd", pl.DelayCompensated),
        ("strategy", "DC_ASGD", pl.DelayCompensated),
        ("strategy", "ea-sgd", pl.EASGD),
        ("codec", "1bit", pl.codecs.OneBit),
        ("codec", "1-bit", pl.codecs.OneBit),
        ("codec", "OneBit", pl.codecs.OneBit),
        ("codec", "bf16", pl.codecs.BFloat16),
        ("codec", "fp16", pl.codecs.Fp16),
        ("codec", "float16", pl.codecs.Fp16),
        ("codec", "powersgd", pl.codecs.PowerSGD),
        ("gate", "ssp", pl.gates.Bound),
    ],
)
def test_a_name_that_means_exactly_one_class_finds_it(kind, name, cls):
    assert registry.find(kind, KINDS[kind], name) is cls


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (
            "strategy",
            "adpsgd",
            "there is no strategy 'adpsgd': ADPSGD of Jiang and Agrawal, with an adaptive period, is Ada",
        ),
        ("strategy", "AD-PSGD", "there is no strategy 'AD-PSGD': ADPSGD of Jiang and Agrawal"),
        (
            "strategy",
            "post-local-sgd",
            "there is no strategy 'post-local-sgd': it is Then(AllReduceSGD(), PeriodicAver",
        ),
        (
            "strategy",
            "one-bit",
            "there is no strategy 'one-bit': OneBit is a codec; give it to a strategy: AllReduceSGD(cod",
        ),
        ("strategy", "1bit-sgd", "there is no strategy '1bit-sgd': OneBit is a codec; give it"),
        ("codec", "8bit", "there is no codec '8bit': it is NBit(bits=8)."),
        ("codec", "strom", "there is no codec 'strom': its codec is Threshold(tau=...)"),
        (
            "codec",
            "bmuf",
            "there is no codec 'bmuf': BlockMomentum is a strategy; give it as the strategy: BlockMomentum(..",
        ),
        ("codec", "onbit", "there is no codec 'onbit'; did you mean 'one-bit'?"),
        ("strategy", "zebra", "there is no strategy 'zebra'. Known: adaptive-averaging, "),  # Nothing is similar.
        ("gate", "bsp", "there is no gate 'bsp': it is Bound(bound=0)."),
    ],
)
def test_a_name_that_is_not_one_of_ours_is_told_what_it_is_called_here(kind, name, said):
    with pytest.raises(ValueError) as caught:
        registry.find(kind, KINDS[kind], name)
    assert str(caught.value).startswith(said)


def test_every_alias_is_found_and_hides_no_class():
    for kind, names in aliases.ALIASES.items():
        ours = {cls.__name__.lower() for cls in KINDS[kind]}
        for name, meant in names.items():
            assert registry.find(kind, KINDS[kind], name).__name__.lower() == meant
            assert name not in ours and name not in aliases.NOT_ONE.get(kind, {})


def test_every_explanation_names_classes_that_exist():
    for kind, names in aliases.NOT_ONE.items():
        for name, said in names.items():
            assert name not in {cls.__name__.lower() for cls in KINDS[kind]}
            for cls in re.findall(r"\b([A-Z][A-Za-z]+)\(", said):
                assert hasattr(pl, cls) or cls in {c.__name__ for group in (CODECS, *KINDS.values()) for c in group}
