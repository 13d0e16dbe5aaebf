-- control: what operators do, each time on record.
-- in   a command, who gives it and why
-- out  {"done", "skipped", "duplicates": [[job, holder], ...]}
-- why  a command holds the locks of the queues that it is about: nobody claims what it changes
--
-- command: as serde writes ControlCommand, e.g. {"cancel": {"job": "..."}}, {"revoke": {"owner":
-- "..."}}. said: the same in words, for the record.
--
-- Locks: leased jobs, then keys in their order, then jobs that wait. Whoever ends a lease has its
-- job and then its key; who has a key has the jobs parked behind it.

CREATE OR REPLACE FUNCTION leasehold.control_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    actor text, reason text, command jsonb, said text, patience text DEFAULT NULL
) RETURNS jsonb LANGUAGE plpgsql settings.PLANS AS $$
DECLARE
    VERB constant smallint := verb.CONTROL;
    word   text := (SELECT k FROM jsonb_object_keys(command) AS k);
    what   jsonb := command -> word;
    first  record;
    did    record;
    of_    integer;
    answer jsonb;
    done   bigint := 0;
    skipped bigint := 0;
    others jsonb := '[]';
    tokens bigint[] := '{}';
BEGIN
    PERFORM set_config('lock_timeout', patience, true) WHERE patience IS NOT NULL;
    first := leasehold.recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        RETURN first.answer;
    END IF;
    IF word IN ('pause', 'resume', 'configure') THEN
        PERFORM leasehold.set_queue_1(of_namespace, by_hand, word, what);
        done := 1;
    ELSIF word = 'revoke' THEN
        FOR of_ IN SELECT q.id FROM leasehold.queue q WHERE q.namespace = of_namespace ORDER BY q.id LOOP
            tokens := tokens || leasehold.revoke_1(of_namespace, by_hand, of_, what, reason);
        END LOOP;
        tokens := ARRAY (SELECT t FROM unnest(tokens) AS t ORDER BY t);
        done := cardinality(tokens);
    ELSE
        FOR of_ IN SELECT leasehold.queues_of_1(of_namespace, coalesce(what -> 'jobs', what)) LOOP
            did := leasehold.each_1(of_namespace, by_hand, of_, word, coalesce(what -> 'jobs', what), what -> 'delay');
            done := done + did.done;
            skipped := skipped + did.skipped;
            others := others || did.others;
        END LOOP;
    END IF;
    answer := jsonb_build_object('done', done, 'skipped', skipped, 'duplicates', others);
    INSERT INTO leasehold.audit (namespace, at, actor, reason, command, done, tokens)
    VALUES (of_namespace, leasehold.clock_1(by_hand), actor, reason, said, done,
            to_jsonb(tokens[1 : limit.AUDIT_TOKENS])::text);
    PERFORM leasehold.remember_1(of_session, of_lane, of_seq, VERB, leasehold.clock_1(by_hand), answer, first.prior);
    RETURN answer;
END $$;

