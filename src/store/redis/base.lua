-- base: the counters of a partition, and the memory of calls.
-- So much of what takes long is done in one step: about a millisecond of it.
local EXPIRIES, PROMOTIONS, CHUNK = 50, 200, 50

local function p8(n) return pack('<I8', n) end
local function u8(s, at) return (read('<I8', s, at)) end
local function u4(s, at) return (read('<I4', s, at)) end
local function text(s) return pack('<I4', #s) .. s end

local M
local created, there = false, true
-- Reads the counters. A partition that is not there has none: `make` makes it; otherwise nothing of
-- it is saved.
local function open_meta(make)
  local raw = call('GET', META)
  if raw then
    M = { read(FIELDS, raw) }
    return
  end
  created, there, M = make, make, {}
  for at = 1, COUNTERS do M[at] = 0 end
  -- An issuer without memory starts above everything that it can have given.
  M[1], M[FLOOR] = LAYOUT, now + LEAD
end
local function save_meta()
  if there then call('SET', META, pack(FIELDS, unpack(M, 1, COUNTERS))) end
end
local function add(field, n) M[field] = M[field] + n end

-- A number in the order of arrival, as eight bytes that sort.
local function next_seq()
  M[SEQ] = M[SEQ] + 1
  return pack('>I8', M[SEQ])
end

-- What a call can come to.
local DONE, LOST, OVERTAKEN, MIXED_UP, AHEAD, CROWDED = 0, 1, 2, 3, 4, 5

-- The request's name, and what its lane remembers. Returns a refusal, or DONE and the first answer.
-- A call that would take long comes in steps, each of which is remembered in the place of the one before.
local R
-- The caller tells when it last heard of its session; a partition knows its own share only.
local function is_idle(heard) return now - heard > SESSION_IDLE end
local function recall(packed)
  local lane, seq, verb, step, heard = read('<c4I8I1I2I8', packed)
  R = { lane = lane, seq = seq, verb = verb, step = step }
  local kept = call('HMGET', SESSION, 'open', lane)
  -- `open.lua` has been here before: a memory that is gone may have held this very request.
  if not kept[1] or is_idle(heard) then return LOST end
  if kept[2] then
    local last, of, last_step = read('<I8I1I2', kept[2])
    if last > seq then return OVERTAKEN end
    if last == seq then
      if of ~= verb then return MIXED_UP end
      if last_step > step then return OVERTAKEN end
      if last_step == step then return DONE, sub(kept[2], 12) end
    end
  end
  return DONE
end
local function remember(answer)
  call('HSET', SESSION, R.lane, pack('<I8I1I2', R.seq, R.verb, R.step) .. answer)
end
local function reply(status, body)
  return char(status) .. p8(now) .. char(created and 1 or 0) .. (body or '')
end
