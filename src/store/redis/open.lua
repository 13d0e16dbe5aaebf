-- open: from here on a partition remembers a session's calls.
-- in   1 when the caller last heard of the session, by a clock of the store; -1: nobody opens
--      anything
-- out  one byte if the partition is there, else nothing but the time
-- why  a partition of another layout is refused before anything is done to it;
--      sent before the first request to a partition, and harmless to repeat: so a request that
--      finds no memory may have been applied, and is refused
local function open()
  local used = tonumber(ARGS[1])
  if used < 0 then return reply(DONE) end
  local layout = call('HGET', K.meta, 'layout')
  if layout and tonumber(layout) ~= LAYOUT then return reply(FOREIGN) end
  if is_idle(used) then return reply(LOST) end
  call('HSET', SESSION, 'open', 1)
  call('PEXPIRE', SESSION, 2 * SESSION_IDLE / 1000)
  return reply(DONE, layout and '\1')
end
register('open', open, { 'allow-oom' })
