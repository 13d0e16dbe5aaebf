-- place: where jobs that are not leased stand, and who is to know.
-- in   queues, keys, jobs      out  places, heads of keys, stretches of lines
-- why  a job that was taken stays in the index until a vacuum, and a vacuum removes nothing while
--      any transaction of the server is open that is older. So whoever looks for the first job of a
--      line begins behind those that were taken: at a place up to which there is none, and never
--      will be one. That is certain once all those have ended who may have drawn such a place: each
--      holds a shared lock for as long as its transaction lasts. Other transactions do not matter
--
-- Locks: a queue's row, then jobs, then keys in their order, then parked jobs, which are passed
-- over if somebody has them.

-- The queue of that name, which is made if it is not there.
CREATE OR REPLACE FUNCTION leasehold.queue_1(of_namespace text, of_name text, at bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    found_ integer;
BEGIN
    FOR try IN 1 .. 8 LOOP
        SELECT q.id INTO found_ FROM leasehold.queue q WHERE q.namespace = of_namespace AND q.name = of_name;
        IF FOUND THEN
            RETURN found_;
        END IF;
        INSERT INTO leasehold.queue (namespace, name) VALUES (of_namespace, of_name)
        ON CONFLICT DO NOTHING RETURNING id INTO found_;
        IF FOUND THEN
            -- An issuer without memory: what an older copy of this database gave is below its
            -- floor.
            INSERT INTO leasehold.head (queue, gen, last, floor, epoch, drawn, drawn_at, sealed, sealed_at, lines, fronts,
                                        starts, due_from, overdue_from, counts, counted_to)
            VALUES (found_, 1, 0, at + rule.LEAD, 0, 0, 0, 0, 0, '{}', '{}', '{}', 0, 0, leasehold.no_counts_1(), 0);
            RETURN found_;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'a queue is made again and again' USING ERRCODE = '40001';
END $$;

CREATE OR REPLACE FUNCTION leasehold.head_1(of_queue integer) RETURNS SETOF leasehold.head LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT * FROM leasehold.head h WHERE h.queue = of_queue ORDER BY h.gen DESC LIMIT 1
$$;

-- Whoever puts jobs into a queue, or adds to its counts, comes through here before it draws a
-- number or asks the time. The answer: when the epoch began, for due_1.
--
-- The epoch is read again once the lock is held. If it has moved on, this is the one before, and
-- the other lock is taken, too: nobody moves on again while the one before is held. A transaction
-- that reads only what was there when it began takes both at once; and it locks the queue's row,
-- which fails if the queue was removed since. That waits for a removal alone.
CREATE OR REPLACE FUNCTION leasehold.enter_1(of_queue integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    class constant integer := 'leasehold.queue'::regclass::oid::integer;
    was   bigint;
    is_   bigint;
    noted bigint;
    is_strict constant boolean := current_setting('transaction_isolation') <> 'read committed';
BEGIN
    IF is_strict THEN
        PERFORM FROM leasehold.queue q WHERE q.id = of_queue FOR KEY SHARE;
    END IF;
    SELECT h.epoch, h.drawn_at INTO was, noted FROM leasehold.head h WHERE h.queue = of_queue ORDER BY h.gen DESC LIMIT 1;
    PERFORM pg_advisory_xact_lock_shared(class, of_queue * 2 + (was % 2)::integer);
    IF is_strict THEN
        PERFORM pg_advisory_xact_lock_shared(class, of_queue * 2 + 1 - (was % 2)::integer);
        RETURN noted;
    END IF;
    SELECT h.epoch, h.drawn_at INTO is_, noted FROM leasehold.head h WHERE h.queue = of_queue ORDER BY h.gen DESC LIMIT 1;
    IF is_ % 2 <> was % 2 THEN
        PERFORM pg_advisory_xact_lock_shared(class, of_queue * 2 + (is_ % 2)::integer);
    END IF;
    IF is_ IS NULL THEN
        RAISE EXCEPTION 'the queue was removed meanwhile' USING ERRCODE = '40001';
    END IF;
    RETURN noted;
END $$;

-- A job is going to be due. If the clock was set back, that may be before the time from which
-- claims look.
CREATE OR REPLACE FUNCTION leasehold.due_1(of_queue integer, due bigint, noted bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    h leasehold.head;
BEGIN
    IF due < noted THEN
        PERFORM FROM leasehold.queue q WHERE q.id = of_queue FOR NO KEY UPDATE;
        SELECT * INTO h FROM leasehold.head_1(of_queue);
        h.due_from := least(h.due_from, due);
        PERFORM leasehold.save_head_1(h);
    END IF;
END $$;

-- Whether somebody who came in that epoch has not ended.
CREATE OR REPLACE FUNCTION leasehold.is_entered_1(of_queue integer, of_epoch bigint) RETURNS boolean LANGUAGE sql VOLATILE AS $$
    SELECT NOT (pg_try_advisory_lock('leasehold.queue'::regclass::oid::integer, of_queue * 2 + (of_epoch % 2)::integer)
                AND pg_advisory_unlock('leasehold.queue'::regclass::oid::integer, of_queue * 2 + (of_epoch % 2)::integer))
$$;

-- What whoever holds a queue's lock knows of its places by now. The caller looks at jobs in
-- statements after this one: they see all that those have brought who have ended.
CREATE OR REPLACE FUNCTION leasehold.advance_1(h leasehold.head, at bigint) RETURNS leasehold.head LANGUAGE plpgsql AS $$
DECLARE
    numbers bigint;
BEGIN
    SELECT p.last_value INTO numbers FROM leasehold.place p;
    IF numbers < h.drawn THEN
        -- A copy that was made without them.
        h.lines := '{}';
        h.fronts := '{}';
        h.starts := '{}';
        h.drawn := 0;
        h.sealed := 0;
        h.counted_to := 0;
    END IF;
    IF h.drawn_at = at AND h.drawn = numbers THEN
        RETURN h;
    END IF;
    IF NOT leasehold.is_entered_1(h.queue, h.epoch + 1) THEN
        h.sealed := h.drawn;
        -- The clock may have been set back.
        h.sealed_at := least(h.drawn_at, at);
        h.drawn := numbers;
        h.drawn_at := at;
        h.epoch := h.epoch + 1;
    END IF;
    RETURN h;
END $$;

-- Where jobs of each line can be, in the order of service: from a place of a line on, up to another
-- line; or in one line, up to a place. (With both ends in one comparison of rows, the index would
-- be read to the end of the line.) The suspects of a line that is known stand alone: of them only
-- one is taken.
CREATE OR REPLACE FUNCTION leasehold.stretches_1(lines smallint[], fronts bigint[], starts bigint[], suspects boolean)
RETURNS TABLE (line smallint, place bigint, till_line smallint, till_place bigint, alone boolean)
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    FIRST_ constant bigint := -9223372036854775807;
    next   smallint := 0;
    since  bigint := FIRST_;
BEGIN
    FOR nth IN 1 .. cardinality(lines) LOOP
        alone := false;
        line := next;
        place := since;
        till_line := lines[nth];
        till_place := NULL;
        IF line < till_line THEN
            RETURN NEXT;
        END IF;
        next := lines[nth];
        since := starts[nth];
        alone := next % 2 = 0;
        IF suspects OR NOT alone THEN
            line := next;
            till_place := -fronts[nth];
            RETURN NEXT;
        END IF;
        IF alone THEN
            IF suspects THEN
                place := since;
                till_line := next + 1;
                till_place := NULL;
                RETURN NEXT;
            END IF;
            next := next + 1;
            since := FIRST_;
        END IF;
    END LOOP;
    alone := false;
    line := next;
    place := since;
    till_line := 16;
    till_place := NULL;
    RETURN NEXT;
END $$;

-- Whether a queue has a job in line.
CREATE OR REPLACE FUNCTION leasehold.has_ready_1(h leasehold.head, suspects boolean) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
DECLARE
    s record;
BEGIN
    FOR s IN SELECT * FROM leasehold.stretches_1(h.lines, h.fronts, h.starts, suspects) LOOP
        IF s.till_place IS NULL THEN
            IF EXISTS (SELECT FROM leasehold.job j WHERE j.queue = h.queue AND j.state = state.READY
                         AND (j.line, j.place) >= (s.line, s.place) AND j.line < s.till_line
                         AND (suspects OR j.line % 2 = 1)) THEN
                RETURN true;
            END IF;
        ELSIF EXISTS (SELECT FROM leasehold.job j WHERE j.queue = h.queue AND j.state = state.READY
                        AND j.line = s.line AND j.place < s.till_place) THEN
            RETURN true;
        END IF;
    END LOOP;
    -- In a copy that was made without the numbers, nothing is known: see advance_1.
    RETURN (SELECT p.last_value FROM leasehold.place p) < h.drawn AND EXISTS (
        SELECT FROM leasehold.job j WHERE j.queue = h.queue AND j.state = state.READY AND (suspects OR j.line % 2 = 1));
END $$;

-- When the first scheduled job is due, and when the first lease ends.
--
-- Here and elsewhere in PL/pgSQL, though it is one statement: what is in SQL is planned anew by
-- each call.
CREATE OR REPLACE FUNCTION leasehold.first_due_1(h leasehold.head) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT j.run_at FROM leasehold.job j
            WHERE j.queue = h.queue AND j.state = state.SCHEDULED AND j.run_at >= h.due_from
            ORDER BY j.run_at, j.seq LIMIT 1);
END $$;
CREATE OR REPLACE FUNCTION leasehold.first_deadline_1(h leasehold.head) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT g.deadline FROM leasehold.grants g WHERE g.queue + 0 = h.queue AND g.deadline >= h.overdue_from
            ORDER BY g.deadline, g.id + 0 LIMIT 1);
END $$;

-- Whether a job is the head of its exclusive key. Who comes first to a free key is.
CREATE OR REPLACE FUNCTION leasehold.join_key_1(of_queue integer, of_key bytea, of_job uuid) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    found_ uuid;
BEGIN
    FOR try IN 1 .. 8 LOOP
        INSERT INTO leasehold.exclusive_key (queue, key, head) VALUES (of_queue, of_key, of_job) ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN true;
        END IF;
        SELECT e.head INTO found_ FROM leasehold.exclusive_key e WHERE e.queue = of_queue AND e.key = of_key FOR UPDATE;
        IF FOUND THEN
            RETURN found_ = of_job;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'an exclusive key was freed again and again' USING ERRCODE = '40001';
END $$;

-- Whether a job can join its key without waiting. Somebody may have ended the key's head in a
-- transaction of his own: nobody knows who is next until that ends.
CREATE OR REPLACE FUNCTION leasehold.is_free_1(of_queue integer, of_key bytea) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM leasehold.exclusive_key e WHERE e.queue = of_queue AND e.key = of_key FOR UPDATE SKIP LOCKED;
    RETURN FOUND OR NOT EXISTS (SELECT FROM leasehold.exclusive_key e WHERE e.queue = of_queue AND e.key = of_key);
END $$;

-- The head of a key leaves it: the next that waits for it is ready.
CREATE OR REPLACE FUNCTION leasehold.leave_key_1(of_queue integer, of_key bytea, of_job uuid, INOUT counts bigint[])
LANGUAGE plpgsql AS $$
DECLARE
    next uuid;
BEGIN
    IF of_key IS NULL THEN
        RETURN;
    END IF;
    PERFORM FROM leasehold.exclusive_key e WHERE e.queue = of_queue AND e.key = of_key AND e.head = of_job FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT j.id INTO next FROM leasehold.job j
    WHERE j.queue = of_queue AND j.exclusive_key = of_key AND j.state = state.PARKED
    ORDER BY j.seq LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        DELETE FROM leasehold.exclusive_key e WHERE e.queue = of_queue AND e.key = of_key;
        RETURN;
    END IF;
    UPDATE leasehold.exclusive_key e SET head = next WHERE e.queue = of_queue AND e.key = of_key;
    UPDATE leasehold.job j SET state = state.READY, place = nextval('leasehold.place') WHERE j.id = next AND j.queue = of_queue;
    counts[count.PARKED] := counts[count.PARKED] - 1;
END $$;

-- Takes a unique key if it is free, and says who holds it.
CREATE OR REPLACE FUNCTION leasehold.take_unique_1(of_queue integer, of_key bytea, of_job uuid, until_ bigint, at bigint)
RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    holder uuid;
BEGIN
    FOR try IN 1 .. 8 LOOP
        DELETE FROM leasehold.unique_key u WHERE u.queue = of_queue AND u.key = of_key AND u.until + 0 <= at;
        INSERT INTO leasehold.unique_key (queue, key, job, until) VALUES (of_queue, of_key, of_job, until_)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN of_job;
        END IF;
        -- A holder may free its key between the two: then it is there for the taking.
        SELECT u.job INTO holder FROM leasehold.unique_key u WHERE u.queue = of_queue AND u.key = of_key;
        IF FOUND THEN
            RETURN holder;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'a unique key was freed again and again' USING ERRCODE = '40001';
END $$;

-- The locks of those who have room for a queue, one for each process, by its slot: the last six
-- bits.
CREATE OR REPLACE FUNCTION leasehold.room_1(of_namespace text, of_name text) RETURNS integer LANGUAGE sql IMMUTABLE AS
$$ SELECT hashtext(of_namespace || ' ' || of_name) & -64 $$;

-- Tells those who sleep that there are jobs: as many processes as there are jobs, and only such as
-- have room for this queue. Each of these holds a lock on the connection on which it listens.
CREATE OR REPLACE FUNCTION leasehold.wake_1(of_namespace text, of_queue integer, of_name text, jobs bigint, suspects boolean)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    class constant integer := 'leasehold.lane'::regclass::oid::integer;
    room  constant integer := leasehold.room_1(of_namespace, of_name);
    -- A walk through all slots, from anywhere and in odd steps, so that none is the usual one. To
    -- look at all of them and draw lots made jobs that come one by one dearer by a sixth.
    since constant integer := floor(random() * 64)::integer;
    step  constant integer := floor(random() * 32)::integer * 2 + 1;
    left_ bigint := jobs;
    slot  integer;
BEGIN
    IF jobs <= 0 THEN
        RETURN;
    END IF;
    FOR nth IN 0 .. 63 LOOP
        slot := (since + nth * step) % 64;
        CONTINUE WHEN pg_try_advisory_lock_shared(class, room | slot) AND pg_advisory_unlock_shared(class, room | slot);
        PERFORM pg_notify(channel.PREFIX || slot,
                          suspects::integer || ' ' || left_ || ' ' || of_namespace || ' ' || of_name);
        left_ := left_ - 1;
        EXIT WHEN left_ = 0;
    END LOOP;
END $$;
