-- control: what operators do.
-- in   1 request · 2 command: a letter and what it is about · 3 reason · 4 where to go on
-- out  [u64 done][u64 skipped], [u32 n] n × [16 job][16 holder], [u32 n] n × [u64 token],
--      [u8 more][24 cursor]
-- why  one partition's share of a command; `audit.lua` has put it on record
local CONTROL_READS = { 'layout', 'paused', 'relaxed', 'last', 'floor' }
local done, skipped, duplicates, tokens

-- Goes through the live grants that were given before the command began, in steps: by token if they
-- are few, else by (deadline, token), so that no step has to sort them all. `visit` says false if
-- it has had enough. A cursor is [u64 deadline][8 grant][u64 last token]. Returns the next one, if
-- there is more.
local HEADS = 200
local function walk(cursor, visit)
  local score, past, limit = read('<I8>I8<I8', cursor)
  if limit == 0 then limit = M.last end
  local function told() return pack('<I8>I8<I8', score, past, limit) end
  if score == 0 and (past > 0 or call('ZCARD', K.ends) <= FEW) then
    for _, base in ipairs(all_bases()) do
      local g = base > past and base <= limit and held(pack('>I8', base))
      if g then
        if visit(g) == false then return told() end
        past = base
      end
    end
    return nil
  end
  score = math.max(score, 1)
  local since, after, seen, more_left = score, past, 0, nil
  by_deadline(since, NEVER, function(gid, till)
    local base = (read('>I8', gid))
    if till == since and base <= after then return true end
    -- A grant that was lost ends by its deadline.
    local g = base <= limit and held(gid)
    if seen == HEADS or (g and visit(g) == false) then
      more_left = told()
      return false
    end
    score, past, seen = till, base, seen + 1
  end)
  return more_left
end

