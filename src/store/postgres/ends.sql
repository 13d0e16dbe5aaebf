-- ends: how a lease can end, and what becomes of its job: src/rules/ends.rs once more.
-- in   a leased job, locked, its grant, what ends it      out  the job where it goes, and what that
--      adds to the counts
-- why  one place for all that settle, expire, lapse and revoke

CREATE OR REPLACE FUNCTION leasehold.no_counts_1() RETURNS bigint[] LANGUAGE sql IMMUTABLE AS
$$ SELECT array_fill(0::bigint, ARRAY[count.COLUMNS]) $$;

-- What jobs add to the weight of a grant.
CREATE OR REPLACE FUNCTION leasehold.weight_of_headers_1(headers jsonb) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN (SELECT coalesce(sum(octet_length(h ->> 0) + octet_length(h ->> 1)), 0) FROM jsonb_array_elements(headers) AS h);
END $$;
CREATE OR REPLACE FUNCTION leasehold.weight_of_history_1(history jsonb) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN (SELECT coalesce(sum(38 + octet_length(h ->> 'owner') + octet_length(h ->> 'task')
                                + coalesce(4 + octet_length(h ->> 'reason'), 0)
                                + coalesce(21 + octet_length(h -> 'progress' ->> 'note'), 0)), 0)
            FROM jsonb_array_elements(history) AS h);
END $$;

-- Places at the front of a line, one for each token in the order of the tokens.
CREATE OR REPLACE FUNCTION leasehold.fronts_1(tokens bigint[]) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    places bigint[] := '{}';
BEGIN
    FOR nth IN 1 .. cardinality(tokens) LOOP
        places := -nextval('leasehold.place') || places;
    END LOOP;
    RETURN places;
END $$;

-- The end that its holder gives to a lease. believed: a fence's mark is not too far ahead of the
-- clock.
CREATE OR REPLACE FUNCTION leasehold.settled_1(
    outcome smallint, delay bigint, reason text, mark bigint, believed boolean, cancel boolean, relaxed boolean, at bigint,
    OUT ended text, OUT next text, OUT keeps_key boolean, OUT failed boolean, OUT declined boolean, OUT due bigint,
    OUT why text
) LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    keeps_key := true;
    failed := false;
    declined := false;
    IF outcome = outcome.COMPLETE THEN
        ended := 'completed';
        next := 'completed';
    ELSIF outcome = outcome.BURY THEN
        ended := 'buried';
        next := 'dead';
        failed := true;
        why := reason;
    ELSIF outcome = outcome.RETRY THEN
        failed := true;
        why := reason;
        ended := CASE WHEN cancel THEN 'cancelled' ELSE 'retried' END;
        next := CASE WHEN cancel THEN 'cancelled' ELSE 'scheduled' END;
        keeps_key := NOT relaxed;
        due := at + delay / 1000;
    ELSIF NOT believed THEN
        failed := true;
        why := 'broken fence: its mark ' || mark || ' is more than ' || rule.BELIEF / 1000000 || 's ahead of the store''s clock';
        ended := CASE WHEN cancel THEN 'cancelled' ELSE 'retried' END;
        next := CASE WHEN cancel THEN 'cancelled' ELSE 'scheduled' END;
        keeps_key := NOT relaxed;
        due := at + rule.DISBELIEVED_DELAY;
    ELSIF cancel THEN
        ended := 'cancelled';
        next := 'cancelled';
    ELSIF outcome = outcome.SURRENDER AND delay = 0 THEN
        ended := 'surrendered';
        next := 'front';
    ELSE
        ended := 'surrendered';
        next := 'scheduled';
        due := at + delay / 1000;
        declined := outcome = outcome.DECLINE;
        why := CASE WHEN declined THEN reason END;
    END IF;
    due := CASE WHEN next = 'scheduled' THEN due END;
END $$;

-- Where a job goes when its lease expires.
CREATE OR REPLACE FUNCTION leasehold.expired_1(j leasehold.job) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN j.cancel THEN 'cancelled' WHEN j.expiries + 1 >= j.max_expiries THEN 'dead' ELSE 'front' END
$$;

-- Ends a lease. ended: completed, retried, surrendered, buried, cancelled, expired, revoked; cause:
-- of an expiry. next: front, back, scheduled, completed, dead, cancelled. front: its place there.
CREATE OR REPLACE FUNCTION leasehold.end_lease_1(
    j leasehold.job, g leasehold.grants, at bigint, ended text, cause text, next text, keeps_key boolean, failed boolean,
    declined boolean, due bigint, why text, result_ bytea, front bigint, INOUT counts bigint[]
) LANGUAGE plpgsql AS $$
DECLARE
    kept   bigint := (j.options ->> 'retention')::bigint / 1000;
    until_ bigint;
    told   jsonb;
    tier   smallint;
    nth    integer;
