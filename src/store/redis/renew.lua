-- renew: extend grants, let single leases of them lapse.
-- in   1 beats: [8 grant][16 nonce][u16 n] n × [u16 first][u16 leases], [u16 n] n × [u16 lapse],
--      [u16 n] n × [u16 lease][u32 bytes][progress]
-- out  per beat [u8 held][u64 granted], [u16 n] n × [u16 place in the beat] to cancel, and the same
--      for those that are fenced
-- why  evaluated anew each time: it has no request
open_meta()
local beats, at, answers = ARGV[1], 1, {}
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
while at <= #beats do
  local gid, nonce = read('<c8c16', beats, at)
  at = at + 24
  local runs = list_of(4, function() return { read('<I2I2', beats, at) } end)
  local lapse = list_of(2, function() return (read('<I2', beats, at)) end)
  local progress = list_of(6, function()
    local lease, bytes = read('<I2I4', beats, at)
    local shown = sub(beats, at + 6, at + 5 + bytes)
    at = at + bytes
    return { lease, shown }
  end)
  local g = held(gid)
  local wanted = #lapse
  for _, run in ipairs(runs) do wanted = wanted + run[2] end
  -- Past its deadline a lease is gone, whether or not anybody has expired it yet.
  if not g or g.deadline <= now or g.nonce ~= nonce then
    add(FENCED, wanted)
    answers[#answers + 1] = '\0'
  else
    for _, shown in ipairs(progress) do
      if is_live(g, shown[1]) then set_note(g, shown[1], { progress = shown[2] }) end
    end
    if #lapse > 0 then
      local front = {}
      for _, lease in ipairs(lapse) do
        if is_live(g, lease) then expire(g, lease, STALLED, front) end
      end
      if #front > 0 then put_front(front) end
    end
    local cancel, fenced, place = {}, {}, 0
    for _, run in ipairs(runs) do
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
      answers[#answers + 1] = '\0'
    else
      g.deadline = math.min(now + g.term, g.granted_at + g.lifetime)
      g.renewals = g.renewals + 1
      g.dirty, g.moved = true, true
      answers[#answers + 1] = '\1' .. p8(g.deadline - now) .. pack('<I2', #cancel) .. concat(cancel)
        .. pack('<I2', #fenced) .. concat(fenced)
    end
  end
end
save_grants()
save_meta()
ring()
return reply(DONE, concat(answers))
