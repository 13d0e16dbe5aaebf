-- names: what the scripts call the keys of a partition (`keys.rs` says what they hold).
local META, DUE, JOBS, PARK, EXCL, UNIQ, UWIN = unpack(KEYS, 1, 7)
local HELD, NOTES, ENDS, SLEEP, SLEEPS = unpack(KEYS, 12, 16)
-- The session is the last key of a call that has a request.
local FIRST_LINE, SESSION = 17, KEYS[#KEYS]
local FIELDS = '<' .. rep('I8', 46)

-- Calls a command with many arguments, a thousand at a time: Lua cannot spread more.
local function many(command, key, list)
  for from = 1, #list, 1000 do
    call(command, key, unpack(list, from, math.min(from + 999, #list)))
  end
end

local function piece_names(names, gid, pieces)
  for n = 1, pieces % APART do names[#names + 1] = gid .. char(n) end
  return names
end

-- Wake-ups: one sleeper per job.
local bells, alarms = 0, 0
local function ring()
  if bells > 0 then wake(SLEEP, bells, 'j') end
  if alarms > 0 then wake(SLEEPS, alarms, 's') end
end
