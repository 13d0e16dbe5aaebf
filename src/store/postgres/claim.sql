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

CREATE OR REPLACE FUNCTION leasehold.claim_1(
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
) LANGUAGE plpgsql settings.PLANS AS $$
#variable_conflict use_column
DECLARE
    VERB constant smallint := verb.CLAIM;
    -- A tenth of a second: when to look again for a job that is due, or whose lease is overdue,
    -- and that is in somebody's hand.
    PAUSE    constant bigint := 1000000 / 10;
    first    record;
    q        record;
    s        record;
    picked   record;
    did      record;
    h        leasehold.head;
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
    first := leasehold.recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    at := leasehold.clock_1(by_hand);
    FOR q IN
        SELECT k.id, k.name, k.paused, o AS head FROM leasehold.queue k CROSS JOIN LATERAL leasehold.head_1(k.id) AS o
        WHERE k.namespace = of_namespace AND k.name = ANY (queues)
    LOOP
        at_ := array_position(queues, q.name);
        ids[at_] := q.id;
        h := q.head;
        work := most > 0 AND NOT q.paused AND leasehold.has_ready_1(h, admit_suspect);
        EXIT WHEN work AND NOT first.done;
        hint := leasehold.first_due_1(h);
        next_due := least(next_due, hint);
        work := work OR (most > 0 AND hint <= at) IS TRUE;
        hint := leasehold.first_deadline_1(h);
        next_end := least(next_end, hint);
        work := work OR (most > 0 AND hint <= at) IS TRUE;
        EXIT WHEN work AND NOT first.done;
        late := greatest(late, leasehold.behind_1(h, seen, at));
    END LOOP;

    IF first.done THEN
        -- What is left of its grants, with the time originally granted.
        FOR s IN
            SELECT g.g AS held, a FROM jsonb_array_elements(first.answer -> 'grants') AS a
            CROSS JOIN LATERAL (SELECT o AS g FROM leasehold.grants o
                                WHERE o.queue = (a ->> 0)::integer AND o.id = (a ->> 1)::bigint LIMIT 1) AS g
            WHERE (g.g).deadline > at AND (g.g).nonce_hash = sha256(nonce)
        LOOP
            RETURN QUERY
            SELECT array_position(ids, j.queue), j.lease_of, (s.a ->> 2)::bigint, (s.held).granted_at, (s.held).term, j.token, j.id,
                   j.kind, j.version, j.enqueued_at, j.run_at, j.line, j.failures, j.expiries, j.max_expiries,
                   j.declined_since, j.checkpoint_seq, j.checkpoint_token, j.unique_key, j.exclusive_key, j.options,
                   j.headers, j.history, j.payload, j.checkpoint, j.result, NULL::bigint, NULL::bigint, NULL::bigint,
                   NULL::jsonb, NULL::boolean
            FROM leasehold.job j
            WHERE j.queue = (s.held).queue AND j.state = state.LEASED AND j.token >= (s.held).id
              AND j.token < (s.held).id + (s.held).leases ORDER BY j.token;
        END LOOP;
        told := coalesce(first.answer -> 'expired', '[]');
    END IF;
    IF first.done OR NOT work THEN
        IF NOT first.done AND is_repeat THEN
            PERFORM leasehold.need_no_disk_1(of_session);
            PERFORM leasehold.remember_1(of_session, of_lane, of_seq, VERB, at,
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
        SELECT k.id, k.name, k.paused FROM leasehold.queue k
        WHERE k.namespace = of_namespace AND k.name = ANY (queues) ORDER BY k.id FOR NO KEY UPDATE
    LOOP
        at_ := array_position(queues, q.name);
        ids[at_] := q.id;
        open_[at_] := NOT q.paused;
    END LOOP;
    at := leasehold.clock_1(by_hand);

    FOR i IN 1 .. cardinality(queues) LOOP
        EXIT WHEN left_ = 0;
        CONTINUE WHEN ids[i] IS NULL;
        SELECT * INTO h FROM leasehold.head_1(ids[i]);
        h := leasehold.advance_1(h, at);
        counts := h.counts;
        late := greatest(late, leasehold.behind_1(h, seen, at));
        -- Tokens of one process grow across its queues too: a token in a log names one lease.
        highest := greatest(h.last, seen);
        IF greatest(highest + 1, h.floor + 1, at) > greatest(at, h.floor) + rule.LEAD THEN
            highest := h.last;
        END IF;
        base := greatest(highest + 1, h.floor + 1, at);
        room := CASE WHEN NOT strict_clock AND leasehold.behind_1(h, seen, at) IS NOT NULL THEN rule.LEAD
                     ELSE greatest(at, h.floor) + rule.LEAD + 1 - base END;
        IF room <= 0 THEN
            -- A claim that would find nothing needs no token.
            IF open_[i] AND (leasehold.has_ready_1(h, true) OR leasehold.first_due_1(h) <= at OR leasehold.first_deadline_1(h) <= at)
            THEN
                ahead := greatest(ahead, greatest(highest, h.floor) - at);
                CONTINUE;
            END IF;
        END IF;

        ends := leasehold.first_deadline_1(h);
        in_hand := false;
        IF ends <= at THEN
            did := leasehold.expire_1(ids[i], queues[i], h.overdue_from, at, rule.STEP_JOBS, counts);
            counts := did.counts;
            told := told || did.told;
            ends := leasehold.first_deadline_1(h);
            in_hand := ends <= at AND jsonb_array_length(did.told) < rule.STEP_JOBS;
        END IF;
        dues := leasehold.first_due_1(h);
        soonest := dues;
        IF dues <= at THEN
            due_jobs := counts[count.SCHEDULED];
            counts := leasehold.promote_1(h, at, counts);
            dues := leasehold.first_due_1(h);
            -- What is left of fewer than a step is in somebody's hand.
            soonest := CASE WHEN dues <= at AND due_jobs - counts[count.SCHEDULED] < rule.STEP_JOBS THEN at + PAUSE ELSE dues END;
        END IF;

        took := 0;
        more := false;
        wanted := least(left_, room);
        is_admitted := suspect;
        IF open_[i] AND wanted > 0 AND heavy < rule.CALL_BYTES THEN
            LOOP
                spots := '{}';
                lines_ := '{}';
                places_ := '{}';
                weights_ := '{}';
                terms_ := '{}';
                lives_ := '{}';
                suspect := is_admitted;
                again := false;
                FOR s IN SELECT * FROM leasehold.stretches_1(h.lines, h.fronts, h.starts, suspect) LOOP
                    CONTINUE WHEN s.alone AND NOT suspect;
                    -- One more than wanted: whether there is more.
                    SELECT array_agg(p.spot) AS spots, array_agg(p.line) AS lines, array_agg(p.place) AS places,
                           array_agg(p.weight) AS weights, array_agg((p.options ->> 'term')::bigint) AS terms,
                           array_agg((p.options ->> 'max_lifetime')::bigint) AS lives, count(*)::integer AS n,
                           bool_or(p.line % 2 = 0) AS suspects
                    INTO picked
                    FROM (
                        (SELECT j.ctid AS spot, j.line, j.place, j.weight, j.options FROM leasehold.job j
                         WHERE s.till_place IS NULL AND j.queue = h.queue AND j.state = state.READY
                           AND (j.line, j.place) >= (s.line, s.place) AND j.line < s.till_line
                           AND (suspect OR j.line % 2 = 1)
                         ORDER BY j.line, j.place LIMIT CASE WHEN s.alone THEN 1 ELSE wanted - took + 1 END)
                        UNION ALL
                        (SELECT j.ctid, j.line, j.place, j.weight, j.options FROM leasehold.job j
                         WHERE s.till_place IS NOT NULL AND j.queue = h.queue AND j.state = state.READY
                           AND j.line = s.line AND j.place < s.till_place
                         ORDER BY j.line, j.place LIMIT CASE WHEN s.alone THEN 1 ELSE wanted - took + 1 END)
                    ) AS p;
                    CONTINUE WHEN picked.n = 0;
                    IF picked.suspects AND NOT s.alone THEN
                        -- A line of suspects that was not known.
                        h := leasehold.new_lines_1(h, picked.lines);
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
            IF heavy + weight_ >= rule.CALL_BYTES THEN
                -- As much as a call may weigh, and the job with which it weighs more.
                FOR k IN 1 .. took LOOP
                    heavy := heavy + weights_[k];
                    IF heavy >= rule.CALL_BYTES AND k < took THEN
                        more := true;
                        took := k;
                        EXIT;
                    END IF;
                END LOOP;
            ELSE
                heavy := heavy + weight_;
            END IF;
            h := leasehold.start_1(h, lines_[1 : took], places_[1 : took], NOT more, is_admitted);
        END IF;

        IF took > 0 THEN
            -- Neighbours of the same terms are one grant, as many as it may weigh.
            spans := NULL;
            IF weight_ > rule.GRANT_BYTES OR array_remove(terms_, NULL) <> '{}' OR array_remove(lives_, NULL) <> '{}' THEN
                spans := '{}';
                weight_ := 0;
                FOR k IN 1 .. took LOOP
                    weight_ := weight_ + weights_[k];
                    IF k = 1 OR weight_ > rule.GRANT_BYTES
                       OR coalesce(terms_[k], terms[i]) <> coalesce(terms_[k - 1], terms[i])
                       OR coalesce(lives_[k], lifetimes[i]) <> coalesce(lives_[k - 1], lifetimes[i]) THEN
                        weight_ := weights_[k];
                        span := base + k - 1;
                    END IF;
                    spans := spans || span;
                END LOOP;
            END IF;
            INSERT INTO leasehold.grants AS n (queue, leases, id, deadline, granted_at, term, max_lifetime, nonce_hash, owner, task)
            SELECT h.queue, g.leases, g.id, at + least(g.term, g.life) / 1000, at, g.term, g.life, sha256(nonce), of_owner, of_task
            FROM (SELECT took AS leases, base AS id, terms[i] AS term, lifetimes[i] AS life WHERE spans IS NULL
                  UNION ALL
                  SELECT count(*)::integer, k.id, coalesce(min(k.term), terms[i]), coalesce(min(k.life), lifetimes[i])
                  FROM unnest(spans, terms_[1 : took], lives_[1 : took]) AS k (id, term, life)
                  WHERE k.id IS NOT NULL GROUP BY k.id) AS g;
            -- By where they are: + 0 keeps the planner from looking through all jobs in line.
            RETURN QUERY
            WITH leased AS (
                UPDATE leasehold.job j SET state = state.LEASED, token = p.token, lease_of = p.lease_of, cancel = false, progress = NULL
                FROM (SELECT k.spot, base + k.n - 1 AS token, coalesce(spans[k.n], base) AS lease_of
                      FROM unnest(spots[1 : took]) WITH ORDINALITY AS k (spot, n)) AS p
                WHERE j.ctid = p.spot AND j.state + 0 = state.READY
                RETURNING j.*
            )
            SELECT i, j.lease_of, g.deadline - at, at, g.term, j.token, j.id, j.kind, j.version, j.enqueued_at, j.run_at,
                   j.line, j.failures, j.expiries, j.max_expiries, j.declined_since, j.checkpoint_seq, j.checkpoint_token,
                   j.unique_key, j.exclusive_key, j.options, j.headers, j.history, j.payload, j.checkpoint, j.result,
                   NULL::bigint, NULL::bigint, NULL::bigint, NULL::jsonb, NULL::boolean
            FROM leased j
            CROSS JOIN LATERAL (SELECT o.deadline, o.term FROM leasehold.grants o
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
                SELECT min(g.deadline) INTO till FROM leasehold.grants g WHERE g.queue = h.queue AND g.id >= base;
                given := given || (SELECT jsonb_agg(jsonb_build_array(h.queue, g.id, g.deadline - at) ORDER BY g.id)
                                   FROM leasehold.grants g WHERE g.queue = h.queue AND g.id >= base);
            END IF;
            ends := least(ends, till);
            h.last := base + took - 1;
            seen := greatest(seen, h.last);
            left_ := left_ - took;
            counts[count.READY] := counts[count.READY] - took;
            counts[count.LEASED] := counts[count.LEASED] + took;
            counts[count.GRANTED] := counts[count.GRANTED] + took;
            counts[count.LIVE] := counts[count.LIVE] + took;
            IF more AND left_ = 0 THEN
                PERFORM leasehold.wake_1(of_namespace, h.queue, queues[i], 1, false);
            END IF;
        END IF;

        h.due_from := least(dues, h.sealed_at);
        next_due := least(next_due, soonest);
        h.overdue_from := coalesce(ends, 9223372036854775807);
        next_end := least(next_end, CASE WHEN in_hand THEN at + PAUSE ELSE ends END);
        h.counts := counts;
        IF h.gen % 8 = 0 THEN
            h := leasehold.added_up_1(h);
        END IF;
        PERFORM leasehold.save_head_1(h);
    END LOOP;
    IF ahead IS NOT NULL AND left_ = most THEN
        RAISE EXCEPTION 'the last token is ahead of the clock' USING ERRCODE = 'LH002', DETAIL = ahead::text;
    END IF;
    IF given = '[]' AND told = '[]' THEN
        -- Others were faster, and more of them may wait for the lock.
        PERFORM leasehold.need_no_disk_1(of_session);
    END IF;
    PERFORM leasehold.remember_1(of_session, of_lane, of_seq, VERB, at,
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
CREATE OR REPLACE FUNCTION leasehold.need_no_disk_1(of_session uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF of_session IS NOT NULL THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
END $$;

-- How far the clock is behind the tokens given, if by more than speed can explain.
CREATE OR REPLACE FUNCTION leasehold.behind_1(h leasehold.head, seen bigint, at bigint) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF greatest(h.last + 1, seen + 1, h.floor + 1, at) <= greatest(at, h.floor) + rule.LEAD THEN
        h.last := greatest(h.last, seen);
    END IF;
    IF (CASE WHEN h.last > h.floor + rule.LEAD THEN h.last ELSE h.floor END) > at + rule.LEAD THEN
        RETURN greatest(h.last, h.floor) - at;
    END IF;
    RETURN NULL;
END $$;

-- Scheduled jobs whose time has come fall due, the earliest first: each goes to the back of its
-- line, or behind the others of its exclusive key. One whose key somebody has in hand stays where
-- it is: this claim has the queue, and everybody's claims would wait with it.
CREATE OR REPLACE FUNCTION leasehold.promote_1(h leasehold.head, at bigint, INOUT counts bigint[]) LANGUAGE plpgsql AS $$
DECLARE
    due    record;
    keyed  record;
BEGIN
    WITH first AS MATERIALIZED (
        SELECT j.spot, nextval('leasehold.place') AS number
        FROM (SELECT k.ctid AS spot FROM leasehold.job k
              WHERE k.queue = h.queue AND k.state = state.SCHEDULED AND k.run_at >= h.due_from AND k.run_at <= at
                AND (k.exclusive_key IS NULL OR leasehold.is_free_1(h.queue, k.exclusive_key))
              ORDER BY k.run_at, k.seq LIMIT rule.STEP_JOBS FOR UPDATE SKIP LOCKED) AS j
    ), moved AS (
        UPDATE leasehold.job j SET state = state.READY, place = first.number, seq = first.number
        FROM first WHERE j.ctid = first.spot
        RETURNING j.id, j.exclusive_key, first.number
    )
    SELECT count(*) AS jobs, array_agg(m.id ORDER BY m.exclusive_key, m.number) FILTER (WHERE m.exclusive_key IS NOT NULL) AS ids,
           array_agg(m.exclusive_key ORDER BY m.exclusive_key, m.number) FILTER (WHERE m.exclusive_key IS NOT NULL) AS keys
    INTO due FROM moved AS m;
    counts[count.SCHEDULED] := counts[count.SCHEDULED] - due.jobs;
    counts[count.READY] := counts[count.READY] + due.jobs;
    FOR keyed IN SELECT k.id, k.key FROM unnest(due.ids, due.keys) WITH ORDINALITY AS k (id, key, n) ORDER BY k.n LOOP
        IF NOT leasehold.join_key_1(h.queue, keyed.key, keyed.id) THEN
            UPDATE leasehold.job j SET state = state.PARKED WHERE j.id = keyed.id AND j.queue = h.queue;
            counts[count.PARKED] := counts[count.PARKED] + 1;
        END IF;
    END LOOP;
END $$;

-- Lines of suspects that were not known are, from now on.
CREATE OR REPLACE FUNCTION leasehold.new_lines_1(h leasehold.head, of_jobs smallint[]) RETURNS leasehold.head LANGUAGE plpgsql AS $$
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
CREATE OR REPLACE FUNCTION leasehold.start_1(h leasehold.head, lines smallint[], places bigint[], is_all boolean, suspects boolean)
RETURNS leasehold.head LANGUAGE plpgsql AS $$
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
CREATE OR REPLACE FUNCTION leasehold.added_up_1(h leasehold.head) RETURNS leasehold.head LANGUAGE plpgsql AS $$
DECLARE
    total record;
BEGIN
    WITH gone AS (
        DELETE FROM leasehold.tally t WHERE t.ctid = ANY (ARRAY (
            SELECT o.ctid FROM leasehold.tally o WHERE o.queue = h.queue AND o.n > h.counted_to AND o.n <= h.sealed
            ORDER BY o.n LIMIT rule.STEP_JOBS))
        RETURNING t.n, t.counts
    ), sums AS (
        SELECT c.nth, sum(c.number)::bigint AS number FROM gone, unnest(gone.counts) WITH ORDINALITY AS c (number, nth) GROUP BY c.nth
    )
    SELECT (SELECT count(*) FROM gone) AS rows, (SELECT max(gone.n) FROM gone) AS last,
           ARRAY (SELECT o.number + coalesce(s.number, 0) FROM unnest(h.counts) WITH ORDINALITY AS o (number, nth)
                  LEFT JOIN sums s ON s.nth = o.nth ORDER BY o.nth) AS counts
    INTO total;
    h.counts := total.counts;
    h.counted_to := CASE WHEN total.rows = rule.STEP_JOBS THEN total.last ELSE greatest(h.counted_to, h.sealed) END;
    RETURN h;
END $$;

-- The same for a queue of which nobody holds the lock.
CREATE OR REPLACE FUNCTION leasehold.add_up_1(of_queue integer, at bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    h leasehold.head;
BEGIN
    PERFORM FROM leasehold.queue q WHERE q.id = of_queue FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
        SELECT * INTO h FROM leasehold.head_1(of_queue);
        PERFORM leasehold.save_head_1(leasehold.added_up_1(leasehold.advance_1(h, at)));
    END IF;
END $$;

-- Puts a head in the place of the one that it was made from.
CREATE OR REPLACE FUNCTION leasehold.save_head_1(h leasehold.head) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM leasehold.head o WHERE o.queue = h.queue AND o.gen = h.gen;
    h.gen := h.gen + 1;
    INSERT INTO leasehold.head SELECT h.*;
END $$;

-- name: claim
SELECT nth, lease_of, granted, granted_at, term, token, id, kind, version, enqueued_at, run_at, line, failures, expiries,
       max_expiries, declined_since, checkpoint_seq, checkpoint_token, unique_key, exclusive_key, options, headers,
       history, payload, checkpoint, result, due, deadline, behind, expired, is_full
FROM leasehold.claim_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17);
