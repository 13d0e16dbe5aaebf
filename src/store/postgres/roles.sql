-- roles: what producers, workers, readers and operators may do. Run as the owner of the schema, and
-- again after each migration. Give your own roles one of these: GRANT leasehold_worker TO app.
--
-- The functions run with the rights of whoever calls them, so these rights are all there is.

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['leasehold_producer', 'leasehold_worker', 'leasehold_reader', 'leasehold_operator'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = name) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', name);
        END IF;
    END LOOP;
END $$;

GRANT USAGE ON SCHEMA leasehold TO leasehold_producer, leasehold_worker, leasehold_reader, leasehold_operator;
GRANT SELECT ON leasehold.meta TO leasehold_producer, leasehold_worker, leasehold_reader, leasehold_operator;

-- A producer adds jobs. It sees which there are, not what is in them; it changes and ends none.
GRANT SELECT, INSERT ON leasehold.queue, leasehold.head TO leasehold_producer;
-- After the clock was set back, a job may be due before claims look for any: who adds it locks the
-- queue, by the right to a column that nobody can change, and replaces the head.
GRANT UPDATE (id) ON leasehold.queue TO leasehold_producer;
GRANT DELETE ON leasehold.head TO leasehold_producer;
GRANT INSERT ON leasehold.job, leasehold.tally TO leasehold_producer;
GRANT SELECT (id, queue, state, run_at, seq) ON leasehold.job TO leasehold_producer;
GRANT SELECT, INSERT, DELETE ON leasehold.unique_key TO leasehold_producer;
GRANT SELECT, INSERT, UPDATE (head) ON leasehold.exclusive_key TO leasehold_producer;
GRANT SELECT, INSERT, UPDATE, DELETE ON leasehold.session, leasehold.lane TO leasehold_producer;
GRANT USAGE, SELECT ON SEQUENCE leasehold.place TO leasehold_producer;

-- A worker claims and ends leases, and enqueues.
GRANT SELECT, INSERT, UPDATE, DELETE ON leasehold.queue, leasehold.head, leasehold.tally, leasehold.job,
    leasehold.unique_key, leasehold.exclusive_key, leasehold.grants, leasehold.session, leasehold.lane,
    leasehold.fence, leasehold.fence_done TO leasehold_worker, leasehold_operator;
GRANT USAGE, SELECT ON SEQUENCE leasehold.place TO leasehold_worker, leasehold_operator;

-- An operator commands, too: each command is on record.
GRANT SELECT, INSERT ON leasehold.audit TO leasehold_operator;

-- A reader looks.
GRANT SELECT ON leasehold.jobs, leasehold.leases, leasehold.dead, leasehold.queues
    TO leasehold_reader, leasehold_worker, leasehold_operator;
GRANT SELECT ON leasehold.queue, leasehold.head, leasehold.tally, leasehold.job, leasehold.exclusive_key, leasehold.audit
    TO leasehold_reader;
GRANT SELECT (queue, leases, id, deadline, granted_at, term, max_lifetime, renewals, owner, task) ON leasehold.grants
    TO leasehold_reader;
