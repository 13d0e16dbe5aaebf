-- base: the state of one call, the counters of a partition, and the memory of requests.
-- All of it is set anew by `begin`: what a call that failed has left behind is of no concern.
local now, K, KEYS, SESSION, ARGS
-- The counters that were read, those of them that were changed, and what is to be added to others.
local M, changed, sums = {}, {}, {}
local created, there
-- A table that is new has to grow again, and these never hold more than the names of counters.
local function empty(t)
  for key in pairs(t) do t[key] = nil end
end

-- Counters are fields of META. One that was read is written back, one that was not is added to.
local function field(name)
  if not M[name] then M[name] = tonumber(call('HGET', K.meta, name)) or 0 end
  return M[name]
end
local function set(name, value)
  M[name], changed[name] = value, true
end
local function add(name, n)
  if M[name] then
    set(name, M[name] + n)
  else
    sums[name] = (sums[name] or 0) + n
  end
end
local function read_meta(fields)
  for n, value in ipairs(call('HMGET', K.meta, unpack(fields))) do
    M[fields[n]] = tonumber(value) or 0
  end
end
local function save_meta()
  if not there then return end
  local pairs_set = {}
  for name in pairs(changed) do
    pairs_set[#pairs_set + 1] = name
    pairs_set[#pairs_set + 1] = decimal(M[name])
  end
  if #pairs_set > 0 then call('HSET', K.meta, unpack(pairs_set)) end
  for name, n in pairs(sums) do
    if n ~= 0 then call('HINCRBY', K.meta, name, decimal(n)) end
  end
end
-- Refused calls count where there is a partition to count them.
local function refused(n)
  if n > 0 and (created or call('HEXISTS', K.meta, 'layout') == 1) then add('fenced', n) end
end

-- Makes META. If jobs are there it has been lost: the books then begin with the leases that live.
local function make_meta(is_lost)
  local live = 0
  for _, count in ipairs(call('HMGET', K.meta, unpack(ENDINGS))) do live = live + (tonumber(count) or 0) end
  -- If they are more than one call should count, that is left to a repair.
  if is_lost and call('ZCARD', K.ends) <= COUNTED then
    for _, gid in ipairs(call('ZRANGE', K.ends, 0, -1)) do
      local head = call('HGET', K.held, gid)
      if head then live = live + read('<I2', head, HEAD_LIVE) end
    end
  end
  -- An issuer without memory starts above everything that it can have given.
  call('HSET', K.meta, 'layout', LAYOUT, 'floor', now + LEAD, 'seq', is_lost and now or FIRST_SEQ,
    'lines', is_lost and ALL_LINES or 2 ^ USUAL_LINE, 'due', is_lost and 1 or 0, 'granted', live)
  if is_lost then call('HINCRBY', K.meta, 'lost_books', 1) end
end
-- Reads counters, `layout` among them. A partition that is not there is made if `make` says so;
-- otherwise nothing of it is saved.
local function open_meta(fields, make)
  read_meta(fields)
  if M.layout == LAYOUT then return end
  local is_lost = call('EXISTS', K.jobs, K.held) > 0
  there = make or is_lost
  if there then
    created = true
    make_meta(is_lost)
    read_meta(fields)
  else
    set('floor', now + LEAD)
  end
end

-- A number in the order of arrival, as eight bytes that sort.
local function next_seq() return pack('>I8', call('HINCRBY', K.meta, 'seq', 1)) end

local function reply(status, body)
  return pack('<I1I8I1', status, now, created and 1 or 0) .. (body or '')
end

-- The request's name, and what its lane remembers. Returns a refusal, or DONE and the first answer.
-- A call that would take long comes in steps, each of which is remembered in the place of the one
-- before.
local R = {}
-- The caller tells when it last heard of its session; a partition knows its own share only.
local function is_idle(heard) return now - heard > SESSION_IDLE end
local function recall()
  local lane, seq, verb, step, heard = read('<c4I8I1I2I8', ARGS[1])
  R.lane, R.seq, R.verb, R.step = lane, seq, verb, step
  local kept = call('HMGET', SESSION, 'open', lane)
  -- `open` has been here before: a memory that is gone may have held this very request.
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
