-- place: where jobs are put, and how they are taken out again. JOBS has of every job a letter for
-- its state, where it stands, and its record:
--   r, p, s  ready, parked, scheduled: [seq][record]
--   l        leased: [grant][u16 place in it][record]
--   c, d, x  completed, dead, cancelled: [seq][u64 settled at][u64 kept until][record]
local BEFORE = { l = 12, c = 26, d = 26, x = 26 }
local function record_in(stands) return sub(stands, BEFORE[sub(stands, 1, 1)] or 10) end

local function is_suspect(rec) return u4(rec, EXPIRIES_AT) >= SUSPECT end
local function line_of(rec) return byte(rec, PRIORITY_AT) * 2 + (is_suspect(rec) and 0 or 1) end
-- Notes that a line may have jobs. Nobody unmarks the usual one, whatever becomes of it.
local function mark_line(line)
  if line == USUAL_LINE then return end
  local bits = field('lines')
  if floor(bits / 2 ^ line) % 2 == 0 then set('lines', bits + 2 ^ line) end
end
local function count_ready(line)
  if line % 2 == 0 then suspicious = suspicious + 1 else ready = ready + 1 end
end

-- Puts a job at an end of its line, which has of it [seq][id]. A job that is taken out elsewhere
-- leaves that behind: it is stale once JOBS has another state or number.
local function put(command, rec)
  local line, id, seq = line_of(rec), id_of(rec), next_seq()
  call('HSET', K.jobs, id, 'r' .. seq .. rec)
  call(command, K[line], seq .. id)
  mark_line(line)
  count_ready(line)
end
local function put_back(rec) put('RPUSH', rec) end
-- Puts jobs ahead of everything in their lines, in token order.
local function is_older(a, b) return a.token < b.token end
local function put_front(jobs)
  table.sort(jobs, is_older)
  for at = #jobs, 1, -1 do put('LPUSH', jobs[at].rec) end
end

-- Whether JOBS has a job where a member of a set says that it is: a job may have come under the id
-- of a lost one.
local function is_at(stands, state, member)
  return stands and sub(stands, 1, 9) == state .. sub(member, -24, -17)
end
-- The parked of a key lie together, and those of no other key between them.
local function line_of_key(key) return string.gsub(key, '%z', '\0\255') .. '\0\0' end
local function first_parked(key)
  local prefix = line_of_key(key)
  return call('ZRANGE', K.park, '[' .. prefix, '(' .. sub(prefix, 1, -2) .. '\1', 'BYLEX', 'LIMIT', 0, 1)[1]
end

-- A job falls due: it goes to the back of its line, or behind the others of its exclusive key.
local function join(rec, p)
  local id = id_of(rec)
  if p.exclusive then
    local head = call('HGET', K.excl, p.exclusive)
    if not head then
      call('HSET', K.excl, p.exclusive, id)
    elseif head ~= id then
      local seq = next_seq()
      call('ZADD', K.park, 0, line_of_key(p.exclusive) .. seq .. id)
      call('HSET', K.jobs, id, 'p' .. seq .. rec)
      return
    end
  end
  put_back(rec)
end

local function put_scheduled(rec)
  local run_at, seq = u8(rec, RUN_AT), next_seq()
  local first = call('ZRANGE', K.due, 0, 0, 'WITHSCORES')
  if not first[2] or run_at < tonumber(first[2]) then ready = ready + 1 end
  call('ZADD', K.due, run_at, seq .. id_of(rec))
  set('due', 1)
  call('HSET', K.jobs, id_of(rec), 's' .. seq .. rec)
end

-- Takes the job's unique key, or names the job that holds it.
local function take_unique(id, p)
  if not p.unique then return nil end
  local held = call('HGET', K.uniq, p.unique)
  if held and sub(held, 1, 16) ~= id and (#held == 16 or u8(held, 17) > now) then
    return sub(held, 1, 16)
  end
  local till = p.window and now + p.window
  call('HSET', K.uniq, p.unique, till and id .. p8(till) or id)
  if till then
    call('ZADD', K.uwin, till, p.unique)
  elseif held and #held > 16 then
    call('ZREM', K.uwin, p.unique)
  end
  return nil
end
local function free_unique(id, p)
  if p.unique and call('HGET', K.uniq, p.unique) == id then call('HDEL', K.uniq, p.unique) end
end

-- If the job is the head of its exclusive key, the next one takes its place. A head that nobody
-- remembers was lost with EXCL: then it may be this one.
local function free_exclusive(id, p)
  if not p.exclusive then return end
  local head = call('HGET', K.excl, p.exclusive)
  if head and head ~= id then return end
  local next = first_parked(p.exclusive)
  while next do
    call('ZREM', K.park, next)
    local follower = sub(next, -16)
    local stands = call('HGET', K.jobs, follower)
    if is_at(stands, 'p', next) then
      call('HSET', K.excl, p.exclusive, follower)
      put_back(record_in(stands))
      return
    end
    add('lost_jobs', 1)
    next = first_parked(p.exclusive)
  end
  if head then call('HDEL', K.excl, p.exclusive) end
end

-- Where a job goes whose life is over: until when it is kept, or nil.
local NEVER = 9007199254740992
local function kept_until(state, p)
  if state == 'd' then return NEVER end
  if state == 'x' then return now + max(p.retention or 0, CANCELLED_RETENTION) end
  return p.retention and now + p.retention
end
-- Until when a job is kept whose life is over, by what JOBS says of it; nil for any other.
local function kept_till(stands)
  local till = stands and K[sub(stands, 1, 1)] and u8(stands, 18)
  return till and till < NEVER and till or nil
end
local function put_settled(rec, p, state, keep)
  local id = id_of(rec)
  free_unique(id, p)
  free_exclusive(id, p)
  if not keep then
    call('HDEL', K.jobs, id)
    return
  end
  local seq = next_seq()
  call('ZADD', K[state], now, seq .. id)
  call('HSET', K.jobs, id, state .. seq .. p8(now) .. p8(keep) .. rec)
  if keep < NEVER then call('ZADD', K.keep, keep, id) end
end

-- Takes a job out of where it is; its keys stay as they are. `stands` is what JOBS says of it.
local function take(id, stands)
  local state, seq, rec = sub(stands, 1, 1), sub(stands, 2, 9), record_in(stands)
  call('HDEL', K.jobs, id)
  if state == 'r' then
    add('stale', 1)
  elseif state == 'p' then
    call('ZREM', K.park, line_of_key(parse(rec).exclusive) .. seq .. id)
  elseif state == 's' then
    call('ZREM', K.due, seq .. id)
  else
    call('ZREM', K[state], seq .. id)
    call('ZREM', K.keep, id)
  end
  return rec, state
end
