-- claim: expire what is overdue (reap.sql), promote what is due, grant.
-- in   a queue and how many      out  a range of records, which becomes one grant
-- why  one range read, one range delete and one grant row, however many jobs

-- name: due_page
SELECT row, record FROM leasehold_aside WHERE queue = ?1 AND state = 0 AND at <= ?2
ORDER BY at, seq LIMIT ?3;

-- name: ready_page
SELECT slot, record FROM leasehold_ready WHERE slot >= ?1 AND slot < ?2 ORDER BY slot LIMIT ?3;

-- name: take_ready
DELETE FROM leasehold_ready WHERE slot BETWEEN ?1 AND ?2;

-- name: grant_new
INSERT INTO leasehold_grants (id, queue, deadline, nonce, owner, task, granted_at, term, max_lifetime,
                              renewals, leases, live, noted, ended, first_job, last_job)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, 0, ?10, ?10, 0, ?11, ?12, ?13);

-- name: records_new
INSERT INTO leasehold_records (id, heads, records) VALUES (?1, ?2, ?3);

-- name: first_deadline
SELECT deadline FROM leasehold_grants WHERE queue = ?1 ORDER BY deadline LIMIT 1;

-- name: issuer
SELECT last, floor FROM leasehold_meta;

-- name: issuer_save
UPDATE leasehold_meta SET last = ?1, floor = ?2;
