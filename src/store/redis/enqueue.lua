-- enqueue: store jobs, all of a call together.
-- in   1 request · 2 the jobs: [u64 delay][record]
-- out  [u32 n] then n × [u32 place][16 holder]: jobs that were there, or whose unique key is held
-- why  the time is the store's, so it is stamped here
-- Jobs without keys that are due: they go behind those of their line together.
local stored, lines, plain
local function flush()
  if plain == 0 then return end
  many('HSET', K.jobs, stored)
  for line, stubs in pairs(lines) do
    many('RPUSH', K[line], stubs)
    mark_line(line)
  end
  ready = ready + plain
  stored, lines, plain = {}, {}, 0
end
-- So many numbers in the order of arrival. Whoever gets the first ones makes the partition.
local function numbers_of(count)
  local last = call('HINCRBY', K.meta, 'seq', decimal(count))
  if last - count >= FIRST_SEQ then return last - count end
  open_meta({ 'layout' }, true)
  return call('HINCRBY', K.meta, 'seq', count) - count
end

local function enqueue()
  local status, first = recall()
  if status ~= DONE or first then return reply(status, first) end
  local jobs, at, count, stamp = ARGS[2], 1, 0, p8(now)
  local ids, froms, lengths, delays, seen, held_by = {}, {}, {}, {}, {}, {}
  while at <= #jobs do
    count = count + 1
    delays[count], lengths[count] = read('<I8I4', jobs, at)
    froms[count] = at + 8
    ids[count] = sub(jobs, at + 7 + ID_AT, at + 22 + ID_AT)
    at = at + 8 + lengths[count]
  end
  for from = 1, count, 1000 do
    for n, stands in ipairs(call('HMGET', K.jobs, unpack(ids, from, min(from + 999, count)))) do
      if stands then seen[ids[from + n - 1]] = true end
    end
  end
  local base = numbers_of(count)
  stored, lines, plain = {}, {}, 0
  for n = 1, count do
    local id, begins, delay = ids[n], froms[n], delays[n]
    local flags, holder = byte(jobs, begins + FLAGS_AT - 1), nil
    local is_keyed = flags > 0 and has(flags, UNIQUE + EXCLUSIVE)
    if seen[id] then
      holder = id
    elseif not is_keyed and delay == 0 then
      local line, seq = byte(jobs, begins + PRIORITY_AT - 1) * 2 + 1, pack('>I8', base + n)
      plain = plain + 1
      stored[2 * plain - 1] = id
      stored[2 * plain] = 'r' .. seq .. sub(jobs, begins, begins + ENQUEUED_AT - 2) .. stamp .. stamp
        .. sub(jobs, begins + LIMIT_AT - 1, begins + lengths[n] - 1)
      local stubs = lines[line] or {}
      stubs[#stubs + 1], lines[line] = seq .. id, stubs
    else
      flush()
      local rec = sub(jobs, begins, begins + ENQUEUED_AT - 2) .. stamp .. p8(now + delay)
        .. sub(jobs, begins + LIMIT_AT - 1, begins + lengths[n] - 1)
      local p = is_keyed and parse(rec) or {}
      holder = take_unique(id, p)
      if not holder and delay == 0 then join(rec, p) end
      if not holder and delay > 0 then put_scheduled(rec) end
    end
    if holder then held_by[#held_by + 1] = pack('<I4', n - 1) .. holder else seen[id] = true end
  end
  flush()
  add('enqueued', count - #held_by)
  local answer = pack('<I4', #held_by) .. concat(held_by)
  remember(answer)
  save_meta()
  wake()
  return reply(DONE, answer)
end
register('enqueue', enqueue, {})
