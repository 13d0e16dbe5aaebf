-- session: open, and answer a repeated call with its first answer.
-- in   session, lane, sequence number      out  the last answer of the lane
-- why  an error from a write means unknown: the caller repeats, and the call must count once

-- name: session_open
INSERT INTO leasehold_sessions (id, namespace, used) VALUES (?1, ?2, ?3);

-- name: session_idle
SELECT id FROM leasehold_sessions WHERE used < ?1;

-- name: session_forget
DELETE FROM leasehold_sessions WHERE id = ?1;

-- name: session_forget_lanes
DELETE FROM leasehold_lanes WHERE session = ?1;

-- name: session_used
SELECT used FROM leasehold_sessions WHERE id = ?1 AND namespace = ?2;

-- name: session_touch
UPDATE leasehold_sessions SET used = ?2 WHERE id = ?1;

-- name: lane_seq
SELECT seq FROM leasehold_lanes WHERE session = ?1 AND lane = ?2;

-- name: lane_answer
SELECT verb, answer FROM leasehold_lanes WHERE session = ?1 AND lane = ?2;

-- name: lane_remember
INSERT INTO leasehold_lanes (session, lane, seq, verb, answer) VALUES (?1, ?2, ?3, ?4, ?5)
ON CONFLICT (session, lane) DO UPDATE SET seq = excluded.seq, verb = excluded.verb, answer = excluded.answer;

-- name: take_turn
UPDATE leasehold_meta SET version = version;
