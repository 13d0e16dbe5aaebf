-- prune: delete settled jobs past their retention, and unique keys past their window.
-- in   for how long past it, how many      out  how many jobs, and whether there may be more keys
-- why  a prune that finds nothing writes nothing: idle workers prune, too. Found, those first whose
--      time was over first, by an index on the end of the retention, whatever else is past it; dead
--      jobs are not in it. Of a queue that has nothing to prune no lock is taken: there may be
--      thousands

CREATE OR REPLACE FUNCTION leasehold.prune_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint, overdue bigint, most integer,
    patience text DEFAULT NULL, OUT pruned bigint, OUT more boolean
) LANGUAGE plpgsql settings.PLANS AS $$
DECLARE
    VERB constant smallint := verb.PRUNE;
    first  record;
    q      record;
    gone   record;
    at     bigint;
    counts bigint[];
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience, true);
    END IF;
    pruned := 0;
    more := true;
    first := leasehold.recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        pruned := first.answer::bigint;
        RETURN;
    END IF;
    at := leasehold.clock_1(by_hand);
    FOR q IN
        SELECT k.id FROM leasehold.queue k WHERE k.namespace = of_namespace AND (
            SELECT true FROM leasehold.job j
            WHERE j.queue = k.id AND j.keep_until IS NOT NULL AND j.keep_until <= at - overdue LIMIT 1)
        ORDER BY k.id
    LOOP
        EXIT WHEN pruned >= most;
        PERFORM leasehold.enter_1(q.id);
        at := leasehold.clock_1(by_hand);
        counts := leasehold.no_counts_1();
        FOR gone IN
            WITH past AS (
                DELETE FROM leasehold.job d WHERE d.queue = q.id AND d.id = ANY (ARRAY (
                    SELECT j.id FROM leasehold.job j WHERE j.queue = q.id AND j.keep_until IS NOT NULL
                      AND j.keep_until <= at - overdue
                    ORDER BY j.keep_until LIMIT most - pruned FOR UPDATE SKIP LOCKED))
                RETURNING d.state
            )
            SELECT past.state, count(*) AS n FROM past GROUP BY past.state
        LOOP
            pruned := pruned + gone.n;
            counts[count.PRUNED] := counts[count.PRUNED] + gone.n;
            counts[CASE gone.state WHEN state.COMPLETED THEN count.COMPLETED ELSE count.CANCELLED END] := -gone.n;
        END LOOP;
        PERFORM leasehold.count_1(q.id, counts);
    END LOOP;
    more := leasehold.prune_keys_1(of_namespace, leasehold.clock_1(by_hand) - overdue, most);
    IF pruned > 0 THEN
        PERFORM leasehold.remember_1(of_session, of_lane, of_seq, VERB, leasehold.clock_1(by_hand), to_jsonb(pruned), first.prior);
    END IF;
END $$;

-- Adds up the counts of the next queue after that one, if there is any to do, and says which it
-- was. One queue in a transaction: a claim waits for its row.
CREATE OR REPLACE FUNCTION leasehold.add_up_next_1(of_namespace text, by_hand bigint, after integer) RETURNS integer
LANGUAGE plpgsql settings.PLANS AS $$
DECLARE
    of_ integer;
BEGIN
    SELECT k.id INTO of_ FROM leasehold.queue k CROSS JOIN LATERAL leasehold.head_1(k.id) AS o
    WHERE k.namespace = of_namespace AND k.id > after
      AND (SELECT true FROM leasehold.tally t WHERE t.queue = k.id AND t.n > o.counted_to LIMIT 1)
    ORDER BY k.id LIMIT 1;
    PERFORM leasehold.add_up_1(of_, leasehold.clock_1(by_hand)) WHERE of_ IS NOT NULL;
    RETURN of_;
END $$;

-- Up to `most` keys. It needs no request id: a key whose window is over is nobody's.
CREATE OR REPLACE FUNCTION leasehold.prune_keys_1(of_namespace text, before bigint, most integer) RETURNS boolean
LANGUAGE plpgsql settings.PLANS AS $$
DECLARE
    left_ integer := most;
    gone  integer;
    q     record;
BEGIN
    FOR q IN SELECT k.id FROM leasehold.queue k WHERE k.namespace = of_namespace ORDER BY k.id LOOP
        DELETE FROM leasehold.unique_key u WHERE u.queue = q.id AND u.key = ANY (ARRAY (
            SELECT k.key FROM leasehold.unique_key k WHERE k.queue = q.id AND k.until IS NOT NULL AND k.until <= before
            ORDER BY k.until LIMIT left_ FOR UPDATE SKIP LOCKED));
        GET DIAGNOSTICS gone = ROW_COUNT;
        left_ := left_ - gone;
    END LOOP;
    RETURN left_ = 0;
END $$;

-- name: prune
SELECT pruned, more FROM leasehold.prune_1($1, $2, $3, $4, $5, $6, $7, $8);

-- name: add_up
SELECT leasehold.add_up_next_1($1, $2, $3);

-- name: prune_keys
SELECT leasehold.prune_keys_1($1, leasehold.clock_1($2) - $3, $4);
