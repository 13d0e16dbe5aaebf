-- claim: expire what is overdue, promote what is due, grant.
-- in   1 request, whose step is not the first once what was due has been done · 2 wishes
--      3 owner · 4 task
-- out  [u8 status], CROWDED if the claim has to be prepared by steps of reap; then: leases, bytes and
--      suspects given at first, the next due and the next deadline, how far the clock is behind,
--      grants, reports of expiries. AHEAD: how far the last token is ahead of the clock
-- why  one deadline for all leases of a claim
local max, admit, strict, most, term, lifetime, term_raw, seen, nonce = read('<I2I1I1I4I8I8c12I8c16', ARGV[2])
open_meta()

local function answer(status, body)
  save_meta()
  ring()
  return reply(DONE, char(status) .. (body or ''))
end
local function next_in(set)
  local first = call('ZRANGE', set, 0, 0, 'WITHSCORES')
  return tonumber(first[2])
end
local function told(at) return at and '\1' .. p8(math.max(at - now, 0)) or '\0' .. p8(0) end
local function hints() return told(M[N_SCHEDULED] > 0 and next_in(DUE) or nil) .. told(next_in(ENDS)) end

-- As clock_behind() and ahead() of src/rules/issue.rs.
local ahead = math.max(M[LAST], M[FLOOR]) - now
local is_behind = (M[LAST] > M[FLOOR] + LEAD and M[LAST] or M[FLOOR]) > now + LEAD
local behind = told(is_behind and now + ahead or nil)

