-- schema: version 1, the tables.
-- in   a transaction that holds the migration's lock, and an empty schema      out  the tables
-- why  a schema of our own beside the user's tables, one for all namespaces: queues carry theirs,
--      so that one migration, one autovacuum setting and one grant of rights serve every
--      application
--
-- A job is one row from its enqueue to its end. Times are microseconds since 1970 on the server's
-- clock, durations nanoseconds.

CREATE TABLE leasehold.meta (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    version integer NOT NULL,
    -- The first version whose programs still find here all that they call.
    oldest  integer NOT NULL DEFAULT 1,
    -- Of the functions that are there, and the release of the program that wrote them, as one
    -- number.
    code    text    NOT NULL DEFAULT '',
    edition integer NOT NULL DEFAULT 0,
    -- Tells this database from others: a receipt is worth nothing there.
    id      uuid    NOT NULL DEFAULT gen_random_uuid()
);

-- The row is the lock of its queue for claims and commands. Enqueue, settle and renew wait for it
-- only if the clock was set back, or if a fence's mark raises the floor.
CREATE TABLE leasehold.queue (
    id        integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace text COLLATE "C" NOT NULL,
    name      text COLLATE "C" NOT NULL,
    paused    boolean NOT NULL DEFAULT false,
    relaxed   boolean NOT NULL DEFAULT false,
    UNIQUE (namespace, name)
);

