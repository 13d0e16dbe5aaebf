-- names: what the scripts call the keys of a partition (`keys.rs` says what they hold), its
-- counters and the flags of a record (`store/record.rs`).
local call, sub, byte, char, rep = redis.call, string.sub, string.byte, string.char, string.rep
local pack, read, concat = struct.pack, struct.unpack, table.concat
local META, DUE, JOBS, PARK, EXCL, UNIQ, UWIN = unpack(KEYS, 1, 7)
local HELD, RECS, NOTES, ENDS, SLEEP, SLEEPS = unpack(KEYS, 12, 17)
-- The session is the last key of a call that has a request.
local FIRST_LINE, SESSION = 18, KEYS[#KEYS]

-- Tokens may run this many microseconds ahead of the clock.
local LEAD = 20000
local SESSION_IDLE = 600000000
local GRANT_BYTES = 4194304
-- A grant that holds no more than this keeps its ended jobs until the last one ends.
local SMALL_GRANT = 65536

-- Counters, by their place in the string at META.
local INDEX, PAUSED, RELAXED, SEQ, LAST, FLOOR = 2, 3, 4, 5, 6, 7
local N_SCHEDULED, N_READY, N_PARKED, N_LEASED = 8, 9, 10, 11
local ENQUEUED, GRANTED, ENDED = 15, 16, 17
local LIVE, LATE, FENCED, PRUNED, PURGED, IN_LINE = 26, 27, 28, 29, 30, 31
local FIELDS = '<' .. rep('I8', 46)

local UNIQUE, WINDOW, EXCLUSIVE, TERM, LIFETIME, TIMEOUT, STALL = 1, 2, 4, 8, 16, 32, 64
local RETENTION, FAILURES, RETRY, HEADERS, CHECKPOINT, RESULT, HISTORY =
  128, 256, 512, 1024, 2048, 4096, 8192
-- Jobs without these leave nothing behind when they complete.
local LASTING = UNIQUE + EXCLUSIVE + RETENTION

-- Calls a command with many arguments, a thousand at a time: Lua cannot spread more.
local function many(command, key, list)
  for from = 1, #list, 1000 do
    call(command, key, unpack(list, from, math.min(from + 999, #list)))
  end
end

-- What HELD has of a grant, before its owner, task, map and ended leases: deadline, renewals, nonce,
-- granted at, term as given, term, lifetime, leases, those alive, noted, lengths, pieces, bytes.
local HEAD = '<I8I4c16I8c12I8I8I2I2I1I2I2I2I2I4'

-- In RECS, the segments of a grant lie behind its id and their number; behind its id alone lies its
-- roll: [u16 flags], of all its jobs together, and their ids.
local MANY_PIECES = 16
local function piece_names(names, gid, pieces)
  for n = 1, pieces do names[#names + 1] = gid .. char(n) end
  return names
end
local function put_pieces(gid, segs)
  local fields = {}
  for n = 1, #segs do fields[2 * n - 1], fields[2 * n] = gid .. char(n), segs[n] end
  call('HSET', RECS, unpack(fields))
end

-- Wake-ups: one sleeper per job.
local bells, alarms = 0, 0
local function wake(sleepers, jobs, kind)
  local who = call('ZRANGE', sleepers, now, '+inf', 'BYSCORE', 'LIMIT', 0, jobs)
  if #who == 0 then return end
  many('ZREM', sleepers, who)
  for _, sleeper in ipairs(who) do
    local channel, queue = string.match(sleeper, '^(%S+) %S+ (%S+)$')
    call('PUBLISH', channel, kind .. queue)
  end
end
local function ring()
  if bells > 0 then wake(SLEEP, bells, 'j') end
  if alarms > 0 then wake(SLEEPS, alarms, 's') end
end
