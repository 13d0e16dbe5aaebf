-- enqueue: store jobs, all of a call together.
-- in   1 request · 2 the jobs: [u64 delay][record]
-- out  [u32 n] then n × [u32 place][16 holder]: jobs that were there, or whose unique key is held
-- why  the time is the store's, so it is stamped here
local status, first = recall(ARGV[1])
if status ~= DONE or first then return reply(status, first) end
open_meta(true)
local jobs, at, place, held_by = ARGV[2], 1, 0, {}
local stamp = p8(now)

-- Stores a job, or returns the id of the one that keeps it out.
local function store(rec, delay)
  local id = id_of(rec)
  if call('HEXISTS', JOBS, id) == 1 then return id end
  local p = has((read('<I2', rec, 7)), UNIQUE + EXCLUSIVE) and parse(rec) or {}
  local holder = take_unique(id, p)
  if holder then return holder end
  add(ENQUEUED, 1)
  if delay == 0 then join(rec, p) else put_scheduled(rec) end
end

while at <= #jobs do
  local delay, from = u8(jobs, at), at + 8
  at = from + u4(jobs, from)
  local run_at = delay == 0 and stamp or p8(now + delay)
  local holder = store(sub(jobs, from, from + 31) .. stamp .. run_at .. sub(jobs, from + 48, at - 1), delay)
  if holder then held_by[#held_by + 1] = pack('<I4', place) .. holder end
  place = place + 1
end

local answer = pack('<I4', #held_by) .. concat(held_by)
remember(answer)
save_meta()
ring()
return reply(DONE, answer)
