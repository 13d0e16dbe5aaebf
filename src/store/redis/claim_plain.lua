-- claim, plainly: nothing is overdue or due, no suspect can be admitted, the jobs come without
-- terms of their own and fit into one grant. Riders are plain, too.
-- in   as claim, but the riders are runs only · 7 … their ids
-- out  as claim, in parts; or NOT_PLAIN
local DUE, LINES = KEYS[5], 6
-- More of them are joined, some at a time: each costs a name, and of a long string every byte costs three times.
local MANY_PIECES = 64
local max, admit, most, term, lifetime, term_raw, seen, nonce = read('<I2I1I4I8I8c12I8c16', ARGV[2])
local paused = read('<I8', counters, 8 * PAUSED - 7)
local last, floor, scheduled, ready = read('<I8I8I8I8', counters, 8 * LAST - 7)
local base = math.max(last + 1, floor + 1, now)
local limit = math.max(now, floor) + LEAD
if seen + 1 > base and seen + 1 <= limit then base = seen + 1 end
if paused == 1 or base > limit then return NOT_PLAIN end
max, most = math.min(max, limit - base + 1), math.min(most, GRANT_BYTES)
local lines = { read(EACH_LINE, counters, 8 * IN_LINE - 7) }
if admit == 1 then
  for line = 1, 15, 2 do
    if lines[line] > 0 then return NOT_PLAIN end
  end
end
local next = call('ZRANGE', ENDS, '0', '0', 'WITHSCORES')
local overdue, due = tonumber(next[2]), nil
if overdue and overdue <= now then return NOT_PLAIN end
if scheduled > 0 then
  due = tonumber(call('ZRANGE', DUE, '0', '0', 'WITHSCORES')[2])
  if due and due <= now then return NOT_PLAIN end
end
if #grants > 0 then
  local lane_of, seq_of, _, _, heard_of = read('<c4I8I1I2I8', ARGV[5])
  local kept_of = call('HGET', SESSION, lane_of)
  if now - heard_of > SESSION_IDLE or kept_of and read('<I8', kept_of) >= seq_of then return NOT_PLAIN end
end

-- What is taken, in parts, and the lines that they are from; of segments in two elements also these.
local parts, from, ids, taken, weight, stored, flags = {}, {}, {}, 0, 0, 0, 0
local starts, rests = {}, {}
local function give_back(key, popped, at)
  for n = #popped, at, -1 do call('LPUSH', key, popped[n]) end
  for n = #parts, 1, -1 do call('LPUSH', from[n], parts[n]) end
  return NOT_PLAIN
