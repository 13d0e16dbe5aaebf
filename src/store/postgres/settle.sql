-- settle: end held leases.
-- in   receipts and outcomes      out  one verdict per receipt
-- why  the grants are locked first (renew.sql). A settled grant is two deletes; a half-settled one is
--      compacted, and what is noted of a lease goes with it, so that one slow job does not pin a megabyte

-- name: settle_plain
SELECT leasehold.settle_plain($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13);

-- name: records
SELECT queue, id, heads, records FROM leasehold.records
WHERE (queue, id) IN (SELECT queue, id FROM unnest($1::integer[], $2::bigint[]) AS k (queue, id));

-- name: grants_end
WITH over AS (
    DELETE FROM leasehold.grants g USING unnest($1::integer[], $2::bigint[]) AS k (queue, id)
    WHERE g.queue = k.queue AND g.id = k.id RETURNING g.queue, g.id
)
DELETE FROM leasehold.records r USING over o WHERE r.queue = o.queue AND r.id = o.id;

-- name: notes_end
DELETE FROM leasehold.notes n USING unnest($1::integer[], $2::bigint[]) AS k (queue, token)
WHERE n.queue = k.queue AND n.token = k.token;

-- name: records_compact
UPDATE leasehold.records r SET heads = k.heads, records = k.records
FROM unnest($1::integer[], $2::bigint[], $3::bytea[], $4::bytea[]) AS k (queue, id, heads, records)
WHERE r.queue = k.queue AND r.id = k.id;

-- name: floor_raise
UPDATE leasehold.queues SET floor = greatest(floor, $2) WHERE id = $1;
