-- prune: delete settled jobs past their retention, and unique keys past their window.
-- in   1 request · 2 microseconds overdue · 3 how many at most
-- out  [u64 jobs][u64 keys]
-- why  found by the end of their retention; dead jobs are not in that set
local status, first = recall(ARGV[1])
if status ~= DONE or first then return reply(status, first) end
open_meta()
local before, max = math.max(now - tonumber(ARGV[2]), 0), tonumber(ARGV[3])
local past = call('ZRANGE', KEEP, '-inf', before, 'BYSCORE', 'LIMIT', 0, max)
for _, id in ipairs(past) do take(id, call('HGET', JOBS, id)) end
add(PRUNED, #past)
local keys = call('ZRANGE', UWIN, '-inf', before, 'BYSCORE', 'LIMIT', 0, max)
for _, key in ipairs(keys) do
  local held_key = call('HGET', UNIQ, key)
  if held_key and #held_key > 16 and u8(held_key, 17) <= before then call('HDEL', UNIQ, key) end
  if not held_key or #held_key == 16 or u8(held_key, 17) <= before then call('ZREM', UWIN, key) end
end
local answer = p8(#past) .. p8(#keys)
remember(answer)
save_meta()
return reply(DONE, answer)