-- Pauses, resumes or configures a queue, which is made if it is not there.
CREATE OR REPLACE FUNCTION leasehold.set_queue_1(of_namespace text, by_hand bigint, word text, what jsonb)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    of_name text := coalesce(what ->> 'queue', what #>> '{}');
    of_     integer := leasehold.queue_1(of_namespace, of_name, leasehold.clock_1(by_hand));
BEGIN
    UPDATE leasehold.queue q SET
        paused = CASE word WHEN 'pause' THEN true WHEN 'resume' THEN false ELSE q.paused END,
        relaxed = coalesce((what ->> 'relaxed')::boolean, q.relaxed)
    WHERE q.id = of_;
    IF word = 'resume' THEN
        PERFORM leasehold.wake_1(of_namespace, of_, of_name, 64, true);
    END IF;
END $$;

-- The queue that selected jobs are in.
CREATE OR REPLACE FUNCTION leasehold.queues_of_1(of_namespace text, which jsonb) RETURNS SETOF integer
LANGUAGE sql STABLE AS $$
    SELECT q.id FROM leasehold.queue q
    WHERE q.namespace = of_namespace AND q.name = which -> 'state' ->> 'queue'
    UNION ALL
    SELECT q.id FROM leasehold.job j JOIN leasehold.queue q ON q.id = j.queue
    WHERE j.id = (which ->> 'job')::uuid AND q.namespace = of_namespace
$$;

-- The jobs that a command is about, in the order in which an inspection lists them.
CREATE OR REPLACE FUNCTION leasehold.selected_1(of_queue integer, which jsonb) RETURNS uuid[] LANGUAGE plpgsql STABLE AS $$
DECLARE
    of_state text := which -> 'state' ->> 'state';
    most     integer := (which -> 'state' ->> 'max')::integer;
    ids      uuid[];
BEGIN
    IF which ? 'job' THEN
        RETURN ARRAY[(which ->> 'job')::uuid];
    ELSIF of_state = 'ready' THEN
        ids := ARRAY (SELECT j.id FROM leasehold.job j WHERE j.queue = of_queue AND j.state = state.READY
                      ORDER BY j.line, j.place LIMIT most);
        RETURN ids || ARRAY (SELECT j.id FROM leasehold.job j WHERE j.queue = of_queue AND j.state = state.PARKED
                             ORDER BY j.exclusive_key, j.seq LIMIT most - cardinality(ids));
    ELSIF of_state = 'scheduled' THEN
        RETURN ARRAY (SELECT j.id FROM leasehold.job j WHERE j.queue = of_queue AND j.state = state.SCHEDULED
                      ORDER BY j.run_at, j.seq LIMIT most);
    ELSIF of_state = 'leased' THEN
        RETURN ARRAY (SELECT j.id FROM leasehold.job j WHERE j.queue = of_queue AND j.state = state.LEASED
                      ORDER BY j.token LIMIT most);
    END IF;
    RETURN ARRAY (SELECT j.id FROM leasehold.job j WHERE j.queue = of_queue AND j.settled_at IS NOT NULL
                    AND j.state = CASE of_state WHEN 'completed' THEN state.COMPLETED WHEN 'dead' THEN state.DEAD
                                                ELSE state.CANCELLED END
                  ORDER BY j.settled_at, j.seq LIMIT most);
END $$;

-- Cancels, purges, reschedules or retries the selected jobs of a queue.
CREATE OR REPLACE FUNCTION leasehold.each_1(
    of_namespace text, by_hand bigint, of_queue integer, word text, which jsonb, delay jsonb,
    OUT done bigint, OUT skipped bigint, OUT others jsonb
) LANGUAGE plpgsql AS $$
DECLARE
    j       leasehold.job;
    ids     uuid[];
    counts  bigint[] := leasehold.no_counts_1();
    at      bigint;
    noted   bigint;
    due     bigint;
    first_due bigint;
    holder  uuid;
    window_ bigint;
    of_name text;
BEGIN
    done := 0;
    skipped := 0;
    others := '[]';
    SELECT q.name INTO of_name FROM leasehold.queue q WHERE q.id = of_queue FOR NO KEY UPDATE;
    noted := leasehold.enter_1(of_queue);
    ids := leasehold.selected_1(of_queue, which);
    PERFORM FROM leasehold.job k WHERE k.queue = of_queue AND k.id = ANY (ids) AND k.state = state.LEASED
    ORDER BY k.token FOR UPDATE;
    PERFORM leasehold.lock_keys_1(of_queue, ids);
    PERFORM FROM leasehold.job k WHERE k.queue = of_queue AND k.id = ANY (ids) ORDER BY k.id FOR UPDATE;
    at := leasehold.clock_1(by_hand);
    IF word = 'reschedule' THEN
        due := at + (delay ->> 'secs')::bigint * 1000000 + (delay ->> 'nanos')::bigint / 1000;
        first_due := leasehold.first_due_1(h) FROM leasehold.head_1(of_queue) AS h;
    END IF;
    FOR j IN
        SELECT k.* FROM unnest(ids) WITH ORDINALITY AS n (id, nth)
        JOIN leasehold.job k ON k.id = n.id AND k.queue = of_queue ORDER BY n.nth
    LOOP
        -- One that was parked may be the head of its key by now.
        j.state := (SELECT k.state FROM leasehold.job k WHERE k.id = j.id AND k.queue = of_queue);
        IF j.state = state.LEASED AND word = 'cancel' AND NOT j.cancel THEN
            UPDATE leasehold.job k SET cancel = true WHERE k.id = j.id AND k.queue = of_queue;
        ELSIF j.state NOT IN (state.SCHEDULED, state.PARKED, state.READY)
              AND NOT (word = 'purge' AND j.state <> state.LEASED)
              AND NOT (word = 'retry_dead' AND j.state = state.DEAD)
           OR word = 'retry_dead' AND j.state <> state.DEAD THEN
            skipped := skipped + 1;
            CONTINUE;
        ELSIF word = 'cancel' THEN
            counts := leasehold.uncount_1(j.state, counts);
            counts := leasehold.free_keys_1(j, counts);
            counts[count.CANCELLED] := counts[count.CANCELLED] + 1;
            UPDATE leasehold.job k SET state = state.CANCELLED, seq = nextval('leasehold.place'), settled_at = at,
                keep_until = at + greatest(coalesce((j.options ->> 'retention')::bigint / 1000, 0), rule.CANCELLED_RETENTION)
            WHERE k.id = j.id AND k.queue = of_queue;
        ELSIF word = 'purge' THEN
            counts := leasehold.uncount_1(j.state, counts);
            counts := leasehold.free_keys_1(j, counts);
            counts[count.PURGED] := counts[count.PURGED] + 1;
            DELETE FROM leasehold.job k WHERE k.id = j.id AND k.queue = of_queue;
        ELSIF word = 'reschedule' THEN
            counts := leasehold.uncount_1(j.state, counts);
            -- Its key goes to the next before it joins again.
            counts := leasehold.leave_key_1(of_queue, j.exclusive_key, j.id, counts);
            IF due > at THEN
                UPDATE leasehold.job k SET state = state.SCHEDULED, seq = nextval('leasehold.place'),
                    run_at = due
                WHERE k.id = j.id AND k.queue = of_queue;
                PERFORM leasehold.due_1(of_queue, due, noted);
                counts[count.SCHEDULED] := counts[count.SCHEDULED] + 1;
            ELSE
                counts := leasehold.join_line_1(j, due, counts);
            END IF;
        ELSE
            IF j.unique_key IS NOT NULL THEN
                window_ := (j.options ->> 'unique_window')::bigint / 1000;
                holder := leasehold.take_unique_1(of_queue, j.unique_key, j.id, at + window_, at);
                IF holder <> j.id THEN
                    others := others || jsonb_build_array(jsonb_build_array(j.id, holder));
                    CONTINUE;
                END IF;
                UPDATE leasehold.unique_key u SET until = at + window_ WHERE u.queue = of_queue AND u.key = j.unique_key;
            END IF;
            counts := leasehold.uncount_1(j.state, counts);
            UPDATE leasehold.job k SET failures = 0, expiries = 0, line = k.line / 2 * 2 + 1, settled_at = NULL,
                keep_until = NULL
            WHERE k.id = j.id AND k.queue = of_queue;
            counts := leasehold.join_line_1(j, at, counts);
        END IF;
        done := done + 1;
    END LOOP;
    PERFORM leasehold.count_1(of_queue, counts);
    PERFORM leasehold.wake_1(of_namespace, of_queue, of_name, counts[count.READY] - counts[count.PARKED], false);
    IF counts[count.SCHEDULED] > 0 AND due > at AND (first_due IS NULL OR due < first_due) THEN
        PERFORM leasehold.wake_1(of_namespace, of_queue, of_name, 1, false);
    END IF;
END $$;

-- A job that waited or was settled is not in its state any more.
CREATE OR REPLACE FUNCTION leasehold.uncount_1(of_state smallint, INOUT counts bigint[]) LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    nth constant integer := CASE of_state
        WHEN state.SCHEDULED THEN count.SCHEDULED WHEN state.COMPLETED THEN count.COMPLETED WHEN state.DEAD THEN count.DEAD
        WHEN state.CANCELLED THEN count.CANCELLED ELSE count.READY END;
BEGIN
    counts[nth] := counts[nth] - 1;
    IF of_state = state.PARKED THEN
        counts[count.PARKED] := counts[count.PARKED] - 1;
    END IF;
END $$;

-- A job joins the back of its line, or waits behind its exclusive key.
CREATE OR REPLACE FUNCTION leasehold.join_line_1(j leasehold.job, due bigint, INOUT counts bigint[]) LANGUAGE plpgsql AS $$
DECLARE
    number constant bigint := nextval('leasehold.place');
    goes   boolean := j.exclusive_key IS NULL OR leasehold.join_key_1(j.queue, j.exclusive_key, j.id);
BEGIN
    UPDATE leasehold.job k SET state = CASE WHEN goes THEN state.READY ELSE state.PARKED END, seq = number, place = number,
        run_at = due
    WHERE k.id = j.id AND k.queue = j.queue;
    counts[count.READY] := counts[count.READY] + 1;
    IF NOT goes THEN
        counts[count.PARKED] := counts[count.PARKED] + 1;
    END IF;
END $$;

-- Ends leases of a queue without their holders, and says which.
CREATE OR REPLACE FUNCTION leasehold.revoke_1(
    of_namespace text, by_hand bigint, of_queue integer, which jsonb, reason text
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    one     record;
    ids     uuid[];
    tokens  bigint[] := '{}';
    counts  bigint[] := leasehold.no_counts_1();
    at      bigint;
    of_name text;
BEGIN
    ids := ARRAY (
        SELECT j.id FROM leasehold.grants g
        JOIN leasehold.job j ON j.queue = g.queue AND j.state = state.LEASED AND j.token >= g.id AND j.token < g.id + g.leases
        WHERE g.queue = of_queue AND (g.owner = which ->> 'owner' OR g.task = which ->> 'task')
        UNION ALL
        SELECT j.id FROM leasehold.job j
        WHERE j.id = (which ->> 'job')::uuid AND j.queue = of_queue AND j.state = state.LEASED);
    IF cardinality(ids) = 0 THEN
        RETURN tokens;
    END IF;
    SELECT q.name INTO of_name FROM leasehold.queue q WHERE q.id = of_queue FOR NO KEY UPDATE;
    PERFORM leasehold.enter_1(of_queue);
    PERFORM FROM leasehold.job j WHERE j.queue = of_queue AND j.id = ANY (ids) AND j.state = state.LEASED
    ORDER BY j.token FOR UPDATE;
    PERFORM leasehold.lock_keys_1(of_queue, ids);
    at := leasehold.clock_1(by_hand);
    FOR one IN
        SELECT j, g FROM leasehold.job j JOIN leasehold.grants g ON g.queue = of_queue AND g.id = j.lease_of
        WHERE j.queue = of_queue AND j.id = ANY (ids) AND j.state = state.LEASED
          AND (which ? 'job' OR g.owner = which ->> 'owner' OR g.task = which ->> 'task')
        ORDER BY j.token
    LOOP
        tokens := tokens || (one.j).token;
        counts := leasehold.end_lease_1(one.j, one.g, at, 'revoked', NULL, CASE WHEN (one.j).cancel THEN 'cancelled' ELSE 'back' END,
                                        true, false, false, NULL, reason, NULL, NULL, counts);
    END LOOP;
    DELETE FROM leasehold.grants d WHERE d.queue = of_queue AND d.id = ANY (ARRAY (
        SELECT g.id FROM leasehold.grants g
        WHERE g.queue = of_queue AND (g.owner = which ->> 'owner' OR g.task = which ->> 'task'
                                      OR which ? 'job' AND tokens[1] >= g.id AND tokens[1] < g.id + g.leases)
          AND NOT EXISTS (SELECT FROM leasehold.job j WHERE j.queue = of_queue AND j.state = state.LEASED
                            AND j.token >= g.id AND j.token < g.id + g.leases)
        FOR UPDATE SKIP LOCKED));
    PERFORM leasehold.count_1(of_queue, counts);
    PERFORM leasehold.wake_1(of_namespace, of_queue, of_name, counts[count.READY] - counts[count.PARKED], false);
    RETURN tokens;
END $$;

-- name: control
SELECT leasehold.control_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
