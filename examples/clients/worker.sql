-- A producer and a worker in SQL alone: psql, in its own transactions.
--
-- Run it on a database of leasehold's: psql -v ON_ERROR_STOP=0 -f examples/clients/worker.sql
-- "$DATABASE_URL"

\set QUIET on
\pset tuples_only on
\pset format unaligned

CREATE TABLE IF NOT EXISTS psql_orders (id int PRIMARY KEY, paid boolean NOT NULL DEFAULT false);

-- The order and its job, or neither.
BEGIN;
INSERT INTO psql_orders VALUES (1);
SELECT id FROM leasehold.enqueue('psql', 'charge', '{"order": 1}');
ROLLBACK;
BEGIN;
INSERT INTO psql_orders VALUES (2);
SELECT id AS enqueued FROM leasehold.enqueue('psql', 'charge', '{"order": 2}') \gset
COMMIT;
\echo enqueued, and not the one that was rolled back: `echo ok`

-- A worker that claims for a second, and stands still for longer.
SELECT receipt AS old FROM leasehold.claim(ARRAY['psql'], 10, 'psql-old', '1 second') \gset
SELECT pg_sleep(1.2) \g /dev/null

-- The next run saves how far it came, and fails: the job comes back with what was saved.
SELECT receipt, attempt FROM leasehold.claim(ARRAY['psql'], 10, 'psql-new') \gset
SELECT leasehold.checkpoint(:'receipt', 1, '{"asked": "the bank"}') \g /dev/null
SELECT leasehold.fail(:'receipt', 'the bank is closed', interval '0') AS state \gset
\echo failed: :state, attempt :attempt

-- Its successor: the effect and the end of the job, or neither.
SELECT receipt, payload ->> 'order' AS order, attempt, checkpoint ->> 'asked' AS asked
FROM leasehold.claim(ARRAY['psql'], 10, 'psql-next') \gset
BEGIN;
SELECT leasehold.begin(:'receipt') \g /dev/null
UPDATE psql_orders SET paid = true WHERE id = :order;
SELECT leasehold.complete(:'receipt') \g /dev/null
COMMIT;
\echo paid: order :order, attempt :attempt, asked :asked

-- The old one wakes up: whatever it tries, the server ends its transaction.
BEGIN;
UPDATE psql_orders SET paid = false WHERE id = :order;
SELECT leasehold.complete(:'old') \g /dev/null
\echo refused: complete :LAST_ERROR_SQLSTATE
COMMIT;
BEGIN;
UPDATE psql_orders SET paid = false WHERE id = :order;
SELECT leasehold.fail(:'old', 'late') \g /dev/null
\echo refused: fail :LAST_ERROR_SQLSTATE
COMMIT;
BEGIN;
UPDATE psql_orders SET paid = false WHERE id = :order;
SELECT leasehold.checkpoint(:'old', 9, '1') \g /dev/null
\echo refused: checkpoint :LAST_ERROR_SQLSTATE
COMMIT;
SELECT 'paid: ' || string_agg(id || ' ' || paid, ', ') FROM psql_orders;