-- The first ready jobs, in the order of their views.
local function first_ready(most)
  local jobs = {}
  for line = 0, LINES - 1 do
    local key, from, stale, leads = K[line], 0, 0, true
    while #jobs < most do
      local stubs = call('LRANGE', key, from, from + 499)
      if #stubs == 0 then break end
      from = from + #stubs
      local ids = {}
      for n, stub in ipairs(stubs) do ids[n] = sub(stub, 9) end
      local stand = call('HMGET', K.jobs, unpack(ids))
      for n, stub in ipairs(stubs) do
        local valid = stand[n] and sub(stand[n], 1, 9) == 'r' .. sub(stub, 1, 8)
        if valid and #jobs < most then jobs[#jobs + 1] = { id = ids[n] } end
        if valid then leads = false elseif leads then stale = stale + 1 end
      end
    end
    -- So that no step has to pass by what the ones before left behind.
    if stale > 0 then
      call('LPOP', key, stale)
      add('stale', -min(stale, field('stale')))
    end
  end
  local from = 0
  while #jobs < most do
    local members = call('ZRANGE', K.park, from, from + most - #jobs - 1)
    if #members == 0 then break end
    from = from + #members
    for _, member in ipairs(members) do
      local id = sub(member, -16)
      -- What is done to the job before it may put it in line.
      if is_at(call('HGET', K.jobs, id), 'p', member) then jobs[#jobs + 1] = { id = id } end
    end
  end
  return jobs
end
local function selected(select, cursor)
  local jobs = {}
  if sub(select, 1, 1) == 'j' then
    local id = sub(select, 2)
    if call('HEXISTS', K.jobs, id) == 1 then jobs[1] = { id = id } end
    return jobs
  end
  local state, most, all = read('<c1I4I4', select, 2)
  if state == 'r' then
    jobs = first_ready(most)
    return jobs, #jobs == most and cursor
  end
  if state == 'l' then
    -- A grant is done as a whole, so that none of its leases is met twice.
    local next = walk(cursor, function(g)
      if #jobs >= most then return false end
      for at = 0, g.count - 1 do
        if #jobs < all and is_live(g, at) then jobs[#jobs + 1] = { id = job_id(g, at), g = g, at = at } end
      end
    end)
    return jobs, next
  end
  local stay = (read('<I8', cursor))
  local members = call('ZRANGE', state == 's' and K.due or K[state], stay, stay + most - 1)
  for n, member in ipairs(members) do
    jobs[n] = { id = sub(member, 9), stands = state .. sub(member, 1, 8) }
  end
  return jobs, #jobs == most and cursor
end
-- Where a selected job stands now: its state, and what JOBS says of it.
local function standing(job)
  if job.g then return 'l' end
  local stands = call('HGET', K.jobs, job.id)
  -- What was lost is as good as settled; another job may have come under its id.
  if not stands or (job.stands and sub(stands, 1, 9) ~= job.stands) then return 'c' end
  local state = sub(stands, 1, 1)
  if state == 'l' then
    job.g, job.at = held(sub(stands, 2, 9)), (read('<I2', stands, 10))
    if not job.g then state = 'c' end
  end
  return state, stands
end
local is_settled = { c = true, d = true, x = true }

local act = {}
function act.C(job)
  local state, stands = standing(job)
  if state == 'l' then
    if note(job.g, job.at).cancel then return false end
    set_note(job.g, job.at, { cancel = true })
    return true
  end
  if is_settled[state] then return false end
  local rec = take(job.id, stands)
  local p = parse(rec)
  put_settled(rec, p, 'x', kept_until('x', p))
  return true
end
function act.U(job)
  local state, stands = standing(job)
  if state == 'l' or not stands or byte(stands) == 108 then return false end
  local rec = take(job.id, stands)
  local p = parse(rec)
  free_unique(job.id, p)
  free_exclusive(job.id, p)
  add('purged', 1)
  return true
end
function act.S(job, delay)
  local state, stands = standing(job)
  if state == 'l' or is_settled[state] then return false end
  local rec = take(job.id, stands)
  local p = parse(rec)
  free_exclusive(job.id, p)
  rec = due_at(rec, now + delay)
  if delay == 0 then join(rec, p) else put_scheduled(rec) end
  return true
end
function act.D(job)
  local state, stands = standing(job)
  if state ~= 'd' then return false end
  local rec = record_in(stands)
  local p = parse(rec)
  local holder = take_unique(job.id, p)
  if holder then
    duplicates[#duplicates + 1] = job.id .. holder
    return nil
  end
  take(job.id, stands)
  join(due_at(sub(rec, 1, FAILURES_AT - 1) .. p8(0) .. sub(rec, ID_AT), now), p)
  return true
end

local function revoke(g, at)
  local rec = record(g, at)
  tokens[#tokens + 1] = first_of(g) + at
  if rec then
    finish(g, at, rec, parse(rec), AS.revoked, note(g, at).cancel and 'x' or 'back', { reason = ARGS[3] })
  else
    add('lost_jobs', 1)
    end_lease(g, at, AS.revoked)
  end
  done = done + 1
end
local function revoke_all(by, who, cursor)
  if by == 'j' then
    local stands = call('HGET', K.jobs, who)
    if stands and sub(stands, 1, 1) == 'l' then
      local g, at = held(sub(stands, 2, 9)), (read('<I2', stands, 10))
      if g and is_live(g, at) then revoke(g, at) end
    end
    return nil
  end
  return walk(cursor, function(g)
    terms(g)
    if (by == 'o' and g.owner or g.task) ~= who then return true end
    for at = 0, g.count - 1 do
      if done == CHUNK and is_live(g, at) then return false end
      if is_live(g, at) then revoke(g, at) end
    end
  end)
end

local function control()
  local status, first = recall()
  if status ~= DONE or first then return reply(status, first) end
  local command, about, cursor, more = sub(ARGS[2], 1, 1), sub(ARGS[2], 2), ARGS[4], nil
  done, skipped, duplicates, tokens = 0, 0, {}, {}
  open_meta(CONTROL_READS, command == 'P' or command == 'R' or command == 'F')
  if command == 'P' then
    set('paused', 1)
    done = 1
  elseif command == 'R' then
    set('paused', 0)
    done, ready, suspicious = 1, EVERYBODY, 0
  elseif command == 'F' then
    set('relaxed', byte(about))
    done = 1
  elseif command == 'X' then
    -- Made again while the clock is behind, it would begin below tokens that it has given. As
    -- clock_behind() of src/rules/issue.rs.
    if (M.last > M.floor + LEAD and M.last or M.floor) > now + LEAD then return reply(AHEAD) end
    -- Only the memory of its sessions is left of a partition without jobs.
    if call('HLEN', K.jobs) + call('ZCARD', K.ends) == 0 then
      for _, part in ipairs(PARTS) do call('DEL', K[part]) end
      call('DEL', unpack(K, 0, LINES - 1))
      there, done = false, 1
    else
      skipped = 1
    end
  elseif command == 'V' then
    more = revoke_all(sub(about, 1, 1), sub(about, 2), cursor)
  else
    local delay, jobs = u8(about, 1), nil
    jobs, more = selected(sub(about, 9), cursor)
    for _, job in ipairs(jobs) do
      local acted = act[command](job, delay)
      if acted then done = done + 1 elseif acted == false then skipped = skipped + 1 end
    end
    -- Jobs whose unique key is held elsewhere stay where they are.
    if more and #duplicates > 0 then more = p8(u8(more, 1) + #duplicates) .. sub(more, 9) end
  end
  save_grants()
  local ended = {}
  for n = 1, min(#tokens, 100) do ended[n] = p8(tokens[n]) end
  local answer = p8(done) .. p8(skipped) .. pack('<I4', #duplicates) .. concat(duplicates)
    .. pack('<I4', #ended) .. concat(ended) .. (more and '\1' .. more or '\0' .. cursor)
  remember(answer)
  save_meta()
  wake()
  return reply(DONE, answer)
end
register('control', control, { 'allow-oom' })
