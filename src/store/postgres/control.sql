-- control: what operators do, each time on record.
-- in   job ids, or a queue and a state      out  where the jobs are
-- why  by id through an index where jobs wait; leased jobs through the id bounds of the live grants,
--      so that claims need no index entry per lease. Every queue of the namespace is locked first: a
--      command sees what it changes

-- name: queues_lock_all
SELECT id, name, paused, relaxed, last, floor FROM leasehold.queues WHERE namespace = $1
ORDER BY id FOR UPDATE;

-- name: ready_by_id
SELECT r.queue, r.line, r.place, r.record FROM leasehold.ready r JOIN leasehold.queues q ON q.id = r.queue
WHERE r.id = $2 AND q.namespace = $1;

-- name: aside_by_id
SELECT a.queue, a.seq, a.state, a.at, a.record FROM leasehold.aside a JOIN leasehold.queues q ON q.id = a.queue
WHERE a.id = $2 AND q.namespace = $1;

-- name: grants_by_job
SELECT g.queue, g.id, r.heads FROM leasehold.grants g
JOIN leasehold.queues q ON q.id = g.queue
JOIN leasehold.records r ON r.queue = g.queue AND r.id = g.id
WHERE g.first_job <= $2 AND g.last_job >= $2 AND q.namespace = $1 ORDER BY g.id;

-- name: take_line
DELETE FROM leasehold.ready WHERE queue = $1 AND line = $2 AND place = $3;

-- name: grants_of
SELECT q.name, g.id FROM leasehold.grants g JOIN leasehold.queues q ON q.id = g.queue
WHERE q.namespace = $1 AND ($2::text IS NULL OR g.owner = $2) AND ($3::text IS NULL OR g.task = $3)
  AND ($4::integer IS NULL OR g.queue = $4)
ORDER BY g.id;

-- name: ready_ids
SELECT id FROM leasehold.ready WHERE queue = $1 ORDER BY queue, line, place LIMIT $2;

-- name: parked_ids
SELECT id FROM leasehold.aside WHERE queue = $1 AND state = 1 ORDER BY key, seq LIMIT $2;

-- name: aside_ids
SELECT id FROM leasehold.aside WHERE queue = $1 AND state = $2 ORDER BY at, seq LIMIT $3;

-- name: queue_set
UPDATE leasehold.queues SET paused = $2, relaxed = $3 WHERE id = $1;

-- name: audit_new
INSERT INTO leasehold.audit (namespace, at, actor, reason, command, done, tokens)
VALUES ($1, $2, $3, $4, $5, $6, $7);
