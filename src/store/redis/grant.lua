-- grant: live grants. HELD has what changes with a grant, and the ids and the segments of its jobs; NOTES
-- has what is known of single leases. Receipts name a lease by its place in the grant as it was given; `map`
-- tells where it lies once ended leases have been dropped.
local grants = {}

local function open_grant(gid, raw)
  local g = { gid = gid, base = (read('>I8', gid)), segs = nil, notes = {}, over = {} }
  local owners, tasks, mapped, at
  owners, tasks, mapped, g.pieces, g.bytes, g.flags, g.nonce, g.granted_at, g.term_raw, g.lifetime, at =
    read(HEAD, raw)
  g.name = gid .. g.nonce
  g.deadline, g.renewals, g.round, g.capped, g.term, g.count, g.live, g.noted =
    read(CELL, call('HGET', HELD, g.name))
  if g.deadline == 0 then g.deadline = g.granted_at + math.min(g.term, g.lifetime) end
  if g.round ~= ALONE then
    local till, times = read('<I8I4', call('HGET', HELD, g.round .. SHARED))
    g.deadline, g.renewals = till, g.renewals + times
  end
  g.owner = sub(raw, at, at + owners - 1)
  at = at + owners
  g.task = sub(raw, at, at + tasks - 1)
  at = at + tasks
  g.map = sub(raw, at, at + 2 * mapped - 1)
  g.ended = sub(raw, at + 2 * mapped)
  if g.count == 1 then g.roll, g.ended = g.ended, '' end
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
  return pack(HEAD, #g.owner, #g.task, #g.map / 2, g.pieces, g.bytes, g.flags, g.nonce, g.granted_at,
    g.term_raw, g.lifetime) .. g.owner .. g.task .. g.map .. (g.count == 1 and g.roll or ended(g))
end
local function cell(g)
  return pack(CELL, g.deadline, g.renewals, g.round, g.capped, g.term, g.count, g.live, g.noted)
end
local function is_live(g, at)
  return at < g.count and not g.over[at] and (g.ended == '' or byte(g.ended, at + 1) == 48)
end

local function roll(g)
  if not g.roll then g.roll = call('HGET', HELD, g.gid .. ROLL) end
  return g.roll
end
local function job_id(g, at) return sub(roll(g), 16 * at + 1, 16 * at + 16) end

local record
do
  local function segments(g)
    if g.segs then return g.segs end
    local parts, segs, at, first = call('HMGET', HELD, unpack(piece_names({}, g.gid, g.pieces))), {}, 1, 0
    if g.pieces > APART then
      local starts = table.remove(parts, 1)
      for n = 1, #parts do parts[n] = sub(starts, START * (n - 1) + 1, START * n) .. parts[n] end
    end
    local blob = concat(parts)
    while at <= #blob do
      local seg = segment_at(blob, at)
      seg.first = first
      segs[#segs + 1] = seg
      at, first = at + seg.bytes, first + seg.count
    end
    g.blob, g.segs = blob, segs
    if g.map ~= '' then
      g.places = {}
      for n = 0, first - 1 do g.places[(read('<I2', g.map, 2 * n + 1))] = n end
    end
    return segs
  end
  -- The segment of a lease, and its place in there.
  local function find(g, at)
    local segs = segments(g)
    local place = g.places and g.places[at] or at
    local low, high = 1, #segs
    while low < high do
      local middle = math.ceil((low + high) / 2)
      if segs[middle].first <= place then low = middle else high = middle - 1 end
    end
    return segs[low], place - segs[low].first
  end
  function record(g, at)
    local seg, n = find(g, at)
    return nth(g.blob, seg, n)
  end
end

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

local function end_leases(g, at, n)
  for place = at, at + n - 1 do g.over[place] = true end
  g.live, g.dirty = g.live - n, true
  add(LIVE, -n)
  add(N_LEASED, -n)
end

-- Drops the records of ended leases once they are half of what is stored, if that is much.
local function compact(g)
  local stored = g.map ~= '' and #g.map / 2 or g.count
  if g.live * 2 > stored or g.bytes <= SMALL_GRANT then return end
  local recs, map = {}, {}
  for at = 0, g.count - 1 do
    if is_live(g, at) then
      recs[#recs + 1] = record(g, at)
      map[#map + 1] = pack('<I2', at)
    end
  end
  call('HDEL', HELD, unpack(piece_names({}, g.gid, g.pieces)))
  g.map, g.segs, g.places, g.pieces = concat(map), nil, nil, 1
  local piece = segment(recs)
  g.bytes = #piece
  call('HSET', HELD, g.gid .. char(1), piece)
end
-- A grant that goes on in another way than the others of its round leaves it.
local function save_grants()
  local left = {}
  for gid, g in pairs(grants) do
    if g and g.dirty then
      g.dirty = false
      if g.round ~= ALONE then left[#left + 1], left[#left + 2] = g.round, g.name end
      if g.live == 0 then
        call('HDEL', HELD, g.name, gid, gid .. ROLL, unpack(piece_names({}, gid, g.pieces)))
        if g.round == ALONE then call('ZREM', ENDS, g.name) end
        grants[gid] = false
      else
        if g.round ~= ALONE then
          g.round = ALONE
          call('ZADD', ENDS, g.deadline, g.name)
        end
        if ended(g) ~= '' then compact(g) end
        call('HSET', HELD, gid, head(g), g.name, cell(g))
      end
    end
  end
  leave(left)
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
  end_leases(g, at, 1)
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
