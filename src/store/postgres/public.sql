-- public: the store for every language that can call a function.
-- in   names, JSON, intervals as people write them      out  rows; a stale owner is an error: LH001
-- why  the server aborts a transaction in which a statement failed, whatever the program does with
--      the error. So whoever is not the owner any more cannot commit
--
-- The names without a number are the contract: what they take and give is documented in the guide's
-- page `postgres`, and does not change. What they call has a number, and may.

-- Refuses an argument as the crate does: the field, what was found, what is allowed.
CREATE OR REPLACE FUNCTION leasehold.refuse_1(field text, found_ text, allowed text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '%: found %, allowed %', field, found_, allowed USING ERRCODE = '22023', COLUMN = field;
END $$;

CREATE OR REPLACE FUNCTION leasehold.stale_1(why text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'stale owner: %', why
        USING ERRCODE = 'LH001', HINT = 'stop working on it: nothing of this transaction is kept';
END $$;

CREATE OR REPLACE FUNCTION leasehold.check_name_1(field text, name text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF coalesce(octet_length(name), 0) NOT BETWEEN 1 AND limit.NAME_BYTES THEN
        PERFORM leasehold.refuse_1(field, coalesce(octet_length(name), 0) || ' bytes', '1 to limit.NAME_BYTES bytes');
    ELSIF name !~ '^[A-Za-z0-9_.-]+$' THEN
        PERFORM leasehold.refuse_1(field, quote_literal(name), 'A-Z a-z 0-9 _ . -');
    END IF;
END $$;

CREATE OR REPLACE FUNCTION leasehold.check_bytes_1(field text, found_ bigint, most bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF found_ > most THEN
        PERFORM leasehold.refuse_1(field, found_ || ' bytes', 'at most ' || most || ' bytes');
    END IF;
END $$;

-- Options are an object with known names: a misspelt one must not be ignored.
CREATE OR REPLACE FUNCTION leasehold.check_options_1(options jsonb, allowed text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    unknown text;
BEGIN
    IF options IS NULL OR jsonb_typeof(options) <> 'object' THEN
        PERFORM leasehold.refuse_1('options', coalesce(jsonb_typeof(options), 'null'), 'an object');
    END IF;
    SELECT k INTO unknown FROM jsonb_object_keys(options) AS k WHERE k <> ALL (allowed) ORDER BY k LIMIT 1;
    IF FOUND THEN
        PERFORM leasehold.refuse_1('options', 'the unknown name ' || quote_literal(left(unknown, 64)),
                                   array_to_string(allowed, ', '));
    END IF;
END $$;

CREATE OR REPLACE FUNCTION leasehold.namespace_1(options jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    name constant text := coalesce(options ->> 'namespace', name.NAMESPACE);
BEGIN
    PERFORM leasehold.check_name_1('namespace', name);
    RETURN name;
END $$;

-- A duration in nanoseconds: an interval as text, or seconds as a number. null: not given.
CREATE OR REPLACE FUNCTION leasehold.duration_1(field text, given jsonb, least_ bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    span numeric;
BEGIN
    IF given IS NULL OR given = 'null' THEN
        RETURN NULL;
    END IF;
    BEGIN
        span := CASE jsonb_typeof(given) WHEN 'number' THEN (given #>> '{}')::numeric
                     ELSE extract(epoch FROM (given #>> '{}')::interval)::numeric END * 1000000000;
    EXCEPTION WHEN data_exception THEN
        PERFORM leasehold.refuse_1(field, left(given::text, 64), 'an interval such as "5 minutes", or seconds');
    END;
    IF span < least_ THEN
        PERFORM leasehold.refuse_1(field, left(given::text, 64), 'at least ' || least_ / 1000 || ' microseconds');
    ELSIF span > limit.DURATION_MAX THEN
        PERFORM leasehold.refuse_1(field, left(given::text, 64), 'at most ' || limit.DURATION_MAX / 1000000000 || ' seconds');
    END IF;
    RETURN span::bigint;
END $$;

-- A whole number within its limits. null: not given.
CREATE OR REPLACE FUNCTION leasehold.number_1(field text, given jsonb, least_ bigint, most bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    allowed constant text := 'a whole number from ' || least_ || ' to ' || most;
    number numeric;
BEGIN
    IF given IS NULL OR given = 'null' THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(given) <> 'number' THEN
        PERFORM leasehold.refuse_1(field, left(given::text, 64), allowed);
    END IF;
    number := (given #>> '{}')::numeric;
    IF number <> trunc(number) OR number NOT BETWEEN least_ AND most THEN
        PERFORM leasehold.refuse_1(field, left(given::text, 64), allowed);
    END IF;
    RETURN number::bigint;
END $$;

CREATE OR REPLACE FUNCTION leasehold.key_1(field text, given jsonb) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
    key bytea;
BEGIN
    IF given IS NULL OR given = 'null' THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(given) <> 'string' THEN
        PERFORM leasehold.refuse_1(field, jsonb_typeof(given), 'text');
    END IF;
    key := convert_to(given #>> '{}', 'UTF8');
    IF octet_length(key) NOT BETWEEN 1 AND limit.KEY_BYTES THEN
        PERFORM leasehold.refuse_1(field, octet_length(key) || ' bytes', '1 to limit.KEY_BYTES bytes');
    END IF;
    RETURN key;
END $$;

-- Headers as an object of texts become a list of pairs.
CREATE OR REPLACE FUNCTION leasehold.headers_1(given jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    pairs jsonb;
    bytes bigint;
    many  bigint;
BEGIN
    IF given IS NULL OR given IN ('null', '{}') THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(given) <> 'object' THEN
        PERFORM leasehold.refuse_1('headers', jsonb_typeof(given), 'an object of texts');
    END IF;
    IF EXISTS (SELECT FROM jsonb_each(given) AS h WHERE jsonb_typeof(h.value) <> 'string') THEN
        PERFORM leasehold.refuse_1('headers', 'a value that is no text', 'an object of texts');
    END IF;
    SELECT jsonb_agg(jsonb_build_array(h.key, h.value) ORDER BY h.key),
           sum(octet_length(h.key) + octet_length(h.value)), count(*)
    INTO pairs, bytes, many FROM jsonb_each_text(given) AS h;
    IF many > limit.HEADERS THEN
        PERFORM leasehold.refuse_1('headers', many || ' headers', 'at most limit.HEADERS headers');
    END IF;
    PERFORM leasehold.check_bytes_1('headers', bytes, limit.HEADER_BYTES);
    RETURN pairs;
END $$;

-- A retry policy as people write it, as the crate stores it.
CREATE OR REPLACE FUNCTION leasehold.retry_1(given jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    base   bigint;
    cap    bigint;
    factor numeric;
BEGIN
    IF given IS NULL OR given = 'null' THEN
        RETURN NULL;
    END IF;
    PERFORM leasehold.check_options_1(given, ARRAY['base', 'cap', 'factor']);
    base := coalesce(leasehold.duration_1('base', given -> 'base', 0), retry.BASE);
    cap := coalesce(leasehold.duration_1('cap', given -> 'cap', 0), retry.CAP);
    IF jsonb_typeof(given -> 'factor') <> 'number' OR (given ->> 'factor')::numeric < 1 THEN
        PERFORM leasehold.refuse_1('factor', left(given ->> 'factor', 64), 'a number from 1');
    END IF;
    factor := coalesce((given ->> 'factor')::numeric, retry.FACTOR);
    RETURN jsonb_build_object(
        'base', jsonb_build_object('secs', base / 1000000000, 'nanos', base % 1000000000),
        'cap', jsonb_build_object('secs', cap / 1000000000, 'nanos', cap % 1000000000),
        'factor', factor);
END $$;

-- An id in the order of time (UUIDv7).
CREATE OR REPLACE FUNCTION leasehold.id_1() RETURNS uuid LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    bytes bytea := uuid_send(gen_random_uuid());
    now_  constant bytea := int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint);
BEGIN
    FOR nth IN 0 .. 5 LOOP
        bytes := set_byte(bytes, nth, get_byte(now_, nth + 2));
    END LOOP;
    bytes := set_byte(bytes, 6, get_byte(bytes, 6) & 15 | 112);
    RETURN encode(bytes, 'hex')::uuid;
END $$;

-- Jobs as JSON: checked, all of them, before the first is stored.
CREATE OR REPLACE FUNCTION leasehold.enqueue_json_1(of_namespace text, jobs jsonb)
RETURNS TABLE (nth integer, id uuid, is_new boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    NAMES constant text[] := ARRAY['queue', 'kind', 'payload', 'id', 'delay', 'run_at', 'priority', 'unique', 'unique_for',
        'exclusive', 'version', 'headers', 'term', 'max_lifetime', 'timeout', 'stall_limit', 'retention', 'max_failures',
        'max_expiries', 'retry'];
    INT_MAX constant bigint := 2147483647;
    given     record;
    job       jsonb;
    payload   bytea;
    key       bytea;
    delay     bigint;
    headers   jsonb;
    choices   jsonb;
    weight    bigint := 0;
    ids       uuid[] := '{}';
    queues    text[] := '{}';
    kinds     text[] := '{}';
    payloads  bytea[] := '{}';
    delays    bigint[] := '{}';
    uniques   bytea[] := '{}';
    exclusive bytea[] := '{}';
    options   jsonb[] := '{}';
BEGIN
    IF jobs IS NULL OR jsonb_typeof(jobs) <> 'array' THEN
        PERFORM leasehold.refuse_1('jobs', coalesce(jsonb_typeof(jobs), 'null'), 'an array of objects');
    END IF;
    IF jsonb_array_length(jobs) > limit.CALL_ITEMS THEN
        PERFORM leasehold.refuse_1('jobs', jsonb_array_length(jobs) || ' jobs in a call',
                                   'at most limit.CALL_ITEMS jobs in a call');
    END IF;
    FOR given IN SELECT j.value FROM jsonb_array_elements(jobs) WITH ORDINALITY AS j (value, n) ORDER BY j.n LOOP
        job := given.value;
        PERFORM leasehold.check_options_1(job, NAMES);
        PERFORM leasehold.check_name_1('queue', job ->> 'queue');
        PERFORM leasehold.check_name_1('kind', job ->> 'kind');
        IF job -> 'payload' IS NULL THEN
            PERFORM leasehold.refuse_1('payload', 'nothing', 'JSON');
        END IF;
        payload := convert_to((job -> 'payload')::text, 'UTF8');
        PERFORM leasehold.check_bytes_1('payload', octet_length(payload), limit.PAYLOAD_BYTES);
        BEGIN
            ids := ids || coalesce((job ->> 'id')::uuid, leasehold.id_1());
        EXCEPTION WHEN data_exception THEN
            PERFORM leasehold.refuse_1('id', left(job ->> 'id', 64), 'a UUID');
        END;
        delay := leasehold.duration_1('delay', job -> 'delay', 0);
        IF job ->> 'run_at' IS NOT NULL THEN
            IF delay IS NOT NULL THEN
                PERFORM leasehold.refuse_1('run_at', 'delay as well', 'one of the two');
            END IF;
            BEGIN
                delay := (greatest(0, extract(epoch FROM (job ->> 'run_at')::timestamptz - clock_timestamp())) * 1000000000)::bigint;
            EXCEPTION WHEN data_exception THEN
                PERFORM leasehold.refuse_1('run_at', left(job ->> 'run_at', 64), 'a timestamp');
            END;
            PERFORM leasehold.duration_1('run_at', to_jsonb(delay / 1000000000), 0);
        END IF;
        key := leasehold.key_1('unique', job -> 'unique');
        IF key IS NULL AND job ->> 'unique_for' IS NOT NULL THEN
            PERFORM leasehold.refuse_1('unique_for', 'no key', 'together with unique');
        END IF;
        headers := leasehold.headers_1(job -> 'headers');
        choices := jsonb_strip_nulls(jsonb_build_object(
            'version', leasehold.number_1('version', job -> 'version', 1, INT_MAX),
            'priority', leasehold.number_1('priority', job -> 'priority', 0, limit.PRIORITY_MAX),
            'max_expiries', leasehold.number_1('max_expiries', job -> 'max_expiries', limit.EXPIRIES_MIN, INT_MAX),
            'max_failures', leasehold.number_1('max_failures', job -> 'max_failures', 1, INT_MAX),
            'unique_window', leasehold.duration_1('unique_for', job -> 'unique_for', 1000),
            'term', leasehold.duration_1('term', job -> 'term', limit.TERM_MIN),
            'max_lifetime', leasehold.duration_1('max_lifetime', job -> 'max_lifetime', 1000),
            'timeout', leasehold.duration_1('timeout', job -> 'timeout', 1000),
            'stall_limit', leasehold.duration_1('stall_limit', job -> 'stall_limit', 1000),
            'retention', leasehold.duration_1('retention', job -> 'retention', 0),
            'retry', leasehold.retry_1(job -> 'retry'),
            'headers', headers));
        weight := weight + octet_length(payload) + coalesce(leasehold.weight_of_headers_1(headers), 0);
        queues := queues || (job ->> 'queue');
        kinds := kinds || (job ->> 'kind');
        payloads := payloads || payload;
        delays := delays || delay;
        uniques := uniques || key;
        exclusive := exclusive || leasehold.key_1('exclusive', job -> 'exclusive');
        options := options || nullif(choices, '{}');
    END LOOP;
    IF weight > rule.CALL_BYTES THEN
        PERFORM leasehold.refuse_1('jobs', weight || ' bytes in a call', 'at most rule.CALL_BYTES bytes in a call');
    END IF;
    RETURN QUERY
    SELECT k.n::integer, coalesce(d.holder, k.id), d.nth IS NULL
    FROM unnest(ids) WITH ORDINALITY AS k (id, n)
    LEFT JOIN leasehold.enqueue_1(
        of_namespace, NULL, NULL, NULL, NULL, ids, queues, kinds, payloads, delays, uniques, exclusive, options
    ) AS d ON d.nth = k.n
    ORDER BY k.n;
END $$;

-- Stores a job. Of a duplicate the job that has the unique key is named, and is_new is false.
CREATE OR REPLACE FUNCTION leasehold.enqueue(queue text, kind text, payload jsonb, options jsonb DEFAULT '{}')
RETURNS TABLE (id uuid, is_new boolean) LANGUAGE plpgsql ROWS 1 AS $$
#variable_conflict use_column
BEGIN
    PERFORM leasehold.check_options_1(options, ARRAY['namespace', 'id', 'delay', 'run_at', 'priority', 'unique',
        'unique_for', 'exclusive', 'version', 'headers', 'term', 'max_lifetime', 'timeout', 'stall_limit', 'retention',
        'max_failures', 'max_expiries', 'retry']);
    RETURN QUERY SELECT e.id, e.is_new FROM leasehold.enqueue_json_1(
        leasehold.namespace_1(options),
        jsonb_build_array(options - 'namespace' || jsonb_build_object(
            'queue', enqueue.queue, 'kind', enqueue.kind, 'payload', coalesce(enqueue.payload, 'null')))) AS e;
END $$;

-- Stores jobs, together or none: [{"queue", "kind", "payload", and what options has}, ...].
CREATE OR REPLACE FUNCTION leasehold.enqueue_many(jobs jsonb, options jsonb DEFAULT '{}')
RETURNS TABLE (nth integer, id uuid, is_new boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM leasehold.check_options_1(options, ARRAY['namespace']);
    RETURN QUERY SELECT e.nth, e.id, e.is_new FROM leasehold.enqueue_json_1(leasehold.namespace_1(options), jobs) AS e;
END $$;

-- A job as the view `jobs` shows it.
CREATE OR REPLACE FUNCTION leasehold.job(id uuid, options jsonb DEFAULT '{}') RETURNS SETOF leasehold.jobs
LANGUAGE plpgsql STABLE ROWS 1 AS $$
BEGIN
    PERFORM leasehold.check_options_1(options, ARRAY['namespace']);
    RETURN QUERY SELECT j.* FROM leasehold.jobs j WHERE j.id = job.id AND j.namespace = leasehold.namespace_1(options);
END $$;

-- The scope of a job's fences, as Scope::of_key and Scope::of_job write it.
CREATE OR REPLACE FUNCTION leasehold.scope_1(of_namespace text, of_queue text, of_key bytea, of_job uuid) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT of_namespace || '/' || of_queue
        || CASE WHEN of_key IS NULL THEN '/j:' || of_job ELSE '/k:' || convert_from(of_key, 'UTF8') END
$$;

-- Takes up to `max` jobs, each under a lease. Commit it alone: others wait for the queue until
-- then.
CREATE OR REPLACE FUNCTION leasehold.claim(
    queues text[], max integer, owner text, term interval DEFAULT '1 minute', options jsonb DEFAULT '{}'
) RETURNS TABLE (
    receipt text, token bigint, scope text, id uuid, queue text, kind text, version integer, payload jsonb, bytes bytea,
    attempt integer, headers jsonb, checkpoint jsonb, checkpoint_seq bigint, deadline timestamptz
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    of_namespace text;
    nonce bytea;
    span  bigint;
    life  bigint;
    many  integer;
BEGIN
    PERFORM leasehold.check_options_1(options, ARRAY['namespace', 'task', 'max_lifetime', 'suspects', 'nonce']);
    of_namespace := leasehold.namespace_1(options);
    many := leasehold.number_1('max', to_jsonb(claim.max), 1, limit.GRANT_LEASES);
    IF many IS NULL THEN
        PERFORM leasehold.refuse_1('max', 'null', 'a whole number');
    END IF;
    PERFORM leasehold.check_name_1('queue', q) FROM unnest(queues) AS q;
    IF coalesce(cardinality(queues), 0) NOT BETWEEN 1 AND limit.GRANT_LEASES THEN
        PERFORM leasehold.refuse_1('queues', coalesce(cardinality(queues), 0)::text, '1 to limit.GRANT_LEASES queues in a claim');
    END IF;
    PERFORM leasehold.check_bytes_1('owner', octet_length(claim.owner), limit.OWNER_BYTES);
    PERFORM leasehold.check_bytes_1('task', octet_length(options ->> 'task'), limit.OWNER_BYTES);
    IF claim.owner IS NULL THEN
        PERFORM leasehold.refuse_1('owner', 'null', 'a name of who works');
    END IF;
    span := leasehold.duration_1('term', to_jsonb(term::text), limit.TERM_MIN);
    life := coalesce(leasehold.duration_1('max_lifetime', options -> 'max_lifetime', 1000), terms.MAX_LIFETIME);
    IF span IS NULL OR life < span THEN
        PERFORM leasehold.refuse_1('max_lifetime', life / 1000000000 || ' seconds', 'at least the term');
    END IF;
    IF options ->> 'nonce' !~ '^[0-9a-f]{32}$' THEN
        PERFORM leasehold.refuse_1('nonce', octet_length(options ->> 'nonce') || ' bytes of text', '32 hex digits of fresh randomness');
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'a claim needs a transaction that is READ COMMITTED' USING ERRCODE = 'LH005';
    END IF;
    -- Two random UUIDs are drawn as one: some of their bits are fixed.
    nonce := coalesce(decode(options ->> 'nonce', 'hex'),
                      substr(sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())), 1, 16));
    RETURN QUERY
    SELECT queues[c.nth] || '/0/' || c.lease_of || '/' || c.token || '/' || c.id || '/' || encode(nonce, 'hex'),
           c.token, leasehold.scope_1(of_namespace, queues[c.nth], c.exclusive_key, c.id), c.id, queues[c.nth], c.kind, c.version,
           leasehold.json_1(c.payload), c.payload, c.failures + c.expiries + 1,
           (SELECT jsonb_object_agg(h ->> 0, h ->> 1) FROM jsonb_array_elements(c.headers) AS h),
           leasehold.json_1(c.checkpoint), c.checkpoint_seq, leasehold.at_1(c.granted_at + c.granted)
    FROM leasehold.claim_1(
        of_namespace, NULL, NULL, NULL, NULL, claim.owner, coalesce(options ->> 'task', ''), nonce, queues,
        array_fill(span, ARRAY[cardinality(queues)]), array_fill(life, ARRAY[cardinality(queues)]), many,
        coalesce((options ->> 'suspects')::boolean, true), 0, false, NULL, true
    ) AS c
    WHERE c.nth > 0;
END $$;

-- The parts of a receipt. It is a secret: no error shows it.
CREATE OR REPLACE FUNCTION leasehold.receipt_1(
    receipt text, OUT queue text, OUT lease_of bigint, OUT token bigint, OUT job uuid, OUT nonce bytea
) LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    parts text[] := regexp_match(receipt, '^([A-Za-z0-9_.-]{1,128})/(0|[1-9][0-9]{0,4})/(0|[1-9][0-9]{0,17})/(0|[1-9][0-9]{0,17})/'
        '([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})/([0-9a-f]{32})$');
BEGIN
    IF parts IS NULL THEN
        PERFORM leasehold.refuse_1('receipt', coalesce(octet_length(receipt), 0) || ' bytes of text',
                                   'queue/partition/grant/token/job/proof');
    END IF;
    queue := parts[1];
    -- This store has no partitions: a receipt of one is nobody's here.
    lease_of := CASE parts[2] WHEN '0' THEN parts[3]::bigint ELSE -1 END;
    token := parts[4];
    job := parts[5];
    nonce := decode(parts[6], 'hex');
END $$;

-- Extends leases by their term. held is false of one that is not the caller's any more: stop
-- working on it. cancel: somebody asked for it to end.
CREATE OR REPLACE FUNCTION leasehold.renew(receipts text[], options jsonb DEFAULT '{}')
RETURNS TABLE (receipt text, held boolean, cancel boolean, deadline timestamptz) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    of_namespace text;
    queues  text[];
    ids     bigint[];
    nonces  bytea[];
    upto    integer[];
    tokens  bigint[];
    term    bigint;
BEGIN
    PERFORM leasehold.check_options_1(options, ARRAY['namespace']);
    of_namespace := leasehold.namespace_1(options);
    IF coalesce(cardinality(receipts), 0) > limit.CALL_ITEMS THEN
        PERFORM leasehold.refuse_1('receipts', cardinality(receipts)::text, 'at most limit.CALL_ITEMS receipts in a call');
    END IF;
    SELECT array_agg(g.queue ORDER BY g.n), array_agg(g.lease_of ORDER BY g.n), array_agg(g.nonce ORDER BY g.n),
           array_agg(g.upto::integer ORDER BY g.n)
    INTO queues, ids, nonces, upto
    FROM (SELECT r.queue, r.lease_of, r.nonce, row_number() OVER w AS n, sum(count(*)) OVER w AS upto
          FROM (SELECT DISTINCT p.* FROM unnest(receipts) AS k (text), leasehold.receipt_1(k.text) AS p) AS r
          GROUP BY r.queue, r.lease_of, r.nonce WINDOW w AS (ORDER BY r.queue, r.lease_of, r.nonce)) AS g;
    IF queues IS NULL THEN
        RETURN;
    END IF;
    SELECT array_agg(r.token ORDER BY r.queue, r.lease_of, r.nonce, r.token) INTO tokens
    FROM (SELECT DISTINCT p.* FROM unnest(receipts) AS k (text), leasehold.receipt_1(k.text) AS p) AS r;
    SELECT min(g.term) / 1000000 INTO term FROM unnest(queues, ids, nonces) AS k (queue, id, nonce)
    JOIN leasehold.queue q ON q.namespace = of_namespace AND q.name = k.queue
    JOIN leasehold.grants g ON g.queue = q.id AND g.id = k.id AND g.nonce_hash = sha256(k.nonce);
    IF term IS NOT NULL THEN
        PERFORM leasehold.limit_1(term, term);
    END IF;
    RETURN QUERY
    WITH answers AS MATERIALIZED (
        SELECT a.*, queues[a.nth] AS queue, ids[a.nth] AS id, nonces[a.nth] AS nonce,
               clock_timestamp() + a.granted * interval '1 microsecond' AS till
        FROM leasehold.renew_1(of_namespace, NULL, queues, ids, nonces, upto, tokens, NULL, NULL, NULL, NULL, NULL) AS a
    )
    SELECT k.text, coalesce(p.token <> ALL (a.fenced), false), coalesce(p.token = ANY (a.cancel), false),
           CASE WHEN p.token <> ALL (a.fenced) THEN a.till END
    FROM unnest(receipts) WITH ORDINALITY AS k (text, n) CROSS JOIN LATERAL leasehold.receipt_1(k.text) AS p
    LEFT JOIN answers a ON a.queue = p.queue AND a.id = p.lease_of AND a.nonce = p.nonce
    ORDER BY k.n;
END $$;

-- Puts the limits of a lease on a transaction: the server ends it if it stands still for a term,
-- and a statement that takes longer than the lease has left (all in milliseconds).
CREATE OR REPLACE FUNCTION leasehold.limit_1(term bigint, left_ bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    own   bigint;
    name  text;
    noted text;
    most  bigint;
BEGIN
    FOREACH name IN ARRAY ARRAY['idle_in_transaction_session_timeout', 'statement_timeout', 'lock_timeout'] LOOP
        most := least(2147483647, greatest(1, CASE name WHEN 'idle_in_transaction_session_timeout' THEN term ELSE left_ END));
        -- A stricter one of the caller's own stays. It is kept under another name, as in
        -- src/driver/limit.rs, so that a later call under a renewed lease can set a longer limit.
        noted := 'leasehold' || '.' || name;
        PERFORM set_config(noted, coalesce(nullif(current_setting(noted, true), ''), current_setting(name)), true);
        own := nullif((extract(epoch FROM current_setting(noted)::interval) * 1000)::bigint, 0);
        PERFORM set_config(name, least(own, most)::text, true);
    END LOOP;
END $$;

-- The same before a call that locks the lease's job, so that a transaction of which it is the first
-- does not keep the job for longer. A lease that is overdue can still be ended: what is left of it
-- is no limit then.
CREATE OR REPLACE FUNCTION leasehold.limit_of_1(of_namespace text, receipt text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    r    constant record := leasehold.receipt_1(receipt);
    term bigint;
    left_ bigint;
BEGIN
    SELECT g.term / 1000000, (g.deadline - leasehold.clock_1(NULL)) / 1000 INTO term, left_
    FROM leasehold.grants g JOIN leasehold.queue q ON q.id = g.queue
    WHERE q.name = r.queue AND q.namespace = of_namespace AND g.id = r.lease_of AND g.nonce_hash = sha256(r.nonce);
    IF FOUND THEN
        PERFORM leasehold.limit_1(term, CASE WHEN left_ > 0 THEN left_ ELSE term END);
    END IF;
END $$;

-- Ends one lease, or says that it was not the caller's.
CREATE OR REPLACE FUNCTION leasehold.settle_text_1(
    receipt text, outcome smallint, delay bigint, reason text, result bytea, options jsonb
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    r        record;
    verdicts smallint[];
BEGIN
    PERFORM leasehold.check_options_1(options, ARRAY['namespace']);
    r := leasehold.receipt_1(receipt);
    PERFORM leasehold.limit_of_1(leasehold.namespace_1(options), receipt);
    verdicts := leasehold.settle_1(
        leasehold.namespace_1(options), NULL, NULL, NULL, NULL, ARRAY[r.queue], ARRAY[r.job], ARRAY[r.lease_of], ARRAY[r.token],
        ARRAY[r.nonce], ARRAY[outcome], ARRAY[delay], ARRAY[reason], NULL, ARRAY[result]);
    IF verdicts[1] = 0 THEN
        PERFORM leasehold.stale_1('the lease of job ' || r.job || ' under token ' || r.token || ' has ended');
    END IF;
END $$;

-- Cut to the bytes that are kept of a reason.
CREATE OR REPLACE FUNCTION leasehold.clip_1(reason text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    cut text := left(reason, rule.REASON_BYTES);
BEGIN
    WHILE octet_length(cut) > rule.REASON_BYTES LOOP
        cut := left(cut, -((octet_length(cut) - rule.REASON_BYTES + 3) / 4));
    END LOOP;
    RETURN cut;
END $$;

-- The job is done.
CREATE OR REPLACE FUNCTION leasehold.complete(receipt text, result jsonb DEFAULT NULL, options jsonb DEFAULT '{}')
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    bytes constant bytea := convert_to(result::text, 'UTF8');
BEGIN
    PERFORM leasehold.check_bytes_1('result', octet_length(bytes), limit.CHECKPOINT_BYTES);
    PERFORM leasehold.settle_text_1(receipt, outcome.COMPLETE::smallint, NULL, NULL, bytes, options);
END $$;

-- The run failed. The job comes back after retry_in, or else as its retry policy says, and is dead
-- after as many failures as it may have, or if it is to be buried. The answer: the job's state.
CREATE OR REPLACE FUNCTION leasehold.fail(
    receipt text, reason text, retry_in interval DEFAULT NULL, bury boolean DEFAULT false, options jsonb DEFAULT '{}'
) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    r     constant record := leasehold.receipt_1(receipt);
    j     record;
    delay bigint := leasehold.duration_1('retry_in', to_jsonb(retry_in::text), 0);
    over  boolean := coalesce(fail.bury, false);
BEGIN
    PERFORM leasehold.check_options_1(options, ARRAY['namespace']);
    SELECT k.queue, k.failures, k.options INTO j FROM leasehold.job k JOIN leasehold.queue q ON q.id = k.queue
    WHERE k.id = r.job AND q.name = r.queue AND q.namespace = leasehold.namespace_1(options);
    IF NOT over AND FOUND THEN
        over := j.failures + 1 >= coalesce((j.options ->> 'max_failures')::bigint, retry.MAX_FAILURES);
        delay := coalesce(delay, leasehold.backoff_1(j.options -> 'retry', j.failures));
    END IF;
    PERFORM leasehold.settle_text_1(receipt, CASE WHEN over THEN outcome.BURY ELSE outcome.RETRY END::smallint, delay,
                                    leasehold.clip_1(coalesce(fail.reason, '')), NULL, options);
    RETURN (SELECT leasehold.state_1(k.state) FROM leasehold.job k WHERE k.id = r.job AND k.queue = j.queue);
END $$;

-- How long to wait after so many failures and one: a random time between half of the bound and the
-- bound.
CREATE OR REPLACE FUNCTION leasehold.backoff_1(policy jsonb, failures integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    base   constant float8 := coalesce((policy #>> '{base,secs}')::float8 * 1e9 + (policy #>> '{base,nanos}')::float8, retry.BASE);
    cap    constant float8 := coalesce((policy #>> '{cap,secs}')::float8 * 1e9 + (policy #>> '{cap,nanos}')::float8, retry.CAP);
    factor constant float8 := coalesce((policy ->> 'factor')::float8, retry.FACTOR);
    bound  float8;
BEGIN
    IF base <= 0 OR cap <= 0 THEN
        RETURN 0;
    END IF;
    bound := CASE WHEN ln(base) + failures * ln(factor) >= ln(cap) THEN cap ELSE base * factor ^ failures END;
    RETURN least(cap, CASE WHEN factor = 1 THEN bound ELSE bound * (0.5 + random() / 2) END);
END $$;

-- Hands the job back unfinished. Nothing is counted; it is ready at once, at the front.
CREATE OR REPLACE FUNCTION leasehold.surrender(receipt text, options jsonb DEFAULT '{}') RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leasehold.settle_text_1(receipt, outcome.SURRENDER::smallint, 0, NULL, NULL, options);
END $$;

-- Hands the job back for a while. Nothing is counted.
CREATE OR REPLACE FUNCTION leasehold.snooze(receipt text, delay interval, options jsonb DEFAULT '{}') RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leasehold.settle_text_1(receipt, outcome.SURRENDER::smallint,
        coalesce(leasehold.duration_1('delay', to_jsonb(delay::text), 0), 0), NULL, NULL, options);
END $$;

-- Saves state for the next run. False: this lease has saved a later one.
CREATE OR REPLACE FUNCTION leasehold.checkpoint(receipt text, seq bigint, state jsonb, options jsonb DEFAULT '{}')
RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    r       constant record := leasehold.receipt_1(receipt);
    bytes   constant bytea := convert_to(coalesce(checkpoint.state, 'null')::text, 'UTF8');
    verdict smallint;
BEGIN
    PERFORM leasehold.check_options_1(options, ARRAY['namespace']);
    PERFORM leasehold.check_bytes_1('checkpoint', octet_length(bytes), limit.CHECKPOINT_BYTES);
    PERFORM leasehold.number_1('seq', to_jsonb(coalesce(checkpoint.seq, -1)), 0, 9223372036854775807);
    PERFORM leasehold.limit_of_1(leasehold.namespace_1(options), receipt);
    SELECT c.verdict INTO verdict FROM leasehold.checkpoint_1(
        leasehold.namespace_1(options), NULL, NULL, NULL, NULL, ARRAY[r.queue], ARRAY[r.job], ARRAY[r.lease_of], ARRAY[r.token],
        ARRAY[r.nonce], ARRAY[checkpoint.seq], ARRAY[bytes]) AS c;
    IF verdict = 0 THEN
        PERFORM leasehold.stale_1('the lease of job ' || r.job || ' under token ' || r.token || ' has ended');
    END IF;
    RETURN verdict < 8;
END $$;

-- Holds a scope and a token for as long as the transaction lasts, so that a successor can see who
-- is there; ends transactions of replaced owners that stand still there (src/driver/limit.rs).
CREATE OR REPLACE FUNCTION leasehold.hold_1(scope text, token bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    key     constant bigint := hashtextextended(scope, 16);
    another boolean;
BEGIN
    another := NOT (pg_try_advisory_lock(key) AND pg_advisory_unlock(key));
    PERFORM pg_advisory_xact_lock_shared(key);
    PERFORM pg_advisory_xact_lock_shared(((token >> 32) - 2147483648)::integer, ((token << 32) >> 32)::integer);
    IF NOT another THEN
        RETURN;
    END IF;
    BEGIN
        PERFORM pg_terminate_backend(s.pid) FROM (
            SELECT l.pid FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
            WHERE l.locktype = 'advisory' AND l.granted AND l.pid <> pg_backend_pid()
              AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
              AND (a.state LIKE 'idle in transaction%' AND a.state_change < clock_timestamp() - interval '1 s'
                   OR a.wait_event = 'ClientWrite' AND a.query_start < clock_timestamp() - interval '1 s')
            GROUP BY l.pid
            HAVING bool_or(l.objsubid = 1 AND l.classid::bigint << 32 | l.objid::bigint = key)
               AND max(CASE WHEN l.objsubid = 2 AND l.classid::bigint >> 31 = 1
                            THEN (l.classid::bigint & 2147483647) << 32 | l.objid::bigint END) < token) AS s;
    EXCEPTION WHEN insufficient_privilege THEN
        -- It is left to its own limits.
    END;
END $$;

-- Begins work under a lease: first in the transaction, under its limits. A frozen owner does not
-- hold its successor.
CREATE OR REPLACE FUNCTION leasehold.begin(receipt text, options jsonb DEFAULT '{}')
RETURNS TABLE (scope text, token bigint, deadline timestamptz) LANGUAGE plpgsql ROWS 1 AS $$
#variable_conflict use_column
DECLARE
    r    constant record := leasehold.receipt_1(receipt);
    held record;
BEGIN
    PERFORM leasehold.check_options_1(options, ARRAY['namespace']);
    SELECT g.term / 1000000 AS term, g.deadline, g.deadline - leasehold.clock_1(NULL) AS left_,
           leasehold.scope_1(q.namespace, q.name, j.exclusive_key, j.id) AS scope
    INTO held FROM leasehold.job j JOIN leasehold.queue q ON q.id = j.queue
    JOIN leasehold.grants g ON g.queue = j.queue AND g.id = j.lease_of
    WHERE j.id = r.job AND q.name = r.queue AND q.namespace = leasehold.namespace_1(options) AND j.state = state.LEASED
      AND j.token = r.token AND j.lease_of = r.lease_of AND g.nonce_hash = sha256(r.nonce);
    IF NOT FOUND OR held.left_ <= 0 THEN
        PERFORM leasehold.stale_1('the lease of job ' || r.job || ' under token ' || r.token || ' has ended');
    END IF;
    PERFORM leasehold.limit_1(held.term, held.left_ / 1000);
    PERFORM leasehold.hold_1(held.scope, r.token);
    RETURN QUERY SELECT held.scope, r.token, leasehold.at_1(held.deadline);
END $$;

-- Raises the mark of a scope, and refuses a token below it: before the first read, in the same
-- transaction as the effect. Whoever opened it with a larger token has replaced the caller. It does
-- not know the lease, and so puts no limits on the transaction: begin does.
CREATE OR REPLACE FUNCTION leasehold.open_fence(scope text, token bigint) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now_ bigint;
BEGIN
    IF open_fence.scope !~ '^[A-Za-z0-9_.-]{1,128}/[A-Za-z0-9_.-]{1,128}/[kjn]:.' OR octet_length(open_fence.scope) > limit.SCOPE_BYTES THEN
        PERFORM leasehold.refuse_1('scope', octet_length(open_fence.scope) || ' bytes of text',
                                   'namespace/queue/k:key, j:job or n:name');
    END IF;
    PERFORM leasehold.hold_1(open_fence.scope, open_fence.token);
    INSERT INTO leasehold.fence AS f (scope, mark) VALUES (open_fence.scope, open_fence.token)
    ON CONFLICT (scope) DO UPDATE SET mark = greatest(f.mark, excluded.mark) RETURNING f.mark INTO now_;
    -- Marks below the floor were forgotten, perhaps just now. A transaction that reads only what
    -- was there when it began fails if the floor was raised since.
    PERFORM FROM leasehold.fence f WHERE f.scope = '' AND current_setting('transaction_isolation') <> 'read committed' FOR SHARE;
    SELECT greatest(now_, (SELECT f.mark FROM leasehold.fence f WHERE f.scope = '')) INTO now_;
    IF now_ > open_fence.token OR open_fence.token IS NULL THEN
        PERFORM leasehold.stale_1('the mark of ' || open_fence.scope || ' is ' || now_ || ', above token ' || open_fence.token);
    END IF;
END $$;
