-- inspect: look, and change nothing.
-- in   1 question · 2 where to go on, as the last answer said · 3 how many rows · 4, 5 more
-- out  rows, and where to go on
-- why  read-only: it runs on a full server, and never keeps a writer waiting
local function lease_row(g, at)
  local n = note(g, at)
  terms(g)
  return p8(g.base + at) .. text(g.owner) .. text(g.task) .. p8(g.granted_at) .. p8(g.deadline)
    .. g.term_raw .. pack('<I4I1', g.renewals, n.cancel and 1 or 0) .. text(n.progress or '')
end
local function leased_row(g, at)
  local rec = record_now(g, at)
  if not rec then return nil end
  return 'l' .. p8(0) .. text(rec) .. '\1' .. lease_row(g, at)
end
local function row(stands)
  local state, at = sub(stands, 1, 1), p8(0)
  if K[state] then at = sub(stands, 10, 17) end
  return state .. at .. text(record_in(stands)) .. '\0'
end
local function rows_of(ids)
  local rows = {}
  if #ids == 0 then return rows end
  for n, stands in ipairs(call('HMGET', K.jobs, unpack(ids))) do
    if stands and byte(stands) ~= 108 then rows[#rows + 1] = row(stands) end
  end
  return rows
end
local function page(rows, next)
  return reply(DONE, pack('<I4', #rows) .. concat(rows) .. text(next or ''))
end

-- What JOBS says of a job, if it is still where its line has it.
local function in_line(stub)
  local stands = call('HGET', K.jobs, sub(stub, 9))
  return stands and sub(stands, 1, 9) == 'r' .. sub(stub, 1, 8) and stands
end

-- So many grants, and so many stubs of jobs that have moved on, are looked at in one step.
local OPENED, STUBS = 150, 2000

local ask = {}
-- Settings, counts by state, the ledger, what was lost, and how long the first of the lines has
-- been due. What stands nowhere else is ready.
function ask.queue()
  local fields = call('HMGET', K.meta, 'layout', 'paused', 'relaxed', 'last', 'floor', unpack(LEDGER))
  if not fields[1] then return reply(DONE) end
  local live = tonumber(fields[7]) or 0
  for n = 8, 7 + #ENDINGS do live = live - (tonumber(fields[n]) or 0) end
  local counts = { call('ZCARD', K.due), 0, call('ZCARD', K.park), max(live, 0), call('ZCARD', K.done),
    call('ZCARD', K.dead), call('ZCARD', K.gone) }
  counts[2] = call('HLEN', K.jobs)
  for _, n in ipairs({ 1, 4, 5, 6, 7 }) do counts[2] = counts[2] - counts[n] end
  counts[2] = max(counts[2], 0)
  local answer = {}
  for n = 2, #fields do answer[#answer + 1] = p8(tonumber(fields[n]) or 0) end
  for n = 1, 7 do answer[#answer + 1] = p8(counts[n]) end
  -- At least the first of each line.
  local oldest, left = nil, STUBS
  for line = 0, LINES - 1 do
    local from, stubs, run_at = 0, nil, nil
    repeat
      stubs = call('LRANGE', K[line], from, from + 99)
      from, left = from + #stubs, left - #stubs
      for _, stub in ipairs(stubs) do
        local stands = not run_at and in_line(stub)
        if stands then run_at = u8(record_in(stands), RUN_AT) end
      end
    until run_at or #stubs == 0 or left <= 0
    if run_at and (not oldest or run_at < oldest) then oldest = run_at end
  end
  return reply(DONE, concat(answer) .. (oldest and '\1' or '\0') .. p8(oldest or 0))
end
function ask.hints() return reply(DONE, told(next_in(K.due)) .. told(next_in(K.ends))) end
function ask.overdue(_, most)
  local rows, seen = {}, 0
  by_deadline('-inf', now, function(gid, till, live)
    seen = seen + 1
    if #rows == most or seen > OPENED + most then return false end
    if live then rows[#rows + 1] = p8(till) .. gid .. pack('<I2', live) end
  end)
  return page(rows)
end
function ask.job(id)
  local stands = call('HGET', K.jobs, id)
  if not stands then return page({}) end
  if sub(stands, 1, 1) ~= 'l' then return page({ row(stands) }) end
  local g = held(sub(stands, 2, 9))
  -- Of a lease whose grant was lost nothing is known but the job.
  return page({ g and leased_row(g, (read('<I2', stands, 10))) or row(stands) })
end
local function ranked(set, after, most)
  local from = tonumber(after) or 0
  local members, ids = call('ZRANGE', set, from, from + most - 1), {}
  for n, member in ipairs(members) do ids[n] = sub(member, -16) end
  return rows_of(ids), #ids == most and from + most
end
function ask.s(after, most)
  local rows, next = ranked(K.due, after, most)
  return page(rows, next and decimal(next))
end
local function settled(state)
  return function(after, most)
    local rows, next = ranked(K[state], after, most)
    return page(rows, next and decimal(next))
  end
end
ask.c, ask.d, ask.x = settled('c'), settled('d'), settled('x')
-- By token if the grants are few, else by deadline.
function ask.l(after, most)
  if find(after, ':', 1, true) or after == '' and call('ZCARD', K.ends) > FEW then
    return ask.leases(after, most)
  end
  local past, last, rows = tonumber(after) or 0, nil, {}
  for _, base in ipairs(all_bases()) do
    local g = base + 1000 > past and held(pack('>I8', base))
    if g then
      for at = 0, g.count - 1 do
        if base + at > past and is_live(g, at) then
          if #rows == most then return page(rows, decimal(last)) end
          rows[#rows + 1], last = leased_row(g, at), base + at
        end
      end
    end
  end
  return page(rows)
end
-- Ready: line by line, then the parked.
function ask.r(after, most)
  local line, element = string.match(after, '^(%d+):(%d+)$')
  local rows, stale = {}, 0
  line, element = tonumber(line) or 0, tonumber(element) or 0
  while line < LINES do
    if stale >= STUBS then return page(rows, format('%d:%d', line, element)) end
    local stubs = call('LRANGE', K[line], element, element + 99)
    for n, stub in ipairs(stubs) do
      local stands = in_line(stub)
      if not stands then
        stale = stale + 1
      else
        if #rows == most then return page(rows, format('%d:%d', line, element + n - 1)) end
        rows[#rows + 1] = row(stands)
      end
    end
    if #stubs < 100 then line, element = line + 1, 0 else element = element + 100 end
  end
  if #rows == most then
    return page(rows, call('ZCARD', K.park) > element and format('16:%d', element))
  end
  local parked, next = ranked(K.park, element, most - #rows)
  for _, parked_row in ipairs(parked) do rows[#rows + 1] = parked_row end
  return page(rows, next and format('16:%d', next))
end
-- Live leases by (deadline, token), of an owner, of a task. A step opens so many grants at most,
-- and says where the next one goes on.
function ask.leases(after, most)
  local from, past = string.match(after, '^(%d+):(%d+)$')
  local since, rows, opened, last, next = tonumber(from) or 0, {}, 0, nil, nil
  past = tonumber(past) or 0
  by_deadline(since, NEVER, function(gid, till)
    local base = (read('>I8', gid))
    if till == since and base + GRANT_LEASES <= past then return true end
    if opened == OPENED then
      next = last
      return false
    end
    if till > since or base > past then opened = opened + 1 end
    local g = held(gid)
    if g then terms(g) end
    local wanted = g and (ARGS[4] == '' or '=' .. g.owner == ARGS[4]) and (ARGS[5] == '' or '=' .. g.task == ARGS[5])
    for at = 0, wanted and g.count - 1 or -1 do
      if is_live(g, at) and (till > since or base + at > past) then
        rows[#rows + 1] = leased_row(g, at)
        if #rows == most then
          next = format('%.0f:%.0f', till, base + at)
          return false
        end
      end
    end
    last = format('%.0f:%.0f', till, base + (g and g.count or 1) - 1)
  end)
  return page(rows, next)
end
local function inspect() return ask[ARGS[1]](ARGS[2], tonumber(ARGS[3])) end
register('inspect', inspect, { 'no-writes' })
