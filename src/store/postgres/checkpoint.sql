-- checkpoint: save state under a lease.
-- in   receipts, numbers, bytes      out  whether each was saved
-- why  the grant is locked first (renew.sql); all notes of a call are written at once

-- name: notes_save
INSERT INTO leasehold.notes (queue, token, cancel, progress, seq, checkpoint)
SELECT * FROM unnest($1::integer[], $2::bigint[], $3::boolean[], $4::bytea[], $5::bigint[], $6::bytea[])
ON CONFLICT (queue, token) DO UPDATE
SET cancel = excluded.cancel, progress = excluded.progress, seq = excluded.seq, checkpoint = excluded.checkpoint;
