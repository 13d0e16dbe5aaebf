-- round: taking grants out of the rounds in which they were renewed. `left` has of each that leaves the round
-- and its name.
local function leave(left)
  local gone, counts = {}, {}
  for n = 1, #left, 2 do
    gone[left[n + 1]], counts[left[n]] = true, (counts[left[n]] or 0) + 1
  end
  for round, count in pairs(counts) do
    local roll, stay = call('HGET', HELD, round), {}
    if #roll > NAME * count then
      for at = 1, #roll, NAME do
        local name = sub(roll, at, at + NAME - 1)
        if not gone[name] then stay[#stay + 1] = name end
      end
      call('HSET', HELD, round, concat(stay))
    else
      call('HDEL', HELD, round, round .. SHARED)
      call('ZREM', ENDS, round)
    end
  end
end
