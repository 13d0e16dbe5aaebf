-- checkpoint: save state under a lease, never behind what that lease has saved.
-- in   1 request · 2 n × [8 grant][16 nonce][u16 lease][16 job][8 seq][u32 bytes][state]
-- out  per checkpoint a verdict byte as in settle, or 8 and the seq that is saved
-- why  a note beside the grant: the records of the other leases are not rewritten

-- Whether a checkpoint's number comes after another's.
local function later(a, b)
  local low_a, high_a = read('<I4I4', a)
  local low_b, high_b = read('<I4I4', b)
  return high_a > high_b or (high_a == high_b and low_a > low_b)
end
-- Reads one. Returns where the next begins, the grant if the lease is held, and of what is to be
-- saved the place, the number and the bytes; or else what to answer.
local function read_checkpoint(data, at)
  local gid, nonce, lease, id, seq, bytes
  gid, nonce, lease, id, seq, bytes, at = read('<c8c16I2c16c8I4', data, at)
  local g, answer = current(gid, nonce, lease, id), nil
  if not g then
    refused(1)
    answer = '\0'
  else
    local n = note(g, lease)
    if n.seq and later(n.seq, seq) then answer = '\8' .. n.seq end
  end
  return at + bytes, g, lease, seq, sub(data, at, at + bytes - 1), answer
end
local function is_saved(g, lease)
  return char(1 + (g.deadline <= now and 2 or 0) + (note(g, lease).cancel and 4 or 0))
end

local function checkpoint()
  local status, first = recall()
  if status ~= DONE or first then return reply(status, first) end
  local data, at, answers = ARGS[2], 1, {}
  while at <= #data do
    local g, lease, seq, state, answer
    at, g, lease, seq, state, answer = read_checkpoint(data, at)
    if not answer then
      set_note(g, lease, { seq = seq, state = state })
      answer = is_saved(g, lease)
    end
    answers[#answers + 1] = answer
  end
  save_grants()
  local all = concat(answers)
  remember(all)
  save_meta()
  return reply(DONE, all)
end
register('checkpoint', checkpoint, { 'allow-oom' })

-- checkpoint_with: run the caller's commands and save state under the lease, in one step.
-- in   keys: the partition's, the session, one per command
--      1 request · 2 one checkpoint, as in checkpoint · 3… the commands
-- out  a verdict as in checkpoint; or 255, the number of a command that would fail [u16], and why
-- why  the state says what has been done: it is saved in the step that does it. A number that is
--      saved has had its commands run, so the same call under another request runs nothing
local function checkpoint_with()
  local status, first = recall()
  if status ~= DONE or first then return reply(status, first) end
  local _, g, lease, seq, state, answer = read_checkpoint(ARGS[2], 1)
  if not answer then
    local wrong, why, commands
    if note(g, lease).seq ~= seq then
      commands, wrong, why = prepared(KEYS, ARGS, 3, 3)
      if commands then
        for _, command in ipairs(commands) do call(unpack(command)) end
        set_note(g, lease, { seq = seq, state = state })
      end
    end
    answer = wrong and pack('<I1I2', 255, wrong) .. why or is_saved(g, lease)
  end
  save_grants()
  remember(answer)
  save_meta()
  return reply(DONE, answer)
end
register('checkpoint_with', checkpoint_with, {})
