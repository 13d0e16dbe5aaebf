CREATE SCHEMA IF NOT EXISTS "leasehold";

-- schema: version 1, the tables.
-- in   a transaction that holds the migration's lock, and an empty schema      out  the tables
-- why  a schema of our own beside the user's tables, one for all namespaces: queues carry theirs,
--      so that one migration, one autovacuum setting and one grant of rights serve every
--      application
--
-- A job is one row from its enqueue to its end. Times are microseconds since 1970 on the server's
-- clock, durations nanoseconds.

CREATE TABLE "leasehold".meta (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    version integer NOT NULL,
    -- The first version whose programs still find here all that they call.
    oldest  integer NOT NULL DEFAULT 1,
    -- Of the functions that are there, and the release of the program that wrote them, as one
    -- number.
    code    text    NOT NULL DEFAULT '',
    edition integer NOT NULL DEFAULT 0,
    -- Tells this database from others: a receipt is worth nothing there.
    id      uuid    NOT NULL DEFAULT gen_random_uuid()
);

-- The row is the lock of its queue for claims and commands. Enqueue, settle and renew wait for it
-- only if the clock was set back, or if a fence's mark raises the floor.
CREATE TABLE "leasehold".queue (
    id        integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace text COLLATE "C" NOT NULL,
    name      text COLLATE "C" NOT NULL,
    paused    boolean NOT NULL DEFAULT false,
    relaxed   boolean NOT NULL DEFAULT false,
    UNIQUE (namespace, name)
);

