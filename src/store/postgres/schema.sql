-- schema: version 1.
-- in   a transaction that holds the migration's lock, and an empty schema      out  the tables
-- why  a schema of our own beside the user's tables, one for all namespaces: queues carry theirs, so
--      that one migration, one autovacuum setting and one grant of rights serve every application
--
-- A job is in exactly one of: ready (in line), aside (scheduled, parked behind its exclusive key, or
-- settled), or the records of one grant (leased). It moves between them; no row of a job is updated.

CREATE TABLE leasehold.meta (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    version integer NOT NULL,
    -- Tells this database from others: a receipt is worth nothing there.
    id      uuid    NOT NULL DEFAULT gen_random_uuid()
);

-- Microseconds since 1970 on the server's clock; tests bring their own.
CREATE FUNCTION leasehold.clock(by_hand bigint) RETURNS bigint LANGUAGE sql VOLATILE AS
$$ SELECT coalesce(by_hand, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) $$;

-- The row is the lock of its queue for claims, and the issuer of its tokens. Nothing else is in it, so
-- that enqueue, settle and renew never wait for a claim.
CREATE TABLE leasehold.queues (
    id        integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace text COLLATE "C" NOT NULL,
    name      text COLLATE "C" NOT NULL,
    paused    boolean NOT NULL DEFAULT false,
    relaxed   boolean NOT NULL DEFAULT false,
    last      bigint  NOT NULL DEFAULT 0,
    floor     bigint  NOT NULL,
    UNIQUE (namespace, name)
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

-- Counts and ledger, as what each call added to them: appended, so that calls of one queue do not wait
-- for each other, and now and then folded into one row. The columns of the array are in tally.rs.
CREATE TABLE leasehold.tallies (
    queue integer  NOT NULL,
    tally bigint[] NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX tallies_queue ON leasehold.tallies (queue);

-- Places in line and order of arrival. A line grows at the back by +n and at the front by -n.
CREATE SEQUENCE leasehold.places;

-- line: priority * 2, plus 1 unless it is the suspects'. The key's order is the order of service.
CREATE TABLE leasehold.ready (
    queue  integer  NOT NULL,
    line   smallint NOT NULL,
    place  bigint   NOT NULL,
    id     uuid     NOT NULL,
    weight integer  NOT NULL,
    record bytea    NOT NULL,
    PRIMARY KEY (queue, line, place)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
        autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_threshold = -1,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 100000);
CREATE INDEX ready_id ON leasehold.ready (id);

-- state: 0 scheduled (at = run at), 1 parked (key), 3 completed, 4 dead, 5 cancelled (at = settled at).
CREATE TABLE leasehold.aside (
    seq        bigint   PRIMARY KEY DEFAULT nextval('leasehold.places'),
    id         uuid     NOT NULL,
    queue      integer  NOT NULL,
    state      smallint NOT NULL,
    at         bigint   NOT NULL,
    key        bytea,
    keep_until bigint,
    record     bytea    NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX aside_id ON leasehold.aside (id);
CREATE INDEX aside_order ON leasehold.aside (queue, state, at, seq);
CREATE INDEX aside_parked ON leasehold.aside (queue, key, seq) WHERE state = 1;
CREATE INDEX aside_kept ON leasehold.aside (queue, keep_until) WHERE keep_until IS NOT NULL;

CREATE TABLE leasehold.uniques (
    queue integer NOT NULL,
    key   bytea   NOT NULL,
    job   uuid    NOT NULL,
    until bigint,
    PRIMARY KEY (queue, key)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX uniques_until ON leasehold.uniques (queue, until) WHERE until IS NOT NULL;

CREATE TABLE leasehold.exclusive (
    queue integer NOT NULL,
    key   bytea   NOT NULL,
    head  uuid    NOT NULL,
    PRIMARY KEY (queue, key)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- One row per grant, small: a renewal rewrites this row and never the records. ended has one bit for
-- each lease. first_job and last_job bound the ids, so that a look-up by id opens few records.
CREATE TABLE leasehold.grants (
    queue        integer NOT NULL,
    id           bigint  NOT NULL,
    deadline     bigint  NOT NULL,
    nonce        bytea   NOT NULL,
    owner        text    NOT NULL,
    task         text    NOT NULL,
    granted_at   bigint  NOT NULL,
    term         bigint  NOT NULL,
    max_lifetime bigint  NOT NULL,
    renewals     integer NOT NULL,
    leases       integer NOT NULL,
    live         integer NOT NULL,
    noted        boolean NOT NULL,
    ended        bytea   NOT NULL,
    first_job    uuid    NOT NULL,
    last_job     uuid    NOT NULL,
    PRIMARY KEY (queue, id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX grants_deadline ON leasehold.grants (queue, deadline, id);
CREATE INDEX grants_jobs ON leasehold.grants (last_job, first_job);

-- heads: for each record its job id, place in the grant, flags and end. Enough to settle a plain job.
-- Not compressed: they live for the length of a grant.
CREATE TABLE leasehold.records (
    queue   integer NOT NULL,
    id      bigint  NOT NULL,
    heads   bytea   NOT NULL,
    records bytea   NOT NULL,
    PRIMARY KEY (queue, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_scale_factor = 0,
        toast.autovacuum_vacuum_threshold = 5000, toast.autovacuum_vacuum_cost_delay = 0);
ALTER TABLE leasehold.records ALTER heads SET STORAGE EXTERNAL, ALTER records SET STORAGE EXTERNAL;

-- What is known of a single lease beyond its grant; most leases have none.
CREATE TABLE leasehold.notes (
    queue      integer NOT NULL,
    token      bigint  NOT NULL,
    cancel     boolean NOT NULL,
    progress   bytea,
    seq        bigint,
    checkpoint bytea,
    PRIMARY KEY (queue, token)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

CREATE TABLE leasehold.sessions (
    id        uuid   PRIMARY KEY,
    namespace text   NOT NULL,
    used      bigint NOT NULL
) WITH (fillfactor = 50);

-- The last answer of each lane, and when it was given: a session was used when its last lane was.
CREATE TABLE leasehold.lanes (
    session uuid     NOT NULL,
    lane    bigint   NOT NULL,
    seq     bigint   NOT NULL,
    verb    smallint NOT NULL,
    used    bigint   NOT NULL,
    answer  bytea    NOT NULL,
    PRIMARY KEY (session, lane)
) WITH (fillfactor = 30, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

-- Two copies of one request may run at once, when the first lost its connection. The second waits here
-- for the first, finds the lane taken, and starts over: it then meets the first answer.
CREATE FUNCTION leasehold.remember(
    of_session uuid, of_lane bigint, of_seq bigint, of_verb smallint, at bigint, given bytea
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO leasehold.lanes AS l (session, lane, seq, verb, used, answer)
    VALUES (of_session, of_lane, of_seq, of_verb, at, given)
    ON CONFLICT (session, lane) DO UPDATE
    SET seq = excluded.seq, verb = excluded.verb, used = excluded.used, answer = excluded.answer
    WHERE l.seq < excluded.seq;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'this request has been answered meanwhile' USING ERRCODE = '40001';
    END IF;
END $$;

CREATE TABLE leasehold.audit (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace text   NOT NULL,
    at        bigint NOT NULL,
    actor     text   NOT NULL,
    reason    text   NOT NULL,
    command   text   NOT NULL,
    done      bigint NOT NULL,
    tokens    text   NOT NULL
);
CREATE INDEX audit_order ON leasehold.audit (namespace, id);

INSERT INTO leasehold.meta (version) VALUES (1);
