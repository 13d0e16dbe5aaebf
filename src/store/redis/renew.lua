-- renew: extend grants, let single leases of them lapse.
-- in   1 plain beats: [8 grant][16 nonce] · 2 their leases: [u16 first][u16 leases], or nothing if each is a first one
--      3 the others: [8 grant][16 nonce][u16 n] n × [u16 first][u16 leases], [u16 n] n × [u16 lapse],
--      [u16 n] n × [u16 lease][u32 bytes][progress]
-- out  per beat [u8 held][u64 granted], [u16 n] n × [u16 place in the beat] to cancel, the same fenced;
--      or [2][u64 granted] once, if all are held and there is no more to say
-- why  evaluated anew each time: it has no request
open_meta()
local beats, at = ARGV[3], 1
local function list_of(step, read_one)
  local count = (read('<I2', beats, at))
  at = at + 2
  local items = {}
  for n = 1, count do
    items[n] = read_one()
    at = at + step
  end
  return items
end
local nth = #ARGV[1] / NAME
while at <= #beats do
  nth = nth + 1
  local beat = { nth = nth, gid = sub(beats, at, at + 7), nonce = sub(beats, at + 8, at + 23) }
  at = at + 24
  beat.runs = list_of(4, function() return { read('<I2I2', beats, at) } end)
  beat.lapse = list_of(2, function() return (read('<I2', beats, at)) end)
  beat.progress = list_of(6, function()
    local lease, bytes = read('<I2I4', beats, at)
    local shown = sub(beats, at + 6, at + 5 + bytes)
    at = at + bytes
    return { lease, shown }
  end)
  others[#others + 1] = beat
end

for _, beat in ipairs(others) do
  local g = held(beat.gid)
  local wanted = #beat.lapse
  for _, run in ipairs(beat.runs) do wanted = wanted + run[2] end
  -- Past its deadline a lease is gone, whether or not anybody has expired it yet.
  if not g or g.deadline <= now or g.nonce ~= beat.nonce then
    add(FENCED, wanted)
    answers[beat.nth] = '\0'
  else
    for _, shown in ipairs(beat.progress) do
      if is_live(g, shown[1]) then set_note(g, shown[1], { progress = shown[2] }) end
    end
    if #beat.lapse > 0 then
      local front = {}
      for _, lease in ipairs(beat.lapse) do
        if is_live(g, lease) then expire(g, lease, STALLED, front) end
      end
      if #front > 0 then put_front(front) end
    end
    local cancel, fenced, place = {}, {}, 0
    for _, run in ipairs(beat.runs) do
      if g.noted == 0 and ended(g) == '' and run[1] + run[2] <= g.count then
        place = place + run[2]
      else
        for lease = run[1], run[1] + run[2] - 1 do
          if not is_live(g, lease) then
            fenced[#fenced + 1] = pack('<I2', place)
          elseif note(g, lease).cancel then
            cancel[#cancel + 1] = pack('<I2', place)
          end
          place = place + 1
        end
      end
    end
    add(FENCED, #fenced)
    if g.live == 0 then
      answers[beat.nth] = '\0'
    else
      g.deadline = math.min(now + g.term, g.granted_at + g.lifetime)
      g.renewals = g.renewals + 1
      g.moved = true
      answers[beat.nth] = '\1' .. p8(g.deadline - now) .. pack('<I2', #cancel) .. concat(cancel)
        .. pack('<I2', #fenced) .. concat(fenced)
    end
  end
end
local left = {}
for _, g in pairs(grants) do
  if g and g.moved then
    if g.round ~= ALONE then left[#left + 1], left[#left + 2] = g.round, g.name end
    g.round = ALONE
    call('ZADD', ENDS, g.deadline, g.name)
    call('HSET', HELD, g.name, cell(g))
  end
end
leave(left)
save_grants()
save_meta()
ring()
return reply(DONE, concat(answers))
