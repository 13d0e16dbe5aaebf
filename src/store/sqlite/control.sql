-- control: what operators do, each time on record.
-- in   job ids, or a queue and a state      out  where the jobs are
-- why  by id through an index where jobs wait; leased jobs through the id bounds of the live grants,
--      so that claims need no index entry per lease

-- name: ready_by_id
SELECT slot FROM leasehold_ready WHERE id = ?1;

-- name: ready_record
SELECT record FROM leasehold_ready WHERE slot = ?1;

-- name: aside_by_id
SELECT row, queue, state, at FROM leasehold_aside WHERE id = ?1;

-- name: aside_record
SELECT record FROM leasehold_aside WHERE row = ?1;

-- name: grants_by_job
SELECT g.id, r.heads FROM leasehold_grants g JOIN leasehold_records r ON r.id = g.id
WHERE g.first_job <= ?1 AND g.last_job >= ?1 ORDER BY g.id;

-- name: grants_by_owner
SELECT g.id FROM leasehold_grants g JOIN leasehold_queues q ON q.id = g.queue
WHERE q.namespace = ?1 AND g.owner = ?2 ORDER BY g.id;

-- name: grants_by_task
SELECT g.id FROM leasehold_grants g JOIN leasehold_queues q ON q.id = g.queue
WHERE q.namespace = ?1 AND g.task = ?2 ORDER BY g.id;

-- name: ready_ids
SELECT id FROM leasehold_ready WHERE slot >= ?1 AND slot < ?2 ORDER BY slot LIMIT ?3;

-- name: parked_ids
SELECT id FROM leasehold_aside WHERE queue = ?1 AND state = 1 ORDER BY key, seq LIMIT ?2;

-- name: aside_ids
SELECT id FROM leasehold_aside WHERE queue = ?1 AND state = ?2 ORDER BY at, seq LIMIT ?3;

-- name: grants_of_queue
SELECT id FROM leasehold_grants WHERE queue = ?1 ORDER BY id;

-- name: audit_new
INSERT INTO leasehold_audit (namespace, at, actor, reason, command, done, tokens)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7);
