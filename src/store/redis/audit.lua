-- audit: put a command on record, before it is carried out and again when its outcome is known.
-- in   1 request · 2 what is to be written behind the time · 3 the record's place, or nothing
-- out  [u64 place]
-- why  a command that is cut off half-way is on record all the same
local function audit()
  local log = sub(KEYS[1], 1, -5) .. 'audit'
  if ARGS[3] ~= '' then
    local place = tonumber(ARGS[3])
    local before = call('LINDEX', log, place)
    if before then call('LSET', log, place, sub(before, 1, 8) .. ARGS[2]) end
    return reply(DONE, p8(place))
  end
  local status, first = recall()
  if status ~= DONE or first then return reply(status, first) end
  local answer = p8(call('RPUSH', log, p8(now) .. ARGS[2]) - 1)
  remember(answer)
  return reply(DONE, answer)
end
register('audit', audit, { 'allow-oom' })
