-- base: names for the keys of a partition (`keys.rs` says what they hold), its counters, and the
-- memory of calls.
local call, sub, byte, char, rep = redis.call, string.sub, string.byte, string.char, string.rep
local pack, read, concat = struct.pack, struct.unpack, table.concat
local META, DUE, JOBS, PARK, EXCL, UNIQ, UWIN = unpack(KEYS, 1, 7)
local SETTLED = { c = KEYS[8], d = KEYS[9], x = KEYS[10] }
local KEEP, HELD, RECS, NOTES, ENDS, SLEEP, SLEEPS = unpack(KEYS, 11, 17)
-- The session is the last key of a call that has a request.
local FIRST_LINE, SESSION = 18, KEYS[#KEYS]

-- Tokens may run this many microseconds ahead of the clock.
local LEAD = 20000
-- A fence's mark further ahead than this is not believed.
local BELIEF = 86400000000
-- Cancelled jobs are kept this long, or longer.
local CANCELLED_KEPT = 86400000000
local SESSION_IDLE = 600000000
local GRANT_BYTES, STEP = 4194304, 1000

-- Counters, by their place in the string at META.
local INDEX, PAUSED, RELAXED, SEQ, LAST, FLOOR = 2, 3, 4, 5, 6, 7
local N_SCHEDULED, N_READY, N_PARKED, N_LEASED = 8, 9, 10, 11
local N_SETTLED = { c = 12, d = 13, x = 14 }
local ENQUEUED, GRANTED, ENDED = 15, 16, 17
local LIVE, LATE, FENCED, PRUNED, PURGED, IN_LINE = 26, 27, 28, 29, 30, 31
local FIELDS = '<' .. rep('I8', 46)

local function p8(n) return pack('<I8', n) end
local function u8(s, at) return (read('<I8', s, at)) end
local function u4(s, at) return (read('<I4', s, at)) end
local function text(s) return pack('<I4', #s) .. s end

local M
local created, there = false, true
-- Reads the counters. A partition that is not there has none: `make` makes it, with an index or
-- without; otherwise nothing of it is saved.
local function open_meta(make)
  local raw = call('GET', META)
  if raw then
    M = { read(FIELDS, raw) }
    return
  end
  created, there, M = make ~= nil, make ~= nil, {}
  for at = 1, 46 do M[at] = 0 end
  -- An issuer without memory starts above everything that it can have given.
  M[1], M[INDEX], M[FLOOR] = 1, make or 0, now + LEAD
end
local function save_meta()
  if there then call('SET', META, pack(FIELDS, unpack(M, 1, 46))) end
end
local function add(field, n) M[field] = M[field] + n end

-- A number in the order of arrival, as eight bytes that sort.
local function next_seq()
  M[SEQ] = M[SEQ] + 1
  return pack('>I8', M[SEQ])
end

-- Calls a command with many arguments, a thousand at a time: Lua cannot spread more.
local function many(command, key, list)
  for from = 1, #list, 1000 do
    call(command, key, unpack(list, from, math.min(from + 999, #list)))
  end
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

-- What a call can come to.
local DONE, LOST, OVERTAKEN, MIXED_UP, AHEAD = 0, 1, 2, 3, 4

-- The request's name, and what its lane remembers. Returns a refusal, or DONE and the first answer.
local R
-- The caller tells when it last heard of its session; a partition knows its own share only.
local function is_idle(heard) return now - heard > SESSION_IDLE end
local function recall(packed)
  local lane, seq, verb, heard = read('<c4I8I1I8', packed)
  R = { lane = lane, seq = seq, verb = verb }
  local kept = call('HMGET', SESSION, 'open', lane)
  -- `open.lua` has been here before: a memory that is gone may have held this very request.
  if not kept[1] or is_idle(heard) then return LOST end
  if kept[2] then
    local last, of = read('<I8I1', kept[2])
    if last > seq then return OVERTAKEN end
    if last == seq then
      if of ~= verb then return MIXED_UP end
      return DONE, sub(kept[2], 10)
    end
  end
  return DONE
end
local function remember(answer)
  call('HSET', SESSION, R.lane, pack('<I8I1', R.seq, R.verb) .. answer)
end
local function reply(status, body)
  return char(status) .. p8(now) .. char(created and 1 or 0) .. (body or '')
end
