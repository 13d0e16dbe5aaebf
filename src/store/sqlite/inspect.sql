-- inspect: look, and change nothing.
-- in   a question and where the last page ended      out  one page
-- why  every page starts at a key, never at a number of rows to skip; counts are kept, not counted.
--      Leases are found among the live grants, which are few: one row for each claim

-- name: queues
SELECT id, name, paused, relaxed, seq, n_scheduled, n_ready, n_parked, n_leased, n_completed, n_dead,
       n_cancelled, enqueued, granted, completed, retried, surrendered, buried, cancelled,
       expired_deadline, expired_stalled, expired_lifetime, revoked, live, late, fenced, pruned, purged
FROM leasehold_queues WHERE namespace = ?1 ORDER BY name;

-- name: queue_id
SELECT id, paused FROM leasehold_queues WHERE namespace = ?1 AND name = ?2;

-- name: queue_name
SELECT name FROM leasehold_queues WHERE namespace = ?1 AND id = ?2;

-- name: ready_head
SELECT slot, record FROM leasehold_ready WHERE slot >= ?1 AND slot < ?2 ORDER BY slot LIMIT 1;

-- name: ready_slot
SELECT slot FROM leasehold_ready WHERE slot >= ?1 AND slot < ?2 ORDER BY slot LIMIT 1;

-- name: grants_by_deadline
SELECT id, deadline FROM leasehold_grants WHERE queue = ?1 AND deadline >= ?2
  AND (deadline > ?2 OR id + leases > ?3)
  AND (?4 IS NULL OR owner = ?4) AND (?5 IS NULL OR task = ?5)
ORDER BY deadline, id LIMIT ?6;

-- name: grants_by_token
SELECT id FROM leasehold_grants WHERE queue = ?1 AND id + leases > ?2 AND id > ?3 ORDER BY id LIMIT ?4;

-- name: parked_page
SELECT key, seq, record FROM leasehold_aside WHERE queue = ?1 AND state = 1 AND (key, seq) > (?2, ?3)
ORDER BY key, seq LIMIT ?4;

-- name: parked_keys
WITH RECURSIVE keys (key) AS (
    SELECT min(key) FROM leasehold_aside WHERE queue = ?1 AND state = 1 AND key >= ?2
    UNION ALL
    SELECT (SELECT min(key) FROM leasehold_aside WHERE queue = ?1 AND state = 1 AND key > keys.key)
    FROM keys WHERE keys.key IS NOT NULL LIMIT ?3
)
SELECT key, (
    SELECT count(*) FROM (
        SELECT 1 FROM leasehold_aside
        WHERE queue = ?1 AND state = 1 AND key = keys.key LIMIT ?4
    )
) FROM keys WHERE key IS NOT NULL;

-- name: aside_page
SELECT at, seq, record FROM leasehold_aside
WHERE queue = ?1 AND state = ?2 AND (at, seq) > (?3, ?4)
ORDER BY at, seq LIMIT ?5;

-- name: audit_page
SELECT id, at, actor, reason, command, done, tokens FROM leasehold_audit
WHERE namespace = ?1 AND id < ?2 ORDER BY id DESC LIMIT ?3;
