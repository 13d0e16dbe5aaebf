-- session: open, and answer a repeated call with its first answer.
-- in   session, lane, sequence number      out  the last answer of the lane
-- why  an error from a write means unknown: the caller repeats, and the call must count once. No
--      session: a call that is not repeated, as inside a user's transaction

-- Microseconds since 1970 on the server's clock; tests bring their own.
CREATE OR REPLACE FUNCTION leasehold.clock_1(by_hand bigint) RETURNS bigint LANGUAGE sql VOLATILE AS
$$ SELECT coalesce(by_hand, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) $$;

CREATE OR REPLACE FUNCTION leasehold.open_session_1(of_namespace text, by_hand bigint) RETURNS uuid LANGUAGE plpgsql
SET enable_seqscan = on AS $$
DECLARE
    at  bigint := leasehold.clock_1(by_hand);
    new uuid := gen_random_uuid();
BEGIN
    WITH idle AS (
        DELETE FROM leasehold.session s WHERE s.used < at - rule.SESSION_IDLE AND s.namespace = of_namespace
          AND NOT EXISTS (SELECT FROM leasehold.lane l WHERE l.session = s.id AND l.used >= at - rule.SESSION_IDLE)
        RETURNING s.id
    )
    DELETE FROM leasehold.lane l USING idle WHERE l.session = idle.id;
    INSERT INTO leasehold.session (id, namespace, used) VALUES (new, of_namespace, at);
    RETURN new;
END $$;

-- What is known of a request. done: it was answered, with this. prior: the lane's request before
-- it.
CREATE OR REPLACE FUNCTION leasehold.recall_1(
    of_namespace text, by_hand bigint, of_session uuid, of_lane bigint, of_seq bigint, of_verb smallint,
    OUT done boolean, OUT answer jsonb, OUT prior bigint
) LANGUAGE plpgsql AS $$
DECLARE
    MINUTE constant bigint := 60000000;
    at   bigint := leasehold.clock_1(by_hand);
    used bigint;
    last record;
BEGIN
    done := false;
    IF of_session IS NULL THEN
        RETURN;
    END IF;
    -- What waited for a lock must see what the one before has done.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'the isolation of the transaction is not read committed' USING ERRCODE = 'LH005';
    END IF;
    SELECT s.used AS opened, k.seq, k.verb, k.used, k.answer INTO last FROM leasehold.session s
    LEFT JOIN LATERAL (SELECT * FROM leasehold.lane l WHERE l.session = s.id AND l.lane = of_lane
                       ORDER BY l.seq DESC LIMIT 1) AS k ON true
    WHERE s.id = of_session AND s.namespace = of_namespace;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the request''s session is not open' USING ERRCODE = 'LH003';
    END IF;
    used := last.opened;
    prior := last.seq;
    IF at - used > MINUTE THEN
        -- Its own row is touched seldom: the calls of one process must not wait for each other
        -- there.
        IF at - greatest(used, last.used) > rule.SESSION_IDLE
           AND at - (SELECT max(l.used) FROM leasehold.lane l WHERE l.session = of_session) > rule.SESSION_IDLE IS NOT FALSE
        THEN
            RAISE EXCEPTION 'the request''s session is not open' USING ERRCODE = 'LH003';
        END IF;
        UPDATE leasehold.session s SET used = at
        WHERE s.id = (SELECT t.id FROM leasehold.session t WHERE t.id = of_session FOR UPDATE SKIP LOCKED);
    END IF;
    IF last.seq > of_seq THEN
        RAISE EXCEPTION 'a later request of the same lane has been answered' USING ERRCODE = 'LH003';
    ELSIF last.seq = of_seq THEN
        IF last.verb <> of_verb THEN
            RAISE EXCEPTION 'the id of another verb''s call' USING ERRCODE = 'LH004';
        END IF;
        done := true;
        answer := last.answer;
    END IF;
END $$;

-- Two copies of one request may run at once, when the first lost its connection. The second waits
-- here for the first, and starts over: it then meets the first answer.
CREATE OR REPLACE FUNCTION leasehold.remember_1(
    of_session uuid, of_lane bigint, of_seq bigint, of_verb smallint, at bigint, given jsonb, prior bigint
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF of_session IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO leasehold.lane (session, lane, seq, used, verb, answer)
    VALUES (of_session, of_lane, of_seq, at, of_verb, given) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'this request has been answered meanwhile' USING ERRCODE = '40001';
    END IF;
    -- In statements after the INSERT, which waited for whoever was at this row. A copy that stood
    -- still meanwhile finds that the request before it is gone, or a later one there.
    DELETE FROM leasehold.lane l WHERE l.session = of_session AND l.lane = of_lane AND l.seq = prior;
    IF NOT FOUND AND (prior IS NOT NULL OR EXISTS (
        SELECT FROM leasehold.lane l WHERE l.session = of_session AND l.lane = of_lane AND l.seq > of_seq))
    THEN
        RAISE EXCEPTION 'another request of this lane has been answered meanwhile' USING ERRCODE = '40001';
    END IF;
END $$;

-- Callers share a call: what one of its items waits for in somebody's hand, all wait for. So it
-- waits for a moment, and then names the items, for the others to go on without them.
CREATE OR REPLACE FUNCTION leasehold.wait_briefly_1(of_session uuid, patience text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    BRIEFLY constant bigint := 200;
BEGIN
    IF of_session IS NOT NULL THEN
        PERFORM set_config('lock_timeout', least(nullif(patience::bigint, 0), BRIEFLY)::text, true);
    END IF;
END $$;

CREATE OR REPLACE FUNCTION leasehold.in_hand_1(of_session uuid, items text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF of_session IS NULL THEN
        RAISE EXCEPTION 'another transaction has it in hand' USING ERRCODE = '55P03';
    ELSIF items IS NULL THEN
        RAISE EXCEPTION 'it is in nobody''s hand any more' USING ERRCODE = '40001';
    END IF;
    RAISE EXCEPTION 'another transaction has it in hand' USING ERRCODE = 'LH006', DETAIL = items;
END $$;

-- name: whose
SELECT id FROM leasehold.meta;

-- name: open_session
SELECT leasehold.open_session_1($1, $2);
