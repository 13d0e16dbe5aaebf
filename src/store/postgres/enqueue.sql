-- enqueue: store jobs, each in line, behind its exclusive key, or until its time.
-- in   jobs with the client's ids      out  per job: new, or the job that holds its unique key
-- why  places come from a sequence and counts are appended, so that no enqueue waits for another, nor
--      for a claim; only jobs that share a key wait for each other

-- name: enqueue_plain
SELECT leasehold.enqueue_plain($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15);

-- name: ids_taken
SELECT r.id FROM leasehold.ready r JOIN leasehold.queues q ON q.id = r.queue
WHERE r.id = ANY ($2) AND q.namespace = $1
UNION ALL
SELECT a.id FROM leasehold.aside a JOIN leasehold.queues q ON q.id = a.queue
WHERE a.id = ANY ($2) AND q.namespace = $1;

-- name: grants_between
SELECT r.heads, g.leases, g.ended FROM leasehold.grants g
JOIN leasehold.queues q ON q.id = g.queue
JOIN leasehold.records r ON r.queue = g.queue AND r.id = g.id
WHERE g.last_job >= $2 AND g.first_job <= $3 AND q.namespace = $1;

-- name: queues_named
SELECT id, name, paused, relaxed, last, floor FROM leasehold.queues
WHERE namespace = $1 AND name = ANY ($2);

-- name: queues_of_ids
SELECT id, name, paused, relaxed, last, floor FROM leasehold.queues
WHERE namespace = $1 AND id = ANY ($2);

-- name: queue_new
INSERT INTO leasehold.queues (namespace, name, floor) VALUES ($1, $2, $3)
ON CONFLICT (namespace, name) DO NOTHING;

-- name: put_ready
-- The transaction has its number before it draws places: see seal in schema.sql.
WITH own AS MATERIALIZED (SELECT pg_current_xact_id())
INSERT INTO leasehold.ready (queue, line, place, id, weight, record)
SELECT queue, line, CASE WHEN front THEN -1 ELSE 1 END * nextval('leasehold.places'), id, weight, record
FROM own,
     (SELECT * FROM unnest($1::integer[], $2::smallint[], $3::boolean[], $4::uuid[], $5::integer[], $6::bytea[])
      WITH ORDINALITY AS job (queue, line, front, id, weight, record, nth) ORDER BY nth) AS jobs;

-- name: put_aside
INSERT INTO leasehold.aside (seq, id, queue, state, at, key, keep_until, record)
SELECT nextval('leasehold.places'), id, queue, state, at, key, keep_until, record
FROM (SELECT * FROM unnest($1::uuid[], $2::integer[], $3::smallint[], $4::bigint[], $5::bytea[], $6::bigint[],
                           $7::bytea[])
      WITH ORDINALITY AS job (id, queue, state, at, key, keep_until, record, nth) ORDER BY nth) AS jobs;

-- name: tally
INSERT INTO leasehold.tallies (queue, tally)
SELECT queue, ($2::bigint[])[(nth - 1) * 24 + 1 : nth * 24]
FROM unnest($1::integer[]) WITH ORDINALITY AS k (queue, nth);

-- name: fold
WITH few AS (
    SELECT ctid FROM leasehold.tallies WHERE queue = $1 FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM leasehold.tallies WHERE ctid = ANY (ARRAY (SELECT ctid FROM few)) RETURNING tally
)
INSERT INTO leasehold.tallies (queue, tally)
SELECT $1, array_agg(total ORDER BY nth)
FROM (SELECT nth, sum(n)::bigint AS total
      FROM gone, unnest(tally) WITH ORDINALITY AS one (n, nth) GROUP BY nth) AS sums
HAVING count(*) > 0;

-- name: ring
SELECT pg_notify($1, bell) FROM unnest($2::text[]) AS b (bell);

-- name: ring_if_first
SELECT pg_notify($1, bell) FROM unnest($2::text[], $3::integer[], $4::bigint[]) AS b (bell, queue, at)
WHERE NOT EXISTS (SELECT FROM leasehold.aside a WHERE a.queue = b.queue AND a.state = 0 AND a.at <= b.at);

-- name: first_due
SELECT at FROM leasehold.aside WHERE queue = $1 AND state = 0 ORDER BY at, seq LIMIT 1;

-- name: unique_past_of
DELETE FROM leasehold.uniques u USING unnest($1::integer[], $2::bytea[]) AS k (queue, key)
WHERE u.queue = k.queue AND u.key = k.key AND u.until <= $3;

-- name: unique_take
INSERT INTO leasehold.uniques (queue, key, job, until)
SELECT DISTINCT ON (queue, key) queue, key, job, until
FROM unnest($1::integer[], $2::bytea[], $3::uuid[], $4::bigint[])
     WITH ORDINALITY AS k (queue, key, job, until, nth)
ORDER BY queue, key, nth
ON CONFLICT (queue, key) DO NOTHING;

-- name: unique_holders
SELECT u.queue, u.key, u.job FROM leasehold.uniques u
JOIN (SELECT DISTINCT queue, key FROM unnest($1::integer[], $2::bytea[]) AS given (queue, key)) AS k
  ON u.queue = k.queue AND u.key = k.key;

-- name: unique_again
UPDATE leasehold.uniques SET until = $4 WHERE queue = $1 AND key = $2 AND job = $3;

-- name: unique_free
DELETE FROM leasehold.uniques u USING unnest($1::integer[], $2::bytea[], $3::uuid[]) AS k (queue, key, job)
WHERE u.queue = k.queue AND u.key = k.key AND u.job = k.job AND u.until IS NULL;

-- name: exclusive_join
INSERT INTO leasehold.exclusive (queue, key, head)
SELECT DISTINCT ON (queue, key) queue, key, head
FROM unnest($1::integer[], $2::bytea[], $3::uuid[]) WITH ORDINALITY AS k (queue, key, head, nth)
ORDER BY queue, key, nth
ON CONFLICT (queue, key) DO NOTHING;

-- name: exclusive_heads
SELECT e.queue, e.key, e.head FROM leasehold.exclusive e
WHERE (e.queue, e.key) IN (SELECT queue, key FROM unnest($1::integer[], $2::bytea[]) AS k (queue, key))
ORDER BY e.queue, e.key FOR UPDATE;

-- name: exclusive_set
UPDATE leasehold.exclusive e SET head = k.head
FROM unnest($1::integer[], $2::bytea[], $3::uuid[]) AS k (queue, key, head)
WHERE e.queue = k.queue AND e.key = k.key;

-- name: exclusive_free
DELETE FROM leasehold.exclusive e USING unnest($1::integer[], $2::bytea[]) AS k (queue, key)
WHERE e.queue = k.queue AND e.key = k.key;

-- name: take_next_parked
DELETE FROM leasehold.aside WHERE seq = ANY (ARRAY (
    SELECT (SELECT a.seq FROM leasehold.aside a
            WHERE a.queue = k.queue AND a.key = k.key AND a.state = 1 ORDER BY a.seq LIMIT 1)
    FROM unnest($1::integer[], $2::bytea[]) AS k (queue, key)))
RETURNING queue, key, id, record;

-- name: take_aside
DELETE FROM leasehold.aside WHERE seq = ANY ($1) RETURNING seq;
