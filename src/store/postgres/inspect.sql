-- inspect: look, and change nothing.
-- in   a question and where the last page ended      out  one page
-- why  every page starts at a key, never at a number of rows to skip; counts are kept, not counted.
--      All of an answer is read from one snapshot

-- name: queues
SELECT q.id, q.name, q.paused, q.relaxed, t.tally, q.last, q.floor FROM leasehold.queues q LEFT JOIN (
    SELECT queue, array_agg(total ORDER BY nth) AS tally
    FROM (SELECT queue, nth, sum(n)::bigint AS total
          FROM leasehold.tallies, unnest(tally) WITH ORDINALITY AS one (n, nth) GROUP BY queue, nth) AS sums
    GROUP BY queue
) AS t ON t.queue = q.id
WHERE q.namespace = $1 ORDER BY q.name;

-- name: queue_ids
SELECT id FROM leasehold.queues WHERE namespace = $1 ORDER BY id;

-- name: ready_heads
SELECT DISTINCT ON (r.line) r.record FROM leasehold.stretches($1) AS s
CROSS JOIN LATERAL (
    SELECT e.line, e.place, substr(e.record, 1, 64) AS record FROM leasehold.ready e
    WHERE e.queue = $1 AND e.line = s.line AND e.place >= s.since AND e.place < s.till ORDER BY e.place LIMIT 1
) AS r
ORDER BY r.line, r.place;

-- name: look
SELECT EXISTS (
    SELECT FROM leasehold.queues q WHERE q.namespace = $1 AND q.name = ANY ($2) AND NOT q.paused
      AND CASE WHEN $3 THEN leasehold.has_ready(q.id) ELSE EXISTS (
          SELECT FROM leasehold.stretches(q.id) AS s WHERE s.line % 2 = 1 AND EXISTS (
              SELECT FROM leasehold.ready e
              WHERE e.queue = q.id AND e.line = s.line AND e.place >= s.since AND e.place < s.till)) END
), (
    SELECT min(first.at) FROM leasehold.queues q CROSS JOIN LATERAL (
        SELECT at FROM leasehold.aside WHERE queue = q.id AND state = 0 ORDER BY at, seq LIMIT 1
    ) AS first
    WHERE q.namespace = $1 AND q.name = ANY ($2)
);

-- name: grants_by_deadline
SELECT queue, id, deadline FROM leasehold.grants WHERE queue = $1 AND deadline >= $2
  AND (deadline > $2 OR id + leases > $3)
  AND ($4::text IS NULL OR owner = $4) AND ($5::text IS NULL OR task = $5)
ORDER BY deadline, id LIMIT $6;

-- name: grants_by_token
SELECT id FROM leasehold.grants WHERE queue = $1 AND id + leases > $2 AND id > $3 ORDER BY id LIMIT $4;

-- name: ready_page
SELECT line, place, record FROM leasehold.ready WHERE queue = $1 AND (line, place) > ($2, $3)
ORDER BY queue, line, place LIMIT $4;

-- name: parked_page
SELECT key, seq, record FROM leasehold.aside WHERE queue = $1 AND state = 1 AND (key, seq) > ($2, $3)
ORDER BY key, seq LIMIT $4;

-- name: parked_keys
WITH RECURSIVE keys (key) AS (
    (SELECT key FROM leasehold.aside WHERE queue = $1 AND state = 1 AND key >= $2
     ORDER BY key LIMIT 1)
    UNION ALL
    SELECT (SELECT a.key FROM leasehold.aside a
            WHERE a.queue = $1 AND a.state = 1 AND a.key > keys.key ORDER BY a.key LIMIT 1)
    FROM keys WHERE keys.key IS NOT NULL
)
SELECT key, (
    SELECT count(*) FROM (
        SELECT 1 FROM leasehold.aside a
        WHERE a.queue = $1 AND a.state = 1 AND a.key = keys.key LIMIT $4
    ) AS counted
) FROM keys WHERE key IS NOT NULL LIMIT $3;

-- name: aside_page
SELECT at, seq, record FROM leasehold.aside
WHERE queue = $1 AND state = $2 AND (at, seq) > ($3, $4)
ORDER BY at, seq LIMIT $5;

-- name: audit_page
SELECT id, at, actor, reason, command, done, tokens FROM leasehold.audit
WHERE namespace = $1 AND id < $2 ORDER BY id DESC LIMIT $3;
