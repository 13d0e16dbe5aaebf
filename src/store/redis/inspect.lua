-- inspect: look, and change nothing.
-- in   1 question · 2 where to go on, as the last answer said · 3 how many rows · 4, 5 more
-- out  rows, and where to go on
-- why  read-only: it runs on a full server, and never keeps a writer waiting
open_meta()
if not there then return reply(DONE) end

local function lease_row(g, at)
  local n = note(g, at)
  return p8(g.base + at) .. text(g.owner) .. text(g.task) .. p8(g.granted_at) .. p8(g.deadline)
    .. g.term_raw .. pack('<I4I1', g.renewals, n.cancel and 1 or 0) .. text(n.progress or '')
end
local function leased_row(g, at)
  local rec, state = record(g, at), saved(g, at)
  if state then rec = rewrite(rec, parse(rec), { checkpoint = state }) end
  return 'l' .. p8(0) .. text(rec) .. '\1' .. lease_row(g, at)
end
local function row(stands)
  return sub(stands, 1, 1) .. sub(stands, 10, 17) .. text(sub(stands, 26)) .. '\0'
end
local function rows_of(ids)
  local rows = {}
  if #ids == 0 then return rows end
  for n, stands in ipairs(call('HMGET', JOBS, unpack(ids))) do
    if stands then rows[#rows + 1] = row(stands) end
  end
  return rows
end
local function page(rows, next)
  return reply(DONE, pack('<I4', #rows) .. concat(rows) .. text(next or ''))
end

-- What JOBS says of a job, if it is still where its line has it.
local function in_line(stub)
  local stands = call('HGET', JOBS, sub(stub, 9))
  return stands and sub(stands, 1, 9) == 'r' .. sub(stub, 1, 8) and stands
end

local ask = {}
-- The counters, and how long the first of the lines has been due.
function ask.queue()
  local oldest
  for line = 0, 15 do
    if M[IN_LINE + line] > 0 then
      local run_at, from = nil, 0
      while not run_at do
        local stubs = call('LRANGE', line_key(line), from, from + 99)
        if #stubs == 0 then break end
        from = from + #stubs
        for _, stub in ipairs(stubs) do
          local stands = in_line(stub)
          if stands then
            run_at = u8(stands, 66)
            break
          end
        end
      end
      if run_at and (not oldest or run_at < oldest) then oldest = run_at end
    end
  end
  return reply(DONE, pack(FIELDS, unpack(M, 1, COUNTERS)) .. (oldest and '\1' or '\0') .. p8(oldest or 0))
end
-- How many leases live, by the ledger and by the grants.
function ask.live()
  local leases = 0
  by_deadline('-inf', '+inf', function(_, _, live) leases = leases + live end)
  return reply(DONE, p8(M[LIVE]) .. p8(leases))
end
function ask.hints()
  local due = call('ZRANGE', DUE, 0, 0, 'WITHSCORES')[2]
  local till = call('ZRANGE', ENDS, 0, 0, 'WITHSCORES')[2]
  local function told(at) return at and '\1' .. p8(math.max(at - now, 0)) or '\0' .. p8(0) end
  return reply(DONE, told(due) .. told(till))
end
function ask.overdue(_, max)
  local rows = {}
  by_deadline('-inf', now, function(gid, till, live)
    if #rows == max then return false end
    rows[#rows + 1] = p8(till) .. gid .. pack('<I2', live)
  end)
  return page(rows)
end
function ask.job(id)
  local stands = call('HGET', JOBS, id)
  if not stands then return page({}) end
  if sub(stands, 1, 1) ~= 'l' then return page({ row(stands) }) end
  local g = held(sub(stands, 2, 9))
  return page(g and { leased_row(g, u8(stands, 10)) } or {})
end
local function ranked(set, after, max)
  local from = tonumber(after) or 0
  local members, ids = call('ZRANGE', set, from, from + max - 1), {}
  for n, member in ipairs(members) do ids[n] = sub(member, -16) end
  return rows_of(ids), #ids == max and from + max
end
function ask.s(after, max)
  local rows, next = ranked(DUE, after, max)
  return page(rows, next and string.format('%d', next))
end
local function settled(state)
  return function(after, max)
    local rows, next = ranked(SETTLED[state], after, max)
    return page(rows, next and string.format('%d', next))
  end
end
ask.c, ask.d, ask.x = settled('c'), settled('d'), settled('x')
function ask.l(after, max)
  local past, last, rows = tonumber(after) or 0, nil, {}
  for _, base in ipairs(all_bases()) do
    local g = base + 1000 > past and held(pack('>I8', base))
    if g then
      for at = 0, g.count - 1 do
        if base + at > past and is_live(g, at) then
          if #rows == max then return page(rows, string.format('%.0f', last)) end
          rows[#rows + 1], last = leased_row(g, at), base + at
        end
      end
    end
  end
  return page(rows)
end
-- Ready: line by line, then the parked.
function ask.r(after, max)
  local line, element = string.match(after, '^(%d+):(%d+)$')
  local rows = {}
  line, element = tonumber(line) or 0, tonumber(element) or 0
  while line < 16 do
    local stubs = M[IN_LINE + line] > 0 and call('LRANGE', line_key(line), element, element + 99) or {}
    for n, stub in ipairs(stubs) do
      local stands = in_line(stub)
      if stands then
        if #rows == max then return page(rows, string.format('%d:%d', line, element + n - 1)) end
        rows[#rows + 1] = row(stands)
      end
    end
    if #stubs < 100 then line, element = line + 1, 0 else element = element + 100 end
  end
  if #rows == max then
    return page(rows, call('ZCARD', PARK) > element and string.format('16:%d', element))
  end
  local parked, next = ranked(PARK, element, max - #rows)
  for _, parked_row in ipairs(parked) do rows[#rows + 1] = parked_row end
  return page(rows, next and string.format('16:%d', next))
end
-- Live leases by (deadline, token), of an owner, of a task.
function ask.leases(after, max)
  local from, past = string.match(after, '^(%d+):(%d+)$')
  local since, rows, next = tonumber(from) or 0, {}, nil
  past = tonumber(past) or 0
  by_deadline(since, '+inf', function(gid, till)
    local g = held(gid)
    local wanted = (ARGV[4] == '' or '=' .. g.owner == ARGV[4]) and (ARGV[5] == '' or '=' .. g.task == ARGV[5])
    for at = 0, wanted and g.count - 1 or -1 do
      if is_live(g, at) and (till > since or g.base + at > past) then
        rows[#rows + 1] = leased_row(g, at)
        if #rows == max then
          next = string.format('%.0f:%.0f', till, g.base + at)
          return false
        end
      end
    end
  end)
  return page(rows, next)
end
return ask[ARGV[1]](ARGV[2], tonumber(ARGV[3]))
