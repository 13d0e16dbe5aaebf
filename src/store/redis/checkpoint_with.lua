-- checkpoint_with: run the caller's commands and save state under the lease, in one step.
-- in   keys: the partition's, one per command, the session
--      1 request · 2 one checkpoint, as in checkpoint · 3… the commands
-- out  a verdict as in checkpoint; or 255, the number of a command that would fail [u16], and why
-- why  the state says what has been done: it is saved in the step that does it. A number that is saved
--      has had its commands run, so the same call under another request runs nothing
local status, first = recall(ARGV[1])
if status ~= DONE or first then return reply(status, first) end
open_meta()
local gid, nonce, lease, id, seq, bytes, at = read('<c8c16I2c16c8I4', ARGV[2])
local g = current(gid, nonce, lease, id)
local answer
if not g then
  add(FENCED, 1)
  answer = '\0'
else
  local n = note(g, lease)
  if n.seq and later(n.seq, seq) then
    answer = '\8' .. n.seq
  else
    if n.seq ~= seq then
      local commands, wrong, why = prepared(FIRST_LINE + 16, 3)
      if commands then
        for _, command in ipairs(commands) do call(unpack(command)) end
        set_note(g, lease, { seq = seq, state = sub(ARGV[2], at, at + bytes - 1) })
      else
        answer = pack('<I1I2', 255, wrong) .. why
      end
    end
    answer = answer or char(1 + (g.deadline <= now and 2 or 0) + (n.cancel and 4 or 0))
  end
end
save_grants()
remember(answer)
save_meta()
return reply(DONE, answer)
