-- inspect: look, and change nothing.
-- in   a question and where the last page ended      out  one page
-- why  each answer is one statement, so that all of it is of one moment. A page starts at a key,
--      never at a number of rows to skip; counts are kept, not counted
--
-- $1 is the namespace, $2 the clock by hand, wherever they are asked for.

-- Since when the job that is next in line has been due.
CREATE OR REPLACE FUNCTION leasehold.oldest_ready_1(h leasehold.head) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT min(first.run_at)
    FROM (SELECT l.line, h.fronts[array_position(h.lines, l.line)] AS front, h.starts[array_position(h.lines, l.line)] AS start
          FROM (SELECT generate_series(0, 2 * limit.PRIORITY_MAX + 1)::smallint AS line) AS l) AS of_
    CROSS JOIN LATERAL (
        SELECT r.run_at FROM (
            (SELECT j.place, j.run_at FROM leasehold.job j
             WHERE j.queue = h.queue AND j.state = state.READY AND j.line = of_.line AND j.place < -coalesce(of_.front, 0)
             ORDER BY j.place LIMIT 1)
            UNION ALL
            (SELECT j.place, j.run_at FROM leasehold.job j
             WHERE j.queue = h.queue AND j.state = state.READY AND j.line = of_.line AND j.place >= coalesce(of_.start, 0)
             ORDER BY j.place LIMIT 1)
        ) AS r ORDER BY r.place LIMIT 1
    ) AS first
$$;

-- name: queues
SELECT q.name, q.paused, q.relaxed, leasehold.counts_1(q.id) AS counts, h.last, h.floor,
       leasehold.clock_1($2) AS now_, leasehold.oldest_ready_1(h) AS oldest
FROM leasehold.queue q CROSS JOIN LATERAL leasehold.head_1(q.id) AS h
WHERE q.namespace = $1 ORDER BY q.name

-- name: leases
SELECT job.COLUMNS, q.name AS of_queue, j.token, j.cancel, j.progress, j.owner, j.task, j.granted_at, j.deadline, j.term,
       j.renewals, leasehold.clock_1($2) AS now_
FROM leasehold.queue q CROSS JOIN LATERAL (
    SELECT j.*, g.owner, g.task, g.granted_at, g.deadline, g.term, g.renewals
    FROM leasehold.grants g
    JOIN leasehold.job j ON j.queue = g.queue AND j.state = state.LEASED AND j.token >= g.id AND j.token < g.id + g.leases
    WHERE g.queue + 0 = q.id AND g.deadline >= $3 AND (g.deadline > $3 OR j.token > $4)
      AND ($5::text IS NULL OR g.owner = $5) AND ($6::text IS NULL OR g.task = $6)
    ORDER BY g.deadline, g.id + 0, j.token LIMIT $7
) AS j
WHERE q.namespace = $1 AND ($8::text IS NULL OR q.name = $8)
ORDER BY j.deadline, j.token LIMIT $7

-- name: job
SELECT job.COLUMNS, q.name AS of_queue, j.state, j.settled_at, j.token, j.cancel, j.progress, g.owner, g.task, g.granted_at,
       g.deadline, g.term, g.renewals, leasehold.clock_1($2) AS now_
FROM leasehold.job j JOIN leasehold.queue q ON q.id = j.queue
LEFT JOIN leasehold.grants g ON g.queue = j.queue AND g.id = j.lease_of AND j.state = state.LEASED
WHERE j.id = $3 AND q.namespace = $1

-- name: ready_page
SELECT job.COLUMNS, j.state, j.settled_at, j.place FROM leasehold.job j
WHERE j.queue = (SELECT q.id FROM leasehold.queue q WHERE q.namespace = $1 AND q.name = $2)
  AND j.state = state.READY AND (j.line, j.place) > ($3, $4)
ORDER BY j.line, j.place LIMIT $5

-- name: parked_page
SELECT job.COLUMNS, j.state, j.settled_at, j.seq FROM leasehold.job j
WHERE j.queue = (SELECT q.id FROM leasehold.queue q WHERE q.namespace = $1 AND q.name = $2)
  AND j.state = state.PARKED AND (j.exclusive_key, j.seq) > ($3, $4)
ORDER BY j.exclusive_key, j.seq LIMIT $5

-- name: scheduled_page
SELECT job.COLUMNS, j.state, j.settled_at, j.seq FROM leasehold.job j
WHERE j.queue = (SELECT q.id FROM leasehold.queue q WHERE q.namespace = $1 AND q.name = $2)
  AND j.state = state.SCHEDULED AND (j.run_at, j.seq) > ($3, $4)
ORDER BY j.run_at, j.seq LIMIT $5

-- name: leased_page
SELECT job.COLUMNS, j.state, j.settled_at, j.token, j.cancel, j.progress, g.owner, g.task, g.granted_at, g.deadline, g.term, g.renewals, leasehold.clock_1($6) AS now_
FROM (SELECT k.* FROM leasehold.job k
      WHERE k.queue = (SELECT q.id FROM leasehold.queue q WHERE q.namespace = $1 AND q.name = $2)
        AND k.state = state.LEASED AND k.token > $3 AND $4::bigint IS NOT NULL
      ORDER BY k.token LIMIT $5) AS j
JOIN leasehold.grants g ON g.queue = j.queue AND g.id = j.lease_of
ORDER BY j.token

-- name: settled_page
SELECT job.COLUMNS, j.state, j.settled_at, j.seq FROM leasehold.job j
WHERE j.queue = (SELECT q.id FROM leasehold.queue q WHERE q.namespace = $1 AND q.name = $2)
  AND j.state = $6 AND j.settled_at IS NOT NULL AND (j.settled_at, j.seq) > ($3, $4)
ORDER BY j.settled_at, j.seq LIMIT $5

-- name: parked_keys
WITH RECURSIVE of_ (queue) AS (
    SELECT q.id FROM leasehold.queue q WHERE q.namespace = $1 AND q.name = $2
), keys (key) AS (
    (SELECT j.exclusive_key FROM leasehold.job j
     WHERE j.queue = (SELECT queue FROM of_) AND j.state = state.PARKED AND j.exclusive_key >= $3
     ORDER BY j.exclusive_key LIMIT 1)
    UNION ALL
    SELECT (SELECT j.exclusive_key FROM leasehold.job j
            WHERE j.queue = (SELECT queue FROM of_) AND j.state = state.PARKED AND j.exclusive_key > keys.key
            ORDER BY j.exclusive_key LIMIT 1)
    FROM keys WHERE keys.key IS NOT NULL
)
SELECT key, (
    SELECT count(*) FROM (
        SELECT 1 FROM leasehold.job j
        WHERE j.queue = (SELECT queue FROM of_) AND j.state = state.PARKED AND j.exclusive_key = keys.key LIMIT $5
    ) AS counted
) AS jobs FROM keys WHERE key IS NOT NULL LIMIT $4

-- name: audit_page
SELECT id, at, actor, reason, command, done, tokens FROM leasehold.audit
WHERE namespace = $1 AND id < $2 ORDER BY id DESC LIMIT $3