local status, first = recall(ARGV[1])
-- No answer to a session that is over may look like a sign of its life.
if status == LOST then return reply(LOST) end
if status ~= DONE then return answer(status) end
local function repeated()
  -- What is left of the grants, with the time originally granted.
  local grants_left, at = {}, 10
  for _ = 1, (read('<I2', first, 8)) do
    local gid, granted = read('<c8c8', first, at)
    at = at + 16
    local g = held(gid)
    if g and g.deadline > now then
      local recs, map = {}, {}
      for n = 0, g.count - 1 do
        if is_live(g, n) then
          local rec, state = record(g, n), saved(g, n)
          recs[#recs + 1] = state and rewrite(rec, parse(rec), { checkpoint = state }) or rec
          map[#map + 1] = pack('<I2', n)
        end
      end
      grants_left[#grants_left + 1] = gid .. granted .. p8(g.granted_at) .. g.term_raw
        .. pack('<I2', #map) .. concat(map) .. text(concat(recs))
    end
  end
  return answer(DONE, sub(first, 1, 7) .. hints() .. behind .. pack('<I2', #grants_left)
    .. concat(grants_left) .. sub(first, at))
end
if first then return repeated() end

-- The next token follows the last one, the floor, the clock, and what the caller has seen of other
-- issuers, as far as it fits.
local base = math.max(M[LAST] + 1, M[FLOOR] + 1, now)
local limit = math.max(now, M[FLOOR]) + LEAD
if seen + 1 > base and seen + 1 <= limit then base = seen + 1 end
if is_behind and strict == 0 then limit = base + LEAD - 1 end
if base > limit and M[PAUSED] == 0 then
  local due, overdue = next_in(DUE), next_in(ENDS)
  if M[N_READY] > M[N_PARKED] or (due and due <= now) or (overdue and overdue <= now) then
    return answer(AHEAD, p8(ahead))
  end
end
max = math.min(max, math.max(limit - base + 1, 0))

-- What is more than a step's work is done in steps of its own, and then the claim goes on.
local overdue, reports = next_in(ENDS), {}
local due = M[N_SCHEDULED] > 0 and next_in(DUE) or nil
if R.step == 0 then
  local late, count = {}, 0
  if overdue and overdue <= now then
    late, count = overdue_leases(EXPIRIES + 1)
    if count > EXPIRIES then return answer(CROWDED) end
  end
  if due and due <= now and call('ZRANGE', DUE, '-inf', now, 'BYSCORE', 'LIMIT', PROMOTIONS, 1)[1] then
    return answer(CROWDED)
  end
  if count > 0 then
    reports = expire_newest(late, count)
    overdue = next_in(ENDS)
  end
  if due and due <= now then
    promote(PROMOTIONS)
    due = M[N_SCHEDULED] > 0 and next_in(DUE) or nil
  end
end

-- Takes ready jobs by (priority, place), at most one of them a suspect.
local recs, weight, suspects = {}, 0, 0
do
  -- Takes up to so many jobs of a line, and returns how many there were; nil for an empty line.
  local function pick(line, most_jobs)
    local key = line_key(line)
    local stubs = call('LPOP', key, math.min(most_jobs, 500))
    if not stubs then return nil end
    local ids, before = {}, #recs
    for at, stub in ipairs(stubs) do ids[at] = sub(stub, 9) end
    local stand = call('HMGET', JOBS, unpack(ids))
    for at, stub in ipairs(stubs) do
      -- A stub whose job has moved on is stale.
      if stand[at] and sub(stand[at], 1, 9) == 'r' .. sub(stub, 1, 8) then
        if weight >= most then
          for back = #stubs, at, -1 do call('LPUSH', key, stubs[back]) end
          break
        end
        local rec = sub(stand[at], 26)
        recs[#recs + 1], weight = rec, weight + u4(rec, 53)
      end
    end
    return #recs - before
  end
  if M[PAUSED] == 0 then
    for line = 0, 15 do
      local suspicious = line % 2 == 0
      while #recs < max and weight < most and M[IN_LINE + line] > 0 and not (suspicious and admit == 0) do
        local n = pick(line, suspicious and 1 or max - #recs)
        if not n then
          -- The line is shorter than its count: the server lost writes.
          add(N_READY, -M[IN_LINE + line])
          M[IN_LINE + line] = 0
          break
        end
        if suspicious then
          suspects = suspects + n
          if n > 0 then admit = 0 end
        end
        add(IN_LINE + line, -n)
        add(N_READY, -n)
      end
    end
  end
end

-- Grants leases: one grant for each run of jobs with the same terms.
local given, kept = {}, {}
do
  local function grant(run, run_term, run_raw, run_lifetime)
    local gid, count = pack('>I8', base), #run
    local till = now + math.min(run_term, run_lifetime)
    local ids, stand = {}, {}
    for at, rec in ipairs(run) do
      ids[at] = id_of(rec)
      stand[2 * at - 1], stand[2 * at] = ids[at], entry('l', gid, rec, at - 1)
    end
    call('HSET', HELD, gid, pack(HEAD, #ARGV[3], #ARGV[4], count, count, 0, till, 0, nonce, now, run_term,
      run_raw, run_lifetime) .. ARGV[3] .. ARGV[4], gid .. ROLL, concat(ids))
    call('ZADD', ENDS, till, gid)
    many('HSET', JOBS, stand)
    if not overdue or till < overdue then overdue = till end
    M[LAST] = base + count - 1
    base = M[LAST] + 1
    add(GRANTED, count)
    add(LIVE, count)
    add(N_LEASED, count)
    local granted = p8(till - now)
    given[#given + 1] = gid .. granted .. p8(now) .. run_raw .. '\0\0' .. text(concat(run))
    kept[#kept + 1] = gid .. granted
  end
  local run, run_term, run_raw, run_lifetime, run_weight = {}, term, term_raw, lifetime, 0
  for _, rec in ipairs(recs) do
    local p = has((read('<I2', rec, 7)), TERM + MAX_LIFETIME) and parse(rec) or {}
    local own_raw, own_lifetime, heavy = p.term_raw or term_raw, p.lifetime or lifetime, u4(rec, 53)
    if own_raw ~= run_raw or own_lifetime ~= run_lifetime or run_weight + heavy > GRANT_BYTES then
      if #run > 0 then grant(run, run_term, run_raw, run_lifetime) end
      run, run_term, run_raw, run_lifetime, run_weight = {}, p.term or term, own_raw, own_lifetime, 0
    end
    run[#run + 1], run_weight = rec, run_weight + heavy
  end
  if #run > 0 then grant(run, run_term, run_raw, run_lifetime) end
end

local tail, sums = pack('<I4', #reports) .. concat(reports), pack('<I2I4I1', #recs, weight, suspects)
remember(sums .. pack('<I2', #kept) .. concat(kept) .. tail)
return answer(DONE, sums .. told(due) .. told(overdue) .. behind .. pack('<I2', #given) .. concat(given) .. tail)