BEGIN
    nth := CASE ended WHEN 'completed' THEN count.LEASE_COMPLETED WHEN 'retried' THEN count.RETRIED
                      WHEN 'surrendered' THEN count.SURRENDERED WHEN 'buried' THEN count.BURIED
                      WHEN 'cancelled' THEN count.LEASE_CANCELLED WHEN 'revoked' THEN count.REVOKED
                      ELSE CASE cause WHEN 'deadline' THEN count.EXPIRED_DEADLINE WHEN 'stalled' THEN count.EXPIRED_STALLED
                                      ELSE count.EXPIRED_LIFETIME END END;
    counts[nth] := counts[nth] + 1;
    counts[count.LEASED] := counts[count.LEASED] - 1;
    counts[count.LIVE] := counts[count.LIVE] - 1;
    IF next IN ('completed', 'dead', 'cancelled') THEN
        IF ended = 'expired' AND next = 'dead' THEN
            counts[count.DEAD_BY_EXPIRY] := counts[count.DEAD_BY_EXPIRY] + 1;
        END IF;
        counts := leasehold.free_keys_1(j, counts);
        IF next = 'completed' AND kept IS NULL THEN
            DELETE FROM leasehold.job k WHERE k.id = j.id AND k.queue = j.queue;
            RETURN;
        END IF;
        -- A dead job must not vanish silently: it stays until an operator retries or purges it.
        until_ := CASE next WHEN 'completed' THEN at + kept
                            WHEN 'cancelled' THEN at + greatest(coalesce(kept, 0), rule.CANCELLED_RETENTION) END;
    ELSIF next = 'scheduled' AND NOT keeps_key THEN
        counts := leasehold.leave_key_1(j.queue, j.exclusive_key, j.id, counts);
    END IF;
    told := jsonb_strip_nulls(jsonb_build_object(
        'token', j.token, 'owner', g.owner, 'task', g.task, 'granted_at', g.granted_at, 'ended_at', at,
        'renewals', g.renewals, 'end', ended, 'cause', cause, 'reason', why, 'progress', j.progress));
    told := CASE WHEN jsonb_array_length(j.history) >= rule.HISTORY_LENGTH THEN j.history - 0
                 ELSE coalesce(j.history, '[]') END || jsonb_build_array(told);
    IF ended = 'expired' THEN
        j.expiries := j.expiries + 1;
    END IF;
    -- Suspects have a line of their own.
    tier := j.line / 2 * 2 + CASE WHEN j.expiries >= 2 THEN 0 ELSE 1 END;
    UPDATE leasehold.job k SET
        state = CASE next WHEN 'front' THEN state.READY WHEN 'back' THEN state.READY WHEN 'scheduled' THEN state.SCHEDULED
                          WHEN 'completed' THEN state.COMPLETED WHEN 'dead' THEN state.DEAD ELSE state.CANCELLED END,
        line = tier,
        place = CASE next WHEN 'front' THEN front WHEN 'back' THEN nextval('leasehold.place') ELSE j.place END,
        seq = nextval('leasehold.place'),
        run_at = coalesce(due, j.run_at),
        failures = j.failures + failed::integer,
        expiries = j.expiries,
        declined_since = CASE WHEN declined THEN coalesce(j.declined_since, at) END,
        settled_at = CASE WHEN next IN ('completed', 'dead', 'cancelled') THEN at END,
        keep_until = until_,
        weight = j.weight + leasehold.weight_of_history_1(told) - leasehold.weight_of_history_1(coalesce(j.history, '[]')),
        history = told,
        result = coalesce(result_, j.result),
        token = NULL, lease_of = NULL, cancel = false, progress = NULL
    WHERE k.id = j.id AND k.queue = j.queue;
    nth := CASE next WHEN 'front' THEN count.READY WHEN 'back' THEN count.READY WHEN 'scheduled' THEN count.SCHEDULED
                     WHEN 'completed' THEN count.COMPLETED WHEN 'dead' THEN count.DEAD ELSE count.CANCELLED END;
    counts[nth] := counts[nth] + 1;
END $$;

-- A job's life is over: its keys are free, and the next of its exclusive key is ready.
CREATE OR REPLACE FUNCTION leasehold.free_keys_1(j leasehold.job, INOUT counts bigint[]) LANGUAGE plpgsql AS $$
BEGIN
    IF j.unique_key IS NOT NULL THEN
        DELETE FROM leasehold.unique_key u
        WHERE u.queue = j.queue AND u.key = j.unique_key AND u.job = j.id AND u.until IS NULL;
    END IF;
    counts := leasehold.leave_key_1(j.queue, j.exclusive_key, j.id, counts);
