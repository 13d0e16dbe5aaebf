-- grant: live grants (`words.lua` has their layout). NOTES has what is known of single leases.
-- Receipts name a lease by its place in the grant as it was given.
local grants = {}

local function open_grant(gid, raw)
  local g = { gid = gid, base = (read('>I8', gid)), notes = {}, over = {} }
  local owners, tasks, at
  owners, tasks, g.count, g.live, g.noted, g.deadline, g.renewals, g.nonce, g.granted_at, g.term, g.term_raw,
    g.lifetime, at = read(HEAD, raw)
  g.owner = sub(raw, at, at + owners - 1)
  at = at + owners
  g.task, g.ended = sub(raw, at, at + tasks - 1), sub(raw, at + tasks)
  grants[gid] = g
  return g
end
local function held(gid)
  local g = grants[gid]
  if g == nil then
    local raw = call('HGET', HELD, gid)
    g = raw and open_grant(gid, raw) or false
    grants[gid] = g
  end
  return g and g.live > 0 and g
end
-- Which leases have ended, as HELD has it.
local function ended(g)
  if next(g.over) == nil then return g.ended end
  local marks = {}
  for at = 0, g.count - 1 do
    local is_over = g.over[at] or byte(g.ended, at + 1) == 49
    marks[at + 1] = is_over and '1' or '0'
  end
  g.ended, g.over = concat(marks), {}
  return g.ended
end
local function head(g)
  return pack(HEAD, #g.owner, #g.task, g.count, g.live, g.noted, g.deadline, g.renewals, g.nonce, g.granted_at,
    g.term, g.term_raw, g.lifetime) .. g.owner .. g.task .. ended(g)
end
local function is_live(g, at)
  return at < g.count and not g.over[at] and (g.ended == '' or byte(g.ended, at + 1) == 48)
end

local function job_id(g, at)
  if not g.roll then g.roll = call('HGET', HELD, g.gid .. ROLL) end
  return sub(g.roll, 16 * at + 1, 16 * at + 16)
end

local function record(g, at) return sub(call('HGET', JOBS, job_id(g, at)), 26) end

local function note_key(g, at) return g.gid .. pack('>I2', at) end
local NOTHING = { cancel = false }
local function note(g, at)
  if g.noted == 0 then return NOTHING end
  if g.notes[at] then return g.notes[at] end
  local raw = call('HGET', NOTES, note_key(g, at))
  local n = NOTHING
  if raw then
    local cancel, shown = read('<I1I4', raw)
    n = { cancel = cancel == 1, progress = shown > 0 and sub(raw, 6, 5 + shown) or nil }
    if #raw > 5 + shown then n.seq, n.state = sub(raw, 6 + shown, 13 + shown), sub(raw, 14 + shown) end
  end
  g.notes[at] = n
  return n
end
local function set_note(g, at, change)
  local n = note(g, at)
  local cancel = change.cancel or n.cancel
  local progress, seq, state = change.progress or n.progress, change.seq or n.seq, change.state or n.state
  g.notes[at] = { cancel = cancel, progress = progress, seq = seq, state = state }
  call('HSET', NOTES, note_key(g, at), pack('<I1I4', cancel and 1 or 0, #(progress or ''))
    .. (progress or '') .. (seq or '') .. (state or ''))
  if g.noted == 0 then g.noted, g.dirty = 1, true end
end
-- What the lease has saved, as a part of the job's record.
local function saved(g, at)
  local n = note(g, at)
  return n.seq and p8(g.base + at) .. n.seq .. text(n.state)
end

-- The live lease that a receipt is the proof of.
local function current(gid, nonce, at, id)
  local g = held(gid)
  if g and g.nonce == nonce and is_live(g, at) and job_id(g, at) == id then return g end
end


-- Stores the grants that were changed; those of which `moved` is set have another deadline.
local function save_grants()
  for gid, g in pairs(grants) do
    if g and g.dirty then
      if g.live == 0 then
        call('HDEL', HELD, gid, gid .. ROLL)
        call('ZREM', ENDS, gid)
        grants[gid] = false
      else
        call('HSET', HELD, gid, head(g))
        if g.moved then call('ZADD', ENDS, g.deadline, gid) end
      end
      g.dirty, g.moved = false, false
    end
  end
end

-- How leases end, by the place of their count after ENDED.
local AS = { completed = 0, retried = 1, surrendered = 2, buried = 3, cancelled = 4, expired = 5, revoked = 8 }

-- Ends one lease: counts it, and puts the job where it goes. `next` is front, back, wait (keeps
-- its key), free (does not), or the letter of a settled state. Jobs for the front are collected.
local function finish(g, at, rec, p, code, next, change, front)
  local n = note(g, at)
  local keep
  if SETTLED[next] then keep = kept_until(next, p) end
  if keep or not SETTLED[next] then
    local reason = change.reason
    change.ended = p8(g.base + at) .. p8(g.granted_at) .. p8(now)
      .. pack('<I4I1I1', g.renewals, code, (reason and 1 or 0) + (n.progress and 2 or 0))
      .. text(g.owner) .. text(g.task) .. (reason and text(reason) or '') .. (n.progress or '')
    change.checkpoint = saved(g, at)
    rec = rewrite(rec, p, change)
  end
  if n ~= NOTHING then call('HDEL', NOTES, note_key(g, at)) end
  g.over[at], g.live, g.dirty = true, g.live - 1, true
  add(LIVE, -1)
  add(N_LEASED, -1)
  add(ENDED + code, 1)
  if next == 'front' then
    front[#front + 1] = { token = g.base + at, rec = rec }
  elseif next == 'back' then
    put_back(rec)
  elseif SETTLED[next] then
    put_settled(rec, p, next, keep)
  else
    if next == 'free' then free_exclusive(id_of(rec), p) end
    put_scheduled(rec)
  end
end
