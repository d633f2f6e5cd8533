"""Collectives that outlive the death of a worker, and what happens when the workers of a run change."""

from paceline.elastic.agreement import Agreement
from paceline.elastic.endpoint import ElasticEndpoint
from paceline.elastic.members import Members
from paceline.elastic.rendezvous import Arrival, Generation, LeftOut, Over, Proposal, Rendezvous, following

__all__ = [
    "Agreement",
    "Arrival",
    "ElasticEndpoint",
    "Generation",
    "LeftOut",
    "Members",
    "Over",
    "Proposal",
    "Rendezvous",
    "following",
]
