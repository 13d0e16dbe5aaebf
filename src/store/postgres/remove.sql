-- remove: delete a queue that has no jobs.
-- in   its name, who asks and why
-- out  {"done"}; or {"left": the counts of the queue} or {"ahead": microseconds}, and nothing was
--      done
-- why  whoever puts jobs into a queue holds a lock of one of its epochs: who has both is alone, and
--      whoever comes later finds that the queue is gone (enter_1)

CREATE OR REPLACE FUNCTION leasehold.remove_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint,
    actor text, reason text, of_name text, said text, patience text DEFAULT NULL
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    VERB   constant smallint := verb.CONTROL;
    class  constant integer := 'leasehold.queue'::regclass::oid::integer;
    first  record;
    of_    integer;
    ahead  bigint;
    answer jsonb;
    done   bigint := 0;
BEGIN
    PERFORM set_config('lock_timeout', patience, true) WHERE patience IS NOT NULL;
    first := leasehold.recall_1(of_namespace, by_hand, of_session, of_lane, of_seq, VERB);
    IF first.done THEN
        RETURN first.answer;
    END IF;
    SELECT q.id INTO of_ FROM leasehold.queue q WHERE q.namespace = of_namespace AND q.name = of_name FOR UPDATE;
    IF FOUND THEN
        PERFORM pg_advisory_xact_lock(class, of_ * 2), pg_advisory_xact_lock(class, of_ * 2 + 1);
        IF EXISTS (SELECT FROM leasehold.job j WHERE j.queue = of_) THEN
            RETURN jsonb_build_object('done', 0, 'left', leasehold.counts_1(of_));
        END IF;
        -- Made again it would begin LEAD above the clock, and so below tokens that it has given.
        ahead := leasehold.behind_1(h, 0, leasehold.clock_1(by_hand)) FROM leasehold.head_1(of_) h;
        IF ahead IS NOT NULL THEN
            RETURN jsonb_build_object('done', 0, 'ahead', ahead);
        END IF;
        DELETE FROM leasehold.unique_key k WHERE k.queue = of_;
        DELETE FROM leasehold.exclusive_key k WHERE k.queue = of_;
        DELETE FROM leasehold.grants g WHERE g.queue = of_;
        DELETE FROM leasehold.tally t WHERE t.queue = of_;
        DELETE FROM leasehold.head h WHERE h.queue = of_;
        DELETE FROM leasehold.queue q WHERE q.id = of_;
        done := 1;
    END IF;
    answer := jsonb_build_object('done', done, 'skipped', 0, 'duplicates', '[]'::jsonb);
    INSERT INTO leasehold.audit (namespace, at, actor, reason, command, done, tokens)
    VALUES (of_namespace, leasehold.clock_1(by_hand), actor, reason, said, done, '[]');
    PERFORM leasehold.remember_1(of_session, of_lane, of_seq, VERB, leasehold.clock_1(by_hand), answer, first.prior);
    RETURN answer;
END $$;

-- name: remove
SELECT leasehold.remove_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
