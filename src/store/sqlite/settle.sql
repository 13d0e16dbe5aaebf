-- settle: end held leases.
-- in   receipts and outcomes      out  one verdict per receipt
-- why  a settled grant is two deletes; a half-settled one is compacted, and what is noted of a lease goes
--      with it, so that one slow job does not pin a megabyte

-- name: heads
SELECT heads FROM leasehold_records WHERE id = ?1;

-- name: records
SELECT records FROM leasehold_records WHERE id = ?1;

-- name: grant_end
DELETE FROM leasehold_grants WHERE id = ?1;

-- name: records_end
DELETE FROM leasehold_records WHERE id = ?1;

-- name: note_end
DELETE FROM leasehold_notes WHERE token = ?1;

-- name: records_compact
UPDATE leasehold_records SET heads = ?2, records = ?3 WHERE id = ?1;
