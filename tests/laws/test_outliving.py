"""Synchronous training outlives deaths at any moment, by seed: those that are left end with one model."""

from __future__ import annotations

import torch
from torch import nn

import paceline as pl
from paceline.codecs import OneBit, PowerSGD, TopK
from tests.laws.mortal import World, trained
from tests.laws.tasks import *  # noqa: F403
