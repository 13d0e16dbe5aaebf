-- claim: expire what is overdue, promote what is due, grant; sleep if that is less than wanted.
-- in   1 request, whose step is not the first once what was due has been done · 2 wishes
--      3 owner · 4 task · 5 sleeper, or nothing
-- out  [u8 status], CROWDED if the claim has to be prepared by steps of reap; then: leases, bytes
--      and suspects given at first, the next due and the next deadline, how far the clock is
--      behind, grants, reports of expiries, [u8] 1 if it sleeps. AHEAD: how far
--      the last token is ahead of the clock
-- why  one deadline for all leases of a claim; looking and falling asleep are one step, so that no
--      wake-up falls between them
local CLAIM_READS = { 'layout', 'paused', 'last', 'floor', 'lines', 'due', 'granted' }
local BIT = {}
for line = 0, LINES - 1 do BIT[line] = 2 ^ line end
local function is_marked(line) return M.lines % (2 * BIT[line]) >= BIT[line] end

-- Takes ready jobs by (priority, place), at most one of them a suspect. Returns their records and
-- weight, the number of suspects, whether claimable jobs stayed, and whether it stopped because no
-- step passes by more of what commands left behind than about STALE.
local STALE, READY = 800, 114
-- Drops what is stale among the first stubs of a line: few jobs may be wanted, and a look at one
-- stub costs as much as a look at many. Returns how many.
local function drop_stale(key, first)
  local stubs, ids, stale = call('LRANGE', key, 0, first - 1), {}, 0
  if #stubs == 0 then return 0 end
  for at, stub in ipairs(stubs) do ids[at] = sub(stub, 9) end
  for at, stands in ipairs(call('HMGET', K.jobs, unpack(ids))) do
    if stands and sub(stands, 1, 9) == 'r' .. sub(stubs[at], 1, 8) then break end
    stale = at
  end
  if stale > 0 then call('LPOP', key, stale) end
  return stale
