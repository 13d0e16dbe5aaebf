-- enqueue: store jobs, each in line, behind its exclusive key, or until its time.
-- in   jobs with the client's ids      out  per job: new, or the job that holds its unique key
-- why  a line's ends are found by two seeks; every insert is then an append

-- name: ids_taken
SELECT EXISTS (SELECT 1 FROM leasehold_ready WHERE id BETWEEN ?1 AND ?2)
    OR EXISTS (SELECT 1 FROM leasehold_aside WHERE id BETWEEN ?1 AND ?2)
    OR EXISTS (SELECT 1 FROM leasehold_grants WHERE last_job >= ?1 AND first_job <= ?2);

-- name: queue_named
SELECT id, name, paused, relaxed, seq, n_scheduled, n_ready, n_parked, n_leased, n_completed, n_dead,
       n_cancelled, enqueued, granted, completed, retried, surrendered, buried, cancelled,
       expired_deadline, expired_stalled, expired_lifetime, revoked, live, late, fenced, pruned, purged
FROM leasehold_queues WHERE namespace = ?1 AND name = ?2;

-- name: queue_of_id
SELECT id, name, paused, relaxed, seq, n_scheduled, n_ready, n_parked, n_leased, n_completed, n_dead,
       n_cancelled, enqueued, granted, completed, retried, surrendered, buried, cancelled,
       expired_deadline, expired_stalled, expired_lifetime, revoked, live, late, fenced, pruned, purged
FROM leasehold_queues WHERE namespace = ?1 AND id = ?2;

-- name: queue_new
INSERT INTO leasehold_queues (namespace, name) VALUES (?1, ?2);

-- name: queue_save
UPDATE leasehold_queues
SET paused = ?2, relaxed = ?3, seq = ?4, n_scheduled = ?5, n_ready = ?6, n_parked = ?7, n_leased = ?8,
    n_completed = ?9, n_dead = ?10, n_cancelled = ?11, enqueued = ?12, granted = ?13, completed = ?14,
    retried = ?15, surrendered = ?16, buried = ?17, cancelled = ?18, expired_deadline = ?19,
    expired_stalled = ?20, expired_lifetime = ?21, revoked = ?22, live = ?23, late = ?24, fenced = ?25,
    pruned = ?26, purged = ?27
WHERE id = ?1;

-- name: line_ends
SELECT (SELECT slot FROM leasehold_ready WHERE slot >= ?1 AND slot < ?2 ORDER BY slot LIMIT 1),
       (SELECT slot FROM leasehold_ready WHERE slot >= ?1 AND slot < ?2 ORDER BY slot DESC LIMIT 1);

-- name: put_ready
INSERT INTO leasehold_ready (slot, id, record) VALUES (?1, ?2, ?3);

-- name: put_aside
INSERT INTO leasehold_aside (id, queue, state, at, seq, key, keep_until, record)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8);

-- name: first_due
SELECT at FROM leasehold_aside WHERE queue = ?1 AND state = 0 ORDER BY at, seq LIMIT 1;

-- name: unique_holder
SELECT job, until FROM leasehold_unique WHERE queue = ?1 AND key = ?2;

-- name: unique_take
INSERT OR REPLACE INTO leasehold_unique (queue, key, job, until) VALUES (?1, ?2, ?3, ?4);

-- name: unique_free
DELETE FROM leasehold_unique WHERE queue = ?1 AND key = ?2 AND job = ?3 AND until IS NULL;

-- name: exclusive_head
SELECT head FROM leasehold_exclusive WHERE queue = ?1 AND key = ?2;

-- name: exclusive_set
INSERT OR REPLACE INTO leasehold_exclusive (queue, key, head) VALUES (?1, ?2, ?3);

-- name: exclusive_free
DELETE FROM leasehold_exclusive WHERE queue = ?1 AND key = ?2;

-- name: next_parked
SELECT row, record FROM leasehold_aside WHERE queue = ?1 AND key = ?2 AND state = 1 ORDER BY seq LIMIT 1;

-- name: take_aside
DELETE FROM leasehold_aside WHERE row = ?1;
