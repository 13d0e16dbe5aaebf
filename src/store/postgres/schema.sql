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

-- Where the lines of a queue start. A job that was taken stays in the index until a vacuum, and whoever
-- looks for the first job of a line would step over all that were taken before it.
--
-- sealed: every transaction that drew a number up to this has ended, so that no job can still appear at
-- a place from -sealed to sealed. starts: for each of these lines a place up to which, from -sealed on,
-- there was no job when that was known. So there never will be one, and an old answer stays true.
--
-- sealing: the numbers drawn when transaction `before` began. They are sealed once all transactions
-- before that one have ended.
CREATE TABLE leasehold.starts (
    queue   integer    PRIMARY KEY,
    sealed  bigint     NOT NULL DEFAULT 0,
    lines   smallint[] NOT NULL DEFAULT '{}',
    starts  bigint[]   NOT NULL DEFAULT '{}',
    sealing bigint     NOT NULL,
    before  xid8       NOT NULL
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

-- What is known of a queue's starts. If the numbers themselves went back, as in a copy that was made
-- without them, nothing is.
CREATE FUNCTION leasehold.known_starts(of_queue integer)
RETURNS TABLE (sealed bigint, lines smallint[], starts bigint[]) LANGUAGE sql STABLE AS $$
    SELECT coalesce(s.sealed, 0), coalesce(s.lines, '{}'), coalesce(s.starts, '{}')
    FROM (VALUES (of_queue)) AS q (id)
    LEFT JOIN leasehold.starts s ON s.queue = q.id AND s.sealed <= pg_sequence_last_value('leasehold.places')
$$;

-- Where jobs of each line can be, in the order of service: what went to its front since the numbers were
-- sealed, and what is behind its start.
CREATE FUNCTION leasehold.stretches(of_queue integer)
RETURNS TABLE (line smallint, since bigint, till bigint) LANGUAGE sql STABLE AS $$
    SELECT (n / 2)::smallint,
           CASE WHEN n % 2 = 0 THEN -9223372036854775807
                ELSE coalesce(k.starts[array_position(k.lines, (n / 2)::smallint)], -k.sealed) END,
           CASE WHEN n % 2 = 0 THEN -k.sealed ELSE 9223372036854775807 END
    FROM leasehold.known_starts(of_queue) AS k CROSS JOIN generate_series(0, 31) AS n
$$;

-- Whether a queue has a job in line. Lines of which no start is known are looked through together with
-- their neighbours: most queues use one line, and a look into each of the others costs more than the job.
CREATE FUNCTION leasehold.has_ready(of_queue integer) RETURNS boolean LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    known record;
    after smallint := -1;
    next  smallint;
BEGIN
    SELECT * INTO known FROM leasehold.known_starts(of_queue);
    FOR nth IN 1 .. cardinality(known.lines) LOOP
        next := known.lines[nth];
        IF EXISTS (SELECT FROM leasehold.ready e
                   WHERE e.queue = of_queue AND e.line = next AND e.place >= known.starts[nth])
           OR EXISTS (SELECT FROM leasehold.ready e
                      WHERE e.queue = of_queue AND e.line = next AND e.place < -known.sealed)
           OR EXISTS (SELECT FROM leasehold.ready e WHERE e.queue = of_queue AND e.line > after AND e.line < next)
        THEN
            RETURN true;
        END IF;
        after := next;
    END LOOP;
    RETURN EXISTS (SELECT FROM leasehold.ready e WHERE e.queue = of_queue AND e.line > after);
END $$;

-- Moves the starts of queues up, as far as is certain. of_lines: those that jobs were taken from.
--
-- Who draws a number has its transaction's number before (enqueue.sql, plain.sql). So what is drawn
-- before this transaction has its own, is drawn by transactions before it, and they all have ended when
-- the oldest that has not is no longer one of them. A transaction that only reads has no number, and may
-- stay open for as long as it likes.
CREATE FUNCTION leasehold.seal(of_namespace text, names text[], of_lines smallint[]) RETURNS void LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off SET synchronous_commit = off AS $$
DECLARE
    drawn bigint;
    own   xid8;
    was   leasehold.starts;
    now_  leasehold.starts;
    of_   integer;
BEGIN
    IF pg_current_xact_id_if_assigned() IS NOT NULL
       OR current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN;
    END IF;
    drawn := coalesce(pg_sequence_last_value('leasehold.places'), 0);
    own := pg_current_xact_id();
    FOR of_ IN SELECT q.id FROM leasehold.queues q WHERE q.namespace = of_namespace AND q.name = ANY (names) LOOP
        INSERT INTO leasehold.starts (queue, sealing, before) VALUES (of_, drawn, own) ON CONFLICT DO NOTHING;
        CONTINUE WHEN FOUND;
        -- Somebody else is at it.
        SELECT * INTO was FROM leasehold.starts s WHERE s.queue = of_ FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        IF drawn < was.sealed THEN
            DELETE FROM leasehold.starts s WHERE s.queue = of_;
            CONTINUE;
        END IF;
        now_ := was;
        IF was.before <= pg_snapshot_xmin(pg_current_snapshot()) THEN
            now_.sealed := was.sealing;
        END IF;
        -- A copy of the tables in a younger server names transactions that were never there.
        IF now_.sealed = was.sealing OR was.before > own THEN
            now_.sealing := drawn;
            now_.before := own;
        END IF;
        now_.lines := ARRAY (SELECT DISTINCT line FROM unnest(was.lines || of_lines) AS line ORDER BY line);
        -- Read after that, so that it sees all that the transactions have brought that have ended.
        now_.starts := ARRAY (
            SELECT least(now_.sealed + 1,
                (SELECT e.place FROM leasehold.ready e WHERE e.queue = of_ AND e.line = l.line
                   AND e.place >= -now_.sealed AND e.place < -was.sealed ORDER BY e.place LIMIT 1),
                (SELECT e.place FROM leasehold.ready e WHERE e.queue = of_ AND e.line = l.line
                   AND e.place >= coalesce(was.starts[array_position(was.lines, l.line)], -was.sealed)
                 ORDER BY e.place LIMIT 1))
            FROM unnest(now_.lines) AS l (line) ORDER BY l.line);
        UPDATE leasehold.starts s
        SET sealed = now_.sealed, lines = now_.lines, starts = now_.starts, sealing = now_.sealing,
            before = now_.before
        WHERE s.queue = of_;
    END LOOP;
END $$;

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
