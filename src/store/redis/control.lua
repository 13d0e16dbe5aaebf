-- control: what operators do.
-- in   1 request · 2 command: a letter and what it is about · 3 reason · 4 where to go on
-- out  [u64 done][u64 skipped], [u32 n] n × [16 job][16 holder], [u32 n] n × [u64 token], [u8 more][24 cursor]
-- why  one partition's share of a command; `audit.lua` has put it on record
local status, first = recall(ARGV[1])
if status ~= DONE or first then return reply(status, first) end
local command = sub(ARGV[2], 1, 1)
local makes = { P = true, R = true, F = true }
open_meta(makes[command])
local done, skipped, duplicates, tokens = 0, 0, {}, {}
local CURSOR, more = ARGV[4], nil

-- Goes through the live grants that were given before the command began, in steps: by token if they are
-- few, else by (deadline, token), so that no step has to sort them all. `visit` says false if it has
-- had enough. A cursor is [u64 deadline][8 grant][u64 last token]. Returns the next one, if there is more.
local FEW, HEADS = 300, 200
local function walk(cursor, visit)
  local score, past, limit = read('<I8>I8<I8', cursor)
  if limit == 0 then limit = M[LAST] end
  local function told() return pack('<I8>I8<I8', score, past, limit) end
  if score == 0 and (past > 0 or call('ZCARD', ENDS) <= FEW) then
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
  by_deadline(since, '+inf', function(gid, till)
    local base = (read('>I8', gid))
    if till == since and base <= after then return true end
    if seen == HEADS or (base <= limit and visit(held(gid)) == false) then
      more_left = told()
      return false
    end
    score, past, seen = till, base, seen + 1
  end)
  return more_left
end

-- The first ready jobs, in the order of their views.
local function ready(max)
  local jobs = {}
  for line = 0, 15 do
    local key, from, stale, leads = line_key(line), 0, 0, true
    while #jobs < max and M[IN_LINE + line] > 0 do
      local stubs = call('LRANGE', key, from, from + 499)
      if #stubs == 0 then break end
      from = from + #stubs
      local ids = {}
      for n, stub in ipairs(stubs) do ids[n] = sub(stub, 9) end
      local stand = call('HMGET', JOBS, unpack(ids))
      for n, stub in ipairs(stubs) do
        local valid = stand[n] and sub(stand[n], 1, 9) == 'r' .. sub(stub, 1, 8)
        if valid and #jobs < max then jobs[#jobs + 1] = { id = ids[n] } end
        if valid then leads = false elseif leads then stale = stale + 1 end
      end
    end
    -- So that no step has to pass by what the ones before left behind.
    if stale > 0 then call('LPOP', key, stale) end
  end
  if #jobs < max then
    for _, member in ipairs(call('ZRANGE', PARK, 0, max - #jobs - 1)) do
      jobs[#jobs + 1] = { id = sub(member, -16) }
    end
  end
  return jobs
end
local function selected(select)
  local jobs = {}
  if sub(select, 1, 1) == 'j' then
    local id = sub(select, 2)
    if call('HEXISTS', JOBS, id) == 1 then jobs[1] = { id = id } end
    return jobs
  end
  local state, max, all = read('<c1I4I4', select, 2)
  if state == 'r' then
    jobs = ready(max)
    return jobs, #jobs == max and CURSOR
  end
  if state == 'l' then
    -- A grant is done as a whole, so that none of its leases is met twice.
    local next = walk(CURSOR, function(g)
      if #jobs >= max then return false end
      for at = 0, g.count - 1 do
        if #jobs < all and is_live(g, at) then jobs[#jobs + 1] = { id = job_id(g, at), g = g, at = at } end
      end
    end)
    return jobs, next
  end
  local stay = (read('<I8', CURSOR))
  local members = call('ZRANGE', state == 's' and DUE or SETTLED[state], stay, stay + max - 1)
  for n, member in ipairs(members) do jobs[n] = { id = sub(member, 9) } end
  return jobs, #jobs == max and CURSOR
end
-- Where a selected job stands now: its state, and what JOBS says of it.
local function standing(job)
  if job.g then return 'l' end
  local stands = call('HGET', JOBS, job.id)
  local state = sub(stands, 1, 1)
  if state == 'l' then
    job.g, job.at = held(sub(stands, 2, 9)), u8(stands, 10)
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
  if state == 'l' then return false end
  local rec = take(job.id, stands)
  local p = parse(rec)
  free_unique(job.id, p)
  free_exclusive(job.id, p)
  add(PURGED, 1)
  return true
end
function act.S(job, delay)
  local state, stands = standing(job)
  if state == 'l' or is_settled[state] then return false end
  local rec = take(job.id, stands)
  local p = parse(rec)
  free_exclusive(job.id, p)
  rec = sub(rec, 1, 40) .. p8(now + delay) .. sub(rec, 49)
  if delay == 0 then join(rec, p) else put_scheduled(rec) end
  return true
end
function act.D(job)
  local state, stands = standing(job)
  if state ~= 'd' then return false end
  local rec = sub(stands, 26)
  local p = parse(rec)
  local holder = take_unique(job.id, p)
  if holder then
    duplicates[#duplicates + 1] = job.id .. holder
    return nil
  end
  take(job.id, stands)
  join(sub(rec, 1, 8) .. rep('\0', 8) .. sub(rec, 17, 40) .. p8(now) .. sub(rec, 49), p)
  return true
end

local function revoke(g, at)
  local rec = record(g, at)
  tokens[#tokens + 1] = g.base + at
  finish(g, at, rec, parse(rec), AS.revoked, note(g, at).cancel and 'x' or 'back', { reason = ARGV[3] })
  done = done + 1
end

if command == 'P' then
  M[PAUSED], done = 1, 1
elseif command == 'R' then
  M[PAUSED], done, bells, alarms = 0, 1, 1000000000, 1000000000
elseif command == 'F' then
  M[RELAXED], done = byte(ARGV[2], 2), 1
elseif command == 'V' then
  local by, who = sub(ARGV[2], 2, 2), sub(ARGV[2], 3)
  if by == 'j' then
    local stands = call('HGET', JOBS, who)
    if stands and sub(stands, 1, 1) == 'l' then
      local g, at = held(sub(stands, 2, 9)), u8(stands, 10)
      if g and is_live(g, at) then revoke(g, at) end
    end
  else
    more = walk(CURSOR, function(g)
      if (by == 'o' and g.owner or g.task) ~= who then return true end
      for at = 0, g.count - 1 do
        if done == CHUNK and is_live(g, at) then return false end
        if is_live(g, at) then revoke(g, at) end
      end
    end)
  end
else
  local delay, jobs = u8(ARGV[2], 2), nil
  jobs, more = selected(sub(ARGV[2], 10))
  for _, job in ipairs(jobs) do
    local acted = act[command](job, delay)
    if acted then done = done + 1 elseif acted == false then skipped = skipped + 1 end
  end
  -- Jobs whose unique key is held elsewhere stay where they are.
  if more and #duplicates > 0 then more = p8(u8(more, 1) + #duplicates) .. sub(more, 9) end
end
save_grants()

local ended = {}
for n = 1, math.min(#tokens, 100) do ended[n] = p8(tokens[n]) end
local answer = p8(done) .. p8(skipped) .. pack('<I4', #duplicates) .. concat(duplicates)
  .. pack('<I4', #ended) .. concat(ended) .. (more and '\1' .. more or '\0' .. CURSOR)
remember(answer)
save_meta()
ring()
return reply(DONE, answer)
