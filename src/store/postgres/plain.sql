-- plain: version 2. Calls of which every part is plain, each as one statement.
-- in   what the call says      out  its answer, or nothing: the call is not plain, and nothing was done
-- why  the queue's row is locked for as long as the server works, and not for round trips; the plans
--      are kept; and a statement that is a transaction by itself is done as a whole or not at all,
--      whatever became of those sent before it
--
-- Whatever needs the rules of src/rules is not plain: a repeat, an overdue grant, a due or
-- scheduled job, a suspect, a key, a term of the job's own, a stale receipt. The verbs' own statements
-- do it then. So each function looks first and changes last.
--
-- The plans are kept, and must not depend on how many rows there were when they were made: a queue fills
-- in a second, and is analysed once a minute. The settings of the functions below are for that; those
-- that they call inherit them.

-- Eight bytes as records have them: the lowest first.
CREATE FUNCTION leasehold.little(n bigint) RETURNS bytea LANGUAGE sql IMMUTABLE AS
$$ SELECT int8send(((n & 255) << 56) | ((n & 65280) << 40) | ((n & 16711680) << 24) | ((n & 4278190080) << 8)
    | ((n >> 8) & 4278190080) | ((n >> 24) & 16711680) | ((n >> 40) & 65280) | ((n >> 56) & 255)) $$;

-- What plain calls add to the counts, in the columns of tally.rs.
CREATE FUNCTION leasehold.plain_tally(ready bigint, leased bigint, enqueued bigint, granted bigint, completed bigint)
RETURNS bigint[] LANGUAGE sql IMMUTABLE AS
$$ SELECT ARRAY[0, ready, 0, leased, 0, 0, 0, enqueued, granted, completed, 0, 0, 0, 0, 0, 0, 0, 0, leased,
                0, 0, 0, 0]::bigint[] $$;

