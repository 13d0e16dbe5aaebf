-- enqueue, plainly: segments only.
-- in   1 request · 2 for each segment [0][priority][12 head] · 3 … the rest of each, from its form on
-- out  as enqueue, or NOT_PLAIN
-- why  no job is looked at, and no segment is made: it is stored in the parts in which it came
local SLEEP, LINES = KEYS[3], 4
-- Lua cannot spread more of them.
local MANY_PARTS = 2000
local entries, stamp, jobs = ARGV[2], pack('<I8', now), 0
local in_line = { read(EACH_LINE, counters, 8 * IN_LINE - 7) }
local parts, of = {}, nil
for n = 1, #entries / 14 do
  local priority, count = byte(entries, 14 * n - 12), read('<I2', entries, 14 * n - 7)
  if of and (of ~= priority or #parts > MANY_PARTS) then
    call('RPUSH', KEYS[LINES + of], unpack(parts))
    parts = {}
  end
  local line, last = 2 * priority + 2, #parts
  of, parts[last + 1], parts[last + 2] = priority, sub(entries, 14 * n - 11, 14 * n) .. stamp, ARGV[n + 2]
  in_line[line], jobs = in_line[line] + count, jobs + count
end
call('RPUSH', KEYS[LINES + of], unpack(parts))
call('HSET', SESSION, lane, sub(ARGV[1], 5, 15) .. '\0\0\0\0')
local ready, enqueued = read('<I8', counters, 8 * N_READY - 7), read('<I8', counters, 8 * ENQUEUED - 7)
call('SET', META, sub(counters, 1, 64) .. pack('<I8', ready + jobs) .. sub(counters, 73, 112)
  .. pack('<I8', enqueued + jobs) .. sub(counters, 121, 240) .. pack(EACH_LINE, unpack(in_line, 1, 16)))
wake(SLEEP, jobs, 'j')
return pack('<I1I8I1I4', 0, now, 0, 0)
