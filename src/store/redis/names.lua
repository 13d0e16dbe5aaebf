-- names: what the scripts call the keys of a partition (`keys.rs` says what they hold).
local META, DUE, JOBS, PARK, EXCL, UNIQ, UWIN = unpack(KEYS, 1, 7)
local SETTLED, KEEP = { c = KEYS[8], d = KEYS[9], x = KEYS[10] }, KEYS[11]
local HELD, NOTES, ENDS, SLEEP, SLEEPS = unpack(KEYS, 12, 16)
-- The session is the last key of a call that has a request.
local FIRST_LINE, SESSION = 17, KEYS[#KEYS]
local FIELDS = '<' .. rep('I8', COUNTERS)

-- Calls a command with many arguments, a thousand at a time: Lua cannot spread more.
local function many(command, key, list)
  for from = 1, #list, 1000 do
    call(command, key, unpack(list, from, math.min(from + 999, #list)))
  end
end

-- Tells as many sleepers as there are jobs.
local function wake(sleepers, jobs, kind)
  local who = call('ZRANGE', sleepers, now, '+inf', 'BYSCORE', 'LIMIT', '0', jobs)
  many('ZREM', sleepers, who)
  for _, sleeper in ipairs(who) do
    local channel, queue = string.match(sleeper, '^(%S+) %S+ (%S+)$')
    call('PUBLISH', channel, kind .. queue)
  end
end
-- Jobs that became ready in this call: ordinary ones, and suspects.
local bells, alarms = 0, 0
local function ring()
  if bells > 0 then wake(SLEEP, bells, 'j') end
  if alarms > 0 then wake(SLEEPS, alarms, 's') end
end
