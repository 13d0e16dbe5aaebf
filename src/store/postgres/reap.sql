-- reap: expire overdue leases, the oldest first.
-- in   how many      out  the expiries
-- why  a reap that finds nothing writes nothing: idle workers reap, too. Two reapers never have the
--      same lease; one that somebody has in hand is waited for a moment, and then passed over: one
--      who is frozen with it must not keep the others from theirs

CREATE OR REPLACE FUNCTION leasehold.reap_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint, most integer, patience text DEFAULT NULL
) RETURNS jsonb LANGUAGE plpgsql settings.PLANS AS $$
DECLARE
    VERB constant smallint := verb.REAP;
    first   record;
    q       record;
    done    record;
    h       leasehold.head;
    at      bigint;
    expired jsonb := '[]';
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience, true);
    END IF;
    first := leasehold.recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        RETURN first.answer;
    END IF;
    at := leasehold.clock_1(by_hand);
    FOR q IN
        -- The oldest of all queues.
        SELECT o.id, o.name, count(*)::integer AS leases FROM (
            SELECT k.id, k.name, f.deadline, f.token FROM leasehold.queue k
            CROSS JOIN LATERAL leasehold.head_1(k.id) AS o
            CROSS JOIN LATERAL (
                SELECT g.deadline, j.token
                FROM (SELECT * FROM leasehold.grants e
                      WHERE e.queue + 0 = k.id AND e.deadline >= o.overdue_from AND e.deadline <= at
                      ORDER BY e.deadline, e.id + 0 LIMIT most) AS g
                CROSS JOIN LATERAL (
                      SELECT e.token FROM leasehold.job e
                      WHERE e.queue = k.id AND e.state = state.LEASED AND e.token >= g.id AND e.token < g.id + g.leases
                      ORDER BY e.token LIMIT most) AS j
                LIMIT most
            ) AS f
            WHERE k.namespace = of_namespace ORDER BY f.deadline, f.token LIMIT most
        ) AS o
        GROUP BY o.id, o.name ORDER BY o.id
    LOOP
        PERFORM leasehold.enter_1(q.id);
        SELECT * INTO h FROM leasehold.head_1(q.id);
        at := leasehold.clock_1(by_hand);
        FOR try IN 1 .. 10 LOOP
            done := leasehold.expire_1(q.id, q.name, h.overdue_from, at, q.leases, leasehold.no_counts_1());
            expired := expired || done.told;
            q.leases := q.leases - jsonb_array_length(done.told);
            PERFORM leasehold.count_1(q.id, done.counts);
            PERFORM leasehold.wake_1(of_namespace, q.id, q.name, done.counts[count.READY] - done.counts[count.PARKED], false);
            EXIT WHEN q.leases <= 0 OR NOT EXISTS (
                SELECT FROM leasehold.grants g WHERE g.queue + 0 = q.id AND g.deadline >= h.overdue_from AND g.deadline <= at);
            PERFORM pg_sleep(0.01);
        END LOOP;
    END LOOP;
    expired := coalesce((SELECT jsonb_agg(e - 'deadline' ORDER BY (e -> 'deadline')::bigint, (e -> 'token')::bigint)
                         FROM jsonb_array_elements(expired) AS e), '[]');
    IF expired <> '[]' THEN
        PERFORM leasehold.remember_1(of_session, of_lane, of_seq, VERB, leasehold.clock_1(by_hand), expired, first.prior);
    END IF;
    RETURN expired;
END $$;

-- name: reap
SELECT leasehold.reap_1($1, $2, $3, $4, $5, $6, $7);