-- Whether a request is new, and its session in no need of care. Begins a plain call: it reads what is
-- committed when it reads, and waits for each lock as long as any call. The limits of a statement's time
-- and of idleness cannot be set from inside it, and are not missed: a plain call is one statement, of
-- bounded work, that never waits for its client.
CREATE FUNCTION leasehold.plain_begin(
    of_namespace text, patience text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN false;
    END IF;
    PERFORM set_config('lock_timeout', patience, true);
    RETURN EXISTS (SELECT FROM leasehold.sessions s WHERE s.id = of_session AND s.namespace = of_namespace
                     AND s.used > leasehold.clock(by_hand) - 60000000)
       AND NOT EXISTS (SELECT FROM leasehold.lanes l
                       WHERE l.session = of_session AND l.lane = of_lane AND l.seq >= of_seq);
END $$;

-- enqueue, without keys and delays. of_queue says for each job which of the names it has.
CREATE FUNCTION leasehold.enqueue_plain(
    of_namespace text, patience text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    names text[], of_queue integer[], lines smallint[], ids uuid[], lowest uuid, highest uuid,
    weights integer[], records bytea[], given bytea
) RETURNS boolean LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    at     bigint;
    stamp  bytea;
    queues integer[];
BEGIN
    IF NOT leasehold.plain_begin(of_namespace, patience, by_hand, of_session, of_lane, of_seq) THEN
        RETURN false;
    END IF;
    queues := ARRAY (
        SELECT (SELECT q.id FROM leasehold.queues q WHERE q.namespace = of_namespace AND q.name = k.name)
        FROM unnest(names) WITH ORDINALITY AS k (name, nth) ORDER BY nth);
    IF array_position(queues, NULL) IS NOT NULL THEN
        RETURN false;
    END IF;
    -- The client's id is the job. One that seems to be there already is looked at with care.
    IF EXISTS (SELECT FROM unnest(ids) AS k (id)
               WHERE (SELECT true FROM leasehold.ready r WHERE r.id = k.id LIMIT 1)
                  OR (SELECT true FROM leasehold.aside a WHERE a.id = k.id LIMIT 1))
       OR EXISTS (SELECT FROM leasehold.grants g
                  JOIN leasehold.records r ON r.queue = g.queue AND r.id = g.id
                  WHERE g.last_job >= lowest AND g.first_job <= highest AND EXISTS (
                      SELECT FROM generate_series(1, octet_length(r.heads), 24) AS n
                      WHERE substr(r.heads, n, 16) = ANY (ARRAY (SELECT uuid_send(id) FROM unnest(ids) AS id))))
    THEN
        RETURN false;
    END IF;
    at := leasehold.clock(by_hand);
    stamp := leasehold.little(at) || leasehold.little(at);
    -- Before a place is drawn: see seal in schema.sql.
    PERFORM pg_current_xact_id();
    INSERT INTO leasehold.ready (queue, line, place, id, weight, record)
    SELECT queues[nth], line, nextval('leasehold.places'), id, weight, overlay(record PLACING stamp FROM 33 FOR 16)
    FROM unnest(of_queue, lines, ids, weights, records) AS job (nth, line, id, weight, record);
    INSERT INTO leasehold.tallies (queue, tally)
    SELECT queues[nth], leasehold.plain_tally(count(*), 0, count(*), 0, 0) FROM unnest(of_queue) AS nth GROUP BY nth;
    PERFORM leasehold.remember(of_session, of_lane, of_seq, 1::smallint, at, given);
    RETURN true;
END $$;

-- Ends leases of jobs that leave nothing behind when they are completed. upto says where the leases of
-- each grant end in the list of tokens, which ascend within a grant.
CREATE FUNCTION leasehold.end_plain(
    of_namespace text, at bigint, names text[], ids bigint[], nonces bytea[], upto integer[], tokens bigint[], jobs uuid[]
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    held    record;
    token   bigint;
    since   integer;
    ending  integer;
    found_  integer := 0;
    queues  integer[] := '{}';
    counts  integer[] := '{}';
    over_q  integer[] := '{}';
    over_id bigint[] := '{}';
    left_q  integer[] := '{}';
    left_id bigint[] := '{}';
    lives   integer[] := '{}';
    ends    bytea[] := '{}';
BEGIN
    FOR held IN
        SELECT g.queue, g.id, g.leases, g.live, g.ended, r.heads || ''::bytea AS heads, k.nth::integer,
               g.nonce = k.nonce AND NOT g.noted AND g.deadline > at
                   AND octet_length(r.heads) = g.leases * 24 AS fits
        FROM unnest(names, ids, nonces) WITH ORDINALITY AS k (name, id, nonce, nth)
        JOIN leasehold.queues q ON q.namespace = of_namespace AND q.name = k.name
        JOIN leasehold.grants g ON g.queue = q.id AND g.id = k.id
        JOIN leasehold.records r ON r.queue = g.queue AND r.id = g.id
        ORDER BY g.queue, g.id FOR UPDATE OF g
    LOOP
        since := CASE WHEN held.nth = 1 THEN 1 ELSE upto[held.nth - 1] + 1 END;
        ending := upto[held.nth] - since + 1;
        found_ := found_ + 1;
        -- 133: the flags of jobs that leave something behind.
        IF NOT held.fits OR NOT (
            SELECT bool_and(CASE WHEN n >= 0 AND n < held.leases THEN
                       get_bit(held.ended, n) = 0 AND substr(held.heads, n * 24 + 1, 16) = uuid_send(job)
                       AND get_byte(held.heads, n * 24 + 18) & 133 = 0
                   ELSE false END)
            FROM (SELECT (shown - held.id)::integer AS n, job
                  FROM unnest(tokens[since : upto[held.nth]], jobs[since : upto[held.nth]]) AS k (shown, job)) AS l
        ) THEN
            RETURN false;
        END IF;
        queues := queues || held.queue;
        counts := counts || ending;
        IF ending = held.live THEN
            over_q := over_q || held.queue;
            over_id := over_id || held.id;
        ELSE
            -- A large grant of which half has ended is to be compacted: its last head says how large.
            IF (held.live - ending) * 2 <= held.leases
               AND get_byte(held.heads, held.leases * 24 - 1) * 256 + get_byte(held.heads, held.leases * 24 - 2) > 0
            THEN
                RETURN false;
            END IF;
            FOREACH token IN ARRAY tokens[since : upto[held.nth]] LOOP
                held.ended := set_bit(held.ended, (token - held.id)::integer, 1);
            END LOOP;
            left_q := left_q || held.queue;
            left_id := left_id || held.id;
            lives := lives || (held.live - ending);
            ends := ends || held.ended;
        END IF;
    END LOOP;
    IF found_ <> cardinality(ids) THEN
        RETURN false;
    END IF;
    IF over_id <> '{}' THEN
        DELETE FROM leasehold.records r USING unnest(over_q, over_id) AS k (queue, id)
        WHERE r.queue = k.queue AND r.id = k.id;
        DELETE FROM leasehold.grants g USING unnest(over_q, over_id) AS k (queue, id)
        WHERE g.queue = k.queue AND g.id = k.id;
    END IF;
    IF left_id <> '{}' THEN
        UPDATE leasehold.grants g SET live = k.live, ended = k.ended
        FROM unnest(left_q, left_id, lives, ends) AS k (queue, id, live, ended)
        WHERE g.queue = k.queue AND g.id = k.id;
    END IF;
    INSERT INTO leasehold.tallies (queue, tally)
    SELECT queue, leasehold.plain_tally(0, -sum(n), 0, 0, sum(n))
    FROM unnest(queues, counts) AS k (queue, n) GROUP BY queue;
    RETURN true;
END $$;

-- settle, of jobs that are completed and leave nothing behind. The verdicts are all alike.
CREATE FUNCTION leasehold.settle_plain(
    of_namespace text, patience text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    names text[], ids bigint[], nonces bytea[], upto integer[], tokens bigint[], jobs uuid[], given bytea
) RETURNS boolean LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    at bigint;
BEGIN
    IF NOT leasehold.plain_begin(of_namespace, patience, by_hand, of_session, of_lane, of_seq) THEN
        RETURN false;
    END IF;
    at := leasehold.clock(by_hand);
    IF NOT leasehold.end_plain(of_namespace, at, names, ids, nonces, upto, tokens, jobs) THEN
        RETURN false;
    END IF;
    PERFORM leasehold.remember(of_session, of_lane, of_seq, 3::smallint, at, given);
    RETURN true;
END $$;

-- claim. One row for each queue that was served, by its place in names: the first token, the records end
-- to end, and when the queue is worth a claim again. The first row has place 0, and the time.
CREATE FUNCTION leasehold.claim_plain(
    of_namespace text, patience text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    names text[], terms bigint[], lifetimes bigint[], spans bigint[], most integer, seen bigint,
    shown bytea, of_owner text, of_task text
) RETURNS TABLE (nth integer, token bigint, records bytea, due bigint, deadline bigint) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    queue    record;
    next     record;
    at       bigint;
    place_   integer;
    base     bigint;
    room     bigint;
    last_    bigint;
    grants_  integer := 0;
    answer   bytea := '';
    queues   integer[] := array_fill(NULL::integer, ARRAY[cardinality(names)]);
    issuers  bigint[] := array_fill(0::bigint, ARRAY[cardinality(names)]);
    floors   bigint[] := array_fill(0::bigint, ARRAY[cardinality(names)]);
    is_open  boolean[] := array_fill(false, ARRAY[cardinality(names)]);
    counts   integer[] := array_fill(0, ARRAY[cardinality(names)]);
    bases    bigint[] := array_fill(0::bigint, ARRAY[cardinality(names)]);
    first_   uuid[] := array_fill(NULL::uuid, ARRAY[cardinality(names)]);
    final_   uuid[] := array_fill(NULL::uuid, ARRAY[cardinality(names)]);
    dues     bigint[] := array_fill(NULL::bigint, ARRAY[cardinality(names)]);
    spots    tid[] := '{}';
    taken    integer := 0;
    served   integer := 0;
    weight_  bigint := 0;
    known    record;
    line_    smallint;
    wanted   integer;
BEGIN
    IF NOT leasehold.plain_begin(of_namespace, patience, by_hand, of_session, of_lane, of_seq) THEN
        RETURN;
    END IF;
    -- A claim that finds nothing takes nothing: it waits for no lock, and not for the disk, since a
    -- repeat that finds no answer does no harm.
    IF NOT EXISTS (
        SELECT FROM leasehold.queues q WHERE q.namespace = of_namespace AND q.name = ANY (names)
           AND leasehold.has_ready(q.id))
    THEN
        SELECT min(a.at) AS due, min(g.deadline) AS deadline,
               max(CASE WHEN q.last > q.floor + 20000 THEN q.last ELSE q.floor END) AS highest INTO next
        FROM leasehold.queues q
        LEFT JOIN LATERAL (SELECT d.at FROM leasehold.aside d WHERE d.queue = q.id AND d.state = 0
                           ORDER BY d.at, d.seq LIMIT 1) AS a ON true
        LEFT JOIN LATERAL (SELECT l.deadline FROM leasehold.grants l WHERE l.queue = q.id
                           ORDER BY l.deadline, l.id LIMIT 1) AS g ON true
        WHERE q.namespace = of_namespace AND q.name = ANY (names);
        at := leasehold.clock(by_hand);
        IF (next.due > at) IS NOT FALSE AND (next.deadline > at) IS NOT FALSE
           AND (next.highest > at + 20000) IS NOT TRUE THEN
            PERFORM set_config('synchronous_commit', 'off', true);
            PERFORM leasehold.remember(of_session, of_lane, of_seq, 2::smallint, at, '\x00000000'::bytea);
            nth := 0;
            token := at;
            RETURN NEXT;
            nth := 1;
            token := NULL;
            due := next.due;
            deadline := next.deadline;
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;
    FOR queue IN
        SELECT q.id, q.name, q.paused, q.last, q.floor FROM leasehold.queues q
        WHERE q.namespace = of_namespace AND q.name = ANY (names) ORDER BY q.id FOR UPDATE
    LOOP
        place_ := array_position(names, queue.name);
        queues[place_] := queue.id;
        issuers[place_] := queue.last;
        floors[place_] := queue.floor;
        is_open[place_] := NOT queue.paused;
    END LOOP;
    at := leasehold.clock(by_hand);

    FOR i IN 1 .. cardinality(names) LOOP
        EXIT WHEN taken = most;
        served := i;
        CONTINUE WHEN queues[i] IS NULL;
        dues[i] := (SELECT a.at FROM leasehold.aside a WHERE a.queue = queues[i] AND a.state = 0
                    ORDER BY a.at, a.seq LIMIT 1);
        IF dues[i] <= at OR EXISTS (SELECT FROM leasehold.grants g
                                    WHERE g.queue = queues[i] AND g.deadline <= at) THEN
            RETURN;
        END IF;
        -- As the issuer of src/rules/issue.rs does it. While the clock is behind it, no claim is plain.
        last_ := greatest(issuers[i], seen);
        room := greatest(at, floors[i]) + 20001;
        base := greatest(last_ + 1, floors[i] + 1, at);
        IF base >= room THEN
            base := greatest(issuers[i] + 1, floors[i] + 1, at);
        END IF;
        IF base >= room OR floors[i] > at + 20000 THEN
            RETURN;
        END IF;
        CONTINUE WHEN NOT is_open[i];
        -- In the order of service: lines of which no start is known, what went to the front of the next
        -- line since, and what is behind its start.
        SELECT * INTO known FROM leasehold.known_starts(queues[i]);
        FOR part IN 0 .. cardinality(known.lines) * 3 LOOP
            wanted := least(most - taken, room - base - counts[i]);
            EXIT WHEN wanted <= 0;
            line_ := known.lines[part / 3 + 1];
            -- 24: the flags of jobs with terms of their own.
            IF part % 3 = 0 THEN
                SELECT count(*)::integer AS n, array_agg(r.spot) AS spots, sum(r.weight) AS weight,
                       bool_or(r.line % 2 = 0 OR get_byte(r.flags, 0) & 24 <> 0) AS odd,
                       array_agg(r.id ORDER BY r.id) AS ids
                INTO next
                FROM (SELECT e.ctid AS spot, e.line, e.id, e.weight, substr(e.record, 7, 1) AS flags
                      FROM leasehold.ready e
                      WHERE e.queue = queues[i] AND e.line > coalesce(known.lines[part / 3], -1)
                        AND e.line < coalesce(line_, 16)
                      ORDER BY e.line, e.place LIMIT wanted) AS r;
            ELSE
                SELECT count(*)::integer AS n, array_agg(r.spot) AS spots, sum(r.weight) AS weight,
                       bool_or(r.line % 2 = 0 OR get_byte(r.flags, 0) & 24 <> 0) AS odd,
                       array_agg(r.id ORDER BY r.id) AS ids
                INTO next
                FROM (SELECT e.ctid AS spot, e.line, e.id, e.weight, substr(e.record, 7, 1) AS flags
                      FROM leasehold.ready e
                      WHERE e.queue = queues[i] AND e.line = line_
                        AND e.place >= CASE WHEN part % 3 = 1 THEN -9223372036854775807 ELSE known.starts[part / 3 + 1] END
                        AND e.place < CASE WHEN part % 3 = 1 THEN -known.sealed ELSE 9223372036854775807 END
                      ORDER BY e.place LIMIT wanted) AS r;
            END IF;
            CONTINUE WHEN next.n = 0;
            weight_ := weight_ + next.weight;
            IF next.odd OR weight_ > 4194304 THEN
                RETURN;
            END IF;
            counts[i] := counts[i] + next.n;
            spots := spots || next.spots;
            first_[i] := least(first_[i], next.ids[1]);
            final_[i] := greatest(final_[i], next.ids[next.n]);
            taken := taken + next.n;
        END LOOP;
        CONTINUE WHEN counts[i] = 0;
        bases[i] := base;
        seen := greatest(seen, base + counts[i] - 1);
    END LOOP;

    nth := 0;
    token := at;
    RETURN NEXT;
    taken := 0;
    FOR i IN 1 .. served LOOP
        CONTINUE WHEN queues[i] IS NULL;
        nth := i;
        token := NULL;
        records := NULL;
        IF counts[i] > 0 THEN
            -- A head as in src/store/held.rs: the job's id, its place, its flags, the end of its record, each
            -- with the lowest byte first. Written out, for a function would be called for each.
            WITH gone AS (
                DELETE FROM leasehold.ready e WHERE e.ctid = ANY (spots[taken + 1 : taken + counts[i]])
                RETURNING e.line, e.place, e.record
            )
            SELECT count(*) AS n, string_agg(g.record, ''::bytea) AS records,
                   string_agg(substr(g.record, 17, 16) || int8send(
                       ((g.at & 255) << 56) | ((g.at >> 8) << 48) | (get_byte(g.record, 6)::bigint << 40)
                       | (get_byte(g.record, 7)::bigint << 32) | ((g.upto & 255) << 24) | ((g.upto & 65280) << 8)
                       | ((g.upto >> 8) & 65280) | (g.upto >> 24)), ''::bytea) AS heads
            INTO next
            FROM (SELECT gone.record, row_number() OVER (ORDER BY gone.line, gone.place) - 1 AS at,
                         sum(octet_length(gone.record)) OVER (ORDER BY gone.line, gone.place) AS upto
                  FROM gone) AS g;
            IF next.n <> counts[i] THEN
                RAISE EXCEPTION 'a line was changed by others' USING ERRCODE = '40001';
            END IF;
            taken := taken + counts[i];
            token := bases[i];
            records := next.records;
            INSERT INTO leasehold.grants (queue, id, deadline, nonce, owner, task, granted_at, term, max_lifetime,
                                          renewals, leases, live, noted, ended, first_job, last_job)
            VALUES (queues[i], token, at + spans[i], shown, of_owner, of_task, at, terms[i], lifetimes[i], 0,
                    counts[i], counts[i], false, decode(repeat('00', (counts[i] + 7) / 8), 'hex'), first_[i], final_[i]);
            INSERT INTO leasehold.records (queue, id, heads, records) VALUES (queues[i], token, next.heads, records);
            UPDATE leasehold.queues q SET last = token + counts[i] - 1 WHERE q.id = queues[i];
            INSERT INTO leasehold.tallies (queue, tally)
            VALUES (queues[i], leasehold.plain_tally(-counts[i], counts[i], 0, counts[i], 0));
            grants_ := grants_ + 1;
            answer := answer || leasehold.little(token) || leasehold.little(spans[i]);
        END IF;
        due := dues[i];
        deadline := (SELECT g.deadline FROM leasehold.grants g WHERE g.queue = queues[i]
                     ORDER BY g.deadline, g.id LIMIT 1);
        RETURN NEXT;
    END LOOP;
    answer := substr(leasehold.little(grants_), 1, 4) || answer;
    PERFORM leasehold.remember(of_session, of_lane, of_seq, 2::smallint, at, answer);
END $$;

-- renew, where no lease lapses. One row for each grant that is held, by its place in names: how long it
-- is held from now on, and which of the leases shown are cancelled, and which have ended. The first row
-- has place 0. upto says where the leases of each grant end in the list of tokens. Progress comes with the names
-- of its grants: to find them by their places would cost each a walk through the others.
--
-- A holder that is cut off must not keep others from its grant past the deadline: a transaction of several
-- round trips would, for as long as the server waits for the next.
CREATE FUNCTION leasehold.renew_plain(
    of_namespace text, patience text, by_hand bigint, names text[], ids bigint[], nonces bytea[], upto integer[],
    tokens bigint[], shown_names text[], shown_ids bigint[], shown_nonces bytea[], shown_tokens bigint[],
    shown bytea[]
) RETURNS TABLE (nth integer, granted bigint, cancel bigint[], fenced bigint[]) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    at     bigint;
    beat   record;
    queues integer[] := '{}';
    counts integer[] := '{}';
    homes  integer[] := '{}';
    held   bigint[] := '{}';
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN;
    END IF;
    PERFORM set_config('lock_timeout', patience, true);
    PERFORM FROM unnest(names, ids) AS k (name, id)
        JOIN leasehold.queues q ON q.namespace = of_namespace AND q.name = k.name
        JOIN leasehold.grants g ON g.queue = q.id AND g.id = k.id
        ORDER BY g.queue, g.id FOR UPDATE OF g;
    -- Asked once the locks are held: past its deadline a lease is gone, however long the wait was.
    at := leasehold.clock(by_hand);
    nth := 0;
    RETURN NEXT;
    FOR beat IN
        SELECT k.nth::integer, q.id AS queue, g.id, g.leases, g.noted, g.ended,
               coalesce(g.nonce = k.nonce AND g.deadline > at, false) AS is_held,
               least(at + g.term / 1000, g.granted_at + g.max_lifetime / 1000) AS until,
               tokens[CASE WHEN k.nth = 1 THEN 1 ELSE upto[k.nth - 1] + 1 END : upto[k.nth]] AS tokens
        FROM unnest(names, ids, nonces) WITH ORDINALITY AS k (name, id, nonce, nth)
        JOIN leasehold.queues q ON q.namespace = of_namespace AND q.name = k.name
        LEFT JOIN leasehold.grants g ON g.queue = q.id AND g.id = k.id
        ORDER BY k.nth
    LOOP
        IF NOT beat.is_held THEN
            queues := queues || beat.queue;
            counts := counts || cardinality(beat.tokens);
            CONTINUE;
        END IF;
        nth := beat.nth;
        granted := beat.until - at;
        fenced := ARRAY (
            SELECT l.token FROM unnest(beat.tokens) AS l (token)
            WHERE CASE WHEN l.token >= beat.id AND l.token < beat.id + beat.leases
                       THEN get_bit(beat.ended, (l.token - beat.id)::integer) = 1 ELSE true END);
        cancel := '{}';
        IF beat.noted THEN
            cancel := ARRAY (
                SELECT l.token FROM unnest(beat.tokens) AS l (token)
                WHERE l.token <> ALL (fenced) AND EXISTS (
                    SELECT FROM leasehold.notes n WHERE n.queue = beat.queue AND n.token = l.token AND n.cancel));
        END IF;
        queues := queues || beat.queue;
        counts := counts || cardinality(fenced);
        homes := homes || beat.queue;
        held := held || beat.id;
        RETURN NEXT;
    END LOOP;
    IF cardinality(shown) > 0 THEN
        INSERT INTO leasehold.notes AS n (queue, token, cancel, progress)
        SELECT g.queue, k.token, false, k.shown
        FROM unnest(shown_names, shown_ids, shown_nonces, shown_tokens, shown) AS k (name, id, nonce, token, shown)
        JOIN leasehold.queues q ON q.namespace = of_namespace AND q.name = k.name
        JOIN leasehold.grants g ON g.queue = q.id AND g.id = k.id AND g.nonce = k.nonce AND g.deadline > at
        WHERE CASE WHEN k.token >= g.id AND k.token < g.id + g.leases
                   THEN get_bit(g.ended, (k.token - g.id)::integer) = 0 ELSE false END
        ON CONFLICT ON CONSTRAINT notes_pkey DO UPDATE SET progress = excluded.progress;
        UPDATE leasehold.grants g SET noted = true
        FROM unnest(shown_names, shown_ids, shown_nonces) AS k (name, id, nonce)
        JOIN leasehold.queues q ON q.namespace = of_namespace AND q.name = k.name
        WHERE g.queue = q.id AND g.id = k.id AND g.nonce = k.nonce AND g.deadline > at AND NOT g.noted;
    END IF;
    UPDATE leasehold.grants g SET renewals = g.renewals + 1,
        deadline = least(at + g.term / 1000, g.granted_at + g.max_lifetime / 1000)
    FROM unnest(homes, held) AS k (queue, id) WHERE g.queue = k.queue AND g.id = k.id;
    INSERT INTO leasehold.tallies (queue, tally)
    SELECT k.queue, array_fill(0::bigint, ARRAY[20]) || sum(k.n)::bigint || ARRAY[0, 0]::bigint[]
    FROM unnest(queues, counts) AS k (queue, n) GROUP BY k.queue HAVING sum(k.n) > 0;
END $$;

UPDATE leasehold.meta SET version = 2;
