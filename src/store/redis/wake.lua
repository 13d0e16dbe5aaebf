-- wake: who sleeps, and who is woken. SLEEP has the sleepers by the end of their sleep: `s` if one
-- takes suspects, else `n`, then the channel of its process, a space, and its number there.

-- Jobs that became ready in this call: ordinary ones, and suspects.
local ready, suspicious
local EVERYBODY = 1000000000

local function tell(sleeper, kind)
  call('PUBLISH', sub(sleeper, 2, find(sleeper, ' ', 1, true) - 1), kind .. K.queue)
end
-- Wakes as many as there are jobs, the longest asleep first, each of them once.
local function wake()
  while ready > 0 do
    local some = call('ZPOPMIN', K.sleep, decimal(ready))
    if #some == 0 then break end
    for n = 1, #some, 2 do
      if tonumber(some[n + 1]) > now then
        tell(some[n], 'j')
        ready = ready - 1
      end
    end
  end
  if suspicious == 0 then return end
  for _, sleeper in ipairs(call('ZRANGE', K.sleep, decimal(now), '+inf', 'BYSCORE')) do
    if suspicious == 0 then return end
    if byte(sleeper) == 115 then
      call('ZREM', K.sleep, sleeper)
      tell(sleeper, 's')
      suspicious = suspicious - 1
    end
  end
end

-- Lies down, or gets up.
local function lie_down(sleeper, with_suspects)
  call('ZADD', K.sleep, decimal(now + SLEEP), (with_suspects and 's' or 'n') .. sleeper)
end
local function get_up(sleeper) call('ZREM', K.sleep, 's' .. sleeper, 'n' .. sleeper) end
