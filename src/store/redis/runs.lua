-- runs: neighbours in a grant that complete and leave nothing behind. RUNS has them, the ids of each are
-- an argument of their own from IDS on: to cut them out would cost more than to compare them.

-- The grants that they end or shorten, and the verdicts. What is here is read only.
local grants, verdicts = {}, {}
for run = 0, #RUNS / 29 - 1 do
  local name, _, from, n = read('<c24I1I2I2', RUNS, 29 * run + 1)
  local g = grants[name]
  if not g then
    if #grants == 100 then return NOT_PLAIN end
    local gid = sub(name, 1, 8)
    local stored = call('HMGET', HELD, name, gid, gid .. ROLL)
    local cell, raw = stored[1], stored[2]
    if not cell then return NOT_PLAIN end
    local count, live, noted = read('<I2I2I1', cell, KIND + 16)
    local owners, tasks, mapped, pieces, bytes, flags = read('<I2I2I2I2I4I2', raw)
    if noted == 1 or mapped > 0 or bit.band(flags, LASTING) ~= 0 then return NOT_PLAIN end
    local rest, late = HEAD_BYTES + owners + tasks, deadline_of(cell, raw) <= now
    local round = sub(cell, 13, KIND - 1)
    -- A round's deadline is no earlier than those in its cells.
    if late and round ~= ALONE then late = read('<I8', call('HGET', HELD, round .. SHARED)) <= now end
    local ended, roll = sub(raw, rest + 1), stored[3]
    if count == 1 then ended, roll = '', ended end
    g = { gid = gid, name = name, cell = cell, raw = raw, round = round, late = late, count = count, live = live,
      ends = rest, ended = ended, done = 0, roll = roll, pieces = pieces, bytes = bytes }
    grants[name], grants[#grants + 1] = g, g
  end
  local till, ids = from + n, ARGV[IDS + run]
  if till > g.count then return NOT_PLAIN end
  local ended = g.ended ~= '' and string.find(g.ended, '1', from + 1, true)
  if ended and ended <= till then return NOT_PLAIN end
  if g.roll ~= ids and sub(g.roll, 16 * from + 1, 16 * till) ~= ids then return NOT_PLAIN end
  g.live, g.done = g.live - n, g.done + n
  if g.live > 0 then
    if g.live * 2 <= g.count and g.bytes > SMALL_GRANT then return NOT_PLAIN end
    if g.ended == '' then g.ended = rep('0', g.count) end
    g.ended = sub(g.ended, 1, from) .. rep('1', n) .. sub(g.ended, till + 1)
  end
  verdicts[run + 1] = rep(g.late and '\3' or '\1', n)
end
verdicts = concat(verdicts)

-- Ends them, and returns how many leases that are, and how many of those were late.
local function end_runs()
  local gone, left, stored, done, late = {}, {}, {}, 0, 0
  for n = 1, #grants do
    local g = grants[n]
    local gid = g.gid
    done = done + g.done
    if g.late then late = late + g.done end
    if g.live == 0 then
      local round = g.round
      if round == ALONE then gone[#gone + 1] = g.name else left[#left + 1], left[#left + 2] = round, g.name end
      stored[#stored + 1] = g.name
      stored[#stored + 1] = gid
      stored[#stored + 1] = gid .. ROLL
      for piece = 1, g.pieces % APART do stored[#stored + 1] = gid .. char(piece) end
    else
      call('HSET', HELD, gid, sub(g.raw, 1, g.ends) .. g.ended, g.name, sub(g.cell, 1, KIND + 17) .. pack('<I2I1', g.live, 0))
    end
  end
  if #stored > 0 then call('HDEL', HELD, unpack(stored)) end
  if #gone > 0 then call('ZREM', ENDS, unpack(gone)) end
  leave(left)
  return done, late
end
