-- enqueue: store jobs, all of a call together.
-- in   1 request · 2 make with an index: 0 or 1 · 3 what follows, in order: [0][priority][12 head of
--      a segment], or [1] and 13 bytes of no meaning · 4 … for each the ids and records of plain jobs
--      of one priority, or jobs of any kind: [u64 delay][record]
-- out  [u32 n] then n × [u32 place][16 holder]: the jobs that were there, or whose unique key is held
-- why  the time is the store's, so it is stamped here: once per segment, once per other job
local status, first = recall(ARGV[1])
if status ~= DONE or first then return reply(status, first) end
open_meta(tonumber(ARGV[2]))
local entries, place, held_by = ARGV[3], 0, {}
local indexed = M[INDEX] == 1

local function is_there(id)
  if call('HEXISTS', JOBS, id) == 0 then return false end
  held_by[#held_by + 1] = pack('<I4', place) .. id
  return true
end
local function put_segment(priority, head, body)
  local count = (read('<I2', head, 5))
  if indexed then
    local recs = {}
    open_segment(head .. p8(now) .. body, 1, recs)
    for _, rec in ipairs(recs) do
      if not is_there(id_of(rec)) then
        put_back(rec)
        add(ENQUEUED, 1)
      end
      place = place + 1
    end
    return
  end
  local line = priority * 2 + 1
  call('RPUSH', line_key(line), head .. p8(now), body)
  add(IN_LINE + line, count)
  add(N_READY, count)
  add(ENQUEUED, count)
  bells = bells + count
  place = place + count
end
local function put_jobs(items)
  local at = 1
  while at <= #items do
    local delay, from = u8(items, at), at + 8
    at = from + u4(items, from)
    local rec = sub(items, from, from + 31) .. p8(now) .. p8(now + delay) .. sub(items, from + 48, at - 1)
    local id = id_of(rec)
    if not is_there(id) then
      local p = parse(rec)
      local holder = take_unique(id, p)
      if holder then
        held_by[#held_by + 1] = pack('<I4', place) .. holder
      else
        add(ENQUEUED, 1)
        if delay == 0 then join(rec, p) else put_scheduled(rec) end
      end
    end
    place = place + 1
  end
end

for n = 1, #entries / 14 do
  local at, data = 14 * n - 13, ARGV[n + 3]
  if byte(entries, at) == 0 then
    put_segment(byte(entries, at + 1), sub(entries, at + 2, at + 13), data)
  else
    put_jobs(data)
  end
end

local answer = pack('<I4', #held_by) .. concat(held_by)
remember(answer)
save_meta()
ring()
return reply(DONE, answer)
