-- reap: expire overdue leases, the oldest first.
-- in   1 request · 2 how many at most
-- out  [u32 n] n × report
-- why  for queues that nobody claims from
local status, first = recall(ARGV[1])
if status ~= DONE or first then return reply(status, first) end
open_meta()
local reports = expire_overdue(tonumber(ARGV[2]))
local answer = pack('<I4', #reports) .. concat(reports)
remember(answer)
save_meta()
ring()
return reply(DONE, answer)
