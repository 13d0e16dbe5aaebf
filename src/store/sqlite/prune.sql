-- prune: delete settled jobs past their retention, and unique keys past their window.
-- in   a queue, a moment, how many      out  the rows, those first whose time was over first
-- why  found, in that order, by an index on the end of the retention, whatever else is past it; dead
--      jobs are not in it

-- name: queue_ids
SELECT id FROM leasehold_queues WHERE namespace = ?1 ORDER BY id;

-- name: unique_past
DELETE FROM leasehold_unique WHERE (queue, key) IN (
    SELECT queue, key FROM leasehold_unique INDEXED BY leasehold_unique_until
    WHERE queue = ?1 AND until IS NOT NULL AND until <= ?2 ORDER BY until LIMIT ?3);

-- name: kept_past
SELECT row, state FROM leasehold_aside INDEXED BY leasehold_aside_kept
WHERE queue = ?1 AND keep_until IS NOT NULL AND keep_until <= ?2
ORDER BY keep_until, row LIMIT ?3;
