-- ending: what an expiry or a settlement means for the job. The same rules as `rules/ends.rs`.

-- Expires one lease, and returns the report. A job whose record was lost leaves none.
local DEADLINE, STALLED, LIFE = 0, 1, 2
local function expire(g, at, cause, front)
  local rec = record(g, at)
  if not rec then
    add('lost_jobs', 1)
    return end_lease(g, at, AS.expired + cause)
  end
  local p, n, expiries = parse(rec), note(g, at), u4(rec, EXPIRIES_AT) + 1
  local next = 'front'
  if n.cancel then next = 'x' elseif expiries >= u4(rec, LIMIT_AT) then next = 'd' end
  if next == 'd' then add('dead_by_expiry', 1) end
  local kind = sub(rec, KIND_AT, KIND_AT + byte(rec, KIND_AT))
  finish(g, at, rec, p, AS.expired + cause, next, { expiries = expiries }, front)
  return p8(g.base + at) .. id_of(rec) .. kind .. text(g.owner) .. text(g.task)
    .. pack('<I1c1I4', cause, sub(next, 1, 1), expiries) .. text(n.progress or '')
end

-- The oldest overdue leases by (deadline, token), up to `max`: grants, and how many of each; and
-- the number of all. The grants are not opened: most of them are for other steps.
local LOST_GRANTS = 500
local function overdue_leases(most)
  local due, count, lost = {}, 0, {}
  by_deadline('-inf', now, function(gid, _, live)
    if count == most or #lost == LOST_GRANTS then return false end
    if not live then
      lost[#lost + 1] = gid
    else
      due[#due + 1] = { gid = gid, leases = min(live, most - count) }
      count = count + due[#due].leases
    end
  end)
  -- HELD was lost: which jobs these were, JOBS alone knows.
  if #lost > 0 then
    many('ZREM', K.ends, lost)
    add('lost_grants', #lost)
  end
  return due, count
end
-- Expires the newest of them, as many as a step takes: each step goes ahead of what the one before
-- put in line, and so the oldest come first in the end. Returns the reports, and how many leases
-- ended.
local function expire_newest(due, count)
  local reports, front, older, done = {}, {}, count - EXPIRIES, 0
  for _, d in ipairs(due) do
    if older >= d.leases then
      older = older - d.leases
    else
      local g, left = held(d.gid), d.leases
      terms(g)
      local cause = g.deadline >= g.granted_at + g.lifetime and LIFE or DEADLINE
      for at = 0, g.count - 1 do
        if left > 0 and is_live(g, at) then
          left = left - 1
          if older > 0 then
            older = older - 1
          else
            done = done + 1
            reports[#reports + 1] = expire(g, at, cause, front)
          end
        end
      end
    end
  end
  save_grants()
  if #front > 0 then put_front(front) end
  return reports, done
end

-- Scheduled jobs whose time has come fall due, the earliest first. Returns how many.
local function promote(most)
  local members = call('ZRANGE', K.due, '-inf', decimal(now), 'BYSCORE', 'LIMIT', 0, most)
  if #members == 0 then return 0 end
  local ids = {}
  for n, member in ipairs(members) do ids[n] = sub(member, 9) end
  call('ZREM', K.due, unpack(members))
  for n, stands in ipairs(call('HMGET', K.jobs, unpack(ids))) do
    if stands and sub(stands, 1, 9) == 's' .. sub(members[n], 1, 8) then
      local rec = record_in(stands)
      join(rec, has(flags_of(rec), EXCLUSIVE) and parse(rec) or {})
    else
      add('lost_jobs', 1)
    end
  end
  return #ids
end

-- The mark of a fence that refused the holder raises the floor, if it can be believed.
local function believe(mark)
  if mark > now + BELIEF then return false end
  set('floor', max(field('floor'), mark))
  return true
end

-- Ends one lease as its holder says: kind 0 complete, 1 retry, 2 surrender, 3 bury, 4 decline.
local function settle_one(g, at, kind, say, front)
  local rec = record(g, at)
  if not rec then
    add('lost_jobs', 1)
    return end_lease(g, at, kind == 4 and AS.surrendered or kind)
  end
  local p, cancel = parse(rec), note(g, at).cancel
  if kind == 0 then
    finish(g, at, rec, p, AS.completed, 'c', { result = say.result }, front)
  elseif kind == 3 then
    finish(g, at, rec, p, AS.buried, 'd', { failures = u4(rec, FAILURES_AT) + 1, reason = say.reason }, front)
  elseif kind == 1 or (say.mark > 0 and not believe(say.mark)) then
    local change = { failures = u4(rec, FAILURES_AT) + 1, reason = say.reason }
    if cancel then
      finish(g, at, rec, p, AS.cancelled, 'x', change, front)
    else
      change.run_at = now + (kind == 1 and say.delay or DISBELIEVED_DELAY)
      finish(g, at, rec, p, AS.retried, field('relaxed') == 1 and 'free' or 'wait', change, front)
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
-- cancel 4; zero is fenced. Those of a grant that follow each other come together:
-- [8 grant][16 nonce][u16 n] n × [u16 lease][16 job][u8 kind]; a kind that is not PLAIN is followed
-- by [u64 delay][u64 mark][u32 bytes] and the result as it stands in a record, [u32 bytes] and the
-- reason. PLAIN is a completion without a result.
local PLAIN = 255
local function settle_all(data)
  local verdicts, front, gone, at, count, fenced, late = {}, {}, {}, 1, 0, 0, 0
  while at <= #data do
    local gid, nonce, leases, lease, id, kind
    gid, nonce, leases, at = read('<c8c16I2', data, at)
    local g = held(gid)
    if g and g.nonce ~= nonce then g = false end
    local is_late = g and g.deadline <= now
    local held_still, cancelled = is_late and '\3' or '\1', is_late and '\7' or '\5'
    for _ = 1, leases do
      lease, id, kind, at = read('<I2c16I1', data, at)
      local say
      if kind ~= PLAIN then
        local delay, mark, result, reason
        delay, mark, result, at = read('<I8I8I4', data, at)
        say = { delay = delay, mark = mark, result = result > 0 and sub(data, at, at + result - 1) or nil }
        reason, at = read('<I4', data, at + result)
        say.reason = sub(data, at, at + reason - 1)
        at = at + reason
      end
      count = count + 1
      if not g or not is_live(g, lease) or job_id(g, lease) ~= id then
        verdicts[count], fenced = '\0', fenced + 1
      else
        if is_late then late = late + 1 end
        verdicts[count] = note(g, lease).cancel and cancelled or held_still
        if kind ~= PLAIN then
          settle_one(g, lease, kind, say, front)
        elseif byte(g.roll, STRIDE * lease + STRIDE) == 1 then
          settle_one(g, lease, 0, {}, front)
        else
          -- It leaves nothing behind, and its record need not be read.
          gone[#gone + 1] = id
          end_lease(g, lease, AS.completed)
        end
      end
    end
  end
  if #gone > 0 then many('HDEL', K.jobs, gone) end
  if #front > 0 then put_front(front) end
  if late > 0 then add('late', late) end
  refused(fenced)
  return concat(verdicts)
end
