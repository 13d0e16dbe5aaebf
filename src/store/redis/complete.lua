-- complete: run the caller's commands and complete the job, in one step.
-- in   keys: the partition's, one per command, the session
--      1 request · 2 one settlement, as in settle · 3… the commands
-- out  a verdict byte as in settle; or 255, the number of a command that would fail [u16], and why
-- why  the receipt is compared in the step that runs the commands: whoever has been replaced writes
--      nothing, and a repeat of the call writes nothing more
local status, first = recall(ARGV[1])
if status ~= DONE or first then return reply(status, first) end
open_meta()
local gid, nonce, lease, id = read('<c8c16I2c16', ARGV[2])
local answer
if current(gid, nonce, lease, id) then
  local commands, wrong, why = prepared(FIRST_LINE + 16, 3)
  if commands then
    for _, command in ipairs(commands) do call(unpack(command)) end
  else
    answer = pack('<I1I2', 255, wrong) .. why
  end
end
answer = answer or settle_all(ARGV[2])
save_grants()
remember(answer)
save_meta()
ring()
return reply(DONE, answer)
