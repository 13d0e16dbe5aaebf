-- settle: end held leases.
-- in   1 request · 2 settlements, as `settle_all` in ending.lua reads them
-- out  one verdict per settlement, in order
-- why  the receipt is compared in the step that ends the lease
local function settle()
  local status, verdicts = recall()
  if status == DONE and not verdicts then
    verdicts = settle_all(ARGS[2])
    save_grants()
    remember(verdicts)
    save_meta()
    wake()
  end
  return reply(status, verdicts)
end
register('settle', settle, { 'allow-oom' })

-- complete: run the caller's commands and complete the job, in one step.
-- in   keys: the partition's, the session, one per command
--      1 request · 2 one settlement, as in settle · 3… the commands
-- out  a verdict byte as in settle; or 255, the number of a command that would fail [u16], and why
-- why  the receipt is compared in the step that runs the commands: whoever has been replaced writes
--      nothing, and a repeat of the call writes nothing more
local function complete()
  local status, first = recall()
  if status ~= DONE or first then return reply(status, first) end
  local gid, nonce, _, lease, id = read('<c8c16I2I2c16', ARGS[2])
  local answer
  if current(gid, nonce, lease, id) then
    local commands, wrong, why = prepared(KEYS, ARGS, 3, 3)
    if commands then
      for _, command in ipairs(commands) do call(unpack(command)) end
    else
      answer = pack('<I1I2', 255, wrong) .. why
    end
  end
  answer = answer or settle_all(ARGS[2])
  save_grants()
  remember(answer)
  save_meta()
  wake()
  return reply(DONE, answer)
end
register('complete', complete, {})
