-- wake: tells as many sleepers as there are jobs.
local function wake(sleepers, jobs, kind)
  local who = call('ZRANGE', sleepers, now, '+inf', 'BYSCORE', 'LIMIT', '0', jobs)
  for n = 1, #who, 1000 do call('ZREM', sleepers, unpack(who, n, math.min(n + 999, #who))) end
  for _, sleeper in ipairs(who) do
    local channel, queue = string.match(sleeper, '^(%S+) %S+ (%S+)$')
    call('PUBLISH', channel, kind .. queue)
  end
end
