-- schema: version 1.
-- in   an immediate transaction in which no table of ours exists      out  the tables
-- why  every name starts with leasehold_: the file may also hold the user's own tables
--
-- A job is in exactly one of: leasehold_ready (in line), leasehold_aside (scheduled, parked behind
-- its exclusive key, or settled), or the records of one grant (leased).

-- One row: the version of these tables; the issuer of tokens, one for the whole file; and the run
-- of the machine in which the file was opened last: which it is, and when it began by the wall
-- clock of whoever opened the file first in it.
CREATE TABLE leasehold_meta (
    one     INTEGER PRIMARY KEY CHECK (one = 1),
    version INTEGER NOT NULL,
    last    INTEGER NOT NULL,
    floor   INTEGER NOT NULL,
    boot    TEXT,
    boot_at INTEGER
);

-- Counts and ledger change in the transaction of the jobs they count, once per queue.
CREATE TABLE leasehold_queues (
    id          INTEGER PRIMARY KEY,
    namespace   TEXT    NOT NULL,
    name        TEXT    NOT NULL,
    paused      INTEGER NOT NULL DEFAULT 0,
    relaxed     INTEGER NOT NULL DEFAULT 0,
    seq         INTEGER NOT NULL DEFAULT 0,
    n_scheduled INTEGER NOT NULL DEFAULT 0,
    n_ready     INTEGER NOT NULL DEFAULT 0,
    n_parked    INTEGER NOT NULL DEFAULT 0,
    n_leased    INTEGER NOT NULL DEFAULT 0,
    n_completed INTEGER NOT NULL DEFAULT 0,
    n_dead      INTEGER NOT NULL DEFAULT 0,
    n_cancelled INTEGER NOT NULL DEFAULT 0,
    enqueued    INTEGER NOT NULL DEFAULT 0,
    granted     INTEGER NOT NULL DEFAULT 0,
    completed   INTEGER NOT NULL DEFAULT 0,
    retried     INTEGER NOT NULL DEFAULT 0,
    surrendered INTEGER NOT NULL DEFAULT 0,
    buried      INTEGER NOT NULL DEFAULT 0,
    cancelled   INTEGER NOT NULL DEFAULT 0,
    expired_deadline INTEGER NOT NULL DEFAULT 0,
    expired_stalled  INTEGER NOT NULL DEFAULT 0,
    expired_lifetime INTEGER NOT NULL DEFAULT 0,
    revoked     INTEGER NOT NULL DEFAULT 0,
    live        INTEGER NOT NULL DEFAULT 0,
    late        INTEGER NOT NULL DEFAULT 0,
    fenced      INTEGER NOT NULL DEFAULT 0,
    pruned      INTEGER NOT NULL DEFAULT 0,
    purged      INTEGER NOT NULL DEFAULT 0,
    dead_by_expiry   INTEGER NOT NULL DEFAULT 0,
    UNIQUE (namespace, name)
);

-- position = queue, tier (priority, suspects first) and index in one number: its order is the order
-- of service, so a claim reads one range and deletes it.
CREATE TABLE leasehold_ready (
    position   INTEGER PRIMARY KEY,
    id     BLOB NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX leasehold_ready_id ON leasehold_ready (id);

-- state: 0 scheduled (at = run at), 1 parked (key), 3 completed, 4 dead, 5 cancelled (at = settled
-- at).
CREATE TABLE leasehold_aside (
    row        INTEGER PRIMARY KEY,
    id         BLOB    NOT NULL,
    queue      INTEGER NOT NULL,
    state      INTEGER NOT NULL,
    at         INTEGER NOT NULL,
    seq        INTEGER NOT NULL,
    key        BLOB,
    keep_until INTEGER,
    record     BLOB    NOT NULL
);
CREATE INDEX leasehold_aside_id ON leasehold_aside (id);
CREATE INDEX leasehold_aside_order ON leasehold_aside (queue, state, at, seq);
CREATE INDEX leasehold_aside_parked ON leasehold_aside (queue, key, seq) WHERE state = 1;
CREATE INDEX leasehold_aside_kept ON leasehold_aside (queue, keep_until) WHERE keep_until IS NOT NULL;

CREATE TABLE leasehold_unique (
    queue INTEGER NOT NULL,
    key   BLOB    NOT NULL,
    job   BLOB    NOT NULL,
    until INTEGER,
    PRIMARY KEY (queue, key)
) WITHOUT ROWID;
CREATE INDEX leasehold_unique_until ON leasehold_unique (queue, until) WHERE until IS NOT NULL;

CREATE TABLE leasehold_exclusive (
    queue INTEGER NOT NULL,
    key   BLOB    NOT NULL,
    head  BLOB    NOT NULL,
    PRIMARY KEY (queue, key)
) WITHOUT ROWID;

-- One row per grant, small: a renewal rewrites this row and never the records. ended has one bit
-- for each lease. first_job and last_job bound the ids, so that a look-up by id opens few records.
CREATE TABLE leasehold_grants (
    id           INTEGER PRIMARY KEY,
    queue        INTEGER NOT NULL,
    deadline     INTEGER NOT NULL,
    nonce        BLOB    NOT NULL,
    owner        TEXT    NOT NULL,
    task         TEXT    NOT NULL,
    granted_at   INTEGER NOT NULL,
    term         INTEGER NOT NULL,
    max_lifetime INTEGER NOT NULL,
    renewals     INTEGER NOT NULL,
    leases       INTEGER NOT NULL,
    live         INTEGER NOT NULL,
    noted        INTEGER NOT NULL,
    ended        BLOB    NOT NULL,
    first_job    BLOB    NOT NULL,
    last_job     BLOB    NOT NULL
);
CREATE INDEX leasehold_grants_deadline ON leasehold_grants (queue, deadline);
CREATE INDEX leasehold_grants_jobs ON leasehold_grants (last_job, first_job);

-- heads: for each record its job id, index in the grant, flags and end. Enough to settle a job that
-- leaves nothing behind.
CREATE TABLE leasehold_records (
    id      INTEGER PRIMARY KEY,
    heads   BLOB NOT NULL,
    records BLOB NOT NULL
);

-- What is known of a single lease beyond its grant; most leases have none.
CREATE TABLE leasehold_notes (
    token      INTEGER PRIMARY KEY,
    cancel     INTEGER NOT NULL,
    progress   BLOB,
    seq        INTEGER,
    checkpoint BLOB
);

-- Few, and touched by every call: no index, which would be one more page in every commit.
CREATE TABLE leasehold_sessions (
    id        BLOB    PRIMARY KEY,
    namespace TEXT    NOT NULL,
    used      INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE leasehold_lanes (
    session BLOB    NOT NULL,
    lane    INTEGER NOT NULL,
    seq     INTEGER NOT NULL,
    verb    INTEGER NOT NULL,
    answer  BLOB    NOT NULL,
    PRIMARY KEY (session, lane)
) WITHOUT ROWID;

CREATE TABLE leasehold_audit (
    id        INTEGER PRIMARY KEY,
    namespace TEXT    NOT NULL,
    at        INTEGER NOT NULL,
    actor     TEXT    NOT NULL,
    reason    TEXT    NOT NULL,
    command   TEXT    NOT NULL,
    done      INTEGER NOT NULL,
    tokens    TEXT    NOT NULL
);
CREATE INDEX leasehold_audit_order ON leasehold_audit (namespace, id);
