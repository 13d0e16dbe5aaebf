-- renew: extend grants, let single leases of them lapse.
-- in   grants, with the leases that the holder still works on      out  for each that is held: how
--      long, and which of its leases are to be cancelled, and which have ended
-- why  a renewal writes the grant's row and no job's. The time is asked once the rows are locked:
--      past its deadline a lease is gone, however long the wait was
--
-- A job that a transaction has in hand is passed over, for all grants of the call wait with it.
-- Progress that is shown of it is not kept. If its lease is to lapse, the grant remembers that for
-- the next renewal.
--
-- upto says where the leases of each grant end in the list of tokens. lapse_of and shown_of say to
-- which grant (from 1) a token of theirs belongs. shown: progress.

CREATE OR REPLACE FUNCTION leasehold.renew_1(
    of_namespace text, by_hand bigint, queues text[], ids bigint[], nonces bytea[], upto integer[], tokens bigint[],
    lapse_of integer[], lapse_tokens bigint[], shown_of integer[], shown_tokens bigint[], shown jsonb[],
    patience text DEFAULT NULL
) RETURNS TABLE (nth integer, granted bigint, cancel bigint[], fenced bigint[]) LANGUAGE plpgsql settings.PLANS AS $$
#variable_conflict use_column
DECLARE
    at      bigint;
    beat    record;
    over    record;
    held    leasehold.grants;
    counts  bigint[];
    given   bigint[];
    over_   bigint[];
    living  bigint[];
    places  bigint[];
    till    bigint;
    h       leasehold.head;
BEGIN
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', patience, true);
    END IF;
    IF lapse_of IS NOT NULL THEN
        PERFORM leasehold.enter_1(q.id) FROM (
            SELECT k.id FROM leasehold.queue k WHERE k.namespace = of_namespace AND k.name = ANY (queues) ORDER BY k.id) AS q;
    END IF;
    PERFORM FROM (SELECT q.id AS of_, k.id FROM unnest(queues, ids) AS k (name, id)
                  JOIN leasehold.queue q ON q.namespace = of_namespace AND q.name = k.name
                  ORDER BY q.id, k.id OFFSET 0) AS k
    CROSS JOIN LATERAL (SELECT FROM leasehold.grants o WHERE o.queue = k.of_ AND o.id = k.id FOR UPDATE) AS g;
    at := leasehold.clock_1(by_hand);
    FOR beat IN
        SELECT k.n::integer, k.id, k.nonce, q.id AS of_, q.name
        FROM unnest(queues, ids, nonces) WITH ORDINALITY AS k (name, id, nonce, n)
        JOIN leasehold.queue q ON q.namespace = of_namespace AND q.name = k.name ORDER BY k.n
    LOOP
        given := tokens[CASE WHEN beat.n = 1 THEN 1 ELSE upto[beat.n - 1] + 1 END : upto[beat.n]];
        SELECT * INTO held FROM leasehold.grants g
        WHERE g.queue = beat.of_ AND g.id = beat.id AND g.nonce_hash = sha256(beat.nonce) AND g.deadline + 0 > at;
        IF NOT FOUND THEN
            CONTINUE;
        END IF;
        over_ := ARRAY (SELECT l.token FROM unnest(lapse_of, lapse_tokens) AS l (of_, token) WHERE l.of_ = beat.n
                          UNION SELECT l FROM unnest(held.lapsing) AS l);
        IF shown_of IS NOT NULL THEN
            UPDATE leasehold.job j SET progress = s.shown
            FROM (SELECT DISTINCT ON (p.token) p.shown, f.spot
                  FROM unnest(shown_of, shown_tokens, shown) WITH ORDINALITY AS p (of_, token, shown, n)
                  CROSS JOIN LATERAL (
                      SELECT o.ctid AS spot FROM leasehold.job o
                      WHERE o.queue = beat.of_ AND o.state = state.LEASED AND o.token = p.token AND o.lease_of = beat.id
                      FOR UPDATE SKIP LOCKED) AS f
                  WHERE p.of_ = beat.n ORDER BY p.token, p.n DESC) AS s
            WHERE j.ctid = s.spot;
        END IF;
        IF cardinality(over_) > 0 THEN
            PERFORM leasehold.enter_1(beat.of_) WHERE held.lapsing IS NOT NULL;
            counts := leasehold.no_counts_1();
            living := ARRAY (SELECT l FROM unnest(over_) AS l ORDER BY l);
            places := leasehold.fronts_1(living);
            FOR over IN
                SELECT j.j FROM unnest(over_) AS l (token)
                CROSS JOIN LATERAL (
                    SELECT o AS j FROM leasehold.job o
                    WHERE o.queue = beat.of_ AND o.state = state.LEASED AND o.token = l.token AND o.lease_of = beat.id
                    FOR UPDATE SKIP LOCKED) AS j
            LOOP
                counts := leasehold.end_lease_1(over.j, held, at, 'expired', 'stalled', leasehold.expired_1(over.j), true, false,
                                                false, NULL, NULL, NULL, places[array_position(living, (over.j).token)], counts);
            END LOOP;
            PERFORM leasehold.count_1(beat.of_, counts);
            PERFORM leasehold.wake_1(of_namespace, beat.of_, beat.name, counts[count.READY] - counts[count.PARKED], false);
        END IF;
        SELECT array_agg(j.token), coalesce(array_agg(j.token) FILTER (WHERE j.cancel AND j.token = ANY (given)), '{}')
        INTO living, cancel FROM leasehold.job j
        WHERE j.queue = beat.of_ AND j.state = state.LEASED AND j.token >= beat.id AND j.token < beat.id + held.leases;
        fenced := ARRAY (SELECT l.token FROM unnest(given) WITH ORDINALITY AS l (token, n)
                         WHERE (l.token = ANY (living)) IS NOT TRUE ORDER BY l.n);
        IF living IS NULL THEN
            DELETE FROM leasehold.grants g WHERE g.queue = beat.of_ AND g.id = beat.id;
            CONTINUE;
        END IF;
        till := least(at + held.term / 1000, held.granted_at + held.max_lifetime / 1000);
        UPDATE leasehold.grants g SET renewals = g.renewals + 1, deadline = till,
            lapsing = nullif(ARRAY (SELECT l FROM unnest(over_) AS l WHERE l = ANY (living)), '{}')
        WHERE g.queue = beat.of_ AND g.id = beat.id;
        IF till < held.deadline THEN
            -- The clock was set back. No claim looks for leases that end so early.
            PERFORM FROM leasehold.queue q WHERE q.id = beat.of_ FOR NO KEY UPDATE;
            SELECT * INTO h FROM leasehold.head_1(beat.of_);
            IF till < h.overdue_from THEN
                h.overdue_from := till;
                PERFORM leasehold.save_head_1(h);
            END IF;
        END IF;
        nth := beat.n;
        granted := till - at;
        RETURN NEXT;
    END LOOP;
END $$;

-- name: renew
SELECT nth, granted, cancel, fenced FROM leasehold.renew_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13);
