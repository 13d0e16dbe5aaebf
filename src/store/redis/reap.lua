-- reap: expire overdue leases, the oldest first; then promote jobs that are due.
-- in   1 request · 2 how many leases at most, in all steps from here on · 3 how many jobs
-- out  [u32 leases][u32 jobs] left for further steps, [u32 n] n × report
-- why  for queues that nobody claims from, and before a claim that finds more than a step's work
local status, first = recall(ARGV[1])
if status ~= DONE or first then return reply(status, first) end
open_meta()
local leases, jobs, reports = tonumber(ARGV[2]), tonumber(ARGV[3]), {}
if leases > 0 then
  local due, count = overdue_leases(leases)
  reports = expire_newest(due, count)
  leases = count - #reports
elseif jobs > 0 then
  local done = promote(math.min(jobs, PROMOTIONS))
  jobs = done == PROMOTIONS and jobs - done or 0
end
local answer = pack('<I4I4I4', leases, jobs, #reports) .. concat(reports)
remember(answer)
save_meta()
ring()
return reply(DONE, answer)
