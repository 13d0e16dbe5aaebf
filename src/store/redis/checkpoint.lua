-- checkpoint: save state under a lease, never behind what that lease has saved.
-- in   1 request · 2 n × [8 grant][16 nonce][u16 lease][16 job][8 seq][u32 bytes][state]
-- out  per checkpoint a verdict byte as in settle, or 8 and the seq that is saved
-- why  a note beside the grant: the records of the other leases are not rewritten
local status, first = recall(ARGV[1])
if status ~= DONE or first then return reply(status, first) end
open_meta()
local data, at, answers = ARGV[2], 1, {}
while at <= #data do
  local gid, nonce, lease, id, seq, bytes
  gid, nonce, lease, id, seq, bytes, at = read('<c8c16I2c16c8I4', data, at)
  local state = sub(data, at, at + bytes - 1)
  at = at + bytes
  local g = current(gid, nonce, lease, id)
  if not g then
    add(FENCED, 1)
    answers[#answers + 1] = '\0'
  else
    local n = note(g, lease)
    if n.seq and later(n.seq, seq) then
      answers[#answers + 1] = '\8' .. n.seq
    else
      set_note(g, lease, { seq = seq, state = state })
      answers[#answers + 1] = char(1 + (g.deadline <= now and 2 or 0) + (n.cancel and 4 or 0))
    end
  end
end
save_grants()
local answer = concat(answers)
remember(answer)
save_meta()
return reply(DONE, answer)
