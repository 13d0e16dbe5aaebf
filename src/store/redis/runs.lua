-- runs: neighbours in a grant that complete and leave nothing behind. RUNS has them, the ids of each are
-- an argument of their own from IDS on: to cut them out would cost more than to compare them.
local HELD, ENDS = KEYS[3], KEYS[4]

-- The grants that they end or shorten, and the verdicts. What is here is read only.
local grants, verdicts = {}, {}
for run = 0, #RUNS / 29 - 1 do
  local gid, nonce, _, from, n = read('<c8c16I1I2I2', RUNS, 29 * run + 1)
  local g = grants[gid]
  if not g then
    if #grants == 100 then return NOT_PLAIN end
    local stored = call('HMGET', HELD, gid, gid .. ROLL)
    local raw = stored[1]
    if not raw then return NOT_PLAIN end
    local till, _, nonce_of, _, _, _, _, count, live, noted, owners, tasks, mapped, pieces, bytes, flags, rest =
      read(HEAD, raw)
    if noted == 1 or mapped > 0 or bit.band(flags, LASTING) ~= 0 then return NOT_PLAIN end
    rest = rest + owners + tasks
    g = { gid = gid, nonce = nonce_of, raw = raw, late = till <= now, count = count, live = live,
      ends = rest, ended = sub(raw, rest), done = 0, roll = stored[2], pieces = pieces, bytes = bytes }
    grants[gid], grants[#grants + 1] = g, g
  end
  local till, ids = from + n, ARGV[IDS + run]
  if g.nonce ~= nonce or till > g.count then return NOT_PLAIN end
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
  local gone, stored, done, late = {}, {}, 0, 0
  for n = 1, #grants do
    local g = grants[n]
    local gid = g.gid
    done = done + g.done
    if g.late then late = late + g.done end
    if g.live == 0 then
      gone[#gone + 1] = gid
      stored[#stored + 1] = gid
      stored[#stored + 1] = gid .. ROLL
      for piece = 1, g.pieces % APART do stored[#stored + 1] = gid .. char(piece) end
    else
      call('HSET', HELD, gid, sub(g.raw, 1, 66) .. pack('<I2', g.live) .. sub(g.raw, 69, g.ends - 1) .. g.ended)
    end
  end
  if #gone > 0 then
    call('HDEL', HELD, unpack(stored))
    call('ZREM', ENDS, unpack(gone))
  end
  return done, late
end
