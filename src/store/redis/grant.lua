-- grant: live grants. HELD has two fields for each.
--   [id], the first token, big-endian: deadline, renewals, how many leases are alive, how many
--       there were, how many have a note; nonce, granted at, lifetime, term as given, lengths of
--       owner and task; owner, task, and a mark for each lease, once one has ended
--   [id][ROLL]: of each lease the id of its job, and 1 if more than the job goes when it is
--       completed
-- NOTES has what is known of single leases. Receipts name a lease by its place in the grant as it
-- was given.
local HEAD, TERMS = '<I8I4I2I2I2c16', '<I8I8c12I2I2'
local TERMS_AT = 35
local NEW = '<I8I4I2I2I2c16I8I8c12I2I2'
local ROLL, STRIDE = '\0', 17
local grants = {}
-- Notes that were changed.
local unsaved = {}

local function open_grant(gid, raw, roll)
  local deadline, renewals, live, count, noted, nonce = read(HEAD, raw)
  local owners, tasks = read('<I2I2', raw, 63)
  local marks = 67 + owners + tasks
  local g = {
    gid = gid, deadline = deadline, renewals = renewals, live = live, count = count, noted = noted, nonce = nonce,
    raw = raw, until_marks = marks - 1, marks = sub(raw, marks), roll = roll, owners = owners, tasks = tasks,
    notes = {}, over = {},
  }
  grants[gid] = g
  return g
end
local function held(gid)
  local g = grants[gid]
  if g == nil then
    local both = call('HMGET', K.held, gid, gid .. ROLL)
    g = both[1] and both[2] and open_grant(gid, both[1], both[2]) or false
    grants[gid] = g
  end
  return g and g.live > 0 and g
end
-- Reads what most calls need not know.
local function terms(g)
  if g.granted_at then return end
  local at
  g.base = (read('>I8', g.gid))
  g.granted_at, g.lifetime, g.term_raw, at = read(TERMS, g.raw, TERMS_AT)
  g.owner, g.task = sub(g.raw, 67, 66 + g.owners), sub(g.raw, 67 + g.owners, g.until_marks)
end
local function first_of(g) return (read('>I8', g.gid)) end
-- Which leases have ended, as HELD has it.
local function marks(g)
  if next(g.over) == nil then return g.marks end
  local all = {}
  for at = 0, g.count - 1 do
    all[at + 1] = (g.over[at] or byte(g.marks, at + 1) == 49) and '1' or '0'
  end
  g.marks, g.over = concat(all), {}
  return g.marks
end
local function head(g)
  return pack('<I8I4I2I2I2', g.deadline, g.renewals, g.live, g.count, g.noted)
    .. sub(g.raw, 19, g.until_marks) .. marks(g)
end
local function is_live(g, at)
  return at < g.count and not g.over[at] and (g.marks == '' or byte(g.marks, at + 1) == 48)
end
local function job_id(g, at)
  if not g.roll then g.roll = call('HGET', K.held, g.gid .. ROLL) or '' end
  return sub(g.roll, STRIDE * at + 1, STRIDE * at + 16)
end
-- The record of a leased job; none if it was lost.
local function record(g, at)
  local stands = call('HGET', K.jobs, job_id(g, at))
  return stands and record_in(stands)
end

local function note_key(g, at) return g.gid .. pack('>I2', at) end
local NOTHING = { cancel = false }
local function note_of(raw)
  if not raw then return NOTHING end
  local cancel, shown = read('<I1I4', raw)
  local n = { cancel = cancel == 1, progress = shown > 0 and sub(raw, 6, 5 + shown) or nil }
  if #raw > 5 + shown then n.seq, n.state = sub(raw, 6 + shown, 13 + shown), sub(raw, 14 + shown) end
  return n
end
local function note(g, at)
  if g.noted == 0 then return NOTHING end
  if not g.notes[at] then g.notes[at] = note_of(call('HGET', K.note, note_key(g, at))) end
  return g.notes[at]
