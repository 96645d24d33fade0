"""The tables of `learning.db`, as a list of migrations: number n brings a database from version n - 1 to version n.

A migration that was released is never changed; another table or column is another migration. Every row names the
adapter that it belongs to, so that several adapters of one server learn in one file.
"""

from __future__ import annotations

from typing import Literal

TrajectoryState = Literal["waiting", "learned", "stale", "overflow", "equal_rewards", "duplicate", "no_reward", "seen"]
"""The state of a trajectory: it waits for an update, was given to one, or was dropped for this reason. seen: its
id alone is known.
"""

MIGRATIONS = (
    """
    CREATE TABLE runs (
        adapter TEXT PRIMARY KEY,
        began REAL NOT NULL,                -- seconds since the epoch
        counters BLOB NOT NULL              -- of the loop; sealed
    );
    CREATE TABLE trajectories (
        adapter TEXT NOT NULL,
        id TEXT NOT NULL,
        position INTEGER NOT NULL,          -- ids are forgotten in this order
        state TEXT NOT NULL,                -- TrajectoryState
        place INTEGER NOT NULL DEFAULT 0,   -- of its group among those that wait
        grp TEXT NOT NULL DEFAULT '',
        size INTEGER NOT NULL DEFAULT 0,    -- of its group, as it has to be added again; 0: unknown
        reward REAL,
        update_number INTEGER,              -- of the update that it was given to
        body BLOB,                          -- the trajectory, sealed; NULL: only its id is known
        PRIMARY KEY (adapter, id)
    );
    CREATE INDEX trajectories_by_position ON trajectories (adapter, position);
    CREATE INDEX trajectories_that_wait ON trajectories (adapter, place, position) WHERE state = 'waiting';
    CREATE INDEX groups_that_wait ON trajectories (adapter, grp) WHERE state = 'waiting';
    CREATE INDEX trajectories_past ON trajectories (adapter, position) WHERE state <> 'waiting' AND body IS NOT NULL;
    CREATE TABLE open_trajectories (
        adapter TEXT NOT NULL,
        id TEXT NOT NULL,
        place INTEGER NOT NULL,             -- those that were continued longest ago come first
        touched REAL NOT NULL,              -- seconds since the epoch
        begun BLOB NOT NULL,                -- what all answers have in common; sealed
        PRIMARY KEY (adapter, id)
    );
    CREATE TABLE exchanges (
        adapter TEXT NOT NULL,
        id TEXT NOT NULL,
        number INTEGER NOT NULL,            -- within its trajectory, from 0 on
        body BLOB NOT NULL,                 -- sealed
        PRIMARY KEY (adapter, id, number)
    );
    CREATE TABLE updates (
        adapter TEXT NOT NULL,
        number INTEGER NOT NULL,            -- from 1 on
        outcome TEXT,                       -- NULL: it has not ended
        step INTEGER NOT NULL DEFAULT 0,    -- of the optimiser, afterwards
        version INTEGER NOT NULL DEFAULT 0, -- that was published; 0: none
        digest TEXT NOT NULL DEFAULT '',    -- of what was published
        began BLOB,                         -- everything its result depends on, sealed; NULL: a state holds the result
        report BLOB,                        -- JSON
        PRIMARY KEY (adapter, number)
    );
    CREATE TABLE states (
        id INTEGER PRIMARY KEY,             -- higher: newer
        adapter TEXT NOT NULL,
        folder TEXT NOT NULL,               -- beside this file
        number INTEGER NOT NULL,            -- of the last update that it holds
        step INTEGER NOT NULL,
        version INTEGER NOT NULL,           -- of its content; 0: it was not published
        digest TEXT NOT NULL,
        files BLOB NOT NULL                 -- JSON: BLAKE2b-256 of each file
    );
    """,
    """
    CREATE TABLE feedback (
        number INTEGER PRIMARY KEY AUTOINCREMENT, -- higher: newer
        completion TEXT NOT NULL,           -- its id
        choice INTEGER NOT NULL,            -- -1: it is about all choices
        adapter TEXT NOT NULL,              -- that answered; '': the base
        learned INTEGER NOT NULL DEFAULT 0, -- updates that learned from it
        body BLOB NOT NULL,                 -- sealed
        UNIQUE (completion, choice)
    );
    CREATE INDEX feedback_to_learn ON feedback (learned, number);
    """,
    """
    CREATE TABLE ab_tests (
        alias TEXT PRIMARY KEY,
        body BLOB NOT NULL                  -- sealed
    );
    CREATE TABLE ab_users (
        alias TEXT NOT NULL,
        user BLOB NOT NULL,                 -- digest of a user with an answer that counts in the test
        PRIMARY KEY (alias, user)
    ) WITHOUT ROWID;
    """,
)
