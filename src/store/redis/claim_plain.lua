-- claim, plainly: nothing is overdue or due, no suspect can be admitted, the jobs come without
-- terms of their own and fit into one grant. Riders are plain, too.
local function claim_plainly()
  local counters = is_new(ARGV[1]) and plain_counters()
  if not counters or counters[PAUSED] == 1 then return nil end
  local max, admit, most, term, lifetime, term_raw, seen, nonce = read('<I2I1I4I8I8c12I8c16', ARGV[2])
  local base = math.max(counters[LAST] + 1, counters[FLOOR] + 1, now)
  local limit = math.max(now, counters[FLOOR]) + LEAD
  if seen + 1 > base and seen + 1 <= limit then base = seen + 1 end
  if base > limit then return nil end
  max, most = math.min(max, limit - base + 1), math.min(most, GRANT_BYTES)
  if admit == 1 then
    for line = 0, 14, 2 do
      if counters[IN_LINE + line] > 0 then return nil end
    end
  end
  local next = call('ZRANGE', ENDS, '0', '0', 'WITHSCORES')
  local overdue, due = tonumber(next[2]), nil
  if overdue and overdue <= now then return nil end
  if counters[N_SCHEDULED] > 0 then
    due = tonumber(call('ZRANGE', DUE, '0', '0', 'WITHSCORES')[2])
    if due and due <= now then return nil end
  end
  local riders, verdicts
  if ARGV[5] ~= '' then
    if sub(ARGV[5], 1, 4) == sub(ARGV[1], 1, 4) or not is_new(ARGV[5]) then return nil end
    riders, verdicts = plain_runs(ARGV[6])
    if not riders then return nil end
  end

  local segs, lines, ids, taken, weight, stored, own = {}, {}, {}, 0, 0, 0, 0
  local function give_back()
    for n = #segs, 1, -1 do call('LPUSH', KEYS[FIRST_LINE + lines[n]], segs[n]) end
  end
  for line = 1, 15, 2 do
    local left = counters[IN_LINE + line]
    while left > 0 and taken < max do
      local key = KEYS[FIRST_LINE + line]
      local seg = call('LPOP', key)
      -- The line is shorter than its count: the server lost writes.
      if not seg then return give_back() end
      segs[#segs + 1], lines[#lines + 1] = seg, line
      local bytes, count, flags, heavy, stamp = read('<I4I2I2I4c8', seg)
      if bit.band(flags, TERM + LIFETIME) ~= 0 or weight + heavy > most then return give_back() end
      if taken + count > max then
        local n, body, part = max - taken, 21 + 16 * count, 0
        local from = body
        for _ = 1, n do
          local length = read('<I4', seg, from)
          part = part + read('<I4', seg, from + 52)
          from = from + length
        end
        segs[#segs] = pack('<I4I2I2I4c8', 20 + 16 * n + from - body, n, flags, part, stamp)
          .. sub(seg, 21, 20 + 16 * n) .. sub(seg, body, from - 1)
        call('LPUSH', key, pack('<I4I2I2I4c8', bytes - 16 * n - (from - body), count - n, flags, heavy - part, stamp)
          .. sub(seg, 21 + 16 * n, body - 1) .. sub(seg, from))
        count, heavy = n, part
      end
      ids[#ids + 1] = sub(seg, 21, 20 + 16 * count)
      stored, own = stored + #segs[#segs], bit.bor(own, flags)
      taken, weight, left = taken + count, weight + heavy, left - count
    end
    counters[IN_LINE + line] = left
  end

  if riders then
    end_runs(riders, counters)
    keep_answer(ARGV[5], verdicts)
    local first = riders[next[1]]
    if first and first.live == 0 then
      overdue = tonumber(call('ZRANGE', ENDS, '0', '0', 'WITHSCORES')[2])
    end
  end
  local sums, kept = pack('<I2I4I1', taken, weight, 0), '\0\0'
  local given = '\0\0'
  if taken > 0 then
    local gid, granted = pack('>I8', base), math.min(term, lifetime)
    local till = now + granted
    if #segs > MANY_PIECES then segs = { concat(segs) } end
    call('HSET', HELD, gid, pack(HEAD, till, 0, nonce, now, term_raw, term, lifetime, taken, taken, 0,
      #ARGV[3], #ARGV[4], 0, #segs, stored) .. ARGV[3] .. ARGV[4])
    call('HSET', RECS, gid, pack('<I2', own) .. concat(ids))
    put_pieces(gid, segs)
    call('ZADD', ENDS, till, gid)
    if not overdue or till < overdue then overdue = till end
    counters[LAST] = base + taken - 1
    counters[GRANTED] = counters[GRANTED] + taken
    counters[LIVE] = counters[LIVE] + taken
    counters[N_LEASED] = counters[N_LEASED] + taken
    counters[N_READY] = counters[N_READY] - taken
    kept = '\1\0' .. gid .. pack('<I8', granted)
    given = kept .. pack('<I8c12I2I4', now, term_raw, 0, stored)
  end
  keep_answer(ARGV[1], sums .. kept .. '\0\0\0\0')
  keep_counters(counters)
  -- In parts: to join them would cost more than all the rest.
  table.insert(segs, 1, pack('<I1I8I1I1I4', 0, now, 0, 0, verdicts and #verdicts or 0) .. (verdicts or '')
    .. '\0' .. sums .. pack('<I1I8I1I8', due and 1 or 0, due and due - now or 0, overdue and 1 or 0,
      overdue and overdue - now or 0) .. given)
  segs[#segs + 1] = '\0\0\0\0'
  return segs
end
do
  local answer = claim_plainly()
  if answer then return answer end
end
