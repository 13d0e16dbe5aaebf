-- session: open, and answer a repeated call with its first answer.
-- in   session, lane, sequence number      out  the last answer of the lane
-- why  an error from a write means unknown: the caller repeats, and the call must count once

-- name: clock
SELECT leasehold.clock($1);

-- name: whose
SELECT id FROM leasehold.meta;

-- name: session_open
INSERT INTO leasehold.sessions (id, namespace, used) VALUES ($1, $2, $3);

-- name: session_forget
WITH idle AS (
    DELETE FROM leasehold.sessions s WHERE used < $1 AND namespace = $2
      AND NOT EXISTS (SELECT FROM leasehold.lanes l WHERE l.session = s.id AND l.used >= $1)
    RETURNING id
)
DELETE FROM leasehold.lanes USING idle WHERE session = idle.id;

-- name: recall
SELECT greatest(s.used, l.used, CASE WHEN s.used < leasehold.clock($5) - 300000000 THEN
           (SELECT max(used) FROM leasehold.lanes WHERE session = $1) END),
       s.used, l.seq, l.verb, CASE WHEN l.seq = $4 THEN l.answer END
FROM leasehold.sessions s LEFT JOIN leasehold.lanes l ON l.session = s.id AND l.lane = $3
WHERE s.id = $1 AND s.namespace = $2;

-- name: session_touch
UPDATE leasehold.sessions SET used = $2
WHERE id = ANY (ARRAY (SELECT id FROM leasehold.sessions WHERE id = ANY ($1) FOR UPDATE SKIP LOCKED));

-- name: remember
SELECT leasehold.remember(session, lane, seq, verb, $5, answer)
FROM unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::smallint[], $6::bytea[])
     AS k (session, lane, seq, verb, answer);
