-- claim: expire what is overdue (reap.sql), promote what is due, grant.
-- in   a queue and how many      out  records, which become one grant
-- why  one read, one delete and one grant row, however many jobs. The queue's row is the lock: whoever
--      takes jobs out of a line holds it, so that the rows of the line need no locks of their own

-- name: claim_plain
SELECT nth, token, records, due, deadline
FROM leasehold.claim_plain($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15);

-- name: queues_lock
SELECT id, name, paused, relaxed, last, floor FROM leasehold.queues WHERE namespace = $1 AND name = ANY ($2) ORDER BY id FOR UPDATE;

-- name: take_due
WITH due AS (
    DELETE FROM leasehold.aside WHERE seq = ANY (ARRAY (
        SELECT seq FROM leasehold.aside WHERE queue = $1 AND state = 0 AND at <= $2
        ORDER BY at, seq LIMIT $3 FOR UPDATE SKIP LOCKED))
    RETURNING at, seq, record
)
SELECT record FROM due ORDER BY at, seq;

-- name: take_ready
WITH next AS (
    SELECT r.spot, r.line, r.place, r.weight
    FROM leasehold.stretches($1) AS s
    CROSS JOIN LATERAL (
        SELECT e.ctid AS spot, e.line, e.place, e.weight FROM leasehold.ready e
        WHERE e.queue = $1 AND e.line = s.line AND e.place >= s.since AND e.place < s.till ORDER BY e.place
        LIMIT CASE WHEN s.line % 2 = 1 THEN $2 WHEN s.line = $4 THEN 1 ELSE 0 END
    ) AS r
    WHERE r.line % 2 = 1 OR r.place = $5
    LIMIT $2
), fits AS (
    SELECT spot FROM (SELECT spot, sum(weight) OVER (ORDER BY line, place) - weight AS before FROM next) AS n
    WHERE before < $3
), taken AS (
    DELETE FROM leasehold.ready WHERE ctid = ANY (ARRAY (SELECT spot FROM fits))
    RETURNING line, place, record
)
SELECT line, record FROM taken ORDER BY line, place;

-- name: first_suspect
SELECT r.line, r.place FROM leasehold.stretches($1) AS s
CROSS JOIN LATERAL (
    SELECT e.line, e.place FROM leasehold.ready e
    WHERE e.queue = $1 AND e.line = s.line AND e.place >= s.since AND e.place < s.till ORDER BY e.place LIMIT 1
) AS r
WHERE s.line % 2 = 0 LIMIT 1;

-- name: grant_new
INSERT INTO leasehold.grants (queue, id, deadline, nonce, owner, task, granted_at, term, max_lifetime,
                              renewals, leases, live, noted, ended, first_job, last_job)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0, $10, $10, false, $11, $12, $13);

-- name: records_new
INSERT INTO leasehold.records (queue, id, heads, records) VALUES ($1, $2, $3, $4);

-- name: first_deadline
SELECT deadline FROM leasehold.grants WHERE queue = $1 AND id <> ALL ($2) ORDER BY deadline, id LIMIT 1;

-- name: issuer_save
UPDATE leasehold.queues q SET last = k.last FROM unnest($1::integer[], $2::bigint[]) AS k (id, last)
WHERE q.id = k.id;

-- name: has_ready
SELECT leasehold.has_ready($1);

-- name: seal
SELECT leasehold.seal($1, $2, $3);
