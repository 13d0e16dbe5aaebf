-- wait: look for work, and sleep if there is none.
-- in   1 suspects too: 0 or 1 · 2 sleeper
-- out  [u8] 1 if there is work; then the next due time and the next deadline
-- why  for who sleeps without having claimed; looking and falling asleep are one step, so that no
--      wake-up falls between them
local function wait()
  local takes, lines = ARGS[1] == '1', {}
  for line = takes and 0 or 1, LINES - 1, takes and 1 or 2 do lines[#lines + 1] = K[line] end
  local is_there = call('EXISTS', unpack(lines)) > 0 and call('HGET', K.meta, 'paused') ~= '1'
  if not is_there then lie_down(ARGS[2], takes) end
  return reply(DONE, (is_there and '\1' or '\0') .. told(next_in(K.due)) .. told(next_in(K.ends)))
end
register('wait', wait, { 'allow-oom' })
