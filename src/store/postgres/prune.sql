-- prune: delete settled jobs past their retention, and unique keys past their window.
-- in   a queue, a moment, how many      out  the keys' queues, the states of the rows deleted
-- why  found, those first whose time was over first, by an index on the end of the retention, whatever
--      else is past it; dead jobs are not in it

-- name: unique_past
DELETE FROM leasehold.uniques WHERE queue = $1 AND key = ANY (ARRAY (
    SELECT key FROM leasehold.uniques WHERE queue = $1 AND until IS NOT NULL AND until <= $2
    ORDER BY until LIMIT $3 FOR UPDATE SKIP LOCKED))
RETURNING queue;

-- name: take_kept
DELETE FROM leasehold.aside WHERE seq = ANY (ARRAY (
    SELECT seq FROM leasehold.aside WHERE queue = $1 AND keep_until IS NOT NULL AND keep_until <= $2
    ORDER BY keep_until LIMIT $3 FOR UPDATE SKIP LOCKED))
RETURNING state;
