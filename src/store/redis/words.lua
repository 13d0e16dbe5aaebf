-- words: what all scripts say: short names, limits, counters, the flags of a record
-- (`store/record.rs`), how grants and segments are laid out.
local call, sub, byte, char, rep = redis.call, string.sub, string.byte, string.char, string.rep
local pack, read, concat = struct.pack, struct.unpack, table.concat

-- Tokens may run this many microseconds ahead of the clock.
local LEAD = 20000
local SESSION_IDLE = 600000000
local GRANT_BYTES = 4194304
-- A grant that holds no more than this keeps its ended jobs until the last one ends.
local SMALL_GRANT = 262144

-- Counters, by their place in the string at META.
local INDEX, PAUSED, RELAXED, SEQ, LAST, FLOOR = 2, 3, 4, 5, 6, 7
local N_SCHEDULED, N_READY, N_PARKED, N_LEASED = 8, 9, 10, 11
local ENQUEUED, GRANTED, ENDED = 15, 16, 17
local LIVE, LATE, FENCED, PRUNED, PURGED, IN_LINE = 26, 27, 28, 29, 30, 31
local EACH_LINE = '<I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8'

local UNIQUE, EXCLUSIVE, TERM, LIFETIME, RETENTION = 1, 4, 8, 16, 128
-- Jobs without these leave nothing behind when they complete.
local LASTING = UNIQUE + EXCLUSIVE + RETENTION

-- A grant's name is its id and its nonce: who can name it holds it. HELD has of it, behind its name, the
-- cell, all that a renewal reads and writes: deadline, renewals, round, and its kind: from when on its
-- renewals may be cut by the maximum lifetime, never too late and the same for grants of one time;
-- term, leases, those alive, noted. Short, so that many are alike; and for that a grant of one lease has
-- no deadline there, but zero, as long as all is as it was given: its head has when that was.
local CELL, KIND = '<I8I4c12I8I8I2I2I1', 25
local SAME_TIME = 16777216
-- Grants that one call renews form a round: ENDS has them under one name, which begins with the least of
-- their ids, as they share a deadline. HELD has their names behind its name, and behind that and a zero what
-- they share: deadline, renewals since it was formed, from when on one of them may be cut, term, whether
-- each is of one lease. A round of such is renewed by this alone; what their cells say of deadline and renewals is
-- as they came into it.
local ROUND, ALONE, SHARED = 12, rep('\0', 12), '\0'
-- Behind its id: lengths, pieces, bytes, flags of all its jobs together, nonce, granted at, term as
-- given, lifetime; owner, task, map and ended leases, or, of a grant of one lease, the id of its job.
local HEAD, HEAD_BYTES = '<I2I2I2I2I4I2c16I8c12I8', 58
-- Behind its id and a zero the ids of its jobs, if they are several; behind its id and a number its pieces: segments. If
-- APART is added to their number, the first has the starts of all segments, and the others are the
-- rests.
local NAME, ROLL, APART = 24, '\0', 256

-- A segment is [u32 bytes][u16 jobs][u16 flags][u32 weight][u64 stamp][u16 form][form][ids][records].
-- Its stamp is the time of the records that carry none. Where it has a form, a record's start up
-- to the payload that is the same for all but for length, id, times and weight, the records are
-- payloads behind their lengths.
local SEGMENT = '<I4I2I2I4c8I2'
-- In a line a segment is one element, or two: its start up to the stamp, and the rest as it came in a
-- call. To join them would cost as much as to take them in.
local START = 20
