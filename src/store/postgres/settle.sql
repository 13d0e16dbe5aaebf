-- settle: end held leases; refuse every other receipt.
-- in   receipts, and how each lease ends      out  for each: 0 fenced, else 1 + 2 if late + 4 if
--      cancel
-- why  the comparison of the receipt and the change are one write of the job's row. Jobs that leave
--      nothing behind are deleted together; the others end one by one
--
-- outcomes: 0 complete, 1 retry, 2 surrender, 3 decline, 4 bury; null: all complete. delays:
-- nanoseconds. In a user's transaction (no session) only the job's own row and those of its keys
-- are locked.

CREATE OR REPLACE FUNCTION leasehold.settle_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    queues text[], jobs uuid[], leases_of bigint[], tokens bigint[], nonces bytea[],
    outcomes smallint[], delays bigint[], reasons text[], marks bigint[], results bytea[],
    patience text DEFAULT NULL
) RETURNS smallint[] LANGUAGE plpgsql settings.PLANS AS $$
DECLARE
    VERB constant smallint := verb.SETTLE;
    first    record;
    q        record;
    one      record;
    of_job   leasehold.job;
    of_grant leasehold.grants;
    ending   record;
    at       bigint;
    noted    bigint;
    counts   bigint[];
    verdict  smallint;
    verdicts smallint[] := array_fill(0::smallint, ARRAY[cardinality(tokens)]);
    done     integer[] := '{}';
    fronts   bigint[];
    places   bigint[];
    highest  bigint;
    due      bigint;
    known    integer;
    first_due bigint;
    h        leasehold.head;
    mixed    boolean := outcomes IS NOT NULL AND (SELECT count(DISTINCT t) FROM unnest(tokens) AS t) < cardinality(tokens);
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience, true);
    END IF;
    first := leasehold.recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        RETURN ARRAY (SELECT v::smallint FROM jsonb_array_elements_text(first.answer) WITH ORDINALITY AS a (v, n) ORDER BY n);
    END IF;
    FOR q IN
        SELECT k.id, k.name, k.relaxed FROM leasehold.queue k
        WHERE k.namespace = of_namespace AND k.name = ANY (queues) ORDER BY k.id
    LOOP
        counts := leasehold.no_counts_1();
        due := NULL;
        first_due := NULL;
        IF marks IS NOT NULL AND EXISTS (SELECT FROM unnest(queues, marks) AS k (name, mark)
                                         WHERE k.name = q.name AND k.mark IS NOT NULL) THEN
            -- The issuer's floor is to rise. Claims read it, and hold this row while they do.
            PERFORM FROM leasehold.queue k WHERE k.id = q.id FOR NO KEY UPDATE;
        END IF;
        noted := leasehold.enter_1(q.id);
        at := leasehold.clock_1(by_hand);
        IF NOT mixed THEN
            FOR one IN
                WITH held AS MATERIALIZED (
                    SELECT k.n, j.spot, 1 + CASE WHEN g.deadline <= at THEN 2 ELSE 0 END
                                          + CASE WHEN j.cancel THEN 4 ELSE 0 END AS verdict
                    FROM unnest(queues, jobs, leases_of, tokens, nonces, outcomes)
                             WITH ORDINALITY AS k (queue, job, lease_of, token, nonce, outcome, n)
                    CROSS JOIN LATERAL (
                        SELECT o.ctid AS spot, o.cancel FROM leasehold.job o
                        WHERE o.id = k.job AND o.queue = q.id AND o.state + 0 = state.LEASED AND o.token = k.token
                          AND o.lease_of = k.lease_of AND o.unique_key IS NULL AND o.exclusive_key IS NULL
                          AND (o.options ? 'retention') IS NOT TRUE FOR UPDATE) AS j
                    CROSS JOIN LATERAL (
                        SELECT o.deadline FROM leasehold.grants o
                        WHERE o.queue = q.id AND o.id = k.lease_of AND o.nonce_hash = sha256(k.nonce) LIMIT 1) AS g
                    WHERE k.queue = q.name AND coalesce(k.outcome, outcome.COMPLETE) = outcome.COMPLETE
                ), gone AS (
                    DELETE FROM leasehold.job d USING held WHERE d.ctid = held.spot
                    RETURNING held.n::integer, held.verdict
                )
                SELECT gone.verdict, array_agg(gone.n) AS places FROM gone GROUP BY gone.verdict
            LOOP
                done := done || one.places;
                FOREACH known IN ARRAY one.places LOOP
                    verdicts[known] := one.verdict;
                END LOOP;
                known := cardinality(one.places);
                counts[count.LEASE_COMPLETED] := counts[count.LEASE_COMPLETED] + known;
                counts[count.LEASED] := counts[count.LEASED] - known;
                counts[count.LIVE] := counts[count.LIVE] - known;
                IF one.verdict & 2 > 0 THEN
                    counts[count.LATE] := counts[count.LATE] + known;
                END IF;
            END LOOP;
        END IF;
        IF cardinality(done) < cardinality(tokens) THEN
            -- In one order, and before their keys.
            PERFORM FROM (SELECT k.token FROM unnest(tokens) AS k (token) ORDER BY k.token OFFSET 0) AS k
            CROSS JOIN LATERAL (SELECT FROM leasehold.job o
                                WHERE o.queue = q.id AND o.state = state.LEASED AND o.token = k.token FOR UPDATE) AS j;
            PERFORM leasehold.lock_keys_1(q.id, jobs);
            -- Past the locks: whoever waited for them finds the time of now.
            at := leasehold.clock_1(by_hand);
            fronts := ARRAY (SELECT k.token FROM unnest(queues, tokens, outcomes, delays) AS k (queue, token, outcome, delay)
                             WHERE k.queue = q.name AND k.outcome = outcome.SURRENDER AND k.delay = 0 ORDER BY k.token);
            places := leasehold.fronts_1(fronts);
            FOR one IN
                SELECT k.* FROM unnest(queues, jobs, leases_of, tokens, nonces, outcomes, delays, reasons, marks, results)
                    WITH ORDINALITY AS k (queue, job, lease_of, token, nonce, outcome, delay, reason, mark, result, n)
                WHERE k.queue = q.name AND k.n <> ALL (done) ORDER BY k.n
            LOOP
                SELECT * INTO of_job FROM leasehold.job o
                WHERE o.id = one.job AND o.queue = q.id AND o.state + 0 = state.LEASED AND o.token = one.token
                  AND o.lease_of = one.lease_of FOR UPDATE;
                SELECT * INTO of_grant FROM leasehold.grants o
                WHERE of_job.id IS NOT NULL AND o.queue = q.id AND o.id = one.lease_of AND o.nonce_hash = sha256(one.nonce);
                IF NOT FOUND THEN
                    counts[count.FENCED] := counts[count.FENCED] + 1;
                    CONTINUE;
                END IF;
                verdict := 1 + CASE WHEN of_grant.deadline <= at THEN 2 ELSE 0 END + CASE WHEN of_job.cancel THEN 4 ELSE 0 END;
                verdicts[one.n] := verdict;
                IF verdict & 2 > 0 THEN
                    counts[count.LATE] := counts[count.LATE] + 1;
                END IF;
                IF one.mark <= at + rule.BELIEF THEN
                    highest := greatest(highest, one.mark);
                END IF;
                ending := leasehold.settled_1(coalesce(one.outcome, outcome.COMPLETE::smallint), coalesce(one.delay, 0), one.reason,
                                              one.mark, (one.mark <= at + rule.BELIEF) IS NOT FALSE, of_job.cancel,
                                              q.relaxed, at);
                IF ending.next = 'scheduled' THEN
                    PERFORM leasehold.due_1(q.id, ending.due, noted);
                    due := least(due, ending.due);
                    IF first_due IS NULL THEN
                        first_due := coalesce((SELECT leasehold.first_due_1(o) FROM leasehold.head_1(q.id) AS o), due + 1);
                    END IF;
                END IF;
                counts := leasehold.end_lease_1(of_job, of_grant, at, ending.ended, NULL, ending.next, ending.keeps_key,
                                                ending.failed, ending.declined, ending.due, ending.why,
                                                CASE WHEN ending.ended = 'completed' THEN one.result END,
                                                places[array_position(fronts, one.token)], counts);
            END LOOP;
        END IF;
        IF highest IS NOT NULL THEN
            SELECT * INTO h FROM leasehold.head_1(q.id);
            IF highest > h.floor THEN
                h.floor := highest;
                PERFORM leasehold.save_head_1(h);
            END IF;
            highest := NULL;
        END IF;
        PERFORM leasehold.count_1(q.id, counts);
        PERFORM leasehold.wake_1(of_namespace, q.id, q.name,
                                 counts[count.READY] - counts[count.PARKED] + CASE WHEN due < first_due THEN 1 ELSE 0 END, false);
        IF of_session IS NOT NULL THEN
            PERFORM leasehold.end_grants_1(q.id, leases_of);
        END IF;
    END LOOP;
    PERFORM leasehold.remember_1(of_session, of_lane, of_seq, VERB, leasehold.clock_1(by_hand), to_jsonb(verdicts), first.prior);
    RETURN verdicts;
END $$;

-- Adds to the counts of a queue. The caller has come through enter_1.
CREATE OR REPLACE FUNCTION leasehold.count_1(of_queue integer, counts bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF counts <> leasehold.no_counts_1() THEN
        INSERT INTO leasehold.tally (queue, n, counts) VALUES (of_queue, nextval('leasehold.place'), counts);
    END IF;
END $$;

-- name: settle
SELECT leasehold.settle_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16);
