-- prune: delete settled jobs past their retention, and unique keys past their window.
-- in   1 request · 2 microseconds overdue · 3 how many at most
-- out  [u64 jobs][u64 keys]
-- why  found by the end of their retention; dead jobs are not in that set
local function prune()
  local status, first = recall()
  if status ~= DONE or first then return reply(status, first) end
  local before, most, pruned = max(now - tonumber(ARGS[2]), 0), tonumber(ARGS[3]), 0
  local past = call('ZRANGE', K.keep, '-inf', decimal(before), 'BYSCORE', 'LIMIT', 0, most)
  for _, id in ipairs(past) do
    local stands = call('HGET', K.jobs, id)
    local till = kept_till(stands)
    if till and till <= before then
      take(id, stands)
      pruned = pruned + 1
    elseif till then
      call('ZADD', K.keep, till, id)
    else
      -- It is gone; another job may have come under its id.
      call('ZREM', K.keep, id)
      add('lost_jobs', 1)
    end
  end
  if pruned > 0 then add('pruned', pruned) end
  local keys = call('ZRANGE', K.uwin, '-inf', decimal(before), 'BYSCORE', 'LIMIT', 0, most)
  for _, key in ipairs(keys) do
    local holder = call('HGET', K.uniq, key)
    local is_over = holder and #holder > 16 and u8(holder, 17) <= before
    if is_over then call('HDEL', K.uniq, key) end
    if is_over or not holder or #holder == 16 then call('ZREM', K.uwin, key) end
    if not holder then add('lost_keys', 1) end
  end
  local answer = p8(pruned) .. p8(#keys)
  remember(answer)
  save_meta()
  return reply(DONE, answer)
end
register('prune', prune, { 'allow-oom' })
