-- wait: look for work, and lie down if there is none.
-- in   1 sleeper · 2 suspects too: 0 or 1 · 3 for how long, in microseconds
-- out  [u8] 1 if there is work
-- why  looking and lying down are one step, so that no wake-up falls between them
open_meta()
local suspects, till = ARGV[2] == '1', now + tonumber(ARGV[3])
if M[PAUSED] == 0 then
  for line = 0, 15 do
    if M[IN_LINE + line] > 0 and (suspects or line % 2 == 1) then return reply(DONE, '\1') end
  end
end
call('ZREMRANGEBYSCORE', SLEEP, '-inf', '(' .. string.format('%.0f', now))
call('ZADD', SLEEP, till, ARGV[1])
if suspects then
  call('ZREMRANGEBYSCORE', SLEEPS, '-inf', '(' .. string.format('%.0f', now))
  call('ZADD', SLEEPS, till, ARGV[1])
end
return reply(DONE, '\0')
