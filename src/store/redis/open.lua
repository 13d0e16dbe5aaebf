-- open: from here on a partition remembers a session's calls.
-- in   1 when the caller last heard of the session, by a clock of the store; -1:
--      nobody opens anything, and the key stands for the slot
-- out  nothing but the time
-- why  sent before the first request to a partition, and harmless to repeat: so a request that
--      finds no memory may have been applied, and is refused
local heard = tonumber(ARGV[1])
if heard < 0 then return reply(DONE) end
if is_idle(heard) then return reply(LOST) end
call('HSET', SESSION, 'open', 1)
call('PEXPIRE', SESSION, 2 * SESSION_IDLE / 1000)
return reply(DONE)