-- What changes with every claim of a queue. The row with the largest gen counts: whoever holds the
-- queue's lock adds the next and deletes this one. An update in place would leave its old versions
-- in front of it, and while some transaction of the server stays open, every look-up would step
-- over all of them.
--
-- last, floor: the issuer of tokens (src/rules/issue.rs).
-- epoch: whoever puts jobs into the queue holds a shared lock of its epoch (place.sql).
-- drawn, drawn_at: the last place drawn, and the time, when the epoch began.
-- sealed, sealed_at: nobody who drew a place up to this one is still at it, and whoever is has come
--   since that time.
-- lines, fronts, starts: in this line there is no job at a place from -front up to the start, nor
--   will there be one. A look begins behind it, and steps over no job that was taken before.
-- due_from: no scheduled job is due before it.  overdue_from: no lease ends before it.
-- counts: see tally. counted_to: the last tally that is in it.
CREATE TABLE leasehold.head (
    queue        integer    NOT NULL,
    gen          bigint     NOT NULL,
    last         bigint     NOT NULL,
    floor        bigint     NOT NULL,
    epoch        bigint     NOT NULL,
    drawn        bigint     NOT NULL,
    drawn_at     bigint     NOT NULL,
    sealed       bigint     NOT NULL,
    sealed_at    bigint     NOT NULL,
    lines        smallint[] NOT NULL,
    fronts       bigint[]   NOT NULL,
    starts       bigint[]   NOT NULL,
    due_from     bigint     NOT NULL,
    overdue_from bigint     NOT NULL,
    counts       bigint[]   NOT NULL,
    counted_to   bigint     NOT NULL,
    PRIMARY KEY (queue, gen)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

-- Counts and ledger, as what each call added to them: appended, so that calls of one queue do not
-- wait for each other, and now and then added up in head.counts. The order of the numbers is in
-- tally.rs. n is drawn as places are.
CREATE TABLE leasehold.tally (
    queue  integer  NOT NULL,
    n      bigint   NOT NULL,
    counts bigint[] NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX tally_n ON leasehold.tally (queue, n);

-- Places in line and order of arrival. A line grows at the back by +n and at the front by -n.
CREATE SEQUENCE leasehold.place;

-- state: 0 scheduled, 1 parked behind its exclusive key, 2 ready, 3 completed, 4 dead, 5 cancelled,
--   6 leased, 7 waiting.
-- line: priority * 2, plus 1 unless it is the suspects'. (line, place) is the order of service.
-- seq: the order among the scheduled, the parked, the settled.
-- options: what only workers read, and what is rare (rules in job.rs). null: the usual ones.
-- token, lease_of, cancel, progress: while it is leased; lease_of is the grant's id.
CREATE TABLE leasehold.job (
    id               uuid     NOT NULL,
    queue            integer  NOT NULL,
    version          integer  NOT NULL,
    seq              bigint   NOT NULL,
    place            bigint   NOT NULL,
    enqueued_at      bigint   NOT NULL,
    run_at           bigint   NOT NULL,
    token            bigint,
    lease_of         bigint,
    declined_since   bigint,
    settled_at       bigint,
    keep_until       bigint,
    checkpoint_seq   bigint,
    checkpoint_token bigint,
    failures         integer  NOT NULL DEFAULT 0,
    expiries         integer  NOT NULL DEFAULT 0,
    max_expiries     integer  NOT NULL,
    weight           integer  NOT NULL,
    state            smallint NOT NULL,
    line             smallint NOT NULL,
    cancel           boolean  NOT NULL DEFAULT false,
    kind             text COLLATE "C" NOT NULL,
    unique_key       bytea,
    exclusive_key    bytea,
    options          jsonb,
    headers          jsonb,
    progress         jsonb,
    history          jsonb,
    payload          bytea    NOT NULL,
    checkpoint       bytea,
    result           bytea,
    PRIMARY KEY (id, queue)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
        autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_threshold = -1,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 100000);
CREATE INDEX job_ready ON leasehold.job (queue, line, place) WHERE state = 2;
CREATE INDEX job_due ON leasehold.job (queue, run_at, seq) WHERE state = 0;
CREATE INDEX job_parked ON leasehold.job (queue, exclusive_key, seq) WHERE state = 1;
CREATE INDEX job_leased ON leasehold.job (queue, token) WHERE state = 6;
CREATE INDEX job_settled ON leasehold.job (queue, state, settled_at, seq) WHERE settled_at IS NOT NULL;
CREATE INDEX job_kept ON leasehold.job (queue, keep_until) WHERE keep_until IS NOT NULL;

CREATE TABLE leasehold.unique_key (
    queue integer NOT NULL,
    key   bytea   NOT NULL,
    job   uuid    NOT NULL,
    until bigint,
    PRIMARY KEY (queue, key)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX unique_key_until ON leasehold.unique_key (queue, until) WHERE until IS NOT NULL;

-- head: the job of the key that may be ready, leased, or waiting for its retry.
CREATE TABLE leasehold.exclusive_key (
    queue integer NOT NULL,
    key   bytea   NOT NULL,
    head  uuid    NOT NULL,
    PRIMARY KEY (queue, key)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- The leases that one claim gave with the same terms: one deadline, and all that a renewal touches.
-- Its tokens are from id to id + leases - 1; which of them live, their jobs know. Of the nonce only
-- the hash. lapsing: leases that are to lapse once no transaction has their jobs in hand.
CREATE TABLE leasehold.grants (
    queue        integer NOT NULL,
    leases       integer NOT NULL,
    id           bigint  NOT NULL,
    deadline     bigint  NOT NULL,
    granted_at   bigint  NOT NULL,
    term         bigint  NOT NULL,
    max_lifetime bigint  NOT NULL,
    renewals     integer NOT NULL DEFAULT 0,
    nonce_hash   bytea   NOT NULL,
    lapsing      bigint[],
    owner        text    NOT NULL,
    task         text    NOT NULL,
    PRIMARY KEY (queue, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);
-- With + 0, so that whoever knows a grant's id comes by the key: until a vacuum, this index has all
-- that ended.
CREATE INDEX grants_deadline ON leasehold.grants ((queue + 0), deadline, (id + 0));

CREATE TABLE leasehold.session (
    id        uuid   PRIMARY KEY,
    namespace text   NOT NULL,
    used      bigint NOT NULL
) WITH (fillfactor = 50);

-- The last answer of each lane: the row with the largest seq, as with head. null: nothing of note.
-- A session was used when its last lane was.
CREATE TABLE leasehold.lane (
    session uuid     NOT NULL,
    lane    bigint   NOT NULL,
    seq     bigint   NOT NULL,
    used    bigint   NOT NULL,
    verb    smallint NOT NULL,
    answer  jsonb,
    PRIMARY KEY (session, lane, seq)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

CREATE TABLE leasehold.audit (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace text   NOT NULL,
    at        bigint NOT NULL,
    actor     text   NOT NULL,
    reason    text   NOT NULL,
    command   text   NOT NULL,
    done      bigint NOT NULL,
    tokens    text   NOT NULL
);
CREATE INDEX audit_order ON leasehold.audit (namespace, id);

-- Marks of fences (src/fence/postgres.rs), beside the jobs so that any driver finds the same ones.
-- The scope '' is the floor below which marks were forgotten.
CREATE TABLE IF NOT EXISTS leasehold.fence (
    scope text COLLATE "C" PRIMARY KEY,
    mark  bigint NOT NULL
);
CREATE TABLE IF NOT EXISTS leasehold.fence_done (
    scope     text COLLATE "C" NOT NULL,
    operation text COLLATE "C" NOT NULL,
    token     bigint NOT NULL,
    PRIMARY KEY (scope, operation)
);

INSERT INTO leasehold.meta (version) VALUES (1);
