-- listen: sleep until work may exist.
-- in   queues      out  whether they have a job in line, when the first scheduled one is due, in
--      how many microseconds the first lease ends, and whether somebody is putting jobs there, who
--      may have looked for sleepers before there was one
-- why  a process that has room says so by locks of its listening connection: nothing is written,
--      and what holds them ends with it

CREATE OR REPLACE FUNCTION leasehold.look_1(
    of_namespace text, queues text[], suspects boolean, by_hand bigint DEFAULT NULL,
    OUT work boolean, OUT due bigint, OUT ends bigint, OUT busy boolean
) LANGUAGE plpgsql settings.PLANS AS $$
DECLARE
    class constant integer := 'leasehold.head'::regclass::oid::integer;
    q record;
BEGIN
    work := false;
    busy := false;
    FOR q IN
        SELECT k.id, k.paused, o AS head FROM leasehold.queue k CROSS JOIN LATERAL leasehold.head_1(k.id) AS o
        WHERE k.namespace = of_namespace AND k.name = ANY (queues) ORDER BY k.id
    LOOP
        -- One after the other, or they would take each other for somebody who is at it.
        PERFORM pg_advisory_xact_lock(class, q.id);
        busy := busy OR leasehold.is_entered_1(q.id, 0) OR leasehold.is_entered_1(q.id, 1);
        work := work OR (NOT q.paused AND leasehold.has_ready_1(q.head, suspects));
        due := least(due, leasehold.first_due_1(q.head));
        ends := least(ends, leasehold.first_deadline_1(q.head));
    END LOOP;
    ends := ends - leasehold.clock_1(by_hand);
END $$;

-- name: look
SELECT work, due, ends, busy FROM leasehold.look_1($1, $2, $3, $4);

-- name: slot
SELECT slot FROM generate_series(0, 63) AS slot
WHERE CASE WHEN current_setting('leasehold_listener.direct', true) = 'on'
           THEN pg_try_advisory_lock('leasehold.session'::regclass::oid::integer, slot) END LIMIT 1;

-- name: have_room
SELECT pg_advisory_lock('leasehold.lane'::regclass::oid::integer, leasehold.room_1($1, name) | $3)
FROM unnest($2::text[]) AS k (name);

-- name: are_full
SELECT pg_advisory_unlock('leasehold.lane'::regclass::oid::integer, leasehold.room_1($1, name) | $3)
FROM unnest($2::text[]) AS k (name);
