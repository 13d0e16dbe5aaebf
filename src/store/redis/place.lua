-- place: where jobs are put, and how they are taken out again. What stands in JOBS is
-- [state][seq][settled at][kept until][record]; of a leased job, [l][grant][place][0][record].
local function is_suspect(rec) return u4(rec, 13) >= 2 end
local function line_of(rec) return byte(rec, 6) * 2 + (is_suspect(rec) and 0 or 1) end
local function line_key(line) return KEYS[FIRST_LINE + line] end
local function entry(state, seq, rec, at, keep)
  return state .. seq .. p8(at or 0) .. p8(keep or 0) .. rec
end

-- Puts a job at an end of its line, which has of it [seq][id]. A job that is taken out elsewhere
-- leaves that behind: it is stale once JOBS has another state or number.
local function put(rec, command)
  local line, id, seq = line_of(rec), id_of(rec), next_seq()
  call('HSET', JOBS, id, entry('r', seq, rec))
  call(command, line_key(line), seq .. id)
  add(IN_LINE + line, 1)
  add(N_READY, 1)
  if line % 2 == 0 then alarms = alarms + 1 else bells = bells + 1 end
end
local function put_back(rec) put(rec, 'RPUSH') end
-- Puts jobs ahead of everything in their lines, in token order.
local function put_front(jobs)
  table.sort(jobs, function(a, b) return a.token < b.token end)
  for at = #jobs, 1, -1 do put(jobs[at].rec, 'LPUSH') end
end

-- The parked of a key lie together, and those of no other key between them.
local function line_of_key(key) return string.gsub(key, '%z', '\0\255') .. '\0\0' end
local function first_parked(key)
  local prefix = line_of_key(key)
  return call('ZRANGE', PARK, '[' .. prefix, '(' .. sub(prefix, 1, -2) .. '\1', 'BYLEX', 'LIMIT', 0, 1)[1]
end

-- A job falls due: it goes to the back of its line, or behind the others of its exclusive key.
local function join(rec, p)
  local id = id_of(rec)
  if p.exclusive then
    local head = call('HGET', EXCL, p.exclusive)
    if not head then
      call('HSET', EXCL, p.exclusive, id)
    elseif head ~= id then
      local seq = next_seq()
      call('ZADD', PARK, 0, line_of_key(p.exclusive) .. seq .. id)
      call('HSET', JOBS, id, entry('p', seq, rec))
      add(N_READY, 1)
      add(N_PARKED, 1)
      return
    end
  end
  put_back(rec)
end

local function put_scheduled(rec)
  local run_at, seq = u8(rec, 41), next_seq()
  local first = call('ZRANGE', DUE, 0, 0, 'WITHSCORES')
  if not first[2] or run_at < tonumber(first[2]) then bells = bells + 1 end
  call('ZADD', DUE, run_at, seq .. id_of(rec))
  call('HSET', JOBS, id_of(rec), entry('s', seq, rec))
  add(N_SCHEDULED, 1)
end

-- Takes the job's unique key, or names the job that holds it.
local function take_unique(id, p)
  if not p.unique then return nil end
  local held = call('HGET', UNIQ, p.unique)
  if held and sub(held, 1, 16) ~= id and (#held == 16 or u8(held, 17) > now) then
    return sub(held, 1, 16)
  end
  local till = p.window and now + p.window
  call('HSET', UNIQ, p.unique, till and id .. p8(till) or id)
  if till then call('ZADD', UWIN, till, p.unique) end
  return nil
end
local function free_unique(id, p)
  if p.unique and call('HGET', UNIQ, p.unique) == id then call('HDEL', UNIQ, p.unique) end
end

local function forget(id) call('HDEL', JOBS, id) end

-- If the job is the head of its exclusive key, the next one takes its place.
local function free_exclusive(id, p)
  if not p.exclusive or call('HGET', EXCL, p.exclusive) ~= id then return end
  local next = first_parked(p.exclusive)
  if not next then
    call('HDEL', EXCL, p.exclusive)
    return
  end
  local follower = sub(next, -16)
  local rec = sub(call('HGET', JOBS, follower), 26)
  call('ZREM', PARK, next)
  forget(follower)
  call('HSET', EXCL, p.exclusive, follower)
  add(N_READY, -1)
  add(N_PARKED, -1)
  put_back(rec)
end

-- Where a job goes whose life is over: until when it is kept, or nil.
local NEVER = 9007199254740992
local function kept_until(state, p)
  if state == 'd' then return NEVER end
  if state == 'x' then return now + math.max(p.retention or 0, CANCELLED_RETENTION) end
  return p.retention and now + p.retention
end
local function put_settled(rec, p, state, keep)
  local id = id_of(rec)
  free_unique(id, p)
  free_exclusive(id, p)
  if not keep then
    forget(id)
    return
  end
  local seq = next_seq()
  call('ZADD', SETTLED[state], now, seq .. id)
  call('HSET', JOBS, id, entry(state, seq, rec, now, keep))
  if keep < NEVER then call('ZADD', KEEP, keep, id) end
  add(N_SETTLED[state], 1)
end

-- Takes a job out of where it is; its keys stay as they are. `stands` is what JOBS says of it.
local function take(id, stands)
  local state, seq, rec = sub(stands, 1, 1), sub(stands, 2, 9), sub(stands, 26)
  forget(id)
  if state == 'r' then
    local line = line_of(rec)
    add(N_READY, -1)
    add(IN_LINE + line, -1)
    -- All that is left in an empty line is stale.
    if M[IN_LINE + line] == 0 then call('DEL', line_key(line)) end
  elseif state == 'p' then
    call('ZREM', PARK, line_of_key(parse(rec).exclusive) .. seq .. id)
    add(N_READY, -1)
    add(N_PARKED, -1)
  elseif state == 's' then
    call('ZREM', DUE, seq .. id)
    add(N_SCHEDULED, -1)
  else
    call('ZREM', SETTLED[state], seq .. id)
    call('ZREM', KEEP, id)
    add(N_SETTLED[state], -1)
  end
  return rec, state
end
