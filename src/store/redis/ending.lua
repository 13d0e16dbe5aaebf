-- ending: what an expiry or a settlement means for the job. The same rules as `rules/ends.rs`.

-- Expires one lease, and returns the report.
local DEADLINE, STALLED, LIFE = 0, 1, 2
local function expire(g, at, cause, front)
  local rec = record(g, at)
  local p, n, expiries = parse(rec), note(g, at), u4(rec, 13) + 1
  local next = 'front'
  if n.cancel then next = 'x' elseif expiries >= u4(rec, 49) then next = 'd' end
  if next == 'd' then add(DEAD_BY_EXPIRY, 1) end
  local kind = sub(rec, 57, 57 + byte(rec, 57))
  finish(g, at, rec, p, AS.expired + cause, next, { expiries = expiries }, front)
  return p8(g.base + at) .. id_of(rec) .. kind .. text(g.owner) .. text(g.task)
    .. pack('<I1c1I4', cause, sub(next, 1, 1), expiries) .. text(n.progress or '')
end

-- The oldest overdue leases by (deadline, token), up to `max`: grants, and how many of each; and the
-- number of all. The grants are not opened: most of them are for other steps.
local function overdue_leases(max)
  local due, room = {}, max
  by_deadline('-inf', now, function(gid, _, live)
    if room == 0 then return false end
    due[#due + 1] = { gid = gid, leases = math.min(live, room) }
    room = room - due[#due].leases
  end)
  return due, max - room
end
-- Expires the newest of them, as many as a step takes: each step goes ahead of what the one before put
-- in line, and so the oldest come first in the end. Returns the reports.
local function expire_newest(due, count)
  local reports, front, older = {}, {}, count - EXPIRIES
  for _, d in ipairs(due) do
    if older >= d.leases then
      older = older - d.leases
    else
      local g, left = held(d.gid), d.leases
      local cause = g.deadline >= g.granted_at + g.lifetime and LIFE or DEADLINE
      for at = 0, g.count - 1 do
        if left > 0 and is_live(g, at) then
          left = left - 1
          if older > 0 then older = older - 1 else reports[#reports + 1] = expire(g, at, cause, front) end
        end
      end
    end
  end
  save_grants()
  if #front > 0 then put_front(front) end
  return reports
end

-- Scheduled jobs whose time has come fall due, the earliest first. Returns how many.
local function promote(max)
  local members = call('ZRANGE', DUE, '-inf', now, 'BYSCORE', 'LIMIT', 0, max)
  if #members == 0 then return 0 end
  local ids = {}
  for n, member in ipairs(members) do ids[n] = sub(member, 9) end
  local stand = call('HMGET', JOBS, unpack(ids))
  call('ZREM', DUE, unpack(members))
  call('HDEL', JOBS, unpack(ids))
  add(N_SCHEDULED, -#ids)
  for _, stands in ipairs(stand) do
    local rec = sub(stands, 26)
    join(rec, has((read('<I2', rec, 7)), EXCLUSIVE) and parse(rec) or {})
  end
  return #ids
end

local settle_all
do
  -- The mark of a fence that refused the holder raises the floor, if it can be believed.
  local function believe(mark)
    if mark > now + BELIEF then return false end
    M[FLOOR] = math.max(M[FLOOR], mark)
    return true
  end

  -- Ends one lease as its holder says: kind 0 complete, 1 retry, 2 surrender, 3 bury,
  -- 4 decline.
  local function settle_one(g, at, kind, say, front)
    local rec = record(g, at)
    -- A job without keys and retention that completes leaves nothing behind, and need not be read.
    local lasts = kind > 0 or has((read('<I2', rec, 7)), UNIQUE + EXCLUSIVE + RETENTION)
    local p, cancel = lasts and parse(rec) or {}, note(g, at).cancel
    local again = M[RELAXED] == 1 and 'free' or 'wait'
    if kind == 0 then
      finish(g, at, rec, p, AS.completed, 'c', { result = say.result }, front)
    elseif kind == 3 then
      finish(g, at, rec, p, AS.buried, 'd', { failures = u4(rec, 9) + 1, reason = say.reason }, front)
    elseif kind == 1 or (say.mark and not believe(say.mark)) then
      local delay = kind == 1 and say.delay or DISBELIEVED_DELAY
      local change = { failures = u4(rec, 9) + 1, reason = say.reason }
      if cancel then
        finish(g, at, rec, p, AS.cancelled, 'x', change, front)
      else
        change.run_at = now + delay
        finish(g, at, rec, p, AS.retried, again, change, front)
      end
    elseif cancel then
      finish(g, at, rec, p, AS.cancelled, 'x', {}, front)
    elseif kind == 4 then
      local change = { run_at = now + say.delay, reason = say.reason, declined = true }
      finish(g, at, rec, p, AS.surrendered, 'wait', change, front)
    elseif say.delay == 0 then
      finish(g, at, rec, p, AS.surrendered, 'front', {}, front)
    else
      finish(g, at, rec, p, AS.surrendered, 'wait', { run_at = now + say.delay }, front)
    end
  end

  -- Applies settlements in order, and returns a verdict for each: a byte with held 1, late 2,
  -- cancel 4; zero is fenced.
  function settle_all(data)
    local verdicts, front, at = {}, {}, 1
    while at <= #data do
      local gid, nonce, lease, id, kind, delay, mark, result, reason
      gid, nonce, lease, id, kind, delay, mark, result, at = read('<c8c16I2c16I1I8I8I4', data, at)
      local say = { delay = delay, mark = mark > 0 and mark or nil }
      if result > 0 then
        say.result = sub(data, at, at + result - 1)
        at = at + result
      end
      reason, at = read('<I4', data, at)
      say.reason = sub(data, at, at + reason - 1)
      at = at + reason
      local g = current(gid, nonce, lease, id)
      if g then
        local late, cancel = g.deadline <= now, note(g, lease).cancel
        verdicts[#verdicts + 1] = char(1 + (late and 2 or 0) + (cancel and 4 or 0))
        if late then add(LATE, 1) end
        settle_one(g, lease, kind, say, front)
      else
        verdicts[#verdicts + 1] = '\0'
        add(FENCED, 1)
      end
    end
    if #front > 0 then put_front(front) end
    return concat(verdicts)
  end
end
