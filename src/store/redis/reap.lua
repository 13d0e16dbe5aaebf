-- reap: expire overdue leases, the oldest first; then promote jobs that are due.
-- in   1 request · 2 how many leases at most, in all steps from here on · 3 how many jobs
-- out  [u32 leases][u32 jobs] left for further steps, [u32 n] n × report
-- why  for queues that nobody claims from, and before a claim that finds more than a step's work
local function reap()
  local status, first = recall()
  if status ~= DONE or first then return reply(status, first) end
  local leases, jobs, reports = tonumber(ARGS[2]), tonumber(ARGS[3]), {}
  if leases > 0 then
    local due, count = overdue_leases(leases)
    local done
    reports, done = expire_newest(due, count)
    leases = count - done
  elseif jobs > 0 then
    local done = promote(min(jobs, PROMOTIONS))
    jobs = done == PROMOTIONS and jobs - done or 0
  end
  local answer = pack('<I4I4I4', leases, jobs, #reports) .. concat(reports)
  remember(answer)
  save_meta()
  wake()
  return reply(DONE, answer)
end
register('reap', reap, { 'allow-oom' })
