-- reap: expire overdue leases, the oldest first.
-- in   a queue, now, how many      out  the overdue grants by (deadline, token)
-- why  found by index; two reapers are two transactions, so no expiry is counted twice

-- name: overdue
SELECT deadline, id FROM leasehold_grants WHERE queue = ?1 AND deadline <= ?2
ORDER BY deadline, id LIMIT ?3;