-- What changes with every claim of a queue. The row with the largest gen counts: whoever holds the
-- queue's lock adds the next and deletes this one. An update in place would leave its old versions
-- in front of it, and while some transaction of the server stays open, every look-up would step
-- over all of them.
--
-- last, floor: the issuer of tokens (src/rules/issue.rs).
-- epoch: whoever puts jobs into the queue holds a shared lock of its epoch (place.sql).
-- drawn, drawn_at: the last place drawn, and the time, when the epoch began.
-- sealed, sealed_at: nobody who drew a place up to this one is still at it, and whoever is has come
--   since that time.
-- lines, fronts, starts: in this line there is no job at a place from -front up to the start, nor
--   will there be one. A look begins behind it, and steps over no job that was taken before.
-- due_from: no scheduled job is due before it.  overdue_from: no lease ends before it.
-- counts: see tally. counted_to: the last tally that is in it.
CREATE TABLE "leasehold".head (
    queue        integer    NOT NULL,
    gen          bigint     NOT NULL,
    last         bigint     NOT NULL,
    floor        bigint     NOT NULL,
    epoch        bigint     NOT NULL,
    drawn        bigint     NOT NULL,
    drawn_at     bigint     NOT NULL,
    sealed       bigint     NOT NULL,
    sealed_at    bigint     NOT NULL,
    lines        smallint[] NOT NULL,
    fronts       bigint[]   NOT NULL,
    starts       bigint[]   NOT NULL,
    due_from     bigint     NOT NULL,
    overdue_from bigint     NOT NULL,
    counts       bigint[]   NOT NULL,
    counted_to   bigint     NOT NULL,
    PRIMARY KEY (queue, gen)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

-- Counts and ledger, as what each call added to them: appended, so that calls of one queue do not
-- wait for each other, and now and then added up in head.counts. The order of the numbers is in
-- tally.rs. n is drawn as places are.
CREATE TABLE "leasehold".tally (
    queue  integer  NOT NULL,
    n      bigint   NOT NULL,
    counts bigint[] NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX tally_n ON "leasehold".tally (queue, n);

-- Places in line and order of arrival. A line grows at the back by +n and at the front by -n.
CREATE SEQUENCE "leasehold".place;

-- state: 0 scheduled, 1 parked behind its exclusive key, 2 ready, 3 completed, 4 dead, 5 cancelled,
--   6 leased, 7 waiting.
-- line: priority * 2, plus 1 unless it is the suspects'. (line, place) is the order of service.
-- seq: the order among the scheduled, the parked, the settled.
-- options: what only workers read, and what is rare (rules in job.rs). null: the usual ones.
-- token, lease_of, cancel, progress: while it is leased; lease_of is the grant's id.
CREATE TABLE "leasehold".job (
    id               uuid     NOT NULL,
    queue            integer  NOT NULL,
    version          integer  NOT NULL,
    seq              bigint   NOT NULL,
    place            bigint   NOT NULL,
    enqueued_at      bigint   NOT NULL,
    run_at           bigint   NOT NULL,
    token            bigint,
    lease_of         bigint,
    declined_since   bigint,
    settled_at       bigint,
    keep_until       bigint,
    checkpoint_seq   bigint,
    checkpoint_token bigint,
    failures         integer  NOT NULL DEFAULT 0,
    expiries         integer  NOT NULL DEFAULT 0,
    max_expiries     integer  NOT NULL,
    weight           integer  NOT NULL,
    state            smallint NOT NULL,
    line             smallint NOT NULL,
    cancel           boolean  NOT NULL DEFAULT false,
    kind             text COLLATE "C" NOT NULL,
    unique_key       bytea,
    exclusive_key    bytea,
    options          jsonb,
    headers          jsonb,
    progress         jsonb,
    history          jsonb,
    payload          bytea    NOT NULL,
    checkpoint       bytea,
    result           bytea,
    PRIMARY KEY (id, queue)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
        autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_threshold = -1,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 100000);
CREATE INDEX job_ready ON "leasehold".job (queue, line, place) WHERE state = 2;
CREATE INDEX job_due ON "leasehold".job (queue, run_at, seq) WHERE state = 0;
CREATE INDEX job_parked ON "leasehold".job (queue, exclusive_key, seq) WHERE state = 1;
CREATE INDEX job_leased ON "leasehold".job (queue, token) WHERE state = 6;
CREATE INDEX job_settled ON "leasehold".job (queue, state, settled_at, seq) WHERE settled_at IS NOT NULL;
CREATE INDEX job_kept ON "leasehold".job (queue, keep_until) WHERE keep_until IS NOT NULL;

CREATE TABLE "leasehold".unique_key (
    queue integer NOT NULL,
    key   bytea   NOT NULL,
    job   uuid    NOT NULL,
    until bigint,
    PRIMARY KEY (queue, key)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX unique_key_until ON "leasehold".unique_key (queue, until) WHERE until IS NOT NULL;

-- head: the job of the key that may be ready, leased, or waiting for its retry.
CREATE TABLE "leasehold".exclusive_key (
    queue integer NOT NULL,
    key   bytea   NOT NULL,
    head  uuid    NOT NULL,
    PRIMARY KEY (queue, key)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- The leases that one claim gave with the same terms: one deadline, and all that a renewal touches.
-- Its tokens are from id to id + leases - 1; which of them live, their jobs know. Of the nonce only
-- the hash. lapsing: leases that are to lapse once no transaction has their jobs in hand.
CREATE TABLE "leasehold".grants (
    queue        integer NOT NULL,
    leases       integer NOT NULL,
    id           bigint  NOT NULL,
    deadline     bigint  NOT NULL,
    granted_at   bigint  NOT NULL,
    term         bigint  NOT NULL,
    max_lifetime bigint  NOT NULL,
    renewals     integer NOT NULL DEFAULT 0,
    nonce_hash   bytea   NOT NULL,
    lapsing      bigint[],
    owner        text    NOT NULL,
    task         text    NOT NULL,
    PRIMARY KEY (queue, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);
-- With + 0, so that whoever knows a grant's id comes by the key: until a vacuum, this index has all
-- that ended.
CREATE INDEX grants_deadline ON "leasehold".grants ((queue + 0), deadline, (id + 0));

CREATE TABLE "leasehold".session (
    id        uuid   PRIMARY KEY,
    namespace text   NOT NULL,
    used      bigint NOT NULL
) WITH (fillfactor = 50);

-- The last answer of each lane: the row with the largest seq, as with head. null: nothing of note.
-- A session was used when its last lane was.
CREATE TABLE "leasehold".lane (
    session uuid     NOT NULL,
    lane    bigint   NOT NULL,
    seq     bigint   NOT NULL,
    used    bigint   NOT NULL,
    verb    smallint NOT NULL,
    answer  jsonb,
    PRIMARY KEY (session, lane, seq)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

CREATE TABLE "leasehold".audit (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace text   NOT NULL,
    at        bigint NOT NULL,
    actor     text   NOT NULL,
    reason    text   NOT NULL,
    command   text   NOT NULL,
    done      bigint NOT NULL,
    tokens    text   NOT NULL
);
CREATE INDEX audit_order ON "leasehold".audit (namespace, id);

-- Marks of fences (src/fence/postgres.rs), beside the jobs so that any driver finds the same ones.
-- The scope '' is the floor below which marks were forgotten.
CREATE TABLE IF NOT EXISTS "leasehold".fence (
    scope text COLLATE "C" PRIMARY KEY,
    mark  bigint NOT NULL
);
CREATE TABLE IF NOT EXISTS "leasehold".fence_done (
    scope     text COLLATE "C" NOT NULL,
    operation text COLLATE "C" NOT NULL,
    token     bigint NOT NULL,
    PRIMARY KEY (scope, operation)
);

INSERT INTO "leasehold".meta (version) VALUES (1);

-- session: open, and answer a repeated call with its first answer.
-- in   session, lane, sequence number      out  the last answer of the lane
-- why  an error from a write means unknown: the caller repeats, and the call must count once. No
--      session: a call that is not repeated, as inside a user's transaction

-- Microseconds since 1970 on the server's clock; tests bring their own.
CREATE OR REPLACE FUNCTION "leasehold".clock_1(by_hand bigint) RETURNS bigint LANGUAGE sql VOLATILE AS
$$ SELECT coalesce(by_hand, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) $$;

CREATE OR REPLACE FUNCTION "leasehold".open_session_1(of_namespace text, by_hand bigint) RETURNS uuid LANGUAGE plpgsql
SET enable_seqscan = on AS $$
DECLARE
    at  bigint := "leasehold".clock_1(by_hand);
    new uuid := gen_random_uuid();
BEGIN
    WITH idle AS (
        DELETE FROM "leasehold".session s WHERE s.used < at - 600000000 AND s.namespace = of_namespace
          AND NOT EXISTS (SELECT FROM "leasehold".lane l WHERE l.session = s.id AND l.used >= at - 600000000)
        RETURNING s.id
    )
    DELETE FROM "leasehold".lane l USING idle WHERE l.session = idle.id;
    INSERT INTO "leasehold".session (id, namespace, used) VALUES (new, of_namespace, at);
    RETURN new;
END $$;

-- What is known of a request. done: it was answered, with this. prior: the lane's request before
-- it.
CREATE OR REPLACE FUNCTION "leasehold".recall_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint, of_verb smallint,
    OUT done boolean, OUT answer jsonb, OUT prior bigint
) LANGUAGE plpgsql AS $$
DECLARE
    MINUTE constant bigint := 60000000;
    at   bigint := "leasehold".clock_1(by_hand);
    used bigint;
    last record;
BEGIN
    done := false;
    IF of_session IS NULL THEN
        RETURN;
    END IF;
    -- What waited for a lock must see what the one before has done.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'the isolation of the transaction is not read committed' USING ERRCODE = 'LH005';
    END IF;
    SELECT s.used AS opened, k.seq, k.verb, k.used, k.answer INTO last FROM "leasehold".session s
    LEFT JOIN LATERAL (SELECT * FROM "leasehold".lane l WHERE l.session = s.id AND l.lane = of_lane
                       ORDER BY l.seq DESC LIMIT 1) AS k ON true
    WHERE s.id = of_session AND s.namespace = of_namespace;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the request''s session is not open' USING ERRCODE = 'LH003';
    END IF;
    used := last.opened;
    prior := last.seq;
    IF at - used > MINUTE THEN
        -- Its own row is touched seldom: the calls of one process must not wait for each other
        -- there.
        IF at - greatest(used, last.used) > 600000000
           AND at - (SELECT max(l.used) FROM "leasehold".lane l WHERE l.session = of_session) > 600000000 IS NOT FALSE
        THEN
            RAISE EXCEPTION 'the request''s session is not open' USING ERRCODE = 'LH003';
        END IF;
        UPDATE "leasehold".session s SET used = at
        WHERE s.id = (SELECT t.id FROM "leasehold".session t WHERE t.id = of_session FOR UPDATE SKIP LOCKED);
    END IF;
    IF last.seq > of_seq THEN
        RAISE EXCEPTION 'a later request of the same lane has been answered' USING ERRCODE = 'LH003';
    ELSIF last.seq = of_seq THEN
        IF last.verb <> of_verb THEN
            RAISE EXCEPTION 'the id of another verb''s call' USING ERRCODE = 'LH004';
        END IF;
        done := true;
        answer := last.answer;
    END IF;
END $$;

-- Two copies of one request may run at once, when the first lost its connection. The second waits
-- here for the first, and starts over: it then meets the first answer.
CREATE OR REPLACE FUNCTION "leasehold".remember_1(
    of_session uuid, of_lane bigint, of_seq bigint, of_verb smallint, at bigint, given jsonb, prior bigint
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF of_session IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO "leasehold".lane (session, lane, seq, used, verb, answer)
    VALUES (of_session, of_lane, of_seq, at, of_verb, given) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'this request has been answered meanwhile' USING ERRCODE = '40001';
    END IF;
    -- In statements after the INSERT, which waited for whoever was at this row. A copy that stood
    -- still meanwhile finds that the request before it is gone, or a later one there.
    DELETE FROM "leasehold".lane l WHERE l.session = of_session AND l.lane = of_lane AND l.seq = prior;
    IF NOT FOUND AND (prior IS NOT NULL OR EXISTS (
        SELECT FROM "leasehold".lane l WHERE l.session = of_session AND l.lane = of_lane AND l.seq > of_seq))
    THEN
        RAISE EXCEPTION 'another request of this lane has been answered meanwhile' USING ERRCODE = '40001';
    END IF;
END $$;

-- Callers share a call: what one of its items waits for in somebody's hand, all wait for. So it
-- waits for a moment, and then names the items, for the others to go on without them.
CREATE OR REPLACE FUNCTION "leasehold".wait_briefly_1(of_session uuid, patience text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    BRIEFLY constant bigint := 200;
BEGIN
    IF of_session IS NOT NULL THEN
        PERFORM set_config('lock_timeout', least(nullif(patience::bigint, 0), BRIEFLY)::text, true);
    END IF;
END $$;

CREATE OR REPLACE FUNCTION "leasehold".in_hand_1(of_session uuid, items text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF of_session IS NULL THEN
        RAISE EXCEPTION 'another transaction has it in hand' USING ERRCODE = '55P03';
    ELSIF items IS NULL THEN
        RAISE EXCEPTION 'it is in nobody''s hand any more' USING ERRCODE = '40001';
    END IF;
    RAISE EXCEPTION 'another transaction has it in hand' USING ERRCODE = 'LH006', DETAIL = items;
END $$;

-- ends: how a lease can end, and what becomes of its job: src/rules/ends.rs once more.
-- in   a leased job, locked, its grant, what ends it      out  the job where it goes, and what that
--      adds to the counts
-- why  one place for all that settle, expire, lapse and revoke

CREATE OR REPLACE FUNCTION "leasehold".no_counts_1() RETURNS bigint[] LANGUAGE sql IMMUTABLE AS
$$ SELECT array_fill(0::bigint, ARRAY[24]) $$;

-- What jobs add to the weight of a grant.
CREATE OR REPLACE FUNCTION "leasehold".weight_of_headers_1(headers jsonb) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN (SELECT coalesce(sum(octet_length(h ->> 0) + octet_length(h ->> 1)), 0) FROM jsonb_array_elements(headers) AS h);
END $$;
CREATE OR REPLACE FUNCTION "leasehold".weight_of_history_1(history jsonb) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN (SELECT coalesce(sum(38 + octet_length(h ->> 'owner') + octet_length(h ->> 'task')
                                + coalesce(4 + octet_length(h ->> 'reason'), 0)
                                + coalesce(21 + octet_length(h -> 'progress' ->> 'note'), 0)), 0)
            FROM jsonb_array_elements(history) AS h);
END $$;

-- Places at the front of a line, one for each token in the order of the tokens.
CREATE OR REPLACE FUNCTION "leasehold".fronts_1(tokens bigint[]) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    places bigint[] := '{}';
BEGIN
    FOR nth IN 1 .. cardinality(tokens) LOOP
        places := -nextval('"leasehold".place') || places;
    END LOOP;
    RETURN places;
END $$;

-- The end that its holder gives to a lease. believed: a fence's mark is not too far ahead of the
-- clock.
CREATE OR REPLACE FUNCTION "leasehold".settled_1(
    outcome smallint, delay bigint, reason text, mark bigint, believed boolean, cancel boolean, relaxed boolean, at bigint,
    OUT ended text, OUT next text, OUT keeps_key boolean, OUT failed boolean, OUT declined boolean, OUT due bigint,
    OUT why text
) LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    keeps_key := true;
    failed := false;
    declined := false;
    IF outcome = 0 THEN
        ended := 'completed';
        next := 'completed';
    ELSIF outcome = 4 THEN
        ended := 'buried';
        next := 'dead';
        failed := true;
        why := reason;
    ELSIF outcome = 1 THEN
        failed := true;
        why := reason;
        ended := CASE WHEN cancel THEN 'cancelled' ELSE 'retried' END;
        next := CASE WHEN cancel THEN 'cancelled' ELSE 'scheduled' END;
        keeps_key := NOT relaxed;
        due := at + delay / 1000;
    ELSIF NOT believed THEN
        failed := true;
        why := 'broken fence: its mark ' || mark || ' is more than ' || 86400000000 / 1000000 || 's ahead of the store''s clock';
        ended := CASE WHEN cancel THEN 'cancelled' ELSE 'retried' END;
        next := CASE WHEN cancel THEN 'cancelled' ELSE 'scheduled' END;
        keeps_key := NOT relaxed;
        due := at + 10000000;
    ELSIF cancel THEN
        ended := 'cancelled';
        next := 'cancelled';
    ELSIF outcome = 2 AND delay = 0 THEN
        ended := 'surrendered';
        next := 'front';
    ELSE
        ended := 'surrendered';
        next := 'scheduled';
        due := at + delay / 1000;
        declined := outcome = 3;
        why := CASE WHEN declined THEN reason END;
    END IF;
    due := CASE WHEN next = 'scheduled' THEN due END;
END $$;

-- Where a job goes when its lease expires.
CREATE OR REPLACE FUNCTION "leasehold".expired_1(j "leasehold".job) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN j.cancel THEN 'cancelled' WHEN j.expiries + 1 >= j.max_expiries THEN 'dead' ELSE 'front' END
$$;

-- Ends a lease. ended: completed, retried, surrendered, buried, cancelled, expired, revoked; cause:
-- of an expiry. next: front, back, scheduled, completed, dead, cancelled. front: its place there.
CREATE OR REPLACE FUNCTION "leasehold".end_lease_1(
    j "leasehold".job, g "leasehold".grants, at bigint, ended text, cause text, next text, keeps_key boolean, failed boolean,
    declined boolean, due bigint, why text, result_ bytea, front bigint, INOUT counts bigint[]
) LANGUAGE plpgsql AS $$
DECLARE
    kept   bigint := (j.options ->> 'retention')::bigint / 1000;
    until_ bigint;
    told   jsonb;
    tier   smallint;
    nth    integer;
BEGIN
    nth := CASE ended WHEN 'completed' THEN 10 WHEN 'retried' THEN 11
                      WHEN 'surrendered' THEN 12 WHEN 'buried' THEN 13
                      WHEN 'cancelled' THEN 14 WHEN 'revoked' THEN 18
                      ELSE CASE cause WHEN 'deadline' THEN 15 WHEN 'stalled' THEN 16
                                      ELSE 17 END END;
    counts[nth] := counts[nth] + 1;
    counts[4] := counts[4] - 1;
    counts[19] := counts[19] - 1;
    IF next IN ('completed', 'dead', 'cancelled') THEN
        IF ended = 'expired' AND next = 'dead' THEN
            counts[24] := counts[24] + 1;
        END IF;
        counts := "leasehold".free_keys_1(j, counts);
        IF next = 'completed' AND kept IS NULL THEN
            DELETE FROM "leasehold".job k WHERE k.id = j.id AND k.queue = j.queue;
            RETURN;
        END IF;
        -- A dead job must not vanish silently: it stays until an operator retries or purges it.
        until_ := CASE next WHEN 'completed' THEN at + kept
                            WHEN 'cancelled' THEN at + greatest(coalesce(kept, 0), 86400000000) END;
    ELSIF next = 'scheduled' AND NOT keeps_key THEN
        counts := "leasehold".leave_key_1(j.queue, j.exclusive_key, j.id, counts);
    END IF;
    told := jsonb_strip_nulls(jsonb_build_object(
        'token', j.token, 'owner', g.owner, 'task', g.task, 'granted_at', g.granted_at, 'ended_at', at,
        'renewals', g.renewals, 'end', ended, 'cause', cause, 'reason', why, 'progress', j.progress));
    told := CASE WHEN jsonb_array_length(j.history) >= 8 THEN j.history - 0
                 ELSE coalesce(j.history, '[]') END || jsonb_build_array(told);
    IF ended = 'expired' THEN
        j.expiries := j.expiries + 1;
    END IF;
    -- Suspects have a line of their own.
    tier := j.line / 2 * 2 + CASE WHEN j.expiries >= 2 THEN 0 ELSE 1 END;
    UPDATE "leasehold".job k SET
        state = CASE next WHEN 'front' THEN 2 WHEN 'back' THEN 2 WHEN 'scheduled' THEN 0
                          WHEN 'completed' THEN 3 WHEN 'dead' THEN 4 ELSE 5 END,
        line = tier,
        place = CASE next WHEN 'front' THEN front WHEN 'back' THEN nextval('"leasehold".place') ELSE j.place END,
        seq = nextval('"leasehold".place'),
        run_at = coalesce(due, j.run_at),
        failures = j.failures + failed::integer,
        expiries = j.expiries,
        declined_since = CASE WHEN declined THEN coalesce(j.declined_since, at) END,
        settled_at = CASE WHEN next IN ('completed', 'dead', 'cancelled') THEN at END,
        keep_until = until_,
        weight = j.weight + "leasehold".weight_of_history_1(told) - "leasehold".weight_of_history_1(coalesce(j.history, '[]')),
        history = told,
        result = coalesce(result_, j.result),
        token = NULL, lease_of = NULL, cancel = false, progress = NULL
    WHERE k.id = j.id AND k.queue = j.queue;
    nth := CASE next WHEN 'front' THEN 2 WHEN 'back' THEN 2 WHEN 'scheduled' THEN 1
                     WHEN 'completed' THEN 5 WHEN 'dead' THEN 6 ELSE 7 END;
    counts[nth] := counts[nth] + 1;
END $$;

-- A job's life is over: its keys are free, and the next of its exclusive key is ready.
CREATE OR REPLACE FUNCTION "leasehold".free_keys_1(j "leasehold".job, INOUT counts bigint[]) LANGUAGE plpgsql AS $$
BEGIN
    IF j.unique_key IS NOT NULL THEN
        DELETE FROM "leasehold".unique_key u
        WHERE u.queue = j.queue AND u.key = j.unique_key AND u.job = j.id AND u.until IS NULL;
    END IF;
    counts := "leasehold".leave_key_1(j.queue, j.exclusive_key, j.id, counts);
END $$;

-- Locks the exclusive keys of leased jobs, in their order.
CREATE OR REPLACE FUNCTION "leasehold".lock_keys_1(of_queue integer, ids uuid[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM "leasehold".exclusive_key e
    WHERE e.queue = of_queue AND e.key = ANY (ARRAY (
        SELECT j.exclusive_key FROM "leasehold".job j
        WHERE j.id = ANY (ids) AND j.queue = of_queue AND j.exclusive_key IS NOT NULL))
    ORDER BY e.key FOR UPDATE;
END $$;

-- Expires up to `most` leases of a queue that are overdue, by (deadline, token). What somebody has
-- in hand is passed over: it is not overdue to him, and the next look sees what became of it.
CREATE OR REPLACE FUNCTION "leasehold".expire_1(
    of_queue integer, of_name text, since bigint, at bigint, most integer, INOUT counts bigint[], OUT told jsonb
) LANGUAGE plpgsql AS $$
DECLARE
    ids    uuid[];
    tokens bigint[];
    places bigint[];
    till   bigint;
    one    record;
    next   text;
    cause  text;
BEGIN
    told := '[]';
    SELECT array_agg(o.id ORDER BY o.deadline, o.token), array_agg(o.token ORDER BY o.token), max(o.deadline)
    INTO ids, tokens, till
    FROM (SELECT j.id, j.token, g.deadline
          FROM (SELECT o.id, o.leases, o.deadline FROM "leasehold".grants o
                WHERE o.queue + 0 = of_queue AND o.deadline >= since AND o.deadline <= at
                ORDER BY o.deadline, o.id + 0 LIMIT most FOR UPDATE SKIP LOCKED) AS g
          CROSS JOIN LATERAL (
                SELECT o.id, o.token FROM "leasehold".job o
                WHERE o.queue = of_queue AND o.state = 6 AND o.token >= g.id AND o.token < g.id + g.leases
                ORDER BY o.token LIMIT most FOR UPDATE SKIP LOCKED) AS j
          LIMIT most) AS o;
    IF ids IS NOT NULL THEN
        PERFORM "leasehold".lock_keys_1(of_queue, ids);
        places := "leasehold".fronts_1(tokens);
        FOR one IN
            SELECT j.j, g.g FROM unnest(ids) WITH ORDINALITY AS k (id, n)
            CROSS JOIN LATERAL (SELECT o AS j, o.lease_of FROM "leasehold".job o WHERE o.id = k.id AND o.queue = of_queue LIMIT 1) AS j
            CROSS JOIN LATERAL (SELECT o AS g FROM "leasehold".grants o
                                WHERE o.queue = of_queue AND o.id = j.lease_of LIMIT 1) AS g ORDER BY k.n
        LOOP
            next := "leasehold".expired_1(one.j);
            cause := CASE WHEN (one.g).deadline >= (one.g).granted_at + (one.g).max_lifetime / 1000
                          THEN 'lifetime' ELSE 'deadline' END;
            counts := "leasehold".end_lease_1(one.j, one.g, at, 'expired', cause, next, true, false, false, NULL, NULL, NULL,
                                            places[array_position(tokens, (one.j).token)], counts);
            told := told || jsonb_build_array(jsonb_strip_nulls(jsonb_build_object(
                'queue', of_name, 'job', (one.j).id, 'kind', (one.j).kind, 'token', (one.j).token, 'owner', (one.g).owner,
                'task', (one.g).task, 'cause', cause, 'progress', (one.j).progress, 'expiries', (one.j).expiries + 1,
                'state', CASE next WHEN 'front' THEN 'ready' ELSE next END, 'deadline', (one.g).deadline)));
        END LOOP;
    END IF;
    -- Grants that have no lease any more.
    DELETE FROM "leasehold".grants d WHERE d.ctid = ANY (ARRAY (
        SELECT g.ctid FROM "leasehold".grants g
        WHERE g.queue + 0 = of_queue AND g.deadline >= since
          AND g.deadline <= CASE WHEN cardinality(ids) = most THEN till ELSE at END
          AND (SELECT true FROM "leasehold".job j WHERE j.queue = of_queue AND j.state = 6
                 AND j.token >= g.id AND j.token < g.id + g.leases LIMIT 1) IS NULL
        FOR UPDATE SKIP LOCKED));
END $$;

-- Grants of which no lease lives any more. One that somebody has in hand is left to its deadline.
CREATE OR REPLACE FUNCTION "leasehold".end_grants_1(of_queue integer, ids bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM "leasehold".grants d WHERE d.ctid = ANY (ARRAY (
        SELECT g.spot FROM (SELECT DISTINCT k.id FROM unnest(ids) AS k (id)) AS k
        CROSS JOIN LATERAL (
            SELECT o.ctid AS spot FROM "leasehold".grants o
            WHERE o.queue = of_queue AND o.id = k.id
              AND (SELECT true FROM "leasehold".job j WHERE j.queue = of_queue AND j.state = 6
                     AND j.token >= o.id AND j.token < o.id + o.leases LIMIT 1) IS NULL
            FOR UPDATE SKIP LOCKED) AS g));
END $$;

-- place: where jobs that are not leased stand, and who is to know.
-- in   queues, keys, jobs      out  places, heads of keys, stretches of lines
-- why  a job that was taken stays in the index until a vacuum, and a vacuum removes nothing while
--      any transaction of the server is open that is older. So whoever looks for the first job of a
--      line begins behind those that were taken: at a place up to which there is none, and never
--      will be one. That is certain once all those have ended who may have drawn such a place: each
--      holds a shared lock for as long as its transaction lasts. Other transactions do not matter
--
-- Locks: a queue's row, then jobs, then keys in their order, then parked jobs, which are passed
-- over if somebody has them.

-- The queue of that name, which is made if it is not there.
CREATE OR REPLACE FUNCTION "leasehold".queue_1(of_namespace text, of_name text, at bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    found_ integer;
BEGIN
    FOR try IN 1 .. 8 LOOP
        SELECT q.id INTO found_ FROM "leasehold".queue q WHERE q.namespace = of_namespace AND q.name = of_name;
        IF FOUND THEN
            RETURN found_;
        END IF;
        INSERT INTO "leasehold".queue (namespace, name) VALUES (of_namespace, of_name)
        ON CONFLICT DO NOTHING RETURNING id INTO found_;
        IF FOUND THEN
            -- An issuer without memory: what an older copy of this database gave is below its
            -- floor.
            INSERT INTO "leasehold".head (queue, gen, last, floor, epoch, drawn, drawn_at, sealed, sealed_at, lines, fronts,
                                        starts, due_from, overdue_from, counts, counted_to)
            VALUES (found_, 1, 0, at + 20000, 0, 0, 0, 0, 0, '{}', '{}', '{}', 0, 0, "leasehold".no_counts_1(), 0);
            RETURN found_;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'a queue is made again and again' USING ERRCODE = '40001';
END $$;

CREATE OR REPLACE FUNCTION "leasehold".head_1(of_queue integer) RETURNS SETOF "leasehold".head LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT * FROM "leasehold".head h WHERE h.queue = of_queue ORDER BY h.gen DESC LIMIT 1
$$;

-- Whoever puts jobs into a queue, or adds to its counts, comes through here before it draws a
-- number or asks the time. The answer: when the epoch began, for due_1.
--
-- The epoch is read again once the lock is held. If it has moved on, this is the one before, and
-- the other lock is taken, too: nobody moves on again while the one before is held. A transaction
-- that reads only what was there when it began takes both at once; and it locks the queue's row,
-- which fails if the queue was removed since. That waits for a removal alone.
CREATE OR REPLACE FUNCTION "leasehold".enter_1(of_queue integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    class constant integer := '"leasehold".queue'::regclass::oid::integer;
    was   bigint;
    is_   bigint;
    noted bigint;
    is_strict constant boolean := current_setting('transaction_isolation') <> 'read committed';
BEGIN
    IF is_strict THEN
        PERFORM FROM "leasehold".queue q WHERE q.id = of_queue FOR KEY SHARE;
    END IF;
    SELECT h.epoch, h.drawn_at INTO was, noted FROM "leasehold".head h WHERE h.queue = of_queue ORDER BY h.gen DESC LIMIT 1;
    PERFORM pg_advisory_xact_lock_shared(class, of_queue * 2 + (was % 2)::integer);
    IF is_strict THEN
        PERFORM pg_advisory_xact_lock_shared(class, of_queue * 2 + 1 - (was % 2)::integer);
        RETURN noted;
    END IF;
    SELECT h.epoch, h.drawn_at INTO is_, noted FROM "leasehold".head h WHERE h.queue = of_queue ORDER BY h.gen DESC LIMIT 1;
    IF is_ % 2 <> was % 2 THEN
        PERFORM pg_advisory_xact_lock_shared(class, of_queue * 2 + (is_ % 2)::integer);
    END IF;
    IF is_ IS NULL THEN
        RAISE EXCEPTION 'the queue was removed meanwhile' USING ERRCODE = '40001';
    END IF;
    RETURN noted;
END $$;

-- A job is going to be due. If the clock was set back, that may be before the time from which
-- claims look.
CREATE OR REPLACE FUNCTION "leasehold".due_1(of_queue integer, due bigint, noted bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    h "leasehold".head;
BEGIN
    IF due < noted THEN
        PERFORM FROM "leasehold".queue q WHERE q.id = of_queue FOR NO KEY UPDATE;
        SELECT * INTO h FROM "leasehold".head_1(of_queue);
        h.due_from := least(h.due_from, due);
        PERFORM "leasehold".save_head_1(h);
    END IF;
END $$;

-- Whether somebody who came in that epoch has not ended.
CREATE OR REPLACE FUNCTION "leasehold".is_entered_1(of_queue integer, of_epoch bigint) RETURNS boolean LANGUAGE sql VOLATILE AS $$
    SELECT NOT (pg_try_advisory_lock('"leasehold".queue'::regclass::oid::integer, of_queue * 2 + (of_epoch % 2)::integer)
                AND pg_advisory_unlock('"leasehold".queue'::regclass::oid::integer, of_queue * 2 + (of_epoch % 2)::integer))
$$;

-- What whoever holds a queue's lock knows of its places by now. The caller looks at jobs in
-- statements after this one: they see all that those have brought who have ended.
CREATE OR REPLACE FUNCTION "leasehold".advance_1(h "leasehold".head, at bigint) RETURNS "leasehold".head LANGUAGE plpgsql AS $$
DECLARE
    numbers bigint;
BEGIN
    SELECT p.last_value INTO numbers FROM "leasehold".place p;
    IF numbers < h.drawn THEN
        -- A copy that was made without them.
        h.lines := '{}';
        h.fronts := '{}';
        h.starts := '{}';
        h.drawn := 0;
        h.sealed := 0;
        h.counted_to := 0;
    END IF;
    IF h.drawn_at = at AND h.drawn = numbers THEN
        RETURN h;
    END IF;
    IF NOT "leasehold".is_entered_1(h.queue, h.epoch + 1) THEN
        h.sealed := h.drawn;
        -- The clock may have been set back.
        h.sealed_at := least(h.drawn_at, at);
        h.drawn := numbers;
        h.drawn_at := at;
        h.epoch := h.epoch + 1;
    END IF;
    RETURN h;
END $$;

-- Where jobs of each line can be, in the order of service: from a place of a line on, up to another
-- line; or in one line, up to a place. (With both ends in one comparison of rows, the index would
-- be read to the end of the line.) The suspects of a line that is known stand alone: of them only
-- one is taken.
CREATE OR REPLACE FUNCTION "leasehold".stretches_1(lines smallint[], fronts bigint[], starts bigint[], suspects boolean)
RETURNS TABLE (line smallint, place bigint, till_line smallint, till_place bigint, alone boolean)
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    FIRST_ constant bigint := -9223372036854775807;
    next   smallint := 0;
    since  bigint := FIRST_;
BEGIN
    FOR nth IN 1 .. cardinality(lines) LOOP
        alone := false;
        line := next;
        place := since;
        till_line := lines[nth];
        till_place := NULL;
        IF line < till_line THEN
            RETURN NEXT;
        END IF;
        next := lines[nth];
        since := starts[nth];
        alone := next % 2 = 0;
        IF suspects OR NOT alone THEN
            line := next;
            till_place := -fronts[nth];
            RETURN NEXT;
        END IF;
        IF alone THEN
            IF suspects THEN
                place := since;
                till_line := next + 1;
                till_place := NULL;
                RETURN NEXT;
            END IF;
            next := next + 1;
            since := FIRST_;
        END IF;
    END LOOP;
    alone := false;
    line := next;
    place := since;
    till_line := 16;
    till_place := NULL;
    RETURN NEXT;
END $$;

-- Whether a queue has a job in line.
CREATE OR REPLACE FUNCTION "leasehold".has_ready_1(h "leasehold".head, suspects boolean) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
DECLARE
    s record;
BEGIN
    FOR s IN SELECT * FROM "leasehold".stretches_1(h.lines, h.fronts, h.starts, suspects) LOOP
        IF s.till_place IS NULL THEN
            IF EXISTS (SELECT FROM "leasehold".job j WHERE j.queue = h.queue AND j.state = 2
                         AND (j.line, j.place) >= (s.line, s.place) AND j.line < s.till_line
                         AND (suspects OR j.line % 2 = 1)) THEN
                RETURN true;
            END IF;
        ELSIF EXISTS (SELECT FROM "leasehold".job j WHERE j.queue = h.queue AND j.state = 2
                        AND j.line = s.line AND j.place < s.till_place) THEN
            RETURN true;
        END IF;
    END LOOP;
    -- In a copy that was made without the numbers, nothing is known: see advance_1.
    RETURN (SELECT p.last_value FROM "leasehold".place p) < h.drawn AND EXISTS (
        SELECT FROM "leasehold".job j WHERE j.queue = h.queue AND j.state = 2 AND (suspects OR j.line % 2 = 1));
END $$;

-- When the first scheduled job is due, and when the first lease ends.
--
-- Here and elsewhere in PL/pgSQL, though it is one statement: what is in SQL is planned anew by
-- each call.
CREATE OR REPLACE FUNCTION "leasehold".first_due_1(h "leasehold".head) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT j.run_at FROM "leasehold".job j
            WHERE j.queue = h.queue AND j.state = 0 AND j.run_at >= h.due_from
            ORDER BY j.run_at, j.seq LIMIT 1);
END $$;
CREATE OR REPLACE FUNCTION "leasehold".first_deadline_1(h "leasehold".head) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT g.deadline FROM "leasehold".grants g WHERE g.queue + 0 = h.queue AND g.deadline >= h.overdue_from
            ORDER BY g.deadline, g.id + 0 LIMIT 1);
END $$;

-- Whether a job is the head of its exclusive key. Who comes first to a free key is.
CREATE OR REPLACE FUNCTION "leasehold".join_key_1(of_queue integer, of_key bytea, of_job uuid) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    found_ uuid;
BEGIN
    FOR try IN 1 .. 8 LOOP
        INSERT INTO "leasehold".exclusive_key (queue, key, head) VALUES (of_queue, of_key, of_job) ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN true;
        END IF;
        SELECT e.head INTO found_ FROM "leasehold".exclusive_key e WHERE e.queue = of_queue AND e.key = of_key FOR UPDATE;
        IF FOUND THEN
            RETURN found_ = of_job;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'an exclusive key was freed again and again' USING ERRCODE = '40001';
END $$;

-- Whether a job can join its key without waiting. Somebody may have ended the key's head in a
-- transaction of his own: nobody knows who is next until that ends.
CREATE OR REPLACE FUNCTION "leasehold".is_free_1(of_queue integer, of_key bytea) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM "leasehold".exclusive_key e WHERE e.queue = of_queue AND e.key = of_key FOR UPDATE SKIP LOCKED;
    RETURN FOUND OR NOT EXISTS (SELECT FROM "leasehold".exclusive_key e WHERE e.queue = of_queue AND e.key = of_key);
END $$;

-- The head of a key leaves it: the next that waits for it is ready.
CREATE OR REPLACE FUNCTION "leasehold".leave_key_1(of_queue integer, of_key bytea, of_job uuid, INOUT counts bigint[])
LANGUAGE plpgsql AS $$
DECLARE
    next uuid;
BEGIN
    IF of_key IS NULL THEN
        RETURN;
    END IF;
    PERFORM FROM "leasehold".exclusive_key e WHERE e.queue = of_queue AND e.key = of_key AND e.head = of_job FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT j.id INTO next FROM "leasehold".job j
    WHERE j.queue = of_queue AND j.exclusive_key = of_key AND j.state = 1
    ORDER BY j.seq LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        DELETE FROM "leasehold".exclusive_key e WHERE e.queue = of_queue AND e.key = of_key;
        RETURN;
    END IF;
    UPDATE "leasehold".exclusive_key e SET head = next WHERE e.queue = of_queue AND e.key = of_key;
    UPDATE "leasehold".job j SET state = 2, place = nextval('"leasehold".place') WHERE j.id = next AND j.queue = of_queue;
    counts[3] := counts[3] - 1;
END $$;

-- Takes a unique key if it is free, and says who holds it.
CREATE OR REPLACE FUNCTION "leasehold".take_unique_1(of_queue integer, of_key bytea, of_job uuid, until_ bigint, at bigint)
RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    holder uuid;
BEGIN
    FOR try IN 1 .. 8 LOOP
        DELETE FROM "leasehold".unique_key u WHERE u.queue = of_queue AND u.key = of_key AND u.until + 0 <= at;
        INSERT INTO "leasehold".unique_key (queue, key, job, until) VALUES (of_queue, of_key, of_job, until_)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN of_job;
        END IF;
        -- A holder may free its key between the two: then it is there for the taking.
        SELECT u.job INTO holder FROM "leasehold".unique_key u WHERE u.queue = of_queue AND u.key = of_key;
        IF FOUND THEN
            RETURN holder;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'a unique key was freed again and again' USING ERRCODE = '40001';
END $$;

-- The locks of those who have room for a queue, one for each process, by its slot: the last six
-- bits.
CREATE OR REPLACE FUNCTION "leasehold".room_1(of_namespace text, of_name text) RETURNS integer LANGUAGE sql IMMUTABLE AS
$$ SELECT hashtext(of_namespace || ' ' || of_name) & -64 $$;

-- Tells those who sleep that there are jobs: as many processes as there are jobs, and only such as
-- have room for this queue. Each of these holds a lock on the connection on which it listens.
CREATE OR REPLACE FUNCTION "leasehold".wake_1(of_namespace text, of_queue integer, of_name text, jobs bigint, suspects boolean)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    class constant integer := '"leasehold".lane'::regclass::oid::integer;
    room  constant integer := "leasehold".room_1(of_namespace, of_name);
    -- A walk through all slots, from anywhere and in odd steps, so that none is the usual one. To
    -- look at all of them and draw lots made jobs that come one by one dearer by a sixth.
    since constant integer := floor(random() * 64)::integer;
    step  constant integer := floor(random() * 32)::integer * 2 + 1;
    left_ bigint := jobs;
    slot  integer;
BEGIN
    IF jobs <= 0 THEN
        RETURN;
    END IF;
    FOR nth IN 0 .. 63 LOOP
        slot := (since + nth * step) % 64;
        CONTINUE WHEN pg_try_advisory_lock_shared(class, room | slot) AND pg_advisory_unlock_shared(class, room | slot);
        PERFORM pg_notify('leasehold_leasehold_' || slot,
                          suspects::integer || ' ' || left_ || ' ' || of_namespace || ' ' || of_name);
        left_ := left_ - 1;
        EXIT WHEN left_ = 0;
    END LOOP;
END $$;

-- enqueue: store jobs, each in line, behind its exclusive key, or until its time.
-- in   jobs with the client's ids      out  of those that are not new: the job that is there
--      instead
-- why  places come from a sequence and counts are appended, so that no enqueue waits for another,
--      nor for a claim; only jobs that share a key wait for each other
--
-- ids, queues, kinds, payloads: one for each job. delays: nanoseconds. unique_keys, exclusive_keys:
-- null where a job has none. options: version, priority, max_expiries, headers ([[name, value],
-- ...]), and what else JobOptions has, durations in nanoseconds. null stands for a list of nulls.
--
-- In a user's transaction (no session) a job with an exclusive key joins its line at the first
-- claim after the commit, and is scheduled until then: the key's row would stay locked for as long
-- as the user likes.

CREATE OR REPLACE FUNCTION "leasehold".enqueue_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    ids uuid[], queues text[], kinds text[], payloads bytea[], delays bigint[],
    unique_keys bytea[], exclusive_keys bytea[], options jsonb[], patience text DEFAULT NULL
) RETURNS TABLE (nth integer, holder uuid) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    VERB constant smallint := 1;
    first    record;
    given    record;
    made     record;
    at       bigint;
    stored   bigint := 0;
    number   integer;
    numbers  integer[] := '{}';
    names    text[] := '{}';
    marks    bigint[] := '{}';
    others   integer[] := '{}';
    holders  uuid[] := '{}';
    parked   integer[] := '{}';
    keys     bytea[];
    holder_  uuid;
    due      bigint;
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience, true);
    END IF;
    first := "leasehold".recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        RETURN QUERY SELECT (a ->> 0)::integer, (a ->> 1)::uuid FROM jsonb_array_elements(first.answer) AS a;
        RETURN;
    END IF;
    -- In the order of their names, for others make them too.
    FOR given IN SELECT DISTINCT k AS name FROM unnest(queues) AS k ORDER BY k LOOP
        number := "leasehold".queue_1(of_namespace, given.name, "leasehold".clock_1(by_hand));
        numbers := numbers || number;
        names := names || given.name;
        marks := marks || "leasehold".enter_1(number);
    END LOOP;
    at := "leasehold".clock_1(by_hand);

    -- The client's id is the job: what is there already is not stored a second time.
    FOR given IN
        SELECT k.n, k.id FROM unnest(ids) WITH ORDINALITY AS k (id, n)
        WHERE (SELECT bool_or((SELECT q.namespace = of_namespace FROM "leasehold".queue q WHERE q.id = j.queue))
               FROM "leasehold".job j WHERE j.id = k.id)
    LOOP
        others := others || given.n::integer;
        holders := holders || given.id;
    END LOOP;
    IF cardinality(ids) > 1 THEN
        FOR given IN
            SELECT k.n, k.id FROM (SELECT id, n, row_number() OVER (PARTITION BY id ORDER BY n) AS copy
                                   FROM unnest(ids) WITH ORDINALITY AS g (id, n)) AS k
            WHERE k.copy > 1
        LOOP
            CONTINUE WHEN given.n = ANY (others);
            others := others || given.n::integer;
            holders := holders || given.id;
        END LOOP;
    END IF;
    -- Keys in their order, for others take them too.
    IF unique_keys IS NOT NULL OR exclusive_keys IS NOT NULL AND of_session IS NOT NULL THEN
    BEGIN
        PERFORM "leasehold".wait_briefly_1(of_session, patience);
        keys := unique_keys;
        FOR given IN
            SELECT k.n, k.id, k.name, k.key, (k.o ->> 'unique_window')::bigint / 1000 AS span
            FROM unnest(ids, queues, unique_keys, options) WITH ORDINALITY AS k (id, name, key, o, n)
            WHERE k.key IS NOT NULL AND k.n <> ALL (others) ORDER BY k.name, k.key, k.n
        LOOP
            holder_ := "leasehold".take_unique_1(numbers[array_position(names, given.name)], given.key, given.id, at + given.span, at);
            IF holder_ <> given.id THEN
                others := others || given.n::integer;
                holders := holders || holder_;
            END IF;
        END LOOP;
        keys := exclusive_keys;
        FOR given IN
            SELECT k.n, k.id, k.name, k.key FROM unnest(ids, queues, exclusive_keys, delays) WITH ORDINALITY AS k (id, name, key, delay, n)
            WHERE k.key IS NOT NULL AND coalesce(k.delay, 0) < 1000 AND k.n <> ALL (others) AND of_session IS NOT NULL
            ORDER BY k.name, k.key, k.n
        LOOP
            IF NOT "leasehold".join_key_1(numbers[array_position(names, given.name)], given.key, given.id) THEN
                parked := parked || given.n::integer;
            END IF;
        END LOOP;
        PERFORM set_config('lock_timeout', patience, true) WHERE patience IS NOT NULL;
    EXCEPTION WHEN lock_not_available THEN
        PERFORM "leasehold".in_hand_1(of_session, (
            SELECT string_agg(k.n::text, ',') FROM unnest(queues, keys) WITH ORDINALITY AS k (name, key, n)
            WHERE k.name = given.name AND k.key = given.key));
    END;
    END IF;

    -- Who sleeps until the first scheduled job is due must hear of one that is due earlier.
    IF delays IS NOT NULL THEN
        FOR given IN
            SELECT k.name, min(at + k.delay / 1000) AS due FROM unnest(queues, delays) WITH ORDINALITY AS k (name, delay, n)
            WHERE k.delay >= 1000 AND k.n <> ALL (others) GROUP BY k.name
        LOOP
            number := numbers[array_position(names, given.name)];
            due := "leasehold".first_due_1(o) FROM "leasehold".head_1(number) AS o;
            IF due IS NULL OR given.due < due THEN
                PERFORM "leasehold".wake_1(of_namespace, number, given.name, 1, false);
            END IF;
            PERFORM "leasehold".due_1(number, given.due, marks[array_position(names, given.name)]);
        END LOOP;
    END IF;
    IF exclusive_keys IS NOT NULL AND of_session IS NULL THEN
        PERFORM "leasehold".due_1(k.number, at, k.mark) FROM unnest(numbers, marks) AS k (number, mark);
    END IF;

    FOR made IN
        WITH new AS (
            INSERT INTO "leasehold".job AS j (id, queue, version, seq, place, enqueued_at, run_at, max_expiries, weight, state,
                                            line, kind, unique_key, exclusive_key, options, headers, payload)
            SELECT n.id, n.queue, coalesce((n.o ->> 'version')::integer, 1), n.number, n.number, at,
                   n.due,
                   coalesce((n.o ->> 'max_expiries')::integer, 5),
                   octet_length(n.payload) + CASE WHEN n.o ? 'headers' THEN "leasehold".weight_of_headers_1(n.o -> 'headers') ELSE 0 END,
                   CASE WHEN n.due > at OR (n.key IS NOT NULL AND of_session IS NULL) THEN 0
                        WHEN n.n = ANY (parked) THEN 1 ELSE 2 END,
                   coalesce((n.o ->> 'priority')::smallint, 4) * 2 + 1,
                   n.kind, n.uniq, n.key,
                   nullif(n.o - '{version,priority,max_expiries,headers}'::text[], '{}'), n.o -> 'headers', n.payload
            FROM (SELECT k.*, numbers[array_position(names, k.name)] AS queue, at + coalesce(k.delay, 0) / 1000 AS due, nextval('"leasehold".place') AS number
                  FROM unnest(ids, queues, kinds, payloads, delays, unique_keys, exclusive_keys, options)
                       WITH ORDINALITY AS k (id, name, kind, payload, delay, uniq, key, o, n)
                  WHERE k.n <> ALL (others)) AS n
            ON CONFLICT DO NOTHING
            RETURNING j.queue, j.state, j.run_at
        )
        SELECT new.queue, count(*) AS jobs, count(*) FILTER (WHERE new.state = 0) AS scheduled,
               count(*) FILTER (WHERE new.state = 1) AS parked,
               -- The next claim has these, ready or due.
               count(*) FILTER (WHERE new.state <> 1 AND new.run_at <= at) AS now
        FROM new GROUP BY new.queue ORDER BY new.queue
    LOOP
        stored := stored + made.jobs;
        INSERT INTO "leasehold".tally (queue, n, counts)
        VALUES (made.queue, nextval('"leasehold".place'),
                ARRAY[made.scheduled, made.jobs - made.scheduled, made.parked, 0, 0, 0, 0, made.jobs]);
        IF made.now > 0 THEN
            PERFORM "leasehold".wake_1(of_namespace, made.queue, names[array_position(numbers, made.queue)], made.now, false);
        END IF;
    END LOOP;
    IF stored + cardinality(others) <> cardinality(ids) THEN
        RAISE EXCEPTION 'a copy of this call has stored its jobs meanwhile' USING ERRCODE = '40001';
    END IF;
    IF others = '{}' THEN
        PERFORM "leasehold".remember_1(of_session, of_lane, of_seq, VERB, at, NULL, first.prior);
        RETURN;
    END IF;
    PERFORM "leasehold".remember_1(of_session, of_lane, of_seq, VERB, at, (
        SELECT jsonb_agg(jsonb_build_array(k.n, k.holder)) FROM unnest(others, holders) AS k (n, holder)), first.prior);
    RETURN QUERY SELECT k.n, k.holder FROM unnest(others, holders) AS k (n, holder);
END $$;

-- claim: expire what is overdue, promote what is due, grant.
-- in   queues in order, with the terms (nanoseconds) of jobs that bring none, and how many leases
--      out  a row for each lease, and one with nth = 0: the time, and when the queues are worth a
--           claim again
-- why  the queue's row is locked for as long as the server works, and not for round trips: whoever
--      takes jobs out of a line holds it. A claim that finds nothing takes no lock and writes
--      nothing, unless a copy of it may be under way
--
-- nth: the place of the lease's queue in the list. granted, due, deadline, behind: microseconds
-- from now on. is_repeat: a copy of this request was sent before, and not answered.

CREATE OR REPLACE FUNCTION "leasehold".claim_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    of_owner text, of_task text, nonce bytea, queues text[], terms bigint[], lifetimes bigint[],
    most integer, admit_suspect boolean, seen bigint, strict_clock boolean, patience text DEFAULT NULL,
    is_repeat boolean DEFAULT true
) RETURNS TABLE (
    nth integer, lease_of bigint, granted bigint, granted_at bigint, term bigint, token bigint, id uuid, kind text,
    version integer, enqueued_at bigint, run_at bigint, line smallint, failures integer, expiries integer,
    max_expiries integer, declined_since bigint, checkpoint_seq bigint, checkpoint_token bigint, unique_key bytea,
    exclusive_key bytea, options jsonb, headers jsonb, history jsonb, payload bytea, checkpoint bytea, result bytea,
    due bigint, deadline bigint, behind bigint, expired jsonb, is_full boolean
) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    VERB constant smallint := 2;
    -- A tenth of a second: when to look again for a job that is due, or whose lease is overdue,
    -- and that is in somebody's hand.
    PAUSE    constant bigint := 1000000 / 10;
    first    record;
    q        record;
    s        record;
    picked   record;
    did      record;
    h        "leasehold".head;
    ids      integer[] := array_fill(NULL::integer, ARRAY[cardinality(queues)]);
    open_    boolean[] := array_fill(false, ARRAY[cardinality(queues)]);
    at       bigint;
    at_      integer;
    work     boolean := false;
    left_    integer := most;
    suspect  boolean := admit_suspect;
    is_admitted boolean;
    heavy    bigint := 0;
    highest  bigint;
    base     bigint;
    room     bigint;
    ahead    bigint;
    wanted   integer;
    took     integer;
    more     boolean;
    again    boolean;
    counts   bigint[];
    spots    tid[];
    lines_   smallint[];
    places_  bigint[];
    terms_   bigint[];
    lives_   bigint[];
    weights_ integer[];
    spans    bigint[];
    span     bigint;
    weight_  bigint;
    till     bigint;
    hint     bigint;
    dues     bigint;
    ends     bigint;
    soonest  bigint;
    due_jobs bigint;
    in_hand  boolean;
    next_due bigint;
    next_end bigint;
    late     bigint;
    told     jsonb := '[]';
    given    jsonb := '[]';
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience, true);
    END IF;
    first := "leasehold".recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    at := "leasehold".clock_1(by_hand);
    FOR q IN
        SELECT k.id, k.name, k.paused, o AS head FROM "leasehold".queue k CROSS JOIN LATERAL "leasehold".head_1(k.id) AS o
        WHERE k.namespace = of_namespace AND k.name = ANY (queues)
    LOOP
        at_ := array_position(queues, q.name);
        ids[at_] := q.id;
        h := q.head;
        work := most > 0 AND NOT q.paused AND "leasehold".has_ready_1(h, admit_suspect);
        EXIT WHEN work AND NOT first.done;
        hint := "leasehold".first_due_1(h);
        next_due := least(next_due, hint);
        work := work OR (most > 0 AND hint <= at) IS TRUE;
        hint := "leasehold".first_deadline_1(h);
        next_end := least(next_end, hint);
        work := work OR (most > 0 AND hint <= at) IS TRUE;
        EXIT WHEN work AND NOT first.done;
        late := greatest(late, "leasehold".behind_1(h, seen, at));
    END LOOP;

    IF first.done THEN
        -- What is left of its grants, with the time originally granted.
        FOR s IN
            SELECT g.g AS held, a FROM jsonb_array_elements(first.answer -> 'grants') AS a
            CROSS JOIN LATERAL (SELECT o AS g FROM "leasehold".grants o
                                WHERE o.queue = (a ->> 0)::integer AND o.id = (a ->> 1)::bigint LIMIT 1) AS g
            WHERE (g.g).deadline > at AND (g.g).nonce_hash = sha256(nonce)
        LOOP
            RETURN QUERY
            SELECT array_position(ids, j.queue), j.lease_of, (s.a ->> 2)::bigint, (s.held).granted_at, (s.held).term, j.token, j.id,
                   j.kind, j.version, j.enqueued_at, j.run_at, j.line, j.failures, j.expiries, j.max_expiries,
                   j.declined_since, j.checkpoint_seq, j.checkpoint_token, j.unique_key, j.exclusive_key, j.options,
                   j.headers, j.history, j.payload, j.checkpoint, j.result, NULL::bigint, NULL::bigint, NULL::bigint,
                   NULL::jsonb, NULL::boolean
            FROM "leasehold".job j
            WHERE j.queue = (s.held).queue AND j.state = 6 AND j.token >= (s.held).id
              AND j.token < (s.held).id + (s.held).leases ORDER BY j.token;
        END LOOP;
        told := coalesce(first.answer -> 'expired', '[]');
    END IF;
    IF first.done OR NOT work THEN
        IF NOT first.done AND is_repeat THEN
            PERFORM "leasehold".need_no_disk_1(of_session);
            PERFORM "leasehold".remember_1(of_session, of_lane, of_seq, VERB, at,
                jsonb_build_object('grants', given, 'expired', told), first.prior);
        END IF;
        nth := 0;
        due := next_due - at;
        deadline := next_end - at;
        behind := late;
        expired := told;
        is_full := false;
        RETURN NEXT;
        RETURN;
    END IF;

    next_due := NULL;
    next_end := NULL;
    late := NULL;
    -- A queue may be removed before its lock is had.
    ids := array_fill(NULL::integer, ARRAY[cardinality(queues)]);
    FOR q IN
        SELECT k.id, k.name, k.paused FROM "leasehold".queue k
        WHERE k.namespace = of_namespace AND k.name = ANY (queues) ORDER BY k.id FOR NO KEY UPDATE
    LOOP
        at_ := array_position(queues, q.name);
        ids[at_] := q.id;
        open_[at_] := NOT q.paused;
    END LOOP;
    at := "leasehold".clock_1(by_hand);

    FOR i IN 1 .. cardinality(queues) LOOP
        EXIT WHEN left_ = 0;
        CONTINUE WHEN ids[i] IS NULL;
        SELECT * INTO h FROM "leasehold".head_1(ids[i]);
        h := "leasehold".advance_1(h, at);
        counts := h.counts;
        late := greatest(late, "leasehold".behind_1(h, seen, at));
        -- Tokens of one process grow across its queues too: a token in a log names one lease.
        highest := greatest(h.last, seen);
        IF greatest(highest + 1, h.floor + 1, at) > greatest(at, h.floor) + 20000 THEN
            highest := h.last;
        END IF;
        base := greatest(highest + 1, h.floor + 1, at);
        room := CASE WHEN NOT strict_clock AND "leasehold".behind_1(h, seen, at) IS NOT NULL THEN 20000
                     ELSE greatest(at, h.floor) + 20000 + 1 - base END;
        IF room <= 0 THEN
            -- A claim that would find nothing needs no token.
            IF open_[i] AND ("leasehold".has_ready_1(h, true) OR "leasehold".first_due_1(h) <= at OR "leasehold".first_deadline_1(h) <= at)
            THEN
                ahead := greatest(ahead, greatest(highest, h.floor) - at);
                CONTINUE;
            END IF;
        END IF;

        ends := "leasehold".first_deadline_1(h);
        in_hand := false;
        IF ends <= at THEN
            did := "leasehold".expire_1(ids[i], queues[i], h.overdue_from, at, 1000, counts);
            counts := did.counts;
            told := told || did.told;
            ends := "leasehold".first_deadline_1(h);
            in_hand := ends <= at AND jsonb_array_length(did.told) < 1000;
        END IF;
        dues := "leasehold".first_due_1(h);
        soonest := dues;
        IF dues <= at THEN
            due_jobs := counts[1];
            counts := "leasehold".promote_1(h, at, counts);
            dues := "leasehold".first_due_1(h);
            -- What is left of fewer than a step is in somebody's hand.
            soonest := CASE WHEN dues <= at AND due_jobs - counts[1] < 1000 THEN at + PAUSE ELSE dues END;
        END IF;

        took := 0;
        more := false;
        wanted := least(left_, room);
        is_admitted := suspect;
        IF open_[i] AND wanted > 0 AND heavy < 16777216 THEN
            LOOP
                spots := '{}';
                lines_ := '{}';
                places_ := '{}';
                weights_ := '{}';
                terms_ := '{}';
                lives_ := '{}';
                suspect := is_admitted;
                again := false;
                FOR s IN SELECT * FROM "leasehold".stretches_1(h.lines, h.fronts, h.starts, suspect) LOOP
                    CONTINUE WHEN s.alone AND NOT suspect;
                    -- One more than wanted: whether there is more.
                    SELECT array_agg(p.spot) AS spots, array_agg(p.line) AS lines, array_agg(p.place) AS places,
                           array_agg(p.weight) AS weights, array_agg((p.options ->> 'term')::bigint) AS terms,
                           array_agg((p.options ->> 'max_lifetime')::bigint) AS lives, count(*)::integer AS n,
                           bool_or(p.line % 2 = 0) AS suspects
                    INTO picked
                    FROM (
                        (SELECT j.ctid AS spot, j.line, j.place, j.weight, j.options FROM "leasehold".job j
                         WHERE s.till_place IS NULL AND j.queue = h.queue AND j.state = 2
                           AND (j.line, j.place) >= (s.line, s.place) AND j.line < s.till_line
                           AND (suspect OR j.line % 2 = 1)
                         ORDER BY j.line, j.place LIMIT CASE WHEN s.alone THEN 1 ELSE wanted - took + 1 END)
                        UNION ALL
                        (SELECT j.ctid, j.line, j.place, j.weight, j.options FROM "leasehold".job j
                         WHERE s.till_place IS NOT NULL AND j.queue = h.queue AND j.state = 2
                           AND j.line = s.line AND j.place < s.till_place
                         ORDER BY j.line, j.place LIMIT CASE WHEN s.alone THEN 1 ELSE wanted - took + 1 END)
                    ) AS p;
                    CONTINUE WHEN picked.n = 0;
                    IF picked.suspects AND NOT s.alone THEN
                        -- A line of suspects that was not known.
                        h := "leasehold".new_lines_1(h, picked.lines);
                        again := true;
                        EXIT;
                    END IF;
                    suspect := suspect AND NOT s.alone;
                    spots := spots || picked.spots;
                    lines_ := lines_ || picked.lines;
                    places_ := places_ || picked.places;
                    weights_ := weights_ || picked.weights;
                    terms_ := terms_ || picked.terms;
                    lives_ := lives_ || picked.lives;
                    took := cardinality(spots);
                    EXIT WHEN took > wanted;
                END LOOP;
                EXIT WHEN NOT again;
                took := 0;
            END LOOP;
            more := took > wanted;
            took := least(took, wanted);
            weight_ := 0;
            FOREACH span IN ARRAY weights_[1 : took] LOOP
                weight_ := weight_ + span;
            END LOOP;
            IF heavy + weight_ >= 16777216 THEN
                -- As much as a call may weigh, and the job with which it weighs more.
                FOR k IN 1 .. took LOOP
                    heavy := heavy + weights_[k];
                    IF heavy >= 16777216 AND k < took THEN
                        more := true;
                        took := k;
                        EXIT;
                    END IF;
                END LOOP;
            ELSE
                heavy := heavy + weight_;
            END IF;
            h := "leasehold".start_1(h, lines_[1 : took], places_[1 : took], NOT more, is_admitted);
        END IF;

        IF took > 0 THEN
            -- Neighbours of the same terms are one grant, as many as it may weigh.
            spans := NULL;
            IF weight_ > 4194304 OR array_remove(terms_, NULL) <> '{}' OR array_remove(lives_, NULL) <> '{}' THEN
                spans := '{}';
                weight_ := 0;
                FOR k IN 1 .. took LOOP
                    weight_ := weight_ + weights_[k];
                    IF k = 1 OR weight_ > 4194304
                       OR coalesce(terms_[k], terms[i]) <> coalesce(terms_[k - 1], terms[i])
                       OR coalesce(lives_[k], lifetimes[i]) <> coalesce(lives_[k - 1], lifetimes[i]) THEN
                        weight_ := weights_[k];
                        span := base + k - 1;
                    END IF;
                    spans := spans || span;
                END LOOP;
            END IF;
            INSERT INTO "leasehold".grants AS n (queue, leases, id, deadline, granted_at, term, max_lifetime, nonce_hash, owner, task)
            SELECT h.queue, g.leases, g.id, at + least(g.term, g.life) / 1000, at, g.term, g.life, sha256(nonce), of_owner, of_task
            FROM (SELECT took AS leases, base AS id, terms[i] AS term, lifetimes[i] AS life WHERE spans IS NULL
                  UNION ALL
                  SELECT count(*)::integer, k.id, coalesce(min(k.term), terms[i]), coalesce(min(k.life), lifetimes[i])
                  FROM unnest(spans, terms_[1 : took], lives_[1 : took]) AS k (id, term, life)
                  WHERE k.id IS NOT NULL GROUP BY k.id) AS g;
            -- By where they are: + 0 keeps the planner from looking through all jobs in line.
            RETURN QUERY
            WITH leased AS (
                UPDATE "leasehold".job j SET state = 6, token = p.token, lease_of = p.lease_of, cancel = false, progress = NULL
                FROM (SELECT k.spot, base + k.n - 1 AS token, coalesce(spans[k.n], base) AS lease_of
                      FROM unnest(spots[1 : took]) WITH ORDINALITY AS k (spot, n)) AS p
                WHERE j.ctid = p.spot AND j.state + 0 = 2
                RETURNING j.*
            )
            SELECT i, j.lease_of, g.deadline - at, at, g.term, j.token, j.id, j.kind, j.version, j.enqueued_at, j.run_at,
                   j.line, j.failures, j.expiries, j.max_expiries, j.declined_since, j.checkpoint_seq, j.checkpoint_token,
                   j.unique_key, j.exclusive_key, j.options, j.headers, j.history, j.payload, j.checkpoint, j.result,
                   NULL::bigint, NULL::bigint, NULL::bigint, NULL::jsonb, NULL::boolean
            FROM leased j
            CROSS JOIN LATERAL (SELECT o.deadline, o.term FROM "leasehold".grants o
                                WHERE o.queue = h.queue AND o.id = j.lease_of LIMIT 1) AS g
            ORDER BY j.token;
            GET DIAGNOSTICS wanted = ROW_COUNT;
            IF wanted <> took THEN
                RAISE EXCEPTION 'a line was changed by others' USING ERRCODE = '40001';
            END IF;
            IF spans IS NULL THEN
                till := at + least(terms[i], lifetimes[i]) / 1000;
                given := given || jsonb_build_array(jsonb_build_array(h.queue, base, till - at));
            ELSE
                SELECT min(g.deadline) INTO till FROM "leasehold".grants g WHERE g.queue = h.queue AND g.id >= base;
                given := given || (SELECT jsonb_agg(jsonb_build_array(h.queue, g.id, g.deadline - at) ORDER BY g.id)
                                   FROM "leasehold".grants g WHERE g.queue = h.queue AND g.id >= base);
            END IF;
            ends := least(ends, till);
            h.last := base + took - 1;
            seen := greatest(seen, h.last);
            left_ := left_ - took;
            counts[2] := counts[2] - took;
            counts[4] := counts[4] + took;
            counts[9] := counts[9] + took;
            counts[19] := counts[19] + took;
            IF more AND left_ = 0 THEN
                PERFORM "leasehold".wake_1(of_namespace, h.queue, queues[i], 1, false);
            END IF;
        END IF;

        h.due_from := least(dues, h.sealed_at);
        next_due := least(next_due, soonest);
        h.overdue_from := coalesce(ends, 9223372036854775807);
        next_end := least(next_end, CASE WHEN in_hand THEN at + PAUSE ELSE ends END);
        h.counts := counts;
        IF h.gen % 8 = 0 THEN
            h := "leasehold".added_up_1(h);
        END IF;
        PERFORM "leasehold".save_head_1(h);
    END LOOP;
    IF ahead IS NOT NULL AND left_ = most THEN
        RAISE EXCEPTION 'the last token is ahead of the clock' USING ERRCODE = 'LH002', DETAIL = ahead::text;
    END IF;
    IF given = '[]' AND told = '[]' THEN
        -- Others were faster, and more of them may wait for the lock.
        PERFORM "leasehold".need_no_disk_1(of_session);
    END IF;
    PERFORM "leasehold".remember_1(of_session, of_lane, of_seq, VERB, at,
        jsonb_build_object('grants', given, 'expired', told), first.prior);
    nth := 0;
    lease_of := NULL;
    due := next_due - at;
    deadline := next_end - at;
    behind := late;
    expired := told;
    is_full := left_ = 0;
    RETURN NEXT;
END $$;

-- A repeated claim that found nothing is remembered all the same, as a late copy of it must not
-- grant what nobody waits for. It need not wait for the disk: a server that forgets it has lost its
-- connections, and with them all copies. What is done in a user's transaction is the user's affair.
CREATE OR REPLACE FUNCTION "leasehold".need_no_disk_1(of_session uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF of_session IS NOT NULL THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
END $$;

-- How far the clock is behind the tokens given, if by more than speed can explain.
CREATE OR REPLACE FUNCTION "leasehold".behind_1(h "leasehold".head, seen bigint, at bigint) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF greatest(h.last + 1, seen + 1, h.floor + 1, at) <= greatest(at, h.floor) + 20000 THEN
        h.last := greatest(h.last, seen);
    END IF;
    IF (CASE WHEN h.last > h.floor + 20000 THEN h.last ELSE h.floor END) > at + 20000 THEN
        RETURN greatest(h.last, h.floor) - at;
    END IF;
    RETURN NULL;
END $$;

-- Scheduled jobs whose time has come fall due, the earliest first: each goes to the back of its
-- line, or behind the others of its exclusive key. One whose key somebody has in hand stays where
-- it is: this claim has the queue, and everybody's claims would wait with it.
CREATE OR REPLACE FUNCTION "leasehold".promote_1(h "leasehold".head, at bigint, INOUT counts bigint[]) LANGUAGE plpgsql AS $$
DECLARE
    due    record;
    keyed  record;
BEGIN
    WITH first AS MATERIALIZED (
        SELECT j.spot, nextval('"leasehold".place') AS number
        FROM (SELECT k.ctid AS spot FROM "leasehold".job k
              WHERE k.queue = h.queue AND k.state = 0 AND k.run_at >= h.due_from AND k.run_at <= at
                AND (k.exclusive_key IS NULL OR "leasehold".is_free_1(h.queue, k.exclusive_key))
              ORDER BY k.run_at, k.seq LIMIT 1000 FOR UPDATE SKIP LOCKED) AS j
    ), moved AS (
        UPDATE "leasehold".job j SET state = 2, place = first.number, seq = first.number
        FROM first WHERE j.ctid = first.spot
        RETURNING j.id, j.exclusive_key, first.number
    )
    SELECT count(*) AS jobs, array_agg(m.id ORDER BY m.exclusive_key, m.number) FILTER (WHERE m.exclusive_key IS NOT NULL) AS ids,
           array_agg(m.exclusive_key ORDER BY m.exclusive_key, m.number) FILTER (WHERE m.exclusive_key IS NOT NULL) AS keys
    INTO due FROM moved AS m;
    counts[1] := counts[1] - due.jobs;
    counts[2] := counts[2] + due.jobs;
    FOR keyed IN SELECT k.id, k.key FROM unnest(due.ids, due.keys) WITH ORDINALITY AS k (id, key, n) ORDER BY k.n LOOP
        IF NOT "leasehold".join_key_1(h.queue, keyed.key, keyed.id) THEN
            UPDATE "leasehold".job j SET state = 1 WHERE j.id = keyed.id AND j.queue = h.queue;
            counts[3] := counts[3] + 1;
        END IF;
    END LOOP;
END $$;

-- Lines of suspects that were not known are, from now on.
CREATE OR REPLACE FUNCTION "leasehold".new_lines_1(h "leasehold".head, of_jobs smallint[]) RETURNS "leasehold".head LANGUAGE plpgsql AS $$
DECLARE
    known record;
BEGIN
    SELECT array_agg(k.line ORDER BY k.line) AS lines, array_agg(k.front ORDER BY k.line) AS fronts,
           array_agg(k.start ORDER BY k.line) AS starts
    INTO known
    FROM (SELECT o.line, o.front, o.start FROM unnest(h.lines, h.fronts, h.starts) AS o (line, front, start)
          UNION ALL
          SELECT DISTINCT m, h.sealed, -h.sealed FROM unnest(of_jobs) AS m WHERE m % 2 = 0 AND m <> ALL (h.lines)) AS k;
    h.lines := known.lines;
    h.fronts := known.fronts;
    h.starts := known.starts;
    RETURN h;
END $$;

-- Where lines start once jobs were taken, in their order. is_all: nothing is left in the lines that
-- were looked at. suspects: so were theirs, up to the one that was taken.
CREATE OR REPLACE FUNCTION "leasehold".start_1(h "leasehold".head, lines smallint[], places bigint[], is_all boolean, suspects boolean)
RETURNS "leasehold".head LANGUAGE plpgsql AS $$
DECLARE
    took   integer := cardinality(lines);
    known  record;
BEGIN
    IF took > 0 AND lines[1] = lines[took] AND lines[1] % 2 = 1 AND h.lines = lines[1 : 1] THEN
        -- As nearly always: one line.
        IF is_all THEN
            h.fronts := ARRAY[h.sealed];
            h.starts := ARRAY[h.sealed + 1];
        ELSIF places[took] >= -h.sealed - 1 THEN
            h.fronts := ARRAY[h.sealed];
            h.starts := ARRAY[least(places[took], h.sealed) + 1];
        END IF;
        RETURN h;
    END IF;
    -- till: there is no job up to here that a look could find.
    SELECT array_agg(l.line ORDER BY l.line) AS lines,
           array_agg(CASE WHEN l.till >= -h.sealed - 1 THEN h.sealed ELSE l.front END ORDER BY l.line) AS fronts,
           array_agg(CASE WHEN l.till >= -h.sealed - 1 THEN least(l.till, h.sealed) + 1 ELSE l.start END ORDER BY l.line) AS starts
    INTO known
    FROM (
        SELECT k.line, k.front, k.start,
               CASE WHEN k.line % 2 = 0 THEN CASE WHEN suspects THEN k.last END
                    WHEN is_all OR k.line < lines[took] THEN h.sealed
                    WHEN k.line = lines[took] THEN k.last END AS till
        FROM (
            SELECT n.line, max(n.front) AS front, max(n.start) AS start, max(n.place) AS last
            FROM (SELECT o.line, o.front, o.start, NULL::bigint AS place
                  FROM unnest(h.lines, h.fronts, h.starts) AS o (line, front, start)
                  UNION ALL
                  SELECT t.line, NULL, NULL, t.place FROM unnest(lines, places) AS t (line, place)) AS n
            GROUP BY n.line
        ) AS k
    ) AS l
    WHERE l.till >= -h.sealed - 1 OR l.front IS NOT NULL;
    h.lines := coalesce(known.lines, '{}');
    h.fronts := coalesce(known.fronts, '{}');
    h.starts := coalesce(known.starts, '{}');
    RETURN h;
END $$;

-- Adds up what other calls have added to the counts, as far as no more can come.
CREATE OR REPLACE FUNCTION "leasehold".added_up_1(h "leasehold".head) RETURNS "leasehold".head LANGUAGE plpgsql AS $$
DECLARE
    total record;
BEGIN
    WITH gone AS (
        DELETE FROM "leasehold".tally t WHERE t.ctid = ANY (ARRAY (
            SELECT o.ctid FROM "leasehold".tally o WHERE o.queue = h.queue AND o.n > h.counted_to AND o.n <= h.sealed
            ORDER BY o.n LIMIT 1000))
        RETURNING t.n, t.counts
    ), sums AS (
        SELECT c.nth, sum(c.number)::bigint AS number FROM gone, unnest(gone.counts) WITH ORDINALITY AS c (number, nth) GROUP BY c.nth
    )
    SELECT (SELECT count(*) FROM gone) AS rows, (SELECT max(gone.n) FROM gone) AS last,
           ARRAY (SELECT o.number + coalesce(s.number, 0) FROM unnest(h.counts) WITH ORDINALITY AS o (number, nth)
                  LEFT JOIN sums s ON s.nth = o.nth ORDER BY o.nth) AS counts
    INTO total;
    h.counts := total.counts;
    h.counted_to := CASE WHEN total.rows = 1000 THEN total.last ELSE greatest(h.counted_to, h.sealed) END;
    RETURN h;
END $$;

-- The same for a queue of which nobody holds the lock.
CREATE OR REPLACE FUNCTION "leasehold".add_up_1(of_queue integer, at bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    h "leasehold".head;
BEGIN
    PERFORM FROM "leasehold".queue q WHERE q.id = of_queue FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
        SELECT * INTO h FROM "leasehold".head_1(of_queue);
        PERFORM "leasehold".save_head_1("leasehold".added_up_1("leasehold".advance_1(h, at)));
    END IF;
END $$;

-- Puts a head in the place of the one that it was made from.
CREATE OR REPLACE FUNCTION "leasehold".save_head_1(h "leasehold".head) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM "leasehold".head o WHERE o.queue = h.queue AND o.gen = h.gen;
    h.gen := h.gen + 1;
    INSERT INTO "leasehold".head SELECT h.*;
END $$;

-- renew: extend grants, let single leases of them lapse.
-- in   grants, with the leases that the holder still works on      out  for each that is held: how
--      long, and which of its leases are to be cancelled, and which have ended
-- why  a renewal writes the grant's row and no job's. The time is asked once the rows are locked:
--      past its deadline a lease is gone, however long the wait was
--
-- A job that a transaction has in hand is passed over, for all grants of the call wait with it.
-- Progress that is shown of it is not kept. If its lease is to lapse, the grant remembers that for
-- the next renewal.
--
-- upto says where the leases of each grant end in the list of tokens. lapse_of and shown_of say to
-- which grant (from 1) a token of theirs belongs. shown: progress.

CREATE OR REPLACE FUNCTION "leasehold".renew_1(
    of_namespace text, by_hand bigint, queues text[], ids bigint[], nonces bytea[], upto integer[], tokens bigint[],
    lapse_of integer[], lapse_tokens bigint[], shown_of integer[], shown_tokens bigint[], shown jsonb[],
    patience text DEFAULT NULL
) RETURNS TABLE (nth integer, granted bigint, cancel bigint[], fenced bigint[]) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at      bigint;
    beat    record;
    over    record;
    held    "leasehold".grants;
    counts  bigint[];
    given   bigint[];
    over_   bigint[];
    living  bigint[];
    places  bigint[];
    till    bigint;
    h       "leasehold".head;
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience, true);
    END IF;
    IF lapse_of IS NOT NULL THEN
        PERFORM "leasehold".enter_1(q.id) FROM (
            SELECT k.id FROM "leasehold".queue k WHERE k.namespace = of_namespace AND k.name = ANY (queues) ORDER BY k.id) AS q;
    END IF;
    PERFORM FROM (SELECT q.id AS of_, k.id FROM unnest(queues, ids) AS k (name, id)
                  JOIN "leasehold".queue q ON q.namespace = of_namespace AND q.name = k.name
                  ORDER BY q.id, k.id OFFSET 0) AS k
    CROSS JOIN LATERAL (SELECT FROM "leasehold".grants o WHERE o.queue = k.of_ AND o.id = k.id FOR UPDATE) AS g;
    at := "leasehold".clock_1(by_hand);
    FOR beat IN
        SELECT k.n::integer, k.id, k.nonce, q.id AS of_, q.name
        FROM unnest(queues, ids, nonces) WITH ORDINALITY AS k (name, id, nonce, n)
        JOIN "leasehold".queue q ON q.namespace = of_namespace AND q.name = k.name ORDER BY k.n
    LOOP
        given := tokens[CASE WHEN beat.n = 1 THEN 1 ELSE upto[beat.n - 1] + 1 END : upto[beat.n]];
        SELECT * INTO held FROM "leasehold".grants g
        WHERE g.queue = beat.of_ AND g.id = beat.id AND g.nonce_hash = sha256(beat.nonce) AND g.deadline + 0 > at;
        IF NOT FOUND THEN
            CONTINUE;
        END IF;
        over_ := ARRAY (SELECT l.token FROM unnest(lapse_of, lapse_tokens) AS l (of_, token) WHERE l.of_ = beat.n
                          UNION SELECT l FROM unnest(held.lapsing) AS l);
        IF shown_of IS NOT NULL THEN
            UPDATE "leasehold".job j SET progress = s.shown
            FROM (SELECT DISTINCT ON (p.token) p.shown, f.spot
                  FROM unnest(shown_of, shown_tokens, shown) WITH ORDINALITY AS p (of_, token, shown, n)
                  CROSS JOIN LATERAL (
                      SELECT o.ctid AS spot FROM "leasehold".job o
                      WHERE o.queue = beat.of_ AND o.state = 6 AND o.token = p.token AND o.lease_of = beat.id
                      FOR UPDATE SKIP LOCKED) AS f
                  WHERE p.of_ = beat.n ORDER BY p.token, p.n DESC) AS s
            WHERE j.ctid = s.spot;
        END IF;
        IF cardinality(over_) > 0 THEN
            PERFORM "leasehold".enter_1(beat.of_) WHERE held.lapsing IS NOT NULL;
            counts := "leasehold".no_counts_1();
            living := ARRAY (SELECT l FROM unnest(over_) AS l ORDER BY l);
            places := "leasehold".fronts_1(living);
            FOR over IN
                SELECT j.j FROM unnest(over_) AS l (token)
                CROSS JOIN LATERAL (
                    SELECT o AS j FROM "leasehold".job o
                    WHERE o.queue = beat.of_ AND o.state = 6 AND o.token = l.token AND o.lease_of = beat.id
                    FOR UPDATE SKIP LOCKED) AS j
            LOOP
                counts := "leasehold".end_lease_1(over.j, held, at, 'expired', 'stalled', "leasehold".expired_1(over.j), true, false,
                                                false, NULL, NULL, NULL, places[array_position(living, (over.j).token)], counts);
            END LOOP;
            PERFORM "leasehold".count_1(beat.of_, counts);
            PERFORM "leasehold".wake_1(of_namespace, beat.of_, beat.name, counts[2] - counts[3], false);
        END IF;
        SELECT array_agg(j.token), coalesce(array_agg(j.token) FILTER (WHERE j.cancel AND j.token = ANY (given)), '{}')
        INTO living, cancel FROM "leasehold".job j
        WHERE j.queue = beat.of_ AND j.state = 6 AND j.token >= beat.id AND j.token < beat.id + held.leases;
        fenced := ARRAY (SELECT l.token FROM unnest(given) WITH ORDINALITY AS l (token, n)
                         WHERE (l.token = ANY (living)) IS NOT TRUE ORDER BY l.n);
        IF living IS NULL THEN
            DELETE FROM "leasehold".grants g WHERE g.queue = beat.of_ AND g.id = beat.id;
            CONTINUE;
        END IF;
        till := least(at + held.term / 1000, held.granted_at + held.max_lifetime / 1000);
        UPDATE "leasehold".grants g SET renewals = g.renewals + 1, deadline = till,
            lapsing = nullif(ARRAY (SELECT l FROM unnest(over_) AS l WHERE l = ANY (living)), '{}')
        WHERE g.queue = beat.of_ AND g.id = beat.id;
        IF till < held.deadline THEN
            -- The clock was set back. No claim looks for leases that end so early.
            PERFORM FROM "leasehold".queue q WHERE q.id = beat.of_ FOR NO KEY UPDATE;
            SELECT * INTO h FROM "leasehold".head_1(beat.of_);
            IF till < h.overdue_from THEN
                h.overdue_from := till;
                PERFORM "leasehold".save_head_1(h);
            END IF;
        END IF;
        nth := beat.n;
        granted := till - at;
        RETURN NEXT;
    END LOOP;
END $$;

-- settle: end held leases; refuse every other receipt.
-- in   receipts, and how each lease ends      out  for each: 0 fenced, else 1 + 2 if late + 4 if
--      cancel
-- why  the comparison of the receipt and the change are one write of the job's row. Jobs that leave
--      nothing behind are deleted together; the others end one by one
--
-- outcomes: 0 complete, 1 retry, 2 surrender, 3 decline, 4 bury; null: all complete. delays:
-- nanoseconds. In a user's transaction (no session) only the job's own row and those of its keys
-- are locked.

CREATE OR REPLACE FUNCTION "leasehold".settle_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    queues text[], jobs uuid[], leases_of bigint[], tokens bigint[], nonces bytea[],
    outcomes smallint[], delays bigint[], reasons text[], marks bigint[], results bytea[],
    patience text DEFAULT NULL
) RETURNS smallint[] LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    VERB constant smallint := 3;
    first    record;
    q        record;
    one      record;
    of_job   "leasehold".job;
    of_grant "leasehold".grants;
    ending   record;
    at       bigint;
    noted    bigint;
    counts   bigint[];
    verdict  smallint;
    verdicts smallint[] := array_fill(0::smallint, ARRAY[cardinality(tokens)]);
    done     integer[] := '{}';
    fronts   bigint[];
    places   bigint[];
    highest  bigint;
    due      bigint;
    known    integer;
    first_due bigint;
    h        "leasehold".head;
    mixed    boolean := outcomes IS NOT NULL AND (SELECT count(DISTINCT t) FROM unnest(tokens) AS t) < cardinality(tokens);
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience, true);
    END IF;
    first := "leasehold".recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        RETURN ARRAY (SELECT v::smallint FROM jsonb_array_elements_text(first.answer) WITH ORDINALITY AS a (v, n) ORDER BY n);
    END IF;
    FOR q IN
        SELECT k.id, k.name, k.relaxed FROM "leasehold".queue k
        WHERE k.namespace = of_namespace AND k.name = ANY (queues) ORDER BY k.id
    LOOP
        counts := "leasehold".no_counts_1();
        due := NULL;
        first_due := NULL;
        IF marks IS NOT NULL AND EXISTS (SELECT FROM unnest(queues, marks) AS k (name, mark)
                                         WHERE k.name = q.name AND k.mark IS NOT NULL) THEN
            -- The issuer's floor is to rise. Claims read it, and hold this row while they do.
            PERFORM FROM "leasehold".queue k WHERE k.id = q.id FOR NO KEY UPDATE;
        END IF;
        noted := "leasehold".enter_1(q.id);
        at := "leasehold".clock_1(by_hand);
        IF NOT mixed THEN
            FOR one IN
                WITH held AS MATERIALIZED (
                    SELECT k.n, j.spot, 1 + CASE WHEN g.deadline <= at THEN 2 ELSE 0 END
                                          + CASE WHEN j.cancel THEN 4 ELSE 0 END AS verdict
                    FROM unnest(queues, jobs, leases_of, tokens, nonces, outcomes)
                             WITH ORDINALITY AS k (queue, job, lease_of, token, nonce, outcome, n)
                    CROSS JOIN LATERAL (
                        SELECT o.ctid AS spot, o.cancel FROM "leasehold".job o
                        WHERE o.id = k.job AND o.queue = q.id AND o.state + 0 = 6 AND o.token = k.token
                          AND o.lease_of = k.lease_of AND o.unique_key IS NULL AND o.exclusive_key IS NULL
                          AND (o.options ? 'retention') IS NOT TRUE FOR UPDATE) AS j
                    CROSS JOIN LATERAL (
                        SELECT o.deadline FROM "leasehold".grants o
                        WHERE o.queue = q.id AND o.id = k.lease_of AND o.nonce_hash = sha256(k.nonce) LIMIT 1) AS g
                    WHERE k.queue = q.name AND coalesce(k.outcome, 0) = 0
                ), gone AS (
                    DELETE FROM "leasehold".job d USING held WHERE d.ctid = held.spot
                    RETURNING held.n::integer, held.verdict
                )
                SELECT gone.verdict, array_agg(gone.n) AS places FROM gone GROUP BY gone.verdict
            LOOP
                done := done || one.places;
                FOREACH known IN ARRAY one.places LOOP
                    verdicts[known] := one.verdict;
                END LOOP;
                known := cardinality(one.places);
                counts[10] := counts[10] + known;
                counts[4] := counts[4] - known;
                counts[19] := counts[19] - known;
                IF one.verdict & 2 > 0 THEN
                    counts[20] := counts[20] + known;
                END IF;
            END LOOP;
        END IF;
        IF cardinality(done) < cardinality(tokens) THEN
            -- In one order, and before their keys.
            PERFORM FROM (SELECT k.token FROM unnest(tokens) AS k (token) ORDER BY k.token OFFSET 0) AS k
            CROSS JOIN LATERAL (SELECT FROM "leasehold".job o
                                WHERE o.queue = q.id AND o.state = 6 AND o.token = k.token FOR UPDATE) AS j;
            PERFORM "leasehold".lock_keys_1(q.id, jobs);
            -- Past the locks: whoever waited for them finds the time of now.
            at := "leasehold".clock_1(by_hand);
            fronts := ARRAY (SELECT k.token FROM unnest(queues, tokens, outcomes, delays) AS k (queue, token, outcome, delay)
                             WHERE k.queue = q.name AND k.outcome = 2 AND k.delay = 0 ORDER BY k.token);
            places := "leasehold".fronts_1(fronts);
            FOR one IN
                SELECT k.* FROM unnest(queues, jobs, leases_of, tokens, nonces, outcomes, delays, reasons, marks, results)
                    WITH ORDINALITY AS k (queue, job, lease_of, token, nonce, outcome, delay, reason, mark, result, n)
                WHERE k.queue = q.name AND k.n <> ALL (done) ORDER BY k.n
            LOOP
                SELECT * INTO of_job FROM "leasehold".job o
                WHERE o.id = one.job AND o.queue = q.id AND o.state + 0 = 6 AND o.token = one.token
                  AND o.lease_of = one.lease_of FOR UPDATE;
                SELECT * INTO of_grant FROM "leasehold".grants o
                WHERE of_job.id IS NOT NULL AND o.queue = q.id AND o.id = one.lease_of AND o.nonce_hash = sha256(one.nonce);
                IF NOT FOUND THEN
                    counts[21] := counts[21] + 1;
                    CONTINUE;
                END IF;
                verdict := 1 + CASE WHEN of_grant.deadline <= at THEN 2 ELSE 0 END + CASE WHEN of_job.cancel THEN 4 ELSE 0 END;
                verdicts[one.n] := verdict;
                IF verdict & 2 > 0 THEN
                    counts[20] := counts[20] + 1;
                END IF;
                IF one.mark <= at + 86400000000 THEN
                    highest := greatest(highest, one.mark);
                END IF;
                ending := "leasehold".settled_1(coalesce(one.outcome, 0::smallint), coalesce(one.delay, 0), one.reason,
                                              one.mark, (one.mark <= at + 86400000000) IS NOT FALSE, of_job.cancel,
                                              q.relaxed, at);
                IF ending.next = 'scheduled' THEN
                    PERFORM "leasehold".due_1(q.id, ending.due, noted);
                    due := least(due, ending.due);
                    IF first_due IS NULL THEN
                        first_due := coalesce((SELECT "leasehold".first_due_1(o) FROM "leasehold".head_1(q.id) AS o), due + 1);
                    END IF;
                END IF;
                counts := "leasehold".end_lease_1(of_job, of_grant, at, ending.ended, NULL, ending.next, ending.keeps_key,
                                                ending.failed, ending.declined, ending.due, ending.why,
                                                CASE WHEN ending.ended = 'completed' THEN one.result END,
                                                places[array_position(fronts, one.token)], counts);
            END LOOP;
        END IF;
        IF highest IS NOT NULL THEN
            SELECT * INTO h FROM "leasehold".head_1(q.id);
            IF highest > h.floor THEN
                h.floor := highest;
                PERFORM "leasehold".save_head_1(h);
            END IF;
            highest := NULL;
        END IF;
        PERFORM "leasehold".count_1(q.id, counts);
        PERFORM "leasehold".wake_1(of_namespace, q.id, q.name,
                                 counts[2] - counts[3] + CASE WHEN due < first_due THEN 1 ELSE 0 END, false);
        IF of_session IS NOT NULL THEN
            PERFORM "leasehold".end_grants_1(q.id, leases_of);
        END IF;
    END LOOP;
    PERFORM "leasehold".remember_1(of_session, of_lane, of_seq, VERB, "leasehold".clock_1(by_hand), to_jsonb(verdicts), first.prior);
    RETURN verdicts;
END $$;

-- Adds to the counts of a queue. The caller has come through enter_1.
CREATE OR REPLACE FUNCTION "leasehold".count_1(of_queue integer, counts bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF counts <> "leasehold".no_counts_1() THEN
        INSERT INTO "leasehold".tally (queue, n, counts) VALUES (of_queue, nextval('"leasehold".place'), counts);
    END IF;
END $$;

-- checkpoint: save state under a lease, never behind what that lease has saved.
-- in   receipts, each with a number and a state      out  for each: as settle, or 8 and the number
--      that is saved
-- why  the comparison of the receipt and the change are one write of the job's row

CREATE OR REPLACE FUNCTION "leasehold".checkpoint_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    queues text[], jobs uuid[], leases_of bigint[], tokens bigint[], nonces bytea[], seqs bigint[], states bytea[],
    patience text DEFAULT NULL
) RETURNS TABLE (nth integer, verdict smallint, seq bigint) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    VERB constant smallint := 4;
    -- Numbers are unsigned.
    HIGHEST constant bigint := 1::bigint << 63;
    first   record;
    one     record;
    held    record;
    refused record;
    at      bigint;
    answer  jsonb := '[]';
    fenced  integer[] := '{}';
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience, true);
    END IF;
    first := "leasehold".recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        RETURN QUERY SELECT (a ->> 0)::integer, (a ->> 1)::smallint, (a ->> 2)::bigint FROM jsonb_array_elements(first.answer) AS a;
        RETURN;
    END IF;
    BEGIN
        PERFORM "leasehold".wait_briefly_1(of_session, patience);
        -- In one order.
        PERFORM FROM (SELECT q.id AS of_, k.token FROM unnest(queues, tokens) AS k (queue, token)
                      JOIN "leasehold".queue q ON q.namespace = of_namespace AND q.name = k.queue
                      ORDER BY q.id, k.token OFFSET 0) AS k
        CROSS JOIN LATERAL (SELECT FROM "leasehold".job o
                            WHERE o.queue = k.of_ AND o.state = 6 AND o.token = k.token FOR UPDATE) AS j;
        PERFORM set_config('lock_timeout', patience, true) WHERE patience IS NOT NULL;
    EXCEPTION WHEN lock_not_available THEN
        PERFORM "leasehold".in_hand_1(of_session, (
            SELECT string_agg(k.n::text, ',') FROM unnest(queues, tokens) WITH ORDINALITY AS k (queue, token, n)
            JOIN "leasehold".queue q ON q.namespace = of_namespace AND q.name = k.queue
            CROSS JOIN LATERAL (SELECT FROM "leasehold".job o
                                WHERE o.queue = q.id AND o.state = 6 AND o.token = k.token) AS j
            LEFT JOIN LATERAL (SELECT true AS free FROM "leasehold".job o
                               WHERE o.queue = q.id AND o.state = 6 AND o.token = k.token
                               FOR UPDATE SKIP LOCKED) AS f ON true
            WHERE f.free IS NULL));
    END;
    at := "leasehold".clock_1(by_hand);
    FOR one IN
        SELECT k.*, q.id AS of_ FROM unnest(queues, jobs, leases_of, tokens, nonces, seqs, states)
            WITH ORDINALITY AS k (queue, job, lease_of, token, nonce, seq, state, n)
        LEFT JOIN "leasehold".queue q ON q.namespace = of_namespace AND q.name = k.queue ORDER BY k.n
    LOOP
        nth := one.n;
        seq := NULL;
        SELECT j.checkpoint_token, j.checkpoint_seq, j.cancel, g.deadline INTO held
        FROM (SELECT * FROM "leasehold".job o
              WHERE o.id = one.job AND o.queue = one.of_ AND o.state + 0 = 6 AND o.token = one.token
                AND o.lease_of = one.lease_of FOR UPDATE) AS j
        CROSS JOIN LATERAL (SELECT o.deadline FROM "leasehold".grants o
                            WHERE o.queue = one.of_ AND o.id = j.lease_of AND o.nonce_hash = sha256(one.nonce) LIMIT 1) AS g;
        IF NOT FOUND THEN
            verdict := 0;
            IF one.of_ IS NOT NULL THEN
                fenced := fenced || one.of_;
            END IF;
        ELSIF held.checkpoint_token = one.token AND (held.checkpoint_seq # HIGHEST) > (one.seq # HIGHEST) THEN
            verdict := 8;
            seq := held.checkpoint_seq;
        ELSE
            verdict := 1 + CASE WHEN held.deadline <= at THEN 2 ELSE 0 END + CASE WHEN held.cancel THEN 4 ELSE 0 END;
            UPDATE "leasehold".job j SET checkpoint = one.state, checkpoint_seq = one.seq, checkpoint_token = one.token,
                weight = j.weight + octet_length(one.state) - coalesce(octet_length(j.checkpoint), 0)
            WHERE j.id = one.job AND j.queue = one.of_;
        END IF;
        answer := answer || jsonb_build_array(jsonb_build_array(nth, verdict, seq));
        RETURN NEXT;
    END LOOP;
    FOR refused IN SELECT k AS of_, count(*) AS n FROM unnest(fenced) AS k GROUP BY k ORDER BY k LOOP
        PERFORM "leasehold".fenced_1(refused.of_, refused.n);
    END LOOP;
    PERFORM "leasehold".remember_1(of_session, of_lane, of_seq, VERB, at, answer, first.prior);
END $$;

-- Counts calls that were refused as stale.
CREATE OR REPLACE FUNCTION "leasehold".fenced_1(of_queue integer, n bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    counts bigint[] := "leasehold".no_counts_1();
BEGIN
    IF n > 0 THEN
        PERFORM "leasehold".enter_1(of_queue);
        counts[21] := n;
        PERFORM "leasehold".count_1(of_queue, counts);
    END IF;
END $$;

-- reap: expire overdue leases, the oldest first.
-- in   how many      out  the expiries
-- why  a reap that finds nothing writes nothing: idle workers reap, too. Two reapers never have the
--      same lease; one that somebody has in hand is waited for a moment, and then passed over: one
--      who is frozen with it must not keep the others from theirs

CREATE OR REPLACE FUNCTION "leasehold".reap_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint, most integer, patience text DEFAULT NULL
) RETURNS jsonb LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    VERB constant smallint := 5;
    first   record;
    q       record;
    done    record;
    h       "leasehold".head;
    at      bigint;
    expired jsonb := '[]';
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience, true);
    END IF;
    first := "leasehold".recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        RETURN first.answer;
    END IF;
    at := "leasehold".clock_1(by_hand);
    FOR q IN
        -- The oldest of all queues.
        SELECT o.id, o.name, count(*)::integer AS leases FROM (
            SELECT k.id, k.name, f.deadline, f.token FROM "leasehold".queue k
            CROSS JOIN LATERAL "leasehold".head_1(k.id) AS o
            CROSS JOIN LATERAL (
                SELECT g.deadline, j.token
                FROM (SELECT * FROM "leasehold".grants e
                      WHERE e.queue + 0 = k.id AND e.deadline >= o.overdue_from AND e.deadline <= at
                      ORDER BY e.deadline, e.id + 0 LIMIT most) AS g
                CROSS JOIN LATERAL (
                      SELECT e.token FROM "leasehold".job e
                      WHERE e.queue = k.id AND e.state = 6 AND e.token >= g.id AND e.token < g.id + g.leases
                      ORDER BY e.token LIMIT most) AS j
                LIMIT most
            ) AS f
            WHERE k.namespace = of_namespace ORDER BY f.deadline, f.token LIMIT most
        ) AS o
        GROUP BY o.id, o.name ORDER BY o.id
    LOOP
        PERFORM "leasehold".enter_1(q.id);
        SELECT * INTO h FROM "leasehold".head_1(q.id);
        at := "leasehold".clock_1(by_hand);
        FOR try IN 1 .. 10 LOOP
            done := "leasehold".expire_1(q.id, q.name, h.overdue_from, at, q.leases, "leasehold".no_counts_1());
            expired := expired || done.told;
            q.leases := q.leases - jsonb_array_length(done.told);
            PERFORM "leasehold".count_1(q.id, done.counts);
            PERFORM "leasehold".wake_1(of_namespace, q.id, q.name, done.counts[2] - done.counts[3], false);
            EXIT WHEN q.leases <= 0 OR NOT EXISTS (
                SELECT FROM "leasehold".grants g WHERE g.queue + 0 = q.id AND g.deadline >= h.overdue_from AND g.deadline <= at);
            PERFORM pg_sleep(0.01);
        END LOOP;
    END LOOP;
    expired := coalesce((SELECT jsonb_agg(e - 'deadline' ORDER BY (e -> 'deadline')::bigint, (e -> 'token')::bigint)
                         FROM jsonb_array_elements(expired) AS e), '[]');
    IF expired <> '[]' THEN
        PERFORM "leasehold".remember_1(of_session, of_lane, of_seq, VERB, "leasehold".clock_1(by_hand), expired, first.prior);
    END IF;
    RETURN expired;
END $$;

-- prune: delete settled jobs past their retention, and unique keys past their window.
-- in   for how long past it, how many      out  how many jobs, and whether there may be more keys
-- why  a prune that finds nothing writes nothing: idle workers prune, too. Found, those first whose
--      time was over first, by an index on the end of the retention, whatever else is past it; dead
--      jobs are not in it. Of a queue that has nothing to prune no lock is taken: there may be
--      thousands

CREATE OR REPLACE FUNCTION "leasehold".prune_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint, overdue bigint, most integer,
    patience text DEFAULT NULL, OUT pruned bigint, OUT more boolean
) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    VERB constant smallint := 7;
    first  record;
    q      record;
    gone   record;
    at     bigint;
    counts bigint[];
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience, true);
    END IF;
    pruned := 0;
    more := true;
    first := "leasehold".recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        pruned := first.answer::bigint;
        RETURN;
    END IF;
    at := "leasehold".clock_1(by_hand);
    FOR q IN
        SELECT k.id FROM "leasehold".queue k WHERE k.namespace = of_namespace AND (
            SELECT true FROM "leasehold".job j
            WHERE j.queue = k.id AND j.keep_until IS NOT NULL AND j.keep_until <= at - overdue LIMIT 1)
        ORDER BY k.id
    LOOP
        EXIT WHEN pruned >= most;
        PERFORM "leasehold".enter_1(q.id);
        at := "leasehold".clock_1(by_hand);
        counts := "leasehold".no_counts_1();
        FOR gone IN
            WITH past AS (
                DELETE FROM "leasehold".job d WHERE d.queue = q.id AND d.id = ANY (ARRAY (
                    SELECT j.id FROM "leasehold".job j WHERE j.queue = q.id AND j.keep_until IS NOT NULL
                      AND j.keep_until <= at - overdue
                    ORDER BY j.keep_until LIMIT most - pruned FOR UPDATE SKIP LOCKED))
                RETURNING d.state
            )
            SELECT past.state, count(*) AS n FROM past GROUP BY past.state
        LOOP
            pruned := pruned + gone.n;
            counts[22] := counts[22] + gone.n;
            counts[CASE gone.state WHEN 3 THEN 5 ELSE 7 END] := -gone.n;
        END LOOP;
        PERFORM "leasehold".count_1(q.id, counts);
    END LOOP;
    more := "leasehold".prune_keys_1(of_namespace, "leasehold".clock_1(by_hand) - overdue, most);
    IF pruned > 0 THEN
        PERFORM "leasehold".remember_1(of_session, of_lane, of_seq, VERB, "leasehold".clock_1(by_hand), to_jsonb(pruned), first.prior);
    END IF;
END $$;

-- Adds up the counts of the next queue after that one, if there is any to do, and says which it
-- was. One queue in a transaction: a claim waits for its row.
CREATE OR REPLACE FUNCTION "leasehold".add_up_next_1(of_namespace text, by_hand bigint, after integer) RETURNS integer
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    of_ integer;
BEGIN
    SELECT k.id INTO of_ FROM "leasehold".queue k CROSS JOIN LATERAL "leasehold".head_1(k.id) AS o
    WHERE k.namespace = of_namespace AND k.id > after
      AND (SELECT true FROM "leasehold".tally t WHERE t.queue = k.id AND t.n > o.counted_to LIMIT 1)
    ORDER BY k.id LIMIT 1;
    PERFORM "leasehold".add_up_1(of_, "leasehold".clock_1(by_hand)) WHERE of_ IS NOT NULL;
    RETURN of_;
END $$;

-- Up to `most` keys. It needs no request id: a key whose window is over is nobody's.
CREATE OR REPLACE FUNCTION "leasehold".prune_keys_1(of_namespace text, before bigint, most integer) RETURNS boolean
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    left_ integer := most;
    gone  integer;
    q     record;
BEGIN
    FOR q IN SELECT k.id FROM "leasehold".queue k WHERE k.namespace = of_namespace ORDER BY k.id LOOP
        DELETE FROM "leasehold".unique_key u WHERE u.queue = q.id AND u.key = ANY (ARRAY (
            SELECT k.key FROM "leasehold".unique_key k WHERE k.queue = q.id AND k.until IS NOT NULL AND k.until <= before
            ORDER BY k.until LIMIT left_ FOR UPDATE SKIP LOCKED));
        GET DIAGNOSTICS gone = ROW_COUNT;
        left_ := left_ - gone;
    END LOOP;
    RETURN left_ = 0;
END $$;

-- listen: sleep until work may exist.
-- in   queues      out  whether they have a job in line, when the first scheduled one is due, in
--      how many microseconds the first lease ends, and whether somebody is putting jobs there, who
--      may have looked for sleepers before there was one
-- why  a process that has room says so by locks of its listening connection: nothing is written,
--      and what holds them ends with it

CREATE OR REPLACE FUNCTION "leasehold".look_1(
    of_namespace text, queues text[], suspects boolean, by_hand bigint DEFAULT NULL,
    OUT work boolean, OUT due bigint, OUT ends bigint, OUT busy boolean
) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    class constant integer := '"leasehold".head'::regclass::oid::integer;
    q record;
BEGIN
    work := false;
    busy := false;
    FOR q IN
        SELECT k.id, k.paused, o AS head FROM "leasehold".queue k CROSS JOIN LATERAL "leasehold".head_1(k.id) AS o
        WHERE k.namespace = of_namespace AND k.name = ANY (queues) ORDER BY k.id
    LOOP
        -- One after the other, or they would take each other for somebody who is at it.
        PERFORM pg_advisory_xact_lock(class, q.id);
        busy := busy OR "leasehold".is_entered_1(q.id, 0) OR "leasehold".is_entered_1(q.id, 1);
        work := work OR (NOT q.paused AND "leasehold".has_ready_1(q.head, suspects));
        due := least(due, "leasehold".first_due_1(q.head));
        ends := least(ends, "leasehold".first_deadline_1(q.head));
    END LOOP;
    ends := ends - "leasehold".clock_1(by_hand);
END $$;

-- control: what operators do, each time on record.
-- in   a command, who gives it and why
-- out  {"done", "skipped", "duplicates": [[job, holder], ...]}
-- why  a command holds the locks of the queues that it is about: nobody claims what it changes
--
-- command: as serde writes ControlCommand, e.g. {"cancel": {"job": "..."}}, {"revoke": {"owner":
-- "..."}}. said: the same in words, for the record.
--
-- Locks: leased jobs, then keys in their order, then jobs that wait. Whoever ends a lease has its
-- job and then its key; who has a key has the jobs parked behind it.

CREATE OR REPLACE FUNCTION "leasehold".control_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    actor text, reason text, command jsonb, said text, patience text DEFAULT NULL
) RETURNS jsonb LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    VERB constant smallint := 6;
    word   text := (SELECT k FROM jsonb_object_keys(command) AS k);
    what   jsonb := command -> word;
    first  record;
    did    record;
    of_    integer;
    answer jsonb;
    done   bigint := 0;
    skipped bigint := 0;
    others jsonb := '[]';
    tokens bigint[] := '{}';
BEGIN
    PERFORM set_config('lock_timeout', patience, true) WHERE patience IS NOT NULL;
    first := "leasehold".recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        RETURN first.answer;
    END IF;
    IF word IN ('pause', 'resume', 'configure') THEN
        PERFORM "leasehold".set_queue_1(of_namespace, by_hand, word, what);
        done := 1;
    ELSIF word = 'revoke' THEN
        FOR of_ IN SELECT q.id FROM "leasehold".queue q WHERE q.namespace = of_namespace ORDER BY q.id LOOP
            tokens := tokens || "leasehold".revoke_1(of_namespace, by_hand, of_, what, reason);
        END LOOP;
        tokens := ARRAY (SELECT t FROM unnest(tokens) AS t ORDER BY t);
        done := cardinality(tokens);
    ELSE
        FOR of_ IN SELECT "leasehold".queues_of_1(of_namespace, coalesce(what -> 'jobs', what)) LOOP
            did := "leasehold".each_1(of_namespace, by_hand, of_, word, coalesce(what -> 'jobs', what), what -> 'delay');
            done := done + did.done;
            skipped := skipped + did.skipped;
            others := others || did.others;
        END LOOP;
    END IF;
    answer := jsonb_build_object('done', done, 'skipped', skipped, 'duplicates', others);
    INSERT INTO "leasehold".audit (namespace, at, actor, reason, command, done, tokens)
    VALUES (of_namespace, "leasehold".clock_1(by_hand), actor, reason, said, done,
            to_jsonb(tokens[1 : 100])::text);
    PERFORM "leasehold".remember_1(of_session, of_lane, of_seq, VERB, "leasehold".clock_1(by_hand), answer, first.prior);
    RETURN answer;
END $$;

-- Pauses, resumes or configures a queue, which is made if it is not there.
CREATE OR REPLACE FUNCTION "leasehold".set_queue_1(of_namespace text, by_hand bigint, word text, what jsonb)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    of_name text := coalesce(what ->> 'queue', what #>> '{}');
    of_     integer := "leasehold".queue_1(of_namespace, of_name, "leasehold".clock_1(by_hand));
BEGIN
    UPDATE "leasehold".queue q SET
        paused = CASE word WHEN 'pause' THEN true WHEN 'resume' THEN false ELSE q.paused END,
        relaxed = coalesce((what ->> 'relaxed')::boolean, q.relaxed)
    WHERE q.id = of_;
    IF word = 'resume' THEN
        PERFORM "leasehold".wake_1(of_namespace, of_, of_name, 64, true);
    END IF;
END $$;

-- The queue that selected jobs are in.
CREATE OR REPLACE FUNCTION "leasehold".queues_of_1(of_namespace text, which jsonb) RETURNS SETOF integer
LANGUAGE sql STABLE AS $$
    SELECT q.id FROM "leasehold".queue q
    WHERE q.namespace = of_namespace AND q.name = which -> 'state' ->> 'queue'
    UNION ALL
    SELECT q.id FROM "leasehold".job j JOIN "leasehold".queue q ON q.id = j.queue
    WHERE j.id = (which ->> 'job')::uuid AND q.namespace = of_namespace
$$;

-- The jobs that a command is about, in the order in which an inspection lists them.
CREATE OR REPLACE FUNCTION "leasehold".selected_1(of_queue integer, which jsonb) RETURNS uuid[] LANGUAGE plpgsql STABLE AS $$
DECLARE
    of_state text := which -> 'state' ->> 'state';
    most     integer := (which -> 'state' ->> 'max')::integer;
    ids      uuid[];
BEGIN
    IF which ? 'job' THEN
        RETURN ARRAY[(which ->> 'job')::uuid];
    ELSIF of_state = 'ready' THEN
        ids := ARRAY (SELECT j.id FROM "leasehold".job j WHERE j.queue = of_queue AND j.state = 2
                      ORDER BY j.line, j.place LIMIT most);
        RETURN ids || ARRAY (SELECT j.id FROM "leasehold".job j WHERE j.queue = of_queue AND j.state = 1
                             ORDER BY j.exclusive_key, j.seq LIMIT most - cardinality(ids));
    ELSIF of_state = 'scheduled' THEN
        RETURN ARRAY (SELECT j.id FROM "leasehold".job j WHERE j.queue = of_queue AND j.state = 0
                      ORDER BY j.run_at, j.seq LIMIT most);
    ELSIF of_state = 'leased' THEN
        RETURN ARRAY (SELECT j.id FROM "leasehold".job j WHERE j.queue = of_queue AND j.state = 6
                      ORDER BY j.token LIMIT most);
    END IF;
    RETURN ARRAY (SELECT j.id FROM "leasehold".job j WHERE j.queue = of_queue AND j.settled_at IS NOT NULL
                    AND j.state = CASE of_state WHEN 'completed' THEN 3 WHEN 'dead' THEN 4
                                                ELSE 5 END
                  ORDER BY j.settled_at, j.seq LIMIT most);
END $$;

-- Cancels, purges, reschedules or retries the selected jobs of a queue.
CREATE OR REPLACE FUNCTION "leasehold".each_1(
    of_namespace text, by_hand bigint, of_queue integer, word text, which jsonb, delay jsonb,
    OUT done bigint, OUT skipped bigint, OUT others jsonb
) LANGUAGE plpgsql AS $$
DECLARE
    j       "leasehold".job;
    ids     uuid[];
    counts  bigint[] := "leasehold".no_counts_1();
    at      bigint;
    noted   bigint;
    due     bigint;
    first_due bigint;
    holder  uuid;
    window_ bigint;
    of_name text;
BEGIN
    done := 0;
    skipped := 0;
    others := '[]';
    SELECT q.name INTO of_name FROM "leasehold".queue q WHERE q.id = of_queue FOR NO KEY UPDATE;
    noted := "leasehold".enter_1(of_queue);
    ids := "leasehold".selected_1(of_queue, which);
    PERFORM FROM "leasehold".job k WHERE k.queue = of_queue AND k.id = ANY (ids) AND k.state = 6
    ORDER BY k.token FOR UPDATE;
    PERFORM "leasehold".lock_keys_1(of_queue, ids);
    PERFORM FROM "leasehold".job k WHERE k.queue = of_queue AND k.id = ANY (ids) ORDER BY k.id FOR UPDATE;
    at := "leasehold".clock_1(by_hand);
    IF word = 'reschedule' THEN
        due := at + (delay ->> 'secs')::bigint * 1000000 + (delay ->> 'nanos')::bigint / 1000;
        first_due := "leasehold".first_due_1(h) FROM "leasehold".head_1(of_queue) AS h;
    END IF;
    FOR j IN
        SELECT k.* FROM unnest(ids) WITH ORDINALITY AS n (id, nth)
        JOIN "leasehold".job k ON k.id = n.id AND k.queue = of_queue ORDER BY n.nth
    LOOP
        -- One that was parked may be the head of its key by now.
        j.state := (SELECT k.state FROM "leasehold".job k WHERE k.id = j.id AND k.queue = of_queue);
        IF j.state = 6 AND word = 'cancel' AND NOT j.cancel THEN
            UPDATE "leasehold".job k SET cancel = true WHERE k.id = j.id AND k.queue = of_queue;
        ELSIF j.state NOT IN (0, 1, 2)
              AND NOT (word = 'purge' AND j.state <> 6)
              AND NOT (word = 'retry_dead' AND j.state = 4)
           OR word = 'retry_dead' AND j.state <> 4 THEN
            skipped := skipped + 1;
            CONTINUE;
        ELSIF word = 'cancel' THEN
            counts := "leasehold".uncount_1(j.state, counts);
            counts := "leasehold".free_keys_1(j, counts);
            counts[7] := counts[7] + 1;
            UPDATE "leasehold".job k SET state = 5, seq = nextval('"leasehold".place'), settled_at = at,
                keep_until = at + greatest(coalesce((j.options ->> 'retention')::bigint / 1000, 0), 86400000000)
            WHERE k.id = j.id AND k.queue = of_queue;
        ELSIF word = 'purge' THEN
            counts := "leasehold".uncount_1(j.state, counts);
            counts := "leasehold".free_keys_1(j, counts);
            counts[23] := counts[23] + 1;
            DELETE FROM "leasehold".job k WHERE k.id = j.id AND k.queue = of_queue;
        ELSIF word = 'reschedule' THEN
            counts := "leasehold".uncount_1(j.state, counts);
            -- Its key goes to the next before it joins again.
            counts := "leasehold".leave_key_1(of_queue, j.exclusive_key, j.id, counts);
            IF due > at THEN
                UPDATE "leasehold".job k SET state = 0, seq = nextval('"leasehold".place'),
                    run_at = due
                WHERE k.id = j.id AND k.queue = of_queue;
                PERFORM "leasehold".due_1(of_queue, due, noted);
                counts[1] := counts[1] + 1;
            ELSE
                counts := "leasehold".join_line_1(j, due, counts);
            END IF;
        ELSE
            IF j.unique_key IS NOT NULL THEN
                window_ := (j.options ->> 'unique_window')::bigint / 1000;
                holder := "leasehold".take_unique_1(of_queue, j.unique_key, j.id, at + window_, at);
                IF holder <> j.id THEN
                    others := others || jsonb_build_array(jsonb_build_array(j.id, holder));
                    CONTINUE;
                END IF;
                UPDATE "leasehold".unique_key u SET until = at + window_ WHERE u.queue = of_queue AND u.key = j.unique_key;
            END IF;
            counts := "leasehold".uncount_1(j.state, counts);
            UPDATE "leasehold".job k SET failures = 0, expiries = 0, line = k.line / 2 * 2 + 1, settled_at = NULL,
                keep_until = NULL
            WHERE k.id = j.id AND k.queue = of_queue;
            counts := "leasehold".join_line_1(j, at, counts);
        END IF;
        done := done + 1;
    END LOOP;
    PERFORM "leasehold".count_1(of_queue, counts);
    PERFORM "leasehold".wake_1(of_namespace, of_queue, of_name, counts[2] - counts[3], false);
    IF counts[1] > 0 AND due > at AND (first_due IS NULL OR due < first_due) THEN
        PERFORM "leasehold".wake_1(of_namespace, of_queue, of_name, 1, false);
    END IF;
END $$;

-- A job that waited or was settled is not in its state any more.
CREATE OR REPLACE FUNCTION "leasehold".uncount_1(of_state smallint, INOUT counts bigint[]) LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    nth constant integer := CASE of_state
        WHEN 0 THEN 1 WHEN 3 THEN 5 WHEN 4 THEN 6
        WHEN 5 THEN 7 ELSE 2 END;
BEGIN
    counts[nth] := counts[nth] - 1;
    IF of_state = 1 THEN
        counts[3] := counts[3] - 1;
    END IF;
END $$;

-- A job joins the back of its line, or waits behind its exclusive key.
CREATE OR REPLACE FUNCTION "leasehold".join_line_1(j "leasehold".job, due bigint, INOUT counts bigint[]) LANGUAGE plpgsql AS $$
DECLARE
    number constant bigint := nextval('"leasehold".place');
    goes   boolean := j.exclusive_key IS NULL OR "leasehold".join_key_1(j.queue, j.exclusive_key, j.id);
BEGIN
    UPDATE "leasehold".job k SET state = CASE WHEN goes THEN 2 ELSE 1 END, seq = number, place = number,
        run_at = due
    WHERE k.id = j.id AND k.queue = j.queue;
    counts[2] := counts[2] + 1;
    IF NOT goes THEN
        counts[3] := counts[3] + 1;
    END IF;
END $$;

-- Ends leases of a queue without their holders, and says which.
CREATE OR REPLACE FUNCTION "leasehold".revoke_1(
    of_namespace text, by_hand bigint, of_queue integer, which jsonb, reason text
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    one     record;
    ids     uuid[];
    tokens  bigint[] := '{}';
    counts  bigint[] := "leasehold".no_counts_1();
    at      bigint;
    of_name text;
BEGIN
    ids := ARRAY (
        SELECT j.id FROM "leasehold".grants g
        JOIN "leasehold".job j ON j.queue = g.queue AND j.state = 6 AND j.token >= g.id AND j.token < g.id + g.leases
        WHERE g.queue = of_queue AND (g.owner = which ->> 'owner' OR g.task = which ->> 'task')
        UNION ALL
        SELECT j.id FROM "leasehold".job j
        WHERE j.id = (which ->> 'job')::uuid AND j.queue = of_queue AND j.state = 6);
    IF cardinality(ids) = 0 THEN
        RETURN tokens;
    END IF;
    SELECT q.name INTO of_name FROM "leasehold".queue q WHERE q.id = of_queue FOR NO KEY UPDATE;
    PERFORM "leasehold".enter_1(of_queue);
    PERFORM FROM "leasehold".job j WHERE j.queue = of_queue AND j.id = ANY (ids) AND j.state = 6
    ORDER BY j.token FOR UPDATE;
    PERFORM "leasehold".lock_keys_1(of_queue, ids);
    at := "leasehold".clock_1(by_hand);
    FOR one IN
        SELECT j, g FROM "leasehold".job j JOIN "leasehold".grants g ON g.queue = of_queue AND g.id = j.lease_of
        WHERE j.queue = of_queue AND j.id = ANY (ids) AND j.state = 6
          AND (which ? 'job' OR g.owner = which ->> 'owner' OR g.task = which ->> 'task')
        ORDER BY j.token
    LOOP
        tokens := tokens || (one.j).token;
        counts := "leasehold".end_lease_1(one.j, one.g, at, 'revoked', NULL, CASE WHEN (one.j).cancel THEN 'cancelled' ELSE 'back' END,
                                        true, false, false, NULL, reason, NULL, NULL, counts);
    END LOOP;
    DELETE FROM "leasehold".grants d WHERE d.queue = of_queue AND d.id = ANY (ARRAY (
        SELECT g.id FROM "leasehold".grants g
        WHERE g.queue = of_queue AND (g.owner = which ->> 'owner' OR g.task = which ->> 'task'
                                      OR which ? 'job' AND tokens[1] >= g.id AND tokens[1] < g.id + g.leases)
          AND NOT EXISTS (SELECT FROM "leasehold".job j WHERE j.queue = of_queue AND j.state = 6
                            AND j.token >= g.id AND j.token < g.id + g.leases)
        FOR UPDATE SKIP LOCKED));
    PERFORM "leasehold".count_1(of_queue, counts);
    PERFORM "leasehold".wake_1(of_namespace, of_queue, of_name, counts[2] - counts[3], false);
    RETURN tokens;
END $$;

-- remove: delete a queue that has no jobs.
-- in   its name, who asks and why
-- out  {"done"}; or {"left": the counts of the queue} or {"ahead": microseconds}, and nothing was
--      done
-- why  whoever puts jobs into a queue holds a lock of one of its epochs: who has both is alone, and
--      whoever comes later finds that the queue is gone (enter_1)

CREATE OR REPLACE FUNCTION "leasehold".remove_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    actor text, reason text, of_name text, said text, patience text DEFAULT NULL
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    VERB   constant smallint := 6;
    class  constant integer := '"leasehold".queue'::regclass::oid::integer;
    first  record;
    of_    integer;
    ahead  bigint;
    answer jsonb;
    done   bigint := 0;
BEGIN
    PERFORM set_config('lock_timeout', patience, true) WHERE patience IS NOT NULL;
    first := "leasehold".recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        RETURN first.answer;
    END IF;
    SELECT q.id INTO of_ FROM "leasehold".queue q WHERE q.namespace = of_namespace AND q.name = of_name FOR UPDATE;
    IF FOUND THEN
        PERFORM pg_advisory_xact_lock(class, of_ * 2), pg_advisory_xact_lock(class, of_ * 2 + 1);
        IF EXISTS (SELECT FROM "leasehold".job j WHERE j.queue = of_) THEN
            RETURN jsonb_build_object('done', 0, 'left', "leasehold".counts_1(of_));
        END IF;
        -- Made again it would begin LEAD above the clock, and so below tokens that it has given.
        ahead := "leasehold".behind_1(h, 0, "leasehold".clock_1(by_hand)) FROM "leasehold".head_1(of_) h;
        IF ahead IS NOT NULL THEN
            RETURN jsonb_build_object('done', 0, 'ahead', ahead);
        END IF;
        DELETE FROM "leasehold".unique_key k WHERE k.queue = of_;
        DELETE FROM "leasehold".exclusive_key k WHERE k.queue = of_;
        DELETE FROM "leasehold".grants g WHERE g.queue = of_;
        DELETE FROM "leasehold".tally t WHERE t.queue = of_;
        DELETE FROM "leasehold".head h WHERE h.queue = of_;
        DELETE FROM "leasehold".queue q WHERE q.id = of_;
        done := 1;
    END IF;
    answer := jsonb_build_object('done', done, 'skipped', 0, 'duplicates', '[]'::jsonb);
    INSERT INTO "leasehold".audit (namespace, at, actor, reason, command, done, tokens)
    VALUES (of_namespace, "leasehold".clock_1(by_hand), actor, reason, said, done, '[]');
    PERFORM "leasehold".remember_1(of_session, of_lane, of_seq, VERB, "leasehold".clock_1(by_hand), answer, first.prior);
    RETURN answer;
END $$;

-- inspect: look, and change nothing.
-- in   a question and where the last page ended      out  one page
-- why  each answer is one statement, so that all of it is of one moment. A page starts at a key,
--      never at a number of rows to skip; counts are kept, not counted
--
-- $1 is the namespace, $2 the clock by hand, wherever they are asked for.

-- Since when the job that is next in line has been due.
CREATE OR REPLACE FUNCTION "leasehold".oldest_ready_1(h "leasehold".head) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT min(first.run_at)
    FROM (SELECT l.line, h.fronts[array_position(h.lines, l.line)] AS front, h.starts[array_position(h.lines, l.line)] AS start
          FROM (SELECT generate_series(0, 2 * 7 + 1)::smallint AS line) AS l) AS of_
    CROSS JOIN LATERAL (
        SELECT r.run_at FROM (
            (SELECT j.place, j.run_at FROM "leasehold".job j
             WHERE j.queue = h.queue AND j.state = 2 AND j.line = of_.line AND j.place < -coalesce(of_.front, 0)
             ORDER BY j.place LIMIT 1)
            UNION ALL
            (SELECT j.place, j.run_at FROM "leasehold".job j
             WHERE j.queue = h.queue AND j.state = 2 AND j.line = of_.line AND j.place >= coalesce(of_.start, 0)
             ORDER BY j.place LIMIT 1)
        ) AS r ORDER BY r.place LIMIT 1
    ) AS first
$$;

-- views: jobs, leases, dead and queues, for people and for reports.
-- in   the tables      out  views that are documented, stable and read-only
-- why  what a person asks is not how the store keeps it: states are words, times are timestamps,
--      payloads are JSON where they are. The nonce of a lease stands in no view, nor does its hash

CREATE OR REPLACE FUNCTION "leasehold".at_1(micros bigint) RETURNS timestamptz
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT timestamptz 'epoch' + micros * interval '1 microsecond'
$$;

CREATE OR REPLACE FUNCTION "leasehold".state_1(state smallint) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT (ARRAY['scheduled', 'ready', 'ready', 'completed', 'dead', 'cancelled', 'leased', 'waiting'])[state + 1]
$$;

-- What is JSON as JSON, everything else as null: a payload may be any bytes.
CREATE OR REPLACE FUNCTION "leasehold".json_1(bytes bytea) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    RETURN convert_from(bytes, 'UTF8')::jsonb;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

-- A key is any text; one that this database's encoding cannot show is null here.
CREATE OR REPLACE FUNCTION "leasehold".text_1(bytes bytea) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    RETURN convert_from(bytes, 'UTF8');
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

-- The attempt that people ask for: of a job that is settled, how often it has run; of another, the
-- number of the run that is under way or comes next. What was handed back does not count.
CREATE OR REPLACE FUNCTION "leasehold".attempt_1(state smallint, failures integer, expiries integer, history jsonb)
RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT failures::bigint + expiries + CASE state
        WHEN 4 THEN 0
        WHEN 5 THEN (coalesce(history -> -1 ->> 'end' = 'cancelled' AND history -> -1 ->> 'reason' IS NULL,
                              false))::integer
        ELSE 1 END
$$;

-- Why a lease expired, in words.
CREATE OR REPLACE FUNCTION "leasehold".why_1(cause text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT CASE cause WHEN 'deadline' THEN 'nobody renewed it: the holder died, froze or was cut off' WHEN 'stalled' THEN 'the handler showed no progress for its stall limit'
                      WHEN 'lifetime' THEN 'it reached its maximum lifetime' END
$$;

-- What a queue counts: the sum in its head, and what calls have added since.
CREATE OR REPLACE FUNCTION "leasehold".counts_1(of_queue integer) RETURNS bigint[]
LANGUAGE sql STABLE STRICT AS $$
    WITH head AS (
        SELECT counts, counted_to FROM "leasehold".head WHERE queue = of_queue ORDER BY gen DESC LIMIT 1
    )
    SELECT array_agg(total ORDER BY nth) FROM (
        SELECT nth, sum(n)::bigint AS total
        FROM (
            SELECT counts FROM head
            UNION ALL
            SELECT t.counts FROM "leasehold".tally t
            WHERE t.queue = of_queue AND t.n > coalesce((SELECT counted_to FROM head), 0)
        ) AS parts, unnest(counts) WITH ORDINALITY AS one (n, nth)
        GROUP BY nth
    ) AS sums
$$;

CREATE OR REPLACE VIEW "leasehold".jobs AS
SELECT q.namespace::text AS namespace,
       q.name::text AS queue,
       j.id,
       j.kind::text AS kind,
       "leasehold".state_1(j.state) AS state,
       j.state = 1 AS parked,
       j.line / 2 AS priority,
       "leasehold".json_1(j.payload) AS payload,
       j.version,
       "leasehold".text_1(j.unique_key) AS unique_key,
       "leasehold".text_1(j.exclusive_key) AS exclusive_key,
       "leasehold".attempt_1(j.state, j.failures, j.expiries, j.history) AS attempt,
       j.failures,
       j.expiries,
       "leasehold".at_1(j.enqueued_at) AS enqueued_at,
       "leasehold".at_1(j.run_at) AS run_at,
       "leasehold".at_1(j.settled_at) AS settled_at,
       "leasehold".at_1(j.keep_until) AS keep_until,
       g.owner,
       g.task,
       j.token,
       "leasehold".at_1(g.deadline) AS deadline,
       j.progress,
       coalesce(j.history -> -1 ->> 'reason', "leasehold".why_1(j.history -> -1 ->> 'cause')) AS last_reason,
       "leasehold".json_1(j.result) AS result,
       j.headers,
       coalesce(j.history, '[]') AS history
FROM "leasehold".job j
JOIN "leasehold".queue q ON q.id = j.queue
LEFT JOIN "leasehold".grants g ON g.queue = j.queue AND g.id = j.lease_of AND j.state = 6;

CREATE OR REPLACE VIEW "leasehold".leases AS
SELECT q.namespace::text AS namespace,
       q.name::text AS queue,
       j.id AS job,
       j.kind::text AS kind,
       j.token,
       g.owner,
       g.task,
       "leasehold".attempt_1(j.state, j.failures, j.expiries, NULL) AS attempt,
       "leasehold".at_1(g.granted_at) AS granted_at,
       "leasehold".at_1(g.deadline) AS deadline,
       g.term / 1000 * interval '1 microsecond' AS term,
       g.renewals,
       j.cancel,
       j.progress
FROM "leasehold".job j
JOIN "leasehold".queue q ON q.id = j.queue
JOIN "leasehold".grants g ON g.queue = j.queue AND g.id = j.lease_of
WHERE j.state = 6;

CREATE OR REPLACE VIEW "leasehold".dead AS
SELECT q.namespace::text AS namespace,
       q.name::text AS queue,
       j.id,
       j.kind::text AS kind,
       "leasehold".json_1(j.payload) AS payload,
       "leasehold".text_1(j.unique_key) AS unique_key,
       "leasehold".text_1(j.exclusive_key) AS exclusive_key,
       j.failures::bigint + j.expiries AS attempts,
       "leasehold".at_1(j.enqueued_at) AS enqueued_at,
       "leasehold".at_1(j.settled_at) AS died_at,
       j.history -> -1 ->> 'owner' AS last_owner,
       coalesce(j.history -> -1 ->> 'reason', "leasehold".why_1(j.history -> -1 ->> 'cause')) AS reason,
       coalesce(j.history, '[]') AS history
FROM "leasehold".job j
JOIN "leasehold".queue q ON q.id = j.queue
WHERE j.state = 4 AND j.settled_at IS NOT NULL;

CREATE OR REPLACE VIEW "leasehold".queues AS
SELECT q.namespace::text AS namespace,
       q.name::text AS queue,
       q.paused,
       q.relaxed,
       n.counts[1] AS scheduled,
       n.counts[2] AS ready,
       n.counts[4] AS leased,
       n.counts[5] AS completed,
       n.counts[6] AS dead,
       n.counts[7] AS cancelled
FROM "leasehold".queue q
CROSS JOIN LATERAL (SELECT coalesce("leasehold".counts_1(q.id), "leasehold".no_counts_1()) AS counts) AS n;

-- public: the store for every language that can call a function.
-- in   names, JSON, intervals as people write them      out  rows; a stale owner is an error: LH001
-- why  the server aborts a transaction in which a statement failed, whatever the program does with
--      the error. So whoever is not the owner any more cannot commit
--
-- The names without a number are the contract: what they take and give is documented in the guide's
-- page `postgres`, and does not change. What they call has a number, and may.

-- Refuses an argument as the crate does: the field, what was found, what is allowed.
CREATE OR REPLACE FUNCTION "leasehold".refuse_1(field text, found_ text, allowed text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '%: found %, allowed %', field, found_, allowed USING ERRCODE = '22023', COLUMN = field;
END $$;

CREATE OR REPLACE FUNCTION "leasehold".stale_1(why text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'stale owner: %', why
        USING ERRCODE = 'LH001', HINT = 'stop working on it: nothing of this transaction is kept';
END $$;

CREATE OR REPLACE FUNCTION "leasehold".check_name_1(field text, name text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF coalesce(octet_length(name), 0) NOT BETWEEN 1 AND 128 THEN
        PERFORM "leasehold".refuse_1(field, coalesce(octet_length(name), 0) || ' bytes', '1 to 128 bytes');
    ELSIF name !~ '^[A-Za-z0-9_.-]+$' THEN
        PERFORM "leasehold".refuse_1(field, quote_literal(name), 'A-Z a-z 0-9 _ . -');
    END IF;
END $$;

CREATE OR REPLACE FUNCTION "leasehold".check_bytes_1(field text, found_ bigint, most bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF found_ > most THEN
        PERFORM "leasehold".refuse_1(field, found_ || ' bytes', 'at most ' || most || ' bytes');
    END IF;
END $$;

-- Options are an object with known names: a misspelt one must not be ignored.
CREATE OR REPLACE FUNCTION "leasehold".check_options_1(options jsonb, allowed text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    unknown text;
BEGIN
    IF options IS NULL OR jsonb_typeof(options) <> 'object' THEN
        PERFORM "leasehold".refuse_1('options', coalesce(jsonb_typeof(options), 'null'), 'an object');
    END IF;
    SELECT k INTO unknown FROM jsonb_object_keys(options) AS k WHERE k <> ALL (allowed) ORDER BY k LIMIT 1;
    IF FOUND THEN
        PERFORM "leasehold".refuse_1('options', 'the unknown name ' || quote_literal(left(unknown, 64)),
                                   array_to_string(allowed, ', '));
    END IF;
END $$;

CREATE OR REPLACE FUNCTION "leasehold".namespace_1(options jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    name constant text := coalesce(options ->> 'namespace', 'leasehold');
BEGIN
    PERFORM "leasehold".check_name_1('namespace', name);
    RETURN name;
END $$;

-- A duration in nanoseconds: an interval as text, or seconds as a number. null: not given.
CREATE OR REPLACE FUNCTION "leasehold".duration_1(field text, given jsonb, least_ bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    span numeric;
BEGIN
    IF given IS NULL OR given = 'null' THEN
        RETURN NULL;
    END IF;
    BEGIN
        span := CASE jsonb_typeof(given) WHEN 'number' THEN (given #>> '{}')::numeric
                     ELSE extract(epoch FROM (given #>> '{}')::interval)::numeric END * 1000000000;
    EXCEPTION WHEN data_exception THEN
        PERFORM "leasehold".refuse_1(field, left(given::text, 64), 'an interval such as "5 minutes", or seconds');
    END;
    IF span < least_ THEN
        PERFORM "leasehold".refuse_1(field, left(given::text, 64), 'at least ' || least_ / 1000 || ' microseconds');
    ELSIF span > 315360000000000000 THEN
        PERFORM "leasehold".refuse_1(field, left(given::text, 64), 'at most ' || 315360000000000000 / 1000000000 || ' seconds');
    END IF;
    RETURN span::bigint;
END $$;

-- A whole number within its limits. null: not given.
CREATE OR REPLACE FUNCTION "leasehold".number_1(field text, given jsonb, least_ bigint, most bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    allowed constant text := 'a whole number from ' || least_ || ' to ' || most;
    number numeric;
BEGIN
    IF given IS NULL OR given = 'null' THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(given) <> 'number' THEN
        PERFORM "leasehold".refuse_1(field, left(given::text, 64), allowed);
    END IF;
    number := (given #>> '{}')::numeric;
    IF number <> trunc(number) OR number NOT BETWEEN least_ AND most THEN
        PERFORM "leasehold".refuse_1(field, left(given::text, 64), allowed);
    END IF;
    RETURN number::bigint;
END $$;

CREATE OR REPLACE FUNCTION "leasehold".key_1(field text, given jsonb) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
    key bytea;
BEGIN
    IF given IS NULL OR given = 'null' THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(given) <> 'string' THEN
        PERFORM "leasehold".refuse_1(field, jsonb_typeof(given), 'text');
    END IF;
    key := convert_to(given #>> '{}', 'UTF8');
    IF octet_length(key) NOT BETWEEN 1 AND 256 THEN
        PERFORM "leasehold".refuse_1(field, octet_length(key) || ' bytes', '1 to 256 bytes');
    END IF;
    RETURN key;
END $$;

-- Headers as an object of texts become a list of pairs.
CREATE OR REPLACE FUNCTION "leasehold".headers_1(given jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    pairs jsonb;
    bytes bigint;
    many  bigint;
BEGIN
    IF given IS NULL OR given IN ('null', '{}') THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(given) <> 'object' THEN
        PERFORM "leasehold".refuse_1('headers', jsonb_typeof(given), 'an object of texts');
    END IF;
    IF EXISTS (SELECT FROM jsonb_each(given) AS h WHERE jsonb_typeof(h.value) <> 'string') THEN
        PERFORM "leasehold".refuse_1('headers', 'a value that is no text', 'an object of texts');
    END IF;
    SELECT jsonb_agg(jsonb_build_array(h.key, h.value) ORDER BY h.key),
           sum(octet_length(h.key) + octet_length(h.value)), count(*)
    INTO pairs, bytes, many FROM jsonb_each_text(given) AS h;
    IF many > 64 THEN
        PERFORM "leasehold".refuse_1('headers', many || ' headers', 'at most 64 headers');
    END IF;
    PERFORM "leasehold".check_bytes_1('headers', bytes, 16384);
    RETURN pairs;
END $$;

-- A retry policy as people write it, as the crate stores it.
CREATE OR REPLACE FUNCTION "leasehold".retry_1(given jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    base   bigint;
    cap    bigint;
    factor numeric;
BEGIN
    IF given IS NULL OR given = 'null' THEN
        RETURN NULL;
    END IF;
    PERFORM "leasehold".check_options_1(given, ARRAY['base', 'cap', 'factor']);
    base := coalesce("leasehold".duration_1('base', given -> 'base', 0), 1000000000);
    cap := coalesce("leasehold".duration_1('cap', given -> 'cap', 0), 600000000000);
    IF jsonb_typeof(given -> 'factor') <> 'number' OR (given ->> 'factor')::numeric < 1 THEN
        PERFORM "leasehold".refuse_1('factor', left(given ->> 'factor', 64), 'a number from 1');
    END IF;
    factor := coalesce((given ->> 'factor')::numeric, 2);
    RETURN jsonb_build_object(
        'base', jsonb_build_object('secs', base / 1000000000, 'nanos', base % 1000000000),
        'cap', jsonb_build_object('secs', cap / 1000000000, 'nanos', cap % 1000000000),
        'factor', factor);
END $$;

-- An id in the order of time (UUIDv7).
CREATE OR REPLACE FUNCTION "leasehold".id_1() RETURNS uuid LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    bytes bytea := uuid_send(gen_random_uuid());
    now_  constant bytea := int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint);
BEGIN
    FOR nth IN 0 .. 5 LOOP
        bytes := set_byte(bytes, nth, get_byte(now_, nth + 2));
    END LOOP;
    bytes := set_byte(bytes, 6, get_byte(bytes, 6) & 15 | 112);
    RETURN encode(bytes, 'hex')::uuid;
END $$;

-- Jobs as JSON: checked, all of them, before the first is stored.
CREATE OR REPLACE FUNCTION "leasehold".enqueue_json_1(of_namespace text, jobs jsonb)
RETURNS TABLE (nth integer, id uuid, is_new boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    NAMES constant text[] := ARRAY['queue', 'kind', 'payload', 'id', 'delay', 'run_at', 'priority', 'unique', 'unique_for',
        'exclusive', 'version', 'headers', 'term', 'max_lifetime', 'timeout', 'stall_limit', 'retention', 'max_failures',
        'max_expiries', 'retry'];
    INT_MAX constant bigint := 2147483647;
    given     record;
    job       jsonb;
    payload   bytea;
    key       bytea;
    delay     bigint;
    headers   jsonb;
    choices   jsonb;
    weight    bigint := 0;
    ids       uuid[] := '{}';
    queues    text[] := '{}';
    kinds     text[] := '{}';
    payloads  bytea[] := '{}';
    delays    bigint[] := '{}';
    uniques   bytea[] := '{}';
    exclusive bytea[] := '{}';
    options   jsonb[] := '{}';
BEGIN
    IF jobs IS NULL OR jsonb_typeof(jobs) <> 'array' THEN
        PERFORM "leasehold".refuse_1('jobs', coalesce(jsonb_typeof(jobs), 'null'), 'an array of objects');
    END IF;
    IF jsonb_array_length(jobs) > 10000 THEN
        PERFORM "leasehold".refuse_1('jobs', jsonb_array_length(jobs) || ' jobs in a call',
                                   'at most 10000 jobs in a call');
    END IF;
    FOR given IN SELECT j.value FROM jsonb_array_elements(jobs) WITH ORDINALITY AS j (value, n) ORDER BY j.n LOOP
        job := given.value;
        PERFORM "leasehold".check_options_1(job, NAMES);
        PERFORM "leasehold".check_name_1('queue', job ->> 'queue');
        PERFORM "leasehold".check_name_1('kind', job ->> 'kind');
        IF job -> 'payload' IS NULL THEN
            PERFORM "leasehold".refuse_1('payload', 'nothing', 'JSON');
        END IF;
        payload := convert_to((job -> 'payload')::text, 'UTF8');
        PERFORM "leasehold".check_bytes_1('payload', octet_length(payload), 262144);
        BEGIN
            ids := ids || coalesce((job ->> 'id')::uuid, "leasehold".id_1());
        EXCEPTION WHEN data_exception THEN
            PERFORM "leasehold".refuse_1('id', left(job ->> 'id', 64), 'a UUID');
        END;
        delay := "leasehold".duration_1('delay', job -> 'delay', 0);
        IF job ->> 'run_at' IS NOT NULL THEN
            IF delay IS NOT NULL THEN
                PERFORM "leasehold".refuse_1('run_at', 'delay as well', 'one of the two');
            END IF;
            BEGIN
                delay := (greatest(0, extract(epoch FROM (job ->> 'run_at')::timestamptz - clock_timestamp())) * 1000000000)::bigint;
            EXCEPTION WHEN data_exception THEN
                PERFORM "leasehold".refuse_1('run_at', left(job ->> 'run_at', 64), 'a timestamp');
            END;
            PERFORM "leasehold".duration_1('run_at', to_jsonb(delay / 1000000000), 0);
        END IF;
        key := "leasehold".key_1('unique', job -> 'unique');
        IF key IS NULL AND job ->> 'unique_for' IS NOT NULL THEN
            PERFORM "leasehold".refuse_1('unique_for', 'no key', 'together with unique');
        END IF;
        headers := "leasehold".headers_1(job -> 'headers');
        choices := jsonb_strip_nulls(jsonb_build_object(
            'version', "leasehold".number_1('version', job -> 'version', 1, INT_MAX),
            'priority', "leasehold".number_1('priority', job -> 'priority', 0, 7),
            'max_expiries', "leasehold".number_1('max_expiries', job -> 'max_expiries', 3, INT_MAX),
            'max_failures', "leasehold".number_1('max_failures', job -> 'max_failures', 1, INT_MAX),
            'unique_window', "leasehold".duration_1('unique_for', job -> 'unique_for', 1000),
            'term', "leasehold".duration_1('term', job -> 'term', 10000000),
            'max_lifetime', "leasehold".duration_1('max_lifetime', job -> 'max_lifetime', 1000),
            'timeout', "leasehold".duration_1('timeout', job -> 'timeout', 1000),
            'stall_limit', "leasehold".duration_1('stall_limit', job -> 'stall_limit', 1000),
            'retention', "leasehold".duration_1('retention', job -> 'retention', 0),
            'retry', "leasehold".retry_1(job -> 'retry'),
            'headers', headers));
        weight := weight + octet_length(payload) + coalesce("leasehold".weight_of_headers_1(headers), 0);
        queues := queues || (job ->> 'queue');
        kinds := kinds || (job ->> 'kind');
        payloads := payloads || payload;
        delays := delays || delay;
        uniques := uniques || key;
        exclusive := exclusive || "leasehold".key_1('exclusive', job -> 'exclusive');
        options := options || nullif(choices, '{}');
    END LOOP;
    IF weight > 16777216 THEN
        PERFORM "leasehold".refuse_1('jobs', weight || ' bytes in a call', 'at most 16777216 bytes in a call');
    END IF;
    RETURN QUERY
    SELECT k.n::integer, coalesce(d.holder, k.id), d.nth IS NULL
    FROM unnest(ids) WITH ORDINALITY AS k (id, n)
    LEFT JOIN "leasehold".enqueue_1(
        of_namespace, NULL, NULL, NULL, NULL, ids, queues, kinds, payloads, delays, uniques, exclusive, options
    ) AS d ON d.nth = k.n
    ORDER BY k.n;
END $$;

-- Stores a job. Of a duplicate the job that has the unique key is named, and is_new is false.
CREATE OR REPLACE FUNCTION "leasehold".enqueue(queue text, kind text, payload jsonb, options jsonb DEFAULT '{}')
RETURNS TABLE (id uuid, is_new boolean) LANGUAGE plpgsql ROWS 1 AS $$
#variable_conflict use_column
BEGIN
    PERFORM "leasehold".check_options_1(options, ARRAY['namespace', 'id', 'delay', 'run_at', 'priority', 'unique',
        'unique_for', 'exclusive', 'version', 'headers', 'term', 'max_lifetime', 'timeout', 'stall_limit', 'retention',
        'max_failures', 'max_expiries', 'retry']);
    RETURN QUERY SELECT e.id, e.is_new FROM "leasehold".enqueue_json_1(
        "leasehold".namespace_1(options),
        jsonb_build_array(options - 'namespace' || jsonb_build_object(
            'queue', enqueue.queue, 'kind', enqueue.kind, 'payload', coalesce(enqueue.payload, 'null')))) AS e;
END $$;

-- Stores jobs, together or none: [{"queue", "kind", "payload", and what options has}, ...].
CREATE OR REPLACE FUNCTION "leasehold".enqueue_many(jobs jsonb, options jsonb DEFAULT '{}')
RETURNS TABLE (nth integer, id uuid, is_new boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM "leasehold".check_options_1(options, ARRAY['namespace']);
    RETURN QUERY SELECT e.nth, e.id, e.is_new FROM "leasehold".enqueue_json_1("leasehold".namespace_1(options), jobs) AS e;
END $$;

-- A job as the view `jobs` shows it.
CREATE OR REPLACE FUNCTION "leasehold".job(id uuid, options jsonb DEFAULT '{}') RETURNS SETOF "leasehold".jobs
LANGUAGE plpgsql STABLE ROWS 1 AS $$
BEGIN
    PERFORM "leasehold".check_options_1(options, ARRAY['namespace']);
    RETURN QUERY SELECT j.* FROM "leasehold".jobs j WHERE j.id = job.id AND j.namespace = "leasehold".namespace_1(options);
END $$;

-- The scope of a job's fences, as Scope::of_key and Scope::of_job write it.
CREATE OR REPLACE FUNCTION "leasehold".scope_1(of_namespace text, of_queue text, of_key bytea, of_job uuid) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT of_namespace || '/' || of_queue
        || CASE WHEN of_key IS NULL THEN '/j:' || of_job ELSE '/k:' || convert_from(of_key, 'UTF8') END
$$;

-- Takes up to `max` jobs, each under a lease. Commit it alone: others wait for the queue until
-- then.
CREATE OR REPLACE FUNCTION "leasehold".claim(
    queues text[], max integer, owner text, term interval DEFAULT '1 minute', options jsonb DEFAULT '{}'
) RETURNS TABLE (
    receipt text, token bigint, scope text, id uuid, queue text, kind text, version integer, payload jsonb, bytes bytea,
    attempt integer, headers jsonb, checkpoint jsonb, checkpoint_seq bigint, deadline timestamptz
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    of_namespace text;
    nonce bytea;
    span  bigint;
    life  bigint;
    many  integer;
BEGIN
    PERFORM "leasehold".check_options_1(options, ARRAY['namespace', 'task', 'max_lifetime', 'suspects', 'nonce']);
    of_namespace := "leasehold".namespace_1(options);
    many := "leasehold".number_1('max', to_jsonb(claim.max), 1, 1000);
    IF many IS NULL THEN
        PERFORM "leasehold".refuse_1('max', 'null', 'a whole number');
    END IF;
    PERFORM "leasehold".check_name_1('queue', q) FROM unnest(queues) AS q;
    IF coalesce(cardinality(queues), 0) NOT BETWEEN 1 AND 1000 THEN
        PERFORM "leasehold".refuse_1('queues', coalesce(cardinality(queues), 0)::text, '1 to 1000 queues in a claim');
    END IF;
    PERFORM "leasehold".check_bytes_1('owner', octet_length(claim.owner), 256);
    PERFORM "leasehold".check_bytes_1('task', octet_length(options ->> 'task'), 256);
    IF claim.owner IS NULL THEN
        PERFORM "leasehold".refuse_1('owner', 'null', 'a name of who works');
    END IF;
    span := "leasehold".duration_1('term', to_jsonb(term::text), 10000000);
    life := coalesce("leasehold".duration_1('max_lifetime', options -> 'max_lifetime', 1000), 86400000000000);
    IF span IS NULL OR life < span THEN
        PERFORM "leasehold".refuse_1('max_lifetime', life / 1000000000 || ' seconds', 'at least the term');
    END IF;
    IF options ->> 'nonce' !~ '^[0-9a-f]{32}$' THEN
        PERFORM "leasehold".refuse_1('nonce', octet_length(options ->> 'nonce') || ' bytes of text', '32 hex digits of fresh randomness');
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'a claim needs a transaction that is READ COMMITTED' USING ERRCODE = 'LH005';
    END IF;
    -- Two random UUIDs are drawn as one: some of their bits are fixed.
    nonce := coalesce(decode(options ->> 'nonce', 'hex'),
                      substr(sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())), 1, 16));
    RETURN QUERY
    SELECT queues[c.nth] || '/0/' || c.lease_of || '/' || c.token || '/' || c.id || '/' || encode(nonce, 'hex'),
           c.token, "leasehold".scope_1(of_namespace, queues[c.nth], c.exclusive_key, c.id), c.id, queues[c.nth], c.kind, c.version,
           "leasehold".json_1(c.payload), c.payload, c.failures + c.expiries + 1,
           (SELECT jsonb_object_agg(h ->> 0, h ->> 1) FROM jsonb_array_elements(c.headers) AS h),
           "leasehold".json_1(c.checkpoint), c.checkpoint_seq, "leasehold".at_1(c.granted_at + c.granted)
    FROM "leasehold".claim_1(
        of_namespace, NULL, NULL, NULL, NULL, claim.owner, coalesce(options ->> 'task', ''), nonce, queues,
        array_fill(span, ARRAY[cardinality(queues)]), array_fill(life, ARRAY[cardinality(queues)]), many,
        coalesce((options ->> 'suspects')::boolean, true), 0, false, NULL, true
    ) AS c
    WHERE c.nth > 0;
END $$;

-- The parts of a receipt. It is a secret: no error shows it.
CREATE OR REPLACE FUNCTION "leasehold".receipt_1(
    receipt text, OUT queue text, OUT lease_of bigint, OUT token bigint, OUT job uuid, OUT nonce bytea
) LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    parts text[] := regexp_match(receipt, '^([A-Za-z0-9_.-]{1,128})/(0|[1-9][0-9]{0,4})/(0|[1-9][0-9]{0,17})/(0|[1-9][0-9]{0,17})/'
        '([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})/([0-9a-f]{32})$');
BEGIN
    IF parts IS NULL THEN
        PERFORM "leasehold".refuse_1('receipt', coalesce(octet_length(receipt), 0) || ' bytes of text',
                                   'queue/partition/grant/token/job/proof');
    END IF;
    queue := parts[1];
    -- This store has no partitions: a receipt of one is nobody's here.
    lease_of := CASE parts[2] WHEN '0' THEN parts[3]::bigint ELSE -1 END;
    token := parts[4];
    job := parts[5];
    nonce := decode(parts[6], 'hex');
END $$;

-- Extends leases by their term. held is false of one that is not the caller's any more: stop
-- working on it. cancel: somebody asked for it to end.
CREATE OR REPLACE FUNCTION "leasehold".renew(receipts text[], options jsonb DEFAULT '{}')
RETURNS TABLE (receipt text, held boolean, cancel boolean, deadline timestamptz) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    of_namespace text;
    queues  text[];
    ids     bigint[];
    nonces  bytea[];
    upto    integer[];
    tokens  bigint[];
    term    bigint;
BEGIN
    PERFORM "leasehold".check_options_1(options, ARRAY['namespace']);
    of_namespace := "leasehold".namespace_1(options);
    IF coalesce(cardinality(receipts), 0) > 10000 THEN
        PERFORM "leasehold".refuse_1('receipts', cardinality(receipts)::text, 'at most 10000 receipts in a call');
    END IF;
    SELECT array_agg(g.queue ORDER BY g.n), array_agg(g.lease_of ORDER BY g.n), array_agg(g.nonce ORDER BY g.n),
           array_agg(g.upto::integer ORDER BY g.n)
    INTO queues, ids, nonces, upto
    FROM (SELECT r.queue, r.lease_of, r.nonce, row_number() OVER w AS n, sum(count(*)) OVER w AS upto
          FROM (SELECT DISTINCT p.* FROM unnest(receipts) AS k (text), "leasehold".receipt_1(k.text) AS p) AS r
          GROUP BY r.queue, r.lease_of, r.nonce WINDOW w AS (ORDER BY r.queue, r.lease_of, r.nonce)) AS g;
    IF queues IS NULL THEN
        RETURN;
    END IF;
    SELECT array_agg(r.token ORDER BY r.queue, r.lease_of, r.nonce, r.token) INTO tokens
    FROM (SELECT DISTINCT p.* FROM unnest(receipts) AS k (text), "leasehold".receipt_1(k.text) AS p) AS r;
    SELECT min(g.term) / 1000000 INTO term FROM unnest(queues, ids, nonces) AS k (queue, id, nonce)
    JOIN "leasehold".queue q ON q.namespace = of_namespace AND q.name = k.queue
    JOIN "leasehold".grants g ON g.queue = q.id AND g.id = k.id AND g.nonce_hash = sha256(k.nonce);
    IF term IS NOT NULL THEN
        PERFORM "leasehold".limit_1(term, term);
    END IF;
    RETURN QUERY
    WITH answers AS MATERIALIZED (
        SELECT a.*, queues[a.nth] AS queue, ids[a.nth] AS id, nonces[a.nth] AS nonce,
               clock_timestamp() + a.granted * interval '1 microsecond' AS till
        FROM "leasehold".renew_1(of_namespace, NULL, queues, ids, nonces, upto, tokens, NULL, NULL, NULL, NULL, NULL) AS a
    )
    SELECT k.text, coalesce(p.token <> ALL (a.fenced), false), coalesce(p.token = ANY (a.cancel), false),
           CASE WHEN p.token <> ALL (a.fenced) THEN a.till END
    FROM unnest(receipts) WITH ORDINALITY AS k (text, n) CROSS JOIN LATERAL "leasehold".receipt_1(k.text) AS p
    LEFT JOIN answers a ON a.queue = p.queue AND a.id = p.lease_of AND a.nonce = p.nonce
    ORDER BY k.n;
END $$;

-- Puts the limits of a lease on a transaction: the server ends it if it stands still for a term,
-- and a statement that takes longer than the lease has left (all in milliseconds).
CREATE OR REPLACE FUNCTION "leasehold".limit_1(term bigint, left_ bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    own   bigint;
    name  text;
    noted text;
    most  bigint;
BEGIN
    FOREACH name IN ARRAY ARRAY['idle_in_transaction_session_timeout', 'statement_timeout', 'lock_timeout'] LOOP
        most := least(2147483647, greatest(1, CASE name WHEN 'idle_in_transaction_session_timeout' THEN term ELSE left_ END));
        -- A stricter one of the caller's own stays. It is kept under another name, as in
        -- src/driver/limit.rs, so that a later call under a renewed lease can set a longer limit.
        noted := 'leasehold' || '.' || name;
        PERFORM set_config(noted, coalesce(nullif(current_setting(noted, true), ''), current_setting(name)), true);
        own := nullif((extract(epoch FROM current_setting(noted)::interval) * 1000)::bigint, 0);
        PERFORM set_config(name, least(own, most)::text, true);
    END LOOP;
END $$;

-- The same before a call that locks the lease's job, so that a transaction of which it is the first
-- does not keep the job for longer. A lease that is overdue can still be ended: what is left of it
-- is no limit then.
CREATE OR REPLACE FUNCTION "leasehold".limit_of_1(of_namespace text, receipt text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    r    constant record := "leasehold".receipt_1(receipt);
    term bigint;
    left_ bigint;
BEGIN
    SELECT g.term / 1000000, (g.deadline - "leasehold".clock_1(NULL)) / 1000 INTO term, left_
    FROM "leasehold".grants g JOIN "leasehold".queue q ON q.id = g.queue
    WHERE q.name = r.queue AND q.namespace = of_namespace AND g.id = r.lease_of AND g.nonce_hash = sha256(r.nonce);
    IF FOUND THEN
        PERFORM "leasehold".limit_1(term, CASE WHEN left_ > 0 THEN left_ ELSE term END);
    END IF;
END $$;

-- Ends one lease, or says that it was not the caller's.
CREATE OR REPLACE FUNCTION "leasehold".settle_text_1(
    receipt text, outcome smallint, delay bigint, reason text, result bytea, options jsonb
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    r        record;
    verdicts smallint[];
BEGIN
    PERFORM "leasehold".check_options_1(options, ARRAY['namespace']);
    r := "leasehold".receipt_1(receipt);
    PERFORM "leasehold".limit_of_1("leasehold".namespace_1(options), receipt);
    verdicts := "leasehold".settle_1(
        "leasehold".namespace_1(options), NULL, NULL, NULL, NULL, ARRAY[r.queue], ARRAY[r.job], ARRAY[r.lease_of], ARRAY[r.token],
        ARRAY[r.nonce], ARRAY[outcome], ARRAY[delay], ARRAY[reason], NULL, ARRAY[result]);
    IF verdicts[1] = 0 THEN
        PERFORM "leasehold".stale_1('the lease of job ' || r.job || ' under token ' || r.token || ' has ended');
    END IF;
END $$;

-- Cut to the bytes that are kept of a reason.
CREATE OR REPLACE FUNCTION "leasehold".clip_1(reason text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    cut text := left(reason, 4096);
BEGIN
    WHILE octet_length(cut) > 4096 LOOP
        cut := left(cut, -((octet_length(cut) - 4096 + 3) / 4));
    END LOOP;
    RETURN cut;
END $$;

-- The job is done.
CREATE OR REPLACE FUNCTION "leasehold".complete(receipt text, result jsonb DEFAULT NULL, options jsonb DEFAULT '{}')
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    bytes constant bytea := convert_to(result::text, 'UTF8');
BEGIN
    PERFORM "leasehold".check_bytes_1('result', octet_length(bytes), 262144);
    PERFORM "leasehold".settle_text_1(receipt, 0::smallint, NULL, NULL, bytes, options);
END $$;

-- The run failed. The job comes back after retry_in, or else as its retry policy says, and is dead
-- after as many failures as it may have, or if it is to be buried. The answer: the job's state.
CREATE OR REPLACE FUNCTION "leasehold".fail(
    receipt text, reason text, retry_in interval DEFAULT NULL, bury boolean DEFAULT false, options jsonb DEFAULT '{}'
) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    r     constant record := "leasehold".receipt_1(receipt);
    j     record;
    delay bigint := "leasehold".duration_1('retry_in', to_jsonb(retry_in::text), 0);
    over  boolean := coalesce(fail.bury, false);
BEGIN
    PERFORM "leasehold".check_options_1(options, ARRAY['namespace']);
    SELECT k.queue, k.failures, k.options INTO j FROM "leasehold".job k JOIN "leasehold".queue q ON q.id = k.queue
    WHERE k.id = r.job AND q.name = r.queue AND q.namespace = "leasehold".namespace_1(options);
    IF NOT over AND FOUND THEN
        over := j.failures + 1 >= coalesce((j.options ->> 'max_failures')::bigint, 10);
        delay := coalesce(delay, "leasehold".backoff_1(j.options -> 'retry', j.failures));
    END IF;
    PERFORM "leasehold".settle_text_1(receipt, CASE WHEN over THEN 4 ELSE 1 END::smallint, delay,
                                    "leasehold".clip_1(coalesce(fail.reason, '')), NULL, options);
    RETURN (SELECT "leasehold".state_1(k.state) FROM "leasehold".job k WHERE k.id = r.job AND k.queue = j.queue);
END $$;

-- How long to wait after so many failures and one: a random time between half of the bound and the
-- bound.
CREATE OR REPLACE FUNCTION "leasehold".backoff_1(policy jsonb, failures integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    base   constant float8 := coalesce((policy #>> '{base,secs}')::float8 * 1e9 + (policy #>> '{base,nanos}')::float8, 1000000000);
    cap    constant float8 := coalesce((policy #>> '{cap,secs}')::float8 * 1e9 + (policy #>> '{cap,nanos}')::float8, 600000000000);
    factor constant float8 := coalesce((policy ->> 'factor')::float8, 2);
    bound  float8;
BEGIN
    IF base <= 0 OR cap <= 0 THEN
        RETURN 0;
    END IF;
    bound := CASE WHEN ln(base) + failures * ln(factor) >= ln(cap) THEN cap ELSE base * factor ^ failures END;
    RETURN least(cap, CASE WHEN factor = 1 THEN bound ELSE bound * (0.5 + random() / 2) END);
END $$;

-- Hands the job back unfinished. Nothing is counted; it is ready at once, at the front.
CREATE OR REPLACE FUNCTION "leasehold".surrender(receipt text, options jsonb DEFAULT '{}') RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM "leasehold".settle_text_1(receipt, 2::smallint, 0, NULL, NULL, options);
END $$;

-- Hands the job back for a while. Nothing is counted.
CREATE OR REPLACE FUNCTION "leasehold".snooze(receipt text, delay interval, options jsonb DEFAULT '{}') RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM "leasehold".settle_text_1(receipt, 2::smallint,
        coalesce("leasehold".duration_1('delay', to_jsonb(delay::text), 0), 0), NULL, NULL, options);
END $$;

-- Saves state for the next run. False: this lease has saved a later one.
CREATE OR REPLACE FUNCTION "leasehold".checkpoint(receipt text, seq bigint, state jsonb, options jsonb DEFAULT '{}')
RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    r       constant record := "leasehold".receipt_1(receipt);
    bytes   constant bytea := convert_to(coalesce(checkpoint.state, 'null')::text, 'UTF8');
    verdict smallint;
BEGIN
    PERFORM "leasehold".check_options_1(options, ARRAY['namespace']);
    PERFORM "leasehold".check_bytes_1('checkpoint', octet_length(bytes), 262144);
    PERFORM "leasehold".number_1('seq', to_jsonb(coalesce(checkpoint.seq, -1)), 0, 9223372036854775807);
    PERFORM "leasehold".limit_of_1("leasehold".namespace_1(options), receipt);
    SELECT c.verdict INTO verdict FROM "leasehold".checkpoint_1(
        "leasehold".namespace_1(options), NULL, NULL, NULL, NULL, ARRAY[r.queue], ARRAY[r.job], ARRAY[r.lease_of], ARRAY[r.token],
        ARRAY[r.nonce], ARRAY[checkpoint.seq], ARRAY[bytes]) AS c;
    IF verdict = 0 THEN
        PERFORM "leasehold".stale_1('the lease of job ' || r.job || ' under token ' || r.token || ' has ended');
    END IF;
    RETURN verdict < 8;
END $$;

-- Holds a scope and a token for as long as the transaction lasts, so that a successor can see who
-- is there; ends transactions of replaced owners that stand still there (src/driver/limit.rs).
CREATE OR REPLACE FUNCTION "leasehold".hold_1(scope text, token bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    key     constant bigint := hashtextextended(scope, 16);
    another boolean;
BEGIN
    another := NOT (pg_try_advisory_lock(key) AND pg_advisory_unlock(key));
    PERFORM pg_advisory_xact_lock_shared(key);
    PERFORM pg_advisory_xact_lock_shared(((token >> 32) - 2147483648)::integer, ((token << 32) >> 32)::integer);
    IF NOT another THEN
        RETURN;
    END IF;
    BEGIN
        PERFORM pg_terminate_backend(s.pid) FROM (
            SELECT l.pid FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
            WHERE l.locktype = 'advisory' AND l.granted AND l.pid <> pg_backend_pid()
              AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
              AND (a.state LIKE 'idle in transaction%' AND a.state_change < clock_timestamp() - interval '1 s'
                   OR a.wait_event = 'ClientWrite' AND a.query_start < clock_timestamp() - interval '1 s')
            GROUP BY l.pid
            HAVING bool_or(l.objsubid = 1 AND l.classid::bigint << 32 | l.objid::bigint = key)
               AND max(CASE WHEN l.objsubid = 2 AND l.classid::bigint >> 31 = 1
                            THEN (l.classid::bigint & 2147483647) << 32 | l.objid::bigint END) < token) AS s;
    EXCEPTION WHEN insufficient_privilege THEN
        -- It is left to its own limits.
    END;
END $$;

-- Begins work under a lease: first in the transaction, under its limits. A frozen owner does not
-- hold its successor.
CREATE OR REPLACE FUNCTION "leasehold".begin(receipt text, options jsonb DEFAULT '{}')
RETURNS TABLE (scope text, token bigint, deadline timestamptz) LANGUAGE plpgsql ROWS 1 AS $$
#variable_conflict use_column
DECLARE
    r    constant record := "leasehold".receipt_1(receipt);
    held record;
BEGIN
    PERFORM "leasehold".check_options_1(options, ARRAY['namespace']);
    SELECT g.term / 1000000 AS term, g.deadline, g.deadline - "leasehold".clock_1(NULL) AS left_,
           "leasehold".scope_1(q.namespace, q.name, j.exclusive_key, j.id) AS scope
    INTO held FROM "leasehold".job j JOIN "leasehold".queue q ON q.id = j.queue
    JOIN "leasehold".grants g ON g.queue = j.queue AND g.id = j.lease_of
    WHERE j.id = r.job AND q.name = r.queue AND q.namespace = "leasehold".namespace_1(options) AND j.state = 6
      AND j.token = r.token AND j.lease_of = r.lease_of AND g.nonce_hash = sha256(r.nonce);
    IF NOT FOUND OR held.left_ <= 0 THEN
        PERFORM "leasehold".stale_1('the lease of job ' || r.job || ' under token ' || r.token || ' has ended');
    END IF;
    PERFORM "leasehold".limit_1(held.term, held.left_ / 1000);
    PERFORM "leasehold".hold_1(held.scope, r.token);
    RETURN QUERY SELECT held.scope, r.token, "leasehold".at_1(held.deadline);
END $$;

-- Raises the mark of a scope, and refuses a token below it: before the first read, in the same
-- transaction as the effect. Whoever opened it with a larger token has replaced the caller. It does
-- not know the lease, and so puts no limits on the transaction: begin does.
CREATE OR REPLACE FUNCTION "leasehold".open_fence(scope text, token bigint) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now_ bigint;
BEGIN
    IF open_fence.scope !~ '^[A-Za-z0-9_.-]{1,128}/[A-Za-z0-9_.-]{1,128}/[kjn]:.' OR octet_length(open_fence.scope) > 516 THEN
        PERFORM "leasehold".refuse_1('scope', octet_length(open_fence.scope) || ' bytes of text',
                                   'namespace/queue/k:key, j:job or n:name');
    END IF;
    PERFORM "leasehold".hold_1(open_fence.scope, open_fence.token);
    INSERT INTO "leasehold".fence AS f (scope, mark) VALUES (open_fence.scope, open_fence.token)
    ON CONFLICT (scope) DO UPDATE SET mark = greatest(f.mark, excluded.mark) RETURNING f.mark INTO now_;
    -- Marks below the floor were forgotten, perhaps just now. A transaction that reads only what
    -- was there when it began fails if the floor was raised since.
    PERFORM FROM "leasehold".fence f WHERE f.scope = '' AND current_setting('transaction_isolation') <> 'read committed' FOR SHARE;
    SELECT greatest(now_, (SELECT f.mark FROM "leasehold".fence f WHERE f.scope = '')) INTO now_;
    IF now_ > open_fence.token OR open_fence.token IS NULL THEN
        PERFORM "leasehold".stale_1('the mark of ' || open_fence.scope || ' is ' || now_ || ', above token ' || open_fence.token);
    END IF;
END $$;

UPDATE "leasehold".meta SET code = '35abe74dac4c9a90', edition = 1000 WHERE version = 1;
