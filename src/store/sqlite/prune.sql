-- prune: delete settled jobs past their retention, and unique keys past their window.
-- in   a queue, a moment, how many      out  the rows, in the order in which they were settled
-- why  found by an index on the end of the retention; dead jobs are not in it

-- name: queue_ids
SELECT id FROM leasehold_queues WHERE namespace = ?1 ORDER BY id;

-- name: unique_past
DELETE FROM leasehold_unique WHERE queue = ?1 AND until IS NOT NULL AND until <= ?2;

-- name: kept_past
SELECT row, state FROM leasehold_aside INDEXED BY leasehold_aside_kept
WHERE queue = ?1 AND keep_until IS NOT NULL AND keep_until <= ?2
ORDER BY state, at, seq LIMIT ?3;
