-- enqueue: store jobs, each in line, behind its exclusive key, or until its time.
-- in   jobs with the client's ids      out  of those that are not new: the job that is there
--      instead
-- why  places come from a sequence and counts are appended, so that no enqueue waits for another,
--      nor for a claim; only jobs that share a key wait for each other
--
-- ids, queues, kinds, payloads: one for each job. delays: nanoseconds. unique_keys, exclusive_keys:
-- null where a job has none. options: version, priority, max_expiries, headers ([[name, value],
-- ...]), and what else JobOptions has, durations in nanoseconds. null stands for a list of nulls.
--
-- In a user's transaction (no session) a job with an exclusive key joins its line at the first
-- claim after the commit, and is scheduled until then: the key's row would stay locked for as long
-- as the user likes.

CREATE OR REPLACE FUNCTION leasehold.enqueue_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    ids uuid[], queues text[], kinds text[], payloads bytea[], delays bigint[],
    unique_keys bytea[], exclusive_keys bytea[], options jsonb[], patience text DEFAULT NULL
) RETURNS TABLE (nth integer, holder uuid) LANGUAGE plpgsql settings.PLANS AS $$
#variable_conflict use_column
DECLARE
    VERB constant smallint := verb.ENQUEUE;
    first    record;
    given    record;
    made     record;
    at       bigint;
    stored   bigint := 0;
    number   integer;
    numbers  integer[] := '{}';
    names    text[] := '{}';
    marks    bigint[] := '{}';
    others   integer[] := '{}';
    holders  uuid[] := '{}';
    parked   integer[] := '{}';
    keys     bytea[];
    holder_  uuid;
    due      bigint;
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience, true);
    END IF;
    first := leasehold.recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        RETURN QUERY SELECT (a ->> 0)::integer, (a ->> 1)::uuid FROM jsonb_array_elements(first.answer) AS a;
        RETURN;
    END IF;
    -- In the order of their names, for others make them too.
    FOR given IN SELECT DISTINCT k AS name FROM unnest(queues) AS k ORDER BY k LOOP
        number := leasehold.queue_1(of_namespace, given.name, leasehold.clock_1(by_hand));
        numbers := numbers || number;
        names := names || given.name;
        marks := marks || leasehold.enter_1(number);
    END LOOP;
    at := leasehold.clock_1(by_hand);

    -- The client's id is the job: what is there already is not stored a second time.
    FOR given IN
        SELECT k.n, k.id FROM unnest(ids) WITH ORDINALITY AS k (id, n)
        WHERE (SELECT bool_or((SELECT q.namespace = of_namespace FROM leasehold.queue q WHERE q.id = j.queue))
               FROM leasehold.job j WHERE j.id = k.id)
    LOOP
        others := others || given.n::integer;
        holders := holders || given.id;
    END LOOP;
    IF cardinality(ids) > 1 THEN
        FOR given IN
            SELECT k.n, k.id FROM (SELECT id, n, row_number() OVER (PARTITION BY id ORDER BY n) AS copy
                                   FROM unnest(ids) WITH ORDINALITY AS g (id, n)) AS k
            WHERE k.copy > 1
        LOOP
            CONTINUE WHEN given.n = ANY (others);
            others := others || given.n::integer;
            holders := holders || given.id;
        END LOOP;
    END IF;
    -- Keys in their order, for others take them too.
    IF unique_keys IS NOT NULL OR exclusive_keys IS NOT NULL AND of_session IS NOT NULL THEN
    BEGIN
        PERFORM leasehold.wait_briefly_1(of_session, patience);
        keys := unique_keys;
        FOR given IN
            SELECT k.n, k.id, k.name, k.key, (k.o ->> 'unique_window')::bigint / 1000 AS span
            FROM unnest(ids, queues, unique_keys, options) WITH ORDINALITY AS k (id, name, key, o, n)
            WHERE k.key IS NOT NULL AND k.n <> ALL (others) ORDER BY k.name, k.key, k.n
        LOOP
            holder_ := leasehold.take_unique_1(numbers[array_position(names, given.name)], given.key, given.id, at + given.span, at);
            IF holder_ <> given.id THEN
                others := others || given.n::integer;
                holders := holders || holder_;
            END IF;
        END LOOP;
        keys := exclusive_keys;
        FOR given IN
            SELECT k.n, k.id, k.name, k.key FROM unnest(ids, queues, exclusive_keys, delays) WITH ORDINALITY AS k (id, name, key, delay, n)
            WHERE k.key IS NOT NULL AND coalesce(k.delay, 0) < 1000 AND k.n <> ALL (others) AND of_session IS NOT NULL
            ORDER BY k.name, k.key, k.n
        LOOP
            IF NOT leasehold.join_key_1(numbers[array_position(names, given.name)], given.key, given.id) THEN
                parked := parked || given.n::integer;
            END IF;
        END LOOP;
        PERFORM set_config('lock_timeout', patience, true) WHERE patience IS NOT NULL;
    EXCEPTION WHEN lock_not_available THEN
        PERFORM leasehold.in_hand_1(of_session, (
            SELECT string_agg(k.n::text, ',') FROM unnest(queues, keys) WITH ORDINALITY AS k (name, key, n)
            WHERE k.name = given.name AND k.key = given.key));
    END;
    END IF;

    -- Who sleeps until the first scheduled job is due must hear of one that is due earlier.
    IF delays IS NOT NULL THEN
        FOR given IN
            SELECT k.name, min(at + k.delay / 1000) AS due FROM unnest(queues, delays) WITH ORDINALITY AS k (name, delay, n)
            WHERE k.delay >= 1000 AND k.n <> ALL (others) GROUP BY k.name
        LOOP
            number := numbers[array_position(names, given.name)];
            due := leasehold.first_due_1(o) FROM leasehold.head_1(number) AS o;
            IF due IS NULL OR given.due < due THEN
                PERFORM leasehold.wake_1(of_namespace, number, given.name, 1, false);
            END IF;
            PERFORM leasehold.due_1(number, given.due, marks[array_position(names, given.name)]);
        END LOOP;
    END IF;
    IF exclusive_keys IS NOT NULL AND of_session IS NULL THEN
        PERFORM leasehold.due_1(k.number, at, k.mark) FROM unnest(numbers, marks) AS k (number, mark);
    END IF;

    FOR made IN
        WITH new AS (
            INSERT INTO leasehold.job AS j (id, queue, version, seq, place, enqueued_at, run_at, max_expiries, weight, state,
                                            line, kind, unique_key, exclusive_key, options, headers, payload)
            SELECT n.id, n.queue, coalesce((n.o ->> 'version')::integer, 1), n.number, n.number, at,
                   n.due,
                   coalesce((n.o ->> 'max_expiries')::integer, rule.MAX_EXPIRIES),
                   octet_length(n.payload) + CASE WHEN n.o ? 'headers' THEN leasehold.weight_of_headers_1(n.o -> 'headers') ELSE 0 END,
                   CASE WHEN n.due > at OR (n.key IS NOT NULL AND of_session IS NULL) THEN state.SCHEDULED
                        WHEN n.n = ANY (parked) THEN state.PARKED ELSE state.READY END,
                   coalesce((n.o ->> 'priority')::smallint, rule.PRIORITY) * 2 + 1,
                   n.kind, n.uniq, n.key,
                   nullif(n.o - '{version,priority,max_expiries,headers}'::text[], '{}'), n.o -> 'headers', n.payload
            FROM (SELECT k.*, numbers[array_position(names, k.name)] AS queue, at + coalesce(k.delay, 0) / 1000 AS due, nextval('leasehold.place') AS number
                  FROM unnest(ids, queues, kinds, payloads, delays, unique_keys, exclusive_keys, options)
                       WITH ORDINALITY AS k (id, name, kind, payload, delay, uniq, key, o, n)
                  WHERE k.n <> ALL (others)) AS n
            ON CONFLICT DO NOTHING
            RETURNING j.queue, j.state, j.run_at
        )
        SELECT new.queue, count(*) AS jobs, count(*) FILTER (WHERE new.state = state.SCHEDULED) AS scheduled,
               count(*) FILTER (WHERE new.state = state.PARKED) AS parked,
               -- The next claim has these, ready or due.
               count(*) FILTER (WHERE new.state <> state.PARKED AND new.run_at <= at) AS now
        FROM new GROUP BY new.queue ORDER BY new.queue
    LOOP
        stored := stored + made.jobs;
        INSERT INTO leasehold.tally (queue, n, counts)
        VALUES (made.queue, nextval('leasehold.place'),
                ARRAY[made.scheduled, made.jobs - made.scheduled, made.parked, 0, 0, 0, 0, made.jobs]);
        IF made.now > 0 THEN
            PERFORM leasehold.wake_1(of_namespace, made.queue, names[array_position(numbers, made.queue)], made.now, false);
        END IF;
    END LOOP;
    IF stored + cardinality(others) <> cardinality(ids) THEN
        RAISE EXCEPTION 'a copy of this call has stored its jobs meanwhile' USING ERRCODE = '40001';
    END IF;
    IF others = '{}' THEN
        PERFORM leasehold.remember_1(of_session, of_lane, of_seq, VERB, at, NULL, first.prior);
        RETURN;
    END IF;
    PERFORM leasehold.remember_1(of_session, of_lane, of_seq, VERB, at, (
        SELECT jsonb_agg(jsonb_build_array(k.n, k.holder)) FROM unnest(others, holders) AS k (n, holder)), first.prior);
    RETURN QUERY SELECT k.n, k.holder FROM unnest(others, holders) AS k (n, holder);
END $$;

-- name: enqueue
SELECT nth, holder FROM leasehold.enqueue_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14);