END $$;

-- Locks the exclusive keys of leased jobs, in their order.
CREATE OR REPLACE FUNCTION leasehold.lock_keys_1(of_queue integer, ids uuid[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM leasehold.exclusive_key e
    WHERE e.queue = of_queue AND e.key = ANY (ARRAY (
        SELECT j.exclusive_key FROM leasehold.job j
        WHERE j.id = ANY (ids) AND j.queue = of_queue AND j.exclusive_key IS NOT NULL))
    ORDER BY e.key FOR UPDATE;
END $$;

-- Expires up to `most` leases of a queue that are overdue, by (deadline, token). What somebody has
-- in hand is passed over: it is not overdue to him, and the next look sees what became of it.
CREATE OR REPLACE FUNCTION leasehold.expire_1(
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
          FROM (SELECT o.id, o.leases, o.deadline FROM leasehold.grants o
                WHERE o.queue + 0 = of_queue AND o.deadline >= since AND o.deadline <= at
                ORDER BY o.deadline, o.id + 0 LIMIT most FOR UPDATE SKIP LOCKED) AS g
          CROSS JOIN LATERAL (
                SELECT o.id, o.token FROM leasehold.job o
                WHERE o.queue = of_queue AND o.state = state.LEASED AND o.token >= g.id AND o.token < g.id + g.leases
                ORDER BY o.token LIMIT most FOR UPDATE SKIP LOCKED) AS j
          LIMIT most) AS o;
    IF ids IS NOT NULL THEN
        PERFORM leasehold.lock_keys_1(of_queue, ids);
        places := leasehold.fronts_1(tokens);
        FOR one IN
            SELECT j.j, g.g FROM unnest(ids) WITH ORDINALITY AS k (id, n)
            CROSS JOIN LATERAL (SELECT o AS j, o.lease_of FROM leasehold.job o WHERE o.id = k.id AND o.queue = of_queue LIMIT 1) AS j
            CROSS JOIN LATERAL (SELECT o AS g FROM leasehold.grants o
                                WHERE o.queue = of_queue AND o.id = j.lease_of LIMIT 1) AS g ORDER BY k.n
        LOOP
            next := leasehold.expired_1(one.j);
            cause := CASE WHEN (one.g).deadline >= (one.g).granted_at + (one.g).max_lifetime / 1000
                          THEN 'lifetime' ELSE 'deadline' END;
            counts := leasehold.end_lease_1(one.j, one.g, at, 'expired', cause, next, true, false, false, NULL, NULL, NULL,
                                            places[array_position(tokens, (one.j).token)], counts);
            told := told || jsonb_build_array(jsonb_strip_nulls(jsonb_build_object(
                'queue', of_name, 'job', (one.j).id, 'kind', (one.j).kind, 'token', (one.j).token, 'owner', (one.g).owner,
                'task', (one.g).task, 'cause', cause, 'progress', (one.j).progress, 'expiries', (one.j).expiries + 1,
                'state', CASE next WHEN 'front' THEN 'ready' ELSE next END, 'deadline', (one.g).deadline)));
        END LOOP;
    END IF;
    -- Grants that have no lease any more.
    DELETE FROM leasehold.grants d WHERE d.ctid = ANY (ARRAY (
        SELECT g.ctid FROM leasehold.grants g
        WHERE g.queue + 0 = of_queue AND g.deadline >= since
          AND g.deadline <= CASE WHEN cardinality(ids) = most THEN till ELSE at END
          AND (SELECT true FROM leasehold.job j WHERE j.queue = of_queue AND j.state = state.LEASED
                 AND j.token >= g.id AND j.token < g.id + g.leases LIMIT 1) IS NULL
        FOR UPDATE SKIP LOCKED));
END $$;

-- Grants of which no lease lives any more. One that somebody has in hand is left to its deadline.
CREATE OR REPLACE FUNCTION leasehold.end_grants_1(of_queue integer, ids bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM leasehold.grants d WHERE d.ctid = ANY (ARRAY (
        SELECT g.spot FROM (SELECT DISTINCT k.id FROM unnest(ids) AS k (id)) AS k
        CROSS JOIN LATERAL (
            SELECT o.ctid AS spot FROM leasehold.grants o
            WHERE o.queue = of_queue AND o.id = k.id
              AND (SELECT true FROM leasehold.job j WHERE j.queue = of_queue AND j.state = state.LEASED
                     AND j.token >= o.id AND j.token < o.id + o.leases LIMIT 1) IS NULL
            FOR UPDATE SKIP LOCKED) AS g));
END $$;
