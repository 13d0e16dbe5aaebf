-- runs: neighbours in a grant that complete and leave nothing behind.

-- The grants that these settlements end or shorten, and the verdicts; nothing if one of them is not
-- plain. What is here is read only.
local function plain_runs(data)
  local grants, verdicts, at = {}, {}, 1
  while at <= #data do
    local gid, nonce, op, from, n
    gid, nonce, op, from, n, at = read('<c8c16I1I2I2', data, at)
    if op ~= 0 then return nil end
    local g = grants[gid]
    if not g then
      local raw = #grants < 500 and call('HGET', HELD, gid)
      if not raw then return nil end
      local till, _, nonce_of, _, _, _, _, count, live, noted, owners, tasks, mapped, pieces, bytes, rest =
        read(HEAD, raw)
      if noted == 1 or mapped > 0 then return nil end
      local roll = call('HGET', RECS, gid)
      if bit.band((read('<I2', roll)), LASTING) ~= 0 then return nil end
      rest = rest + owners + tasks
      g = { gid = gid, nonce = nonce_of, raw = raw, late = till <= now, count = count, live = live,
        ends = rest, ended = sub(raw, rest), done = 0, roll = roll,
        pieces = pieces, bytes = bytes }
      grants[gid], grants[#grants + 1] = g, g
    end
    local till = from + n
    if g.nonce ~= nonce or till > g.count then return nil end
    local ended = g.ended ~= '' and string.find(g.ended, '1', from + 1, true)
    if ended and ended <= till then return nil end
    if sub(g.roll, 16 * from + 3, 16 * till + 2) ~= sub(data, at, at + 16 * n - 1) then return nil end
    at = at + 16 * n
    g.live, g.done = g.live - n, g.done + n
    if g.live > 0 then
      if g.live * 2 <= g.count and g.bytes > SMALL_GRANT then return nil end
      if g.ended == '' then g.ended = rep('0', g.count) end
      g.ended = sub(g.ended, 1, from) .. rep('1', n) .. sub(g.ended, till + 1)
    end
    verdicts[#verdicts + 1] = rep(g.late and '\3' or '\1', n)
  end
  return grants, concat(verdicts)
end

local function end_runs(grants, counters)
  local gone, stored, done = {}, {}, 0
  for n = 1, #grants do
    local g = grants[n]
    done = done + g.done
    if g.late then counters[LATE] = counters[LATE] + g.done end
    if g.live == 0 then
      gone[#gone + 1] = g.gid
      stored[#stored + 1] = g.gid
      piece_names(stored, g.gid, g.pieces)
    else
      call('HSET', HELD, g.gid, sub(g.raw, 1, 66) .. pack('<I2', g.live) .. sub(g.raw, 69, g.ends - 1)
        .. g.ended)
    end
  end
  if #gone > 0 then
    call('HDEL', HELD, unpack(gone))
    many('HDEL', RECS, stored)
    call('ZREM', ENDS, unpack(gone))
  end
  counters[LIVE] = counters[LIVE] - done
  counters[N_LEASED] = counters[N_LEASED] - done
  counters[ENDED] = counters[ENDED] + done
end
