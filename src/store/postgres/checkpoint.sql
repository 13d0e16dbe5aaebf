-- checkpoint: save state under a lease, never behind what that lease has saved.
-- in   receipts, each with a number and a state      out  for each: as settle, or 8 and the number
--      that is saved
-- why  the comparison of the receipt and the change are one write of the job's row

CREATE OR REPLACE FUNCTION leasehold.checkpoint_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    queues text[], jobs uuid[], leases_of bigint[], tokens bigint[], nonces bytea[], seqs bigint[], states bytea[],
    patience text DEFAULT NULL
) RETURNS TABLE (nth integer, verdict smallint, seq bigint) LANGUAGE plpgsql settings.PLANS AS $$
#variable_conflict use_column
DECLARE
    VERB constant smallint := verb.CHECKPOINT;
    -- Numbers are unsigned.
    HIGHEST constant bigint := 1::bigint << 63;
    first   record;
    one     record;
    held    record;
    refused record;
    at      bigint;
    answer  jsonb := '[]';
    fenced  integer[] := '{}';
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience, true);
    END IF;
    first := leasehold.recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        RETURN QUERY SELECT (a ->> 0)::integer, (a ->> 1)::smallint, (a ->> 2)::bigint FROM jsonb_array_elements(first.answer) AS a;
        RETURN;
    END IF;
    BEGIN
        PERFORM leasehold.wait_briefly_1(of_session, patience);
        -- In one order.
        PERFORM FROM (SELECT q.id AS of_, k.token FROM unnest(queues, tokens) AS k (queue, token)
                      JOIN leasehold.queue q ON q.namespace = of_namespace AND q.name = k.queue
                      ORDER BY q.id, k.token OFFSET 0) AS k
        CROSS JOIN LATERAL (SELECT FROM leasehold.job o
                            WHERE o.queue = k.of_ AND o.state = state.LEASED AND o.token = k.token FOR UPDATE) AS j;
        PERFORM set_config('lock_timeout', patience, true) WHERE patience IS NOT NULL;
    EXCEPTION WHEN lock_not_available THEN
        PERFORM leasehold.in_hand_1(of_session, (
            SELECT string_agg(k.n::text, ',') FROM unnest(queues, tokens) WITH ORDINALITY AS k (queue, token, n)
            JOIN leasehold.queue q ON q.namespace = of_namespace AND q.name = k.queue
            CROSS JOIN LATERAL (SELECT FROM leasehold.job o
                                WHERE o.queue = q.id AND o.state = state.LEASED AND o.token = k.token) AS j
            LEFT JOIN LATERAL (SELECT true AS free FROM leasehold.job o
                               WHERE o.queue = q.id AND o.state = state.LEASED AND o.token = k.token
                               FOR UPDATE SKIP LOCKED) AS f ON true
            WHERE f.free IS NULL));
    END;
    at := leasehold.clock_1(by_hand);
    FOR one IN
        SELECT k.*, q.id AS of_ FROM unnest(queues, jobs, leases_of, tokens, nonces, seqs, states)
            WITH ORDINALITY AS k (queue, job, lease_of, token, nonce, seq, state, n)
        LEFT JOIN leasehold.queue q ON q.namespace = of_namespace AND q.name = k.queue ORDER BY k.n
    LOOP
        nth := one.n;
        seq := NULL;
        SELECT j.checkpoint_token, j.checkpoint_seq, j.cancel, g.deadline INTO held
        FROM (SELECT * FROM leasehold.job o
              WHERE o.id = one.job AND o.queue = one.of_ AND o.state + 0 = state.LEASED AND o.token = one.token
                AND o.lease_of = one.lease_of FOR UPDATE) AS j
        CROSS JOIN LATERAL (SELECT o.deadline FROM leasehold.grants o
                            WHERE o.queue = one.of_ AND o.id = j.lease_of AND o.nonce_hash = sha256(one.nonce) LIMIT 1) AS g;
        IF NOT FOUND THEN
            verdict := 0;
            IF one.of_ IS NOT NULL THEN
                fenced := fenced || one.of_;
            END IF;
        ELSIF held.checkpoint_token = one.token AND (held.checkpoint_seq # HIGHEST) > (one.seq # HIGHEST) THEN
            verdict := 8;
            seq := held.checkpoint_seq;
        ELSE
            verdict := 1 + CASE WHEN held.deadline <= at THEN 2 ELSE 0 END + CASE WHEN held.cancel THEN 4 ELSE 0 END;
            UPDATE leasehold.job j SET checkpoint = one.state, checkpoint_seq = one.seq, checkpoint_token = one.token,
                weight = j.weight + octet_length(one.state) - coalesce(octet_length(j.checkpoint), 0)
            WHERE j.id = one.job AND j.queue = one.of_;
        END IF;
        answer := answer || jsonb_build_array(jsonb_build_array(nth, verdict, seq));
        RETURN NEXT;
    END LOOP;
    FOR refused IN SELECT k AS of_, count(*) AS n FROM unnest(fenced) AS k GROUP BY k ORDER BY k LOOP
        PERFORM leasehold.fenced_1(refused.of_, refused.n);
    END LOOP;
    PERFORM leasehold.remember_1(of_session, of_lane, of_seq, VERB, at, answer, first.prior);
END $$;

-- Counts calls that were refused as stale.
CREATE OR REPLACE FUNCTION leasehold.fenced_1(of_queue integer, n bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    counts bigint[] := leasehold.no_counts_1();
BEGIN
    IF n > 0 THEN
        PERFORM leasehold.enter_1(of_queue);
        counts[count.FENCED] := n;
        PERFORM leasehold.count_1(of_queue, counts);
    END IF;
END $$;

-- name: checkpoint
SELECT nth, verdict, seq FROM leasehold.checkpoint_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13);