end
-- Reads those of many leases at once.
local function read_notes(g, from, leases)
  local keys = {}
  for at = from, min(from + leases, g.count) - 1 do keys[#keys + 1] = note_key(g, at) end
  if #keys == 0 then return end
  for n, raw in ipairs(call('HMGET', K.note, unpack(keys))) do
    if not g.notes[from + n - 1] then g.notes[from + n - 1] = note_of(raw) end
  end
end
local function set_note(g, at, change)
  local n = note(g, at)
  local cancel = change.cancel or n.cancel
  local progress, seq, state = change.progress or n.progress, change.seq or n.seq, change.state or n.state
  g.notes[at] = { cancel = cancel, progress = progress, seq = seq, state = state }
  unsaved[note_key(g, at)] = pack('<I1I4', cancel and 1 or 0, #(progress or ''))
    .. (progress or '') .. (seq or '') .. (state or '')
  if n == NOTHING then g.noted, g.dirty = g.noted + 1, true end
end
-- What the lease has saved, as a part of the job's record.
local function saved(g, at)
  local n = note(g, at)
  return n.seq and p8(first_of(g) + at) .. n.seq .. text(n.state)
end
-- A leased job's record, with what its lease has saved.
local function record_now(g, at)
  local rec, state = record(g, at), saved(g, at)
  return rec and state and rewrite(rec, parse(rec), { checkpoint = state }) or rec
end

-- The live lease that a receipt is the proof of.
local function current(gid, nonce, at, id)
  local g = held(gid)
  if g and g.nonce == nonce and is_live(g, at) and job_id(g, at) == id then return g end
end

-- Stores the grants and notes that were changed; those of which `moved` is set have another
-- deadline.
local function save_grants()
  local heads, deadlines, over = {}, {}, {}
  if next(unsaved) then
    local notes = {}
    for key, n in pairs(unsaved) do
      notes[#notes + 1] = key
      notes[#notes + 1] = n
    end
    many('HSET', K.note, notes)
    unsaved = {}
  end
  for gid, g in pairs(grants) do
    if g and g.dirty then
      if g.live == 0 then
        over[#over + 1] = gid
        grants[gid] = false
      else
        heads[#heads + 1] = gid
        heads[#heads + 1] = head(g)
        if g.moved then
          deadlines[#deadlines + 1] = decimal(g.deadline)
          deadlines[#deadlines + 1] = gid
        end
      end
      g.dirty, g.moved = false, false
    end
  end
  if #heads > 0 then many('HSET', K.held, heads) end
  if #deadlines > 0 then many('ZADD', K.ends, deadlines) end
  if #over > 0 then
    many('ZREM', K.ends, over)
    for n = 1, #over do over[#over + 1] = over[n] .. ROLL end
    many('HDEL', K.held, over)
  end
end

-- Ends a lease of which nothing but its grant is left to change.
local function end_lease(g, at, ending)
  if note(g, at) ~= NOTHING then
    call('HDEL', K.note, note_key(g, at))
    unsaved[note_key(g, at)] = nil
    g.noted, g.notes[at] = g.noted - 1, nil
  end
  g.over[at], g.live, g.dirty = true, g.live - 1, true
  -- What the last lease leaves behind are notes that nobody found.
  if g.live == 0 and g.noted > 0 then add('lost_notes', g.noted) end
  add(ENDINGS[ending + 1], 1)
end

-- How leases end, by their place in ENDINGS.
local AS = { completed = 0, retried = 1, surrendered = 2, buried = 3, cancelled = 4, expired = 5, revoked = 8 }

-- Ends one lease: counts it, and puts the job where it goes. `next` is front, back, wait (keeps
-- its key), free (does not), or the letter of a settled state. Jobs for the front are collected.
local function finish(g, at, rec, p, code, next, change, front)
  local n = note(g, at)
  local keep
  if K[next] then keep = kept_until(next, p) end
  if keep or not K[next] then
    terms(g)
    local reason = change.reason
    change.ended = p8(g.base + at) .. p8(g.granted_at) .. p8(now)
      .. pack('<I4I1I1', g.renewals, code, (reason and 1 or 0) + (n.progress and 2 or 0))
      .. text(g.owner) .. text(g.task) .. (reason and text(reason) or '') .. (n.progress or '')
    change.checkpoint = saved(g, at)
    rec = rewrite(rec, p, change)
  end
  end_lease(g, at, code)
  if next == 'front' then
    front[#front + 1] = { token = first_of(g) + at, rec = rec }
  elseif next == 'back' then
    put_back(rec)
  elseif K[next] then
    put_settled(rec, p, next, keep)
  else
    if next == 'free' then free_exclusive(id_of(rec), p) end
    put_scheduled(rec)
  end
end

-- The earliest moment of a set, and how an answer tells how far off it is.
local function next_in(set) return tonumber(call('ZRANGE', set, '0', '0', 'WITHSCORES')[2]) end
local function told(at) return pack('<I1I8', at and 1 or 0, at and max(at - now, 0) or 0) end

-- Visits the live grants from one deadline, or -inf, to another, by (deadline, token). `visit` gets
-- the id, the deadline and the number of leases alive, none if the grant was lost; it returns false
-- to stop.
local function by_deadline(since, upto, visit)
  local from, ids = since == '-inf' and 0 or call('ZCOUNT', K.ends, '-inf', '(' .. decimal(since)), nil
  repeat
    local some = call('ZRANGE', K.ends, from, from + 99, 'WITHSCORES')
    ids = {}
    for n = 1, #some, 2 do ids[#ids + 1] = some[n] end
    local heads = #ids > 0 and call('HMGET', K.held, unpack(ids)) or {}
    for n, raw in ipairs(heads) do
      local till = tonumber(some[2 * n])
      if till > upto then return end
      local live = raw and read('<I2', raw, HEAD_LIVE) or nil
      if visit(ids[n], till, live) == false then return end
    end
    from = from + #ids
  until #ids < 100
end

-- The first tokens of all live grants, in order. It takes long if they are not few.
local FEW = 300
local function all_bases()
  local bases = {}
  for n, gid in ipairs(call('ZRANGE', K.ends, 0, -1)) do bases[n] = (read('>I8', gid)) end
  table.sort(bases)
  return bases
end
