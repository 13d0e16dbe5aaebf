-- checkpoint: save state under a lease, never behind what that lease has saved.
-- in   receipt, seq, bytes      out  saved, behind or fenced
-- why  the state stands beside the grant until the lease ends: saving never rewrites the records

-- name: checkpoint_save
INSERT INTO leasehold_notes (token, cancel, progress, seq, checkpoint) VALUES (?1, 0, NULL, ?2, ?3)
ON CONFLICT (token) DO UPDATE SET seq = excluded.seq, checkpoint = excluded.checkpoint;
