"""Planted bugs. Each changes the scheduler, its books or what the runner is told; the property suite must find it.

`corruptions` has the bugs that change plans, and `planting` what the others share. Every other module has a dictionary
`PLANTS` with the bugs of one subject.
"""

from __future__ import annotations

from tests.engine.mutants import adapters, blocks, drafts, embeddings, masks, scheduling, states
from tests.engine.mutants.planting import Plant

PLANTS: dict[str, Plant] = {}
for subject in (adapters, blocks, drafts, embeddings, masks, scheduling, states):
    assert not PLANTS.keys() & subject.PLANTS.keys(), "two bugs have one name"
    PLANTS |= subject.PLANTS

OF_SPOILS = {"blocks are published before their step is read"}
"""Plants that only show where rows are often not finite."""

OF_STATES = {
    "a chunk goes beyond the block that it begins within",
    "a state is not copied",
    "each group is asked once what it knows",
}
"""Plants that only show where layers keep a state."""

FOUND_BY = {
    "embeddings keep the sum of a preempted run": 409,
    "whoever waits for a slot waits for ever": 300,
    "settled drafts take the blocks of the row behind them": 172,
    "a draft is no token": 115,
    "any number of prompts is read at once": 113,
    "each group is asked once what it knows": 106,
    "what is known of a prompt is taken in twice": 100,
    "blocks are published before their step is read": 90,
    "an upload that was lost is trusted": 84,
    "a hit is written to": 64,
    "a fork copies what is not there yet": 46,
    "an end among accepted drafts is not seen": 44,
    "what is behind the end is said": 44,
    "a cancelled leader takes its siblings along": 39,
    "a token names the newest version": 37,
    "whoever has no seat is rolled back": 31,
    "the block in which an adapter begins is the base's": 27,
    "what an adapter computes is the base's": 27,
    "a row goes on where its adapter begins": 27,
    "an adapter begins where it is invoked first": 27,
    "rows made for training are never left out": 23,
    "masks are turned around": 21,
    "a mask made early is asked for behind the end": 21,
    "drafts draw by one mask": 21,
    "settled drafts forget the row behind them": 17,
    "what is not finite is left in the blocks": 13,
}
"""The first workload that found a plant when that was last looked up, for plants that few find. It is tried before the
others: one that finds it no longer costs time and nothing else."""
