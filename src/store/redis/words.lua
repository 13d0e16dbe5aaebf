-- words: what all scripts share: short names, the counters, and how a grant is laid out. Limits of
-- the rules and flags of a record come before this file, from Rust: `numbers` in script.rs.
local call, sub, byte, char, rep = redis.call, string.sub, string.byte, string.char, string.rep
local pack, read, concat = struct.pack, struct.unpack, table.concat

-- Counters, by their place in the string at META. The first is the version of the layout.
local COUNTERS, LAYOUT = 46, 2
local PAUSED, RELAXED, SEQ, LAST, FLOOR = 2, 3, 4, 5, 6
local N_SCHEDULED, N_READY, N_PARKED, N_LEASED = 7, 8, 9, 10
local N_SETTLED = { c = 11, d = 12, x = 13 }
local ENQUEUED, GRANTED, ENDED = 14, 15, 16
local LIVE, LATE, FENCED, PRUNED, PURGED, IN_LINE = 25, 26, 27, 28, 29, 30
local DEAD_BY_EXPIRY = 46

-- HELD has two fields for each grant.
-- [id], the first token, big-endian: the head, which is the lengths of owner and task; how many
-- leases, how many of them alive, whether any has a note; deadline, renewals, nonce, granted at,
-- term in microseconds, term as given, lifetime. Then owner, task, and a mark for each lease, once
-- one has ended.
-- [id][ROLL]: the ids of its jobs.
local HEAD, HEAD_LIVE = '<I2I2I2I2I1I8I4c16I8I8c12I8', 7
local ROLL = '\0'
