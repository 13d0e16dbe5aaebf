-- renew: extend grants, let single leases of them lapse.
-- in   1 beats: [8 grant][16 nonce][u16 n] n × [u16 first][u16 leases], [u16 n] n × [u16 lapse],
--      [u16 n] n × [u16 lease][u32 bytes][progress]
-- out  per beat [u8 held][u64 granted], [u16 n] n × [u16 place in the beat] to cancel, and the same
--      for those that are fenced
--      Beats of which nothing is said were left for another call
-- why  evaluated anew each time: it has no request
-- Beats go on until so much has been done: a note is read for one, taken for five, and a lease that
-- lapses is twenty.
local LOOKS, looked = 1000, 0
local NONE = {}
local function read_beat(beats, at)
  local beat = { runs = {}, lapse = NONE, progress = NONE }
  beat.gid, beat.nonce, beat.count, at = read('<c8c16I2', beats, at)
  for n = 1, 2 * beat.count, 2 do
    beat.runs[n], beat.runs[n + 1], at = read('<I2I2', beats, at)
  end
  local count
  count, at = read('<I2', beats, at)
  if count > 0 then beat.lapse = {} end
  for n = 1, count do beat.lapse[n], at = read('<I2', beats, at) end
  count, at = read('<I2', beats, at)
  if count > 0 then beat.progress = {} end
  for n = 1, count do
    local lease, bytes
    lease, bytes, at = read('<I2I4', beats, at)
    beat.progress[n] = { lease, sub(beats, at, at + bytes - 1) }
    at = at + bytes
  end
  return beat, at
end

-- Extends a grant, and returns the answer. Past its deadline a lease is gone, whether or not
-- anybody has expired it yet.
local function extend(beat, g)
  if not g or g.live == 0 or g.deadline <= now or g.nonce ~= beat.nonce then
    return '\0'
  end
  for _, shown in ipairs(beat.progress) do
    if is_live(g, shown[1]) then set_note(g, shown[1], { progress = shown[2] }) end
  end
  if #beat.lapse > 0 then
    local front = {}
    terms(g)
    for _, lease in ipairs(beat.lapse) do
      if is_live(g, lease) then expire(g, lease, STALLED, front) end
    end
    if #front > 0 then put_front(front) end
  end
  local cancel, fenced, place = NONE, NONE, 0
  for n = 1, 2 * beat.count, 2 do
    local from, leases = beat.runs[n], beat.runs[n + 1]
    if g.noted == 0 and marks(g) == '' and from + leases <= g.count then
      place = place + leases
    else
      if cancel == NONE then
        cancel, fenced = {}, {}
      end
      if g.noted > 0 then
        read_notes(g, from, leases)
        looked = looked + leases
      end
      for lease = from, from + leases - 1 do
        if not is_live(g, lease) then
          fenced[#fenced + 1] = pack('<I2', place)
        elseif note(g, lease).cancel then
          cancel[#cancel + 1] = pack('<I2', place)
        end
        place = place + 1
      end
    end
  end
  if g.live == 0 then return '\0' end
  local granted_at, lifetime, seconds, nanos = read('<I8I8I8I4', g.raw, TERMS_AT)
  g.deadline = min(now + seconds * 1000000 + floor(nanos / 1000), granted_at + lifetime)
  g.renewals = g.renewals + 1
  g.dirty, g.moved = true, true
  return pack('<I1I8I2', 1, g.deadline - now, #cancel) .. concat(cancel)
    .. pack('<I2', #fenced) .. concat(fenced)
end

local function renew()
  local data, at, beats, gids, answers = ARGS[1], 1, {}, {}, {}
  while at <= #data do
    local beat
    beat, at = read_beat(data, at)
    beats[#beats + 1], gids[#gids + 1] = beat, beat.gid
  end
  looked = 0
  for n, raw in ipairs(#gids > 0 and call('HMGET', K.held, unpack(gids)) or {}) do
    if looked >= LOOKS then break end
    if raw and grants[gids[n]] == nil then open_grant(gids[n], raw) end
    looked = looked + 5 * #beats[n].progress + 20 * #beats[n].lapse
    answers[n] = extend(beats[n], grants[gids[n]])
  end
  save_grants()
  save_meta()
  wake()
  return reply(DONE, pack('<I2', #answers) .. concat(answers))
end
register('renew', renew, { 'allow-oom' })