end
for priority = 0, 7 do
  local line, key, size, each, step = 2 * priority + 2, KEYS[LINES + priority], max, 2, 1
  while lines[line] > 0 and taken < max do
    -- Segments of a line are much alike: as many at once as will be wanted if they are. But the first may
    -- be what a claim left of one, and to read and put back those that are too many costs more than to
    -- ask again.
    local popped = call('LPOP', key, each * math.max(math.min(math.floor((max - taken) / size), step), 1))
    step = 2 * step
    -- The line is shorter than its count: the server lost writes.
    if not popped then return give_back(key, {}, 1) end
    local n = 1
    while n <= #popped do
      local seg, rest, at = popped[n], nil, START
      local _, count, own, heavy = read('<I4I2I2I4', seg)
      if taken == max then
        for back = #popped, n, -1 do call('LPUSH', key, popped[back]) end
        break
      end
      if #seg == START then
        if not popped[n + 1] then popped[n + 1] = call('LPOP', key) end
        rest, at = popped[n + 1], 0
      end
      if bit.band(own, TERM + LIFETIME) ~= 0 or weight + heavy > most then return give_back(key, popped, n) end
      each = rest and 2 or 1
      n = n + each
      if taken + count > max then
        for back = #popped, n, -1 do call('LPUSH', key, popped[back]) end
        local some, left
        some, left, count, heavy = cut(seg, rest, max - taken, most)
        call('LPUSH', key, left[2], left[1])
        for m = 1, 4 do
          stored, from[#parts + 1], parts[#parts + 1] = stored + #some[m], key, some[m]
        end
        ids[#ids + 1], n = some[3], #popped + 1
      else
        local form = read('<I2', rest or seg, at + 1)
        ids[#ids + 1] = sub(rest or seg, at + 3 + form, at + 2 + form + 16 * count)
        stored, from[#parts + 1], parts[#parts + 1] = stored + #seg, key, seg
        if rest then
          stored, from[#parts + 1], parts[#parts + 1] = stored + #rest, key, rest
          starts[#starts + 1], rests[#rests + 1] = seg, rest
        end
      end
      size, flags = count, bit.bor(flags, own)
      taken, weight, lines[line] = taken + count, weight + heavy, lines[line] - count
    end
  end
end

local done, late = 0, 0
if #grants > 0 then
  done, late = end_runs()
  call('HSET', SESSION, sub(ARGV[5], 1, 4), sub(ARGV[5], 5, 15) .. verdicts)
  local first = grants[next[1]]
  if first and first.live == 0 or next[1] and #next[1] == ROUND then
    overdue = tonumber(call('ZRANGE', ENDS, '0', '0', 'WITHSCORES')[2])
  end
end
local sums, answer, given = pack('<I2I4I1', taken, weight, 0), '\0\0', '\0\0'
if taken > 0 then
  local gid, granted = pack('>I8', base), math.min(term, lifetime)
  local till = now + granted
  local pieces, apart = parts, 0
  if 2 * #rests == #parts and #rests < MANY_PIECES then
    pieces, apart = rests, APART
    table.insert(rests, 1, concat(starts))
  elseif #parts > MANY_PIECES then
    local each = math.ceil(#parts / MANY_PIECES)
    pieces = {}
    for n = 1, #parts, each do pieces[#pieces + 1] = concat(parts, '', n, math.min(n + each - 1, #parts)) end
  end
  local name, capped = gid .. nonce, now + lifetime - term
  -- To join what is one string costs as much as to read it.
  local roll = ids[2] and concat(ids) or ids[1]
  local fields = {
    gid, pack(HEAD, #ARGV[3], #ARGV[4], 0, #pieces + apart, stored, flags, nonce, now, term_raw, lifetime)
      .. ARGV[3] .. ARGV[4] .. (taken == 1 and roll or ''),
    name, pack(CELL, taken > 1 and till or 0, 0, ALONE, capped - capped % SAME_TIME, term, taken, taken, 0),
  }
  for n = 1, #pieces do fields[2 * n + 3], fields[2 * n + 4] = gid .. char(n), pieces[n] end
  if taken > 1 then fields[#fields + 1], fields[#fields + 2] = gid .. ROLL, roll end
  call('HSET', HELD, unpack(fields))
  call('ZADD', ENDS, till, name)
  if not overdue or till < overdue then overdue = till end
  last = base + taken - 1
  answer = '\1\0' .. gid .. pack('<I8', granted)
  given = answer .. pack('<I8c12I2I4', now, term_raw, 0, stored)
end
call('HSET', SESSION, lane, sub(ARGV[1], 5, 15) .. sums .. answer .. '\0\0\0\0')
if taken + done > 0 then
  local leased, granted = read('<I8', counters, 8 * N_LEASED - 7), read('<I8', counters, 8 * GRANTED - 7)
  local completed = read('<I8', counters, 8 * ENDED - 7)
  local live, lates = read('<I8I8', counters, 8 * LIVE - 7)
  call('SET', META, sub(counters, 1, 40) .. pack('<I8I8I8I8', last, floor, scheduled, ready - taken)
    .. sub(counters, 73, 80) .. pack('<I8', leased + taken - done) .. sub(counters, 89, 120)
    .. pack('<I8I8', granted + taken, completed + done) .. sub(counters, 137, 200)
    .. pack('<I8I8', live + taken - done, lates + late) .. sub(counters, 217, 240)
    .. pack(EACH_LINE, unpack(lines, 1, 16)))
end
-- In parts: to join them would cost more than all the rest.
table.insert(parts, 1, pack('<I1I8I1I1I4', 0, now, 0, 0, #verdicts) .. verdicts
  .. '\0' .. sums .. pack('<I1I8I1I8', due and 1 or 0, due and due - now or 0, overdue and 1 or 0,
    overdue and overdue - now or 0) .. given)
parts[#parts + 1] = '\0\0\0\0'
return parts
