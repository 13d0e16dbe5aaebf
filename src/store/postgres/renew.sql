-- renew: extend grants; let single leases of them lapse.
-- in   queue numbers and grants      out  the grants, locked in one order, and what is noted of them
-- why  the row is locked before it is judged: nothing slips between test and effect

-- name: grants_lock
SELECT g.queue, g.id, g.deadline, g.nonce, g.owner, g.task, g.granted_at, g.term, g.max_lifetime, g.renewals,
       g.leases, g.live, g.noted, g.ended, r.heads
FROM leasehold.grants g JOIN leasehold.records r ON r.queue = g.queue AND r.id = g.id
WHERE (g.queue, g.id) IN (
    SELECT q.id, k.id FROM unnest($2::text[], $3::bigint[]) AS k (name, id)
    JOIN leasehold.queues q ON q.namespace = $1 AND q.name = k.name)
ORDER BY g.queue, g.id FOR UPDATE OF g;

-- name: grants_read
SELECT g.queue, g.id, g.deadline, g.nonce, g.owner, g.task, g.granted_at, g.term, g.max_lifetime, g.renewals,
       g.leases, g.live, g.noted, g.ended, r.heads
FROM leasehold.grants g JOIN leasehold.records r ON r.queue = g.queue AND r.id = g.id
WHERE (g.queue, g.id) IN (SELECT queue, id FROM unnest($1::integer[], $2::bigint[]) AS k (queue, id))
ORDER BY g.queue, g.id;

-- name: grants_relock
SELECT g.queue, g.id, g.deadline, g.nonce, g.owner, g.task, g.granted_at, g.term, g.max_lifetime, g.renewals,
       g.leases, g.live, g.noted, g.ended, r.heads
FROM leasehold.grants g JOIN leasehold.records r ON r.queue = g.queue AND r.id = g.id
WHERE (g.queue, g.id) IN (SELECT queue, id FROM unnest($1::integer[], $2::bigint[]) AS k (queue, id))
ORDER BY g.queue, g.id FOR UPDATE OF g;

-- name: grants_save
UPDATE leasehold.grants g
SET deadline = k.deadline, renewals = k.renewals, live = k.live, noted = k.noted, ended = k.ended
FROM unnest($1::integer[], $2::bigint[], $3::bigint[], $4::integer[], $5::integer[], $6::boolean[], $7::bytea[])
     AS k (queue, id, deadline, renewals, live, noted, ended)
WHERE g.queue = k.queue AND g.id = k.id;

-- name: notes
SELECT n.queue, k.id, n.token, n.cancel, n.progress, n.seq, n.checkpoint
FROM unnest($1::integer[], $2::bigint[], $3::integer[]) AS k (queue, id, leases)
JOIN leasehold.notes n ON n.queue = k.queue AND n.token >= k.id AND n.token < k.id + k.leases;

-- name: renew_plain
SELECT nth, granted, cancel, fenced FROM leasehold.renew_plain($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12,
    $13);
