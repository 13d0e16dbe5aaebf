-- views: jobs, leases, dead and queues, for people and for reports.
-- in   the tables      out  views that are documented, stable and read-only
-- why  what a person asks is not how the store keeps it: states are words, times are timestamps,
--      payloads are JSON where they are. The nonce of a lease stands in no view, nor does its hash

CREATE OR REPLACE FUNCTION leasehold.at_1(micros bigint) RETURNS timestamptz
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT timestamptz 'epoch' + micros * interval '1 microsecond'
$$;

CREATE OR REPLACE FUNCTION leasehold.state_1(state smallint) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT (ARRAY['scheduled', 'ready', 'ready', 'completed', 'dead', 'cancelled', 'leased', 'waiting'])[state + 1]
$$;

-- What is JSON as JSON, everything else as null: a payload may be any bytes.
CREATE OR REPLACE FUNCTION leasehold.json_1(bytes bytea) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    RETURN convert_from(bytes, 'UTF8')::jsonb;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

-- A key is any text; one that this database's encoding cannot show is null here.
CREATE OR REPLACE FUNCTION leasehold.text_1(bytes bytea) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    RETURN convert_from(bytes, 'UTF8');
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

-- The attempt that people ask for: of a job that is settled, how often it has run; of another, the
-- number of the run that is under way or comes next. What was handed back does not count.
CREATE OR REPLACE FUNCTION leasehold.attempt_1(state smallint, failures integer, expiries integer, history jsonb)
RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT failures::bigint + expiries + CASE state
        WHEN state.DEAD THEN 0
        WHEN state.CANCELLED THEN (coalesce(history -> -1 ->> 'end' = 'cancelled' AND history -> -1 ->> 'reason' IS NULL,
                              false))::integer
        ELSE 1 END
$$;

-- Why a lease expired, in words.
CREATE OR REPLACE FUNCTION leasehold.why_1(cause text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT CASE cause WHEN 'deadline' THEN why.DEADLINE WHEN 'stalled' THEN why.STALLED
                      WHEN 'lifetime' THEN why.LIFETIME END
$$;

-- What a queue counts: the sum in its head, and what calls have added since.
CREATE OR REPLACE FUNCTION leasehold.counts_1(of_queue integer) RETURNS bigint[]
LANGUAGE sql STABLE STRICT AS $$
    WITH head AS (
        SELECT counts, counted_to FROM leasehold.head WHERE queue = of_queue ORDER BY gen DESC LIMIT 1
    )
    SELECT array_agg(total ORDER BY nth) FROM (
        SELECT nth, sum(n)::bigint AS total
        FROM (
            SELECT counts FROM head
            UNION ALL
            SELECT t.counts FROM leasehold.tally t
            WHERE t.queue = of_queue AND t.n > coalesce((SELECT counted_to FROM head), 0)
        ) AS parts, unnest(counts) WITH ORDINALITY AS one (n, nth)
        GROUP BY nth
    ) AS sums
$$;

CREATE OR REPLACE VIEW leasehold.jobs AS
SELECT q.namespace::text AS namespace,
       q.name::text AS queue,
       j.id,
       j.kind::text AS kind,
       leasehold.state_1(j.state) AS state,
       j.state = state.PARKED AS parked,
       j.line / 2 AS priority,
       leasehold.json_1(j.payload) AS payload,
       j.version,
       leasehold.text_1(j.unique_key) AS unique_key,
       leasehold.text_1(j.exclusive_key) AS exclusive_key,
       leasehold.attempt_1(j.state, j.failures, j.expiries, j.history) AS attempt,
       j.failures,
       j.expiries,
       leasehold.at_1(j.enqueued_at) AS enqueued_at,
       leasehold.at_1(j.run_at) AS run_at,
       leasehold.at_1(j.settled_at) AS settled_at,
       leasehold.at_1(j.keep_until) AS keep_until,
       g.owner,
       g.task,
       j.token,
       leasehold.at_1(g.deadline) AS deadline,
       j.progress,
       coalesce(j.history -> -1 ->> 'reason', leasehold.why_1(j.history -> -1 ->> 'cause')) AS last_reason,
       leasehold.json_1(j.result) AS result,
       j.headers,
       coalesce(j.history, '[]') AS history
FROM leasehold.job j
JOIN leasehold.queue q ON q.id = j.queue
LEFT JOIN leasehold.grants g ON g.queue = j.queue AND g.id = j.lease_of AND j.state = state.LEASED;

CREATE OR REPLACE VIEW leasehold.leases AS
SELECT q.namespace::text AS namespace,
       q.name::text AS queue,
       j.id AS job,
       j.kind::text AS kind,
       j.token,
       g.owner,
       g.task,
       leasehold.attempt_1(j.state, j.failures, j.expiries, NULL) AS attempt,
       leasehold.at_1(g.granted_at) AS granted_at,
       leasehold.at_1(g.deadline) AS deadline,
       g.term / 1000 * interval '1 microsecond' AS term,
       g.renewals,
       j.cancel,
       j.progress
FROM leasehold.job j
JOIN leasehold.queue q ON q.id = j.queue
JOIN leasehold.grants g ON g.queue = j.queue AND g.id = j.lease_of
WHERE j.state = state.LEASED;

CREATE OR REPLACE VIEW leasehold.dead AS
SELECT q.namespace::text AS namespace,
       q.name::text AS queue,
       j.id,
       j.kind::text AS kind,
       leasehold.json_1(j.payload) AS payload,
       leasehold.text_1(j.unique_key) AS unique_key,
       leasehold.text_1(j.exclusive_key) AS exclusive_key,
       j.failures::bigint + j.expiries AS attempts,
       leasehold.at_1(j.enqueued_at) AS enqueued_at,
       leasehold.at_1(j.settled_at) AS died_at,
       j.history -> -1 ->> 'owner' AS last_owner,
       coalesce(j.history -> -1 ->> 'reason', leasehold.why_1(j.history -> -1 ->> 'cause')) AS reason,
       coalesce(j.history, '[]') AS history
FROM leasehold.job j
JOIN leasehold.queue q ON q.id = j.queue
WHERE j.state = state.DEAD AND j.settled_at IS NOT NULL;

CREATE OR REPLACE VIEW leasehold.queues AS
SELECT q.namespace::text AS namespace,
       q.name::text AS queue,
       q.paused,
       q.relaxed,
       n.counts[count.SCHEDULED] AS scheduled,
       n.counts[count.READY] AS ready,
       n.counts[count.LEASED] AS leased,
       n.counts[count.COMPLETED] AS completed,
       n.counts[count.DEAD] AS dead,
       n.counts[count.CANCELLED] AS cancelled
FROM leasehold.queue q
CROSS JOIN LATERAL (SELECT coalesce(leasehold.counts_1(q.id), leasehold.no_counts_1()) AS counts) AS n;
