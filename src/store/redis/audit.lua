-- audit: put a command on record, before it is carried out and again when its outcome is known.
-- in   1 request · 2 what is to be written behind the time · 3 the record's place, or nothing
-- out  [u64 place]
-- why  a command that is cut off half-way is on record all the same
local AUDIT = KEYS[1]
if ARGV[3] ~= '' then
  local place = tonumber(ARGV[3])
  local before = call('LINDEX', AUDIT, place)
  if before then call('LSET', AUDIT, place, sub(before, 1, 8) .. ARGV[2]) end
  return reply(DONE, p8(place))
end
local status, first = recall(ARGV[1])
if status ~= DONE or first then return reply(status, first) end
local answer = p8(call('RPUSH', AUDIT, p8(now) .. ARGV[2]) - 1)
remember(answer)
return reply(DONE, answer)
