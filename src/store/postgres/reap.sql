-- reap: expire overdue leases, the oldest first.
-- in   queues, now, how many      out  the overdue grants by (deadline, token), locked
-- why  a grant that somebody settles at this moment is passed over: it is not overdue to him, and the
--      next reaper sees what became of it. Two reapers never have the same grant

-- name: overdue
SELECT g.queue, g.id, g.deadline, g.nonce, g.owner, g.task, g.granted_at, g.term, g.max_lifetime, g.renewals,
       g.leases, g.live, g.noted, g.ended, r.heads, r.records
FROM leasehold.grants g JOIN leasehold.records r ON r.queue = g.queue AND r.id = g.id
WHERE g.queue = $1 AND g.deadline <= $2
ORDER BY g.deadline, g.id LIMIT $3 FOR UPDATE OF g SKIP LOCKED;

-- name: overdue_ids
SELECT g.id FROM leasehold.grants g WHERE g.queue = $1 AND g.deadline <= $2 LIMIT $3;