end
local function take_ready(most_jobs, admit, most_bytes)
  local recs, weight, suspects, stale, stayed = {}, 0, 0, 0, false
  for line = 0, LINES - 1 do
    if M.lines < BIT[line] then break end
    local key, is_suspicious = K[line], line % 2 == 0
    while is_marked(line) and not (is_suspicious and admit == 0) do
      local wanted = is_suspicious and 1 or most_jobs - #recs
      if #recs == most_jobs or weight >= most_bytes or stale > STALE then
        stayed = stayed or call('EXISTS', key) == 1
        break
      end
      local stubs = call('LPOP', key, decimal(min(wanted, 500)))
      if not stubs then
        if line ~= USUAL_LINE then set('lines', M.lines - 2 ^ line) end
        break
      end
      local ids, before, passed = {}, #recs, 0
      for at, stub in ipairs(stubs) do ids[at] = sub(stub, 9) end
      for at, stands in ipairs(call('HMGET', K.jobs, unpack(ids))) do
        -- A stub whose job has moved on is stale.
        if not stands or byte(stands) ~= READY or sub(stands, 2, 9) ~= sub(stubs[at], 1, 8) then
          passed = passed + 1
        elseif weight >= most_bytes then
          for back = #stubs, at, -1 do call('LPUSH', key, stubs[back]) end
          break
        else
          local rec = sub(stands, 10)
          recs[#recs + 1], weight = rec, weight + weight_of(rec)
        end
      end
      stale = stale + passed
      if is_suspicious and #recs > before then
        suspects, admit = 1, 0
        break
      elseif #stubs < min(wanted, 500) and weight < most_bytes then
        -- That was all of it: nothing went back for its weight.
        if line ~= USUAL_LINE then set('lines', M.lines - 2 ^ line) end
        break
      elseif passed == #stubs then
        stale = stale + drop_stale(key, min(2 * stale, 500))
      end
    end
  end
  -- More of them than were left behind by commands: the jobs were lost.
  if stale > 0 then
    local left = min(field('stale'), stale)
    add('stale', -left)
    if stale > left then add('lost_jobs', stale - left) end
  end
  return recs, weight, suspects, stayed, stayed and stale > STALE
end

-- Grants leases on jobs with the same terms. Adds the parts of the grant to `given` as the answer
-- has them, and to `kept` as it is remembered; returns its deadline.
local function grant(recs, from, upto, base, terms_of, nonce, given, kept)
  local gid, count, owner, task = pack('>I8', base), upto - from + 1, ARGS[3], ARGS[4]
  local till = now + min(terms_of.term, terms_of.lifetime)
  local roll, stand, bytes = {}, {}, 0
  for n = 1, count do
    local rec = recs[from + n - 1]
    local id, flags = id_of(rec), byte(rec, FLAGS_AT)
    roll[2 * n - 1] = id
    roll[2 * n] = flags > 0 and has(flags, UNIQUE + EXCLUSIVE + RETENTION) and '\1' or '\0'
    stand[2 * n - 1], stand[2 * n] = id, 'l' .. gid .. pack('<I2', n - 1) .. rec
    bytes = bytes + #rec
  end
  call('HSET', K.held, gid, pack(NEW, till, 0, count, count, 0, nonce, now, terms_of.lifetime, terms_of.raw,
    #owner, #task) .. owner .. task, gid .. ROLL, concat(roll))
  call('ZADD', K.ends, decimal(till), gid)
  many('HSET', K.jobs, stand)
  local granted = p8(till - now)
  given[#given + 1] = gid .. granted .. pack('<I8c12I2I4', now, terms_of.raw, 0, bytes)
  for n = from, upto do given[#given + 1] = recs[n] end
  kept[#kept + 1] = gid .. granted
  return till
end
-- One grant for each run of jobs with the same terms. Returns them as they are remembered, and the
-- next deadline.
local function grant_all(recs, base, usual, nonce, given, overdue)
  local kept, from, run, run_weight = {}, 1, usual, 0
  for n, rec in ipairs(recs) do
    local own, heavy, flags = usual, weight_of(rec), byte(rec, FLAGS_AT)
    if flags > 0 and has(flags, TERM + MAX_LIFETIME) then
      local p = parse(rec)
      own = { term = p.term or usual.term, raw = p.term_raw or usual.raw, lifetime = p.lifetime or usual.lifetime }
    end
    if n > from and (own.raw ~= run.raw or own.lifetime ~= run.lifetime or run_weight + heavy > GRANT_BYTES) then
      overdue = min(overdue or NEVER, grant(recs, from, n - 1, base + from - 1, run, nonce, given, kept))
      from, run_weight = n, 0
    end
    if n == from then run = own end
    run_weight = run_weight + heavy
  end
  overdue = min(overdue or NEVER, grant(recs, from, #recs, base + from - 1, run, nonce, given, kept))
  set('last', base + #recs - 1)
  add('granted', #recs)
  return kept, overdue
end

-- What is left of the grants of a first answer, with the time originally granted.
local function grants_left(first)
  local left, at = {}, 10
  for _ = 1, (read('<I2', first, 8)) do
    local gid, granted = read('<c8c8', first, at)
    at = at + 16
    local g = held(gid)
    if g and g.deadline > now then
      local recs, map = {}, {}
      for n = 0, g.count - 1 do
        local rec = is_live(g, n) and record_now(g, n)
        if rec then
          recs[#recs + 1] = rec
          map[#map + 1] = pack('<I2', n)
        end
      end
      terms(g)
      left[#left + 1] = gid .. granted .. p8(g.granted_at) .. g.term_raw
        .. pack('<I2', #map) .. concat(map) .. text(concat(recs))
    end
  end
  return pack('<I2', #left) .. concat(left) .. sub(first, at)
end

local function answered(status, body)
  save_meta()
  wake()
  return reply(DONE, char(status) .. (body or ''))
end
local function hints(due, overdue, behind) return told(due) .. told(overdue) .. told(behind) end
local function claim()
  local wanted, admit, strict, most, term, lifetime, term_raw, seen, nonce = read('<I2I1I1I4I8I8c12I8c16', ARGS[2])
  local status, first = recall()
  -- No answer to a session that is over may look like a sign of its life.
  if status == LOST then return reply(LOST) end
  open_meta(CLAIM_READS)
  if status ~= DONE then return answered(status) end

  -- As clock_behind() and ahead() of src/rules/issue.rs.
  local ahead = max(M.last, M.floor) - now
  local is_behind = (M.last > M.floor + LEAD and M.last or M.floor) > now + LEAD
  local behind = is_behind and now + ahead or nil
  -- Most queues never have a scheduled job.
  local due, overdue = M.due == 1 and next_in(K.due) or nil, next_in(K.ends)
  if M.due == 1 and not due then set('due', 0) end
  if first then
    return answered(DONE, sub(first, 1, 7) .. hints(due, overdue, behind) .. grants_left(first) .. '\0')
  end

  -- The next token follows the last one, the floor, the clock, and what the caller has seen of
  -- other issuers, as far as it fits.
  local base = max(M.last + 1, M.floor + 1, now)
  local limit = max(now, M.floor) + LEAD
  if seen + 1 > base and seen + 1 <= limit then base = seen + 1 end
  if is_behind and strict == 0 then limit = base + LEAD - 1 end
  local is_due, is_overdue = due and due <= now, overdue and overdue <= now
  if base > limit and M.paused == 0 and (is_due or is_overdue or call('EXISTS', unpack(K, 0, LINES - 1)) > 0) then
    return answered(AHEAD, p8(ahead))
  end

  -- What is more than a step's work is done in steps of its own, and then the claim goes on.
  local reports = {}
  if R.step == 0 and (is_due or is_overdue) then
    local late, count = {}, 0
    if is_overdue then
      late, count = overdue_leases(EXPIRIES + 1)
      if count > EXPIRIES then return answered(CROWDED) end
    end
    if is_due and call('ZRANGE', K.due, '-inf', decimal(now), 'BYSCORE', 'LIMIT', PROMOTIONS, 1)[1] then
      return answered(CROWDED)
    end
    if is_overdue then
      reports = expire_newest(late, count)
      overdue = next_in(K.ends)
    end
    if is_due then
      promote(PROMOTIONS)
      due = next_in(K.due)
    end
  end

  local room = min(wanted, max(limit - base + 1, 0))
  -- The answer is put together once, at the end: the server reads all bytes of every string.
  local given = { '' }
  local recs, weight, suspects, stayed, passed_by, kept = {}, 0, 0, M.paused == 1, false, {}
  if M.paused == 0 and room > 0 then
    recs, weight, suspects, stayed, passed_by = take_ready(room, admit, most)
    if #recs > 0 then
      local usual = { term = term, raw = term_raw, lifetime = lifetime }
      kept, overdue = grant_all(recs, base, usual, nonce, given, overdue)
      -- What this call put in line and has taken out again is no reason to wake anybody.
      ready = max(ready - #recs, 0)
    end
  end
  local lies = 0
  if ARGS[5] ~= '' then
    -- Behind what was passed by there may be jobs, of which nobody would tell a sleeper.
    if #recs < wanted and weight < most and not passed_by then
      lie_down(ARGS[5], admit == 1 and suspects == 0)
      lies = 1
    else
      get_up(ARGS[5])
      -- Somebody else may have room for what stayed.
      if stayed then ready = max(ready, 1) end
    end
  end
  local tail, sums_given = pack('<I4', #reports) .. concat(reports), pack('<I2I4I1', #recs, weight, suspects)
  remember(sums_given .. pack('<I2', #kept) .. concat(kept) .. tail)
  given[1] = answered(DONE, sums_given .. hints(due, overdue, behind) .. pack('<I2', #kept))
  given[#given + 1] = tail .. char(lies)
  return concat(given)
end
register('claim', claim, {})
