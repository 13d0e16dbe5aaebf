-- round: taking grants out of the rounds in which they were renewed. `left` says how many leave which.
local function leave(left)
  for round, n in pairs(left) do
    if call('HINCRBY', HELD, round .. STAYED, -n) == 0 then
      call('HDEL', HELD, round, round .. STAYED)
      call('ZREM', ENDS, round)
    end
  end
end
