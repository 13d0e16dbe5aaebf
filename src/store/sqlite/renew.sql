-- renew: extend a grant; let single leases of it lapse.
-- in   grant, nonce      out  the grant and what is noted of its leases
-- why  the row is read and written in one immediate transaction: nothing slips between test and effect

-- name: grant
SELECT queue, deadline, nonce, owner, task, granted_at, term, max_lifetime, renewals, leases, live, noted,
       ended
FROM leasehold_grants WHERE id = ?1;

-- name: grant_save
UPDATE leasehold_grants SET deadline = ?2, renewals = ?3, live = ?4, noted = ?5, ended = ?6 WHERE id = ?1;

-- name: grant_save_kept
UPDATE leasehold_grants SET renewals = ?2, live = ?3, noted = ?4, ended = ?5 WHERE id = ?1;

-- name: notes
SELECT token, cancel, progress, seq, checkpoint FROM leasehold_notes WHERE token >= ?1 AND token < ?2;

-- name: note_save
INSERT OR REPLACE INTO leasehold_notes (token, cancel, progress, seq, checkpoint)
VALUES (?1, ?2, ?3, ?4, ?5);
