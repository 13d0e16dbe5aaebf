-- plain: the way of plain jobs, which come by the hundred. A script starts here, before it
-- makes the functions for everything else; if a call turns out not to be plain, nothing has been
-- changed, and the rest of the script takes it up from the start.

-- Whether a request is neither a repeat nor to be refused.
local function is_new(request)
  local lane, seq, _, heard = read('<c4I8I1I8', request)
  local kept = call('HMGET', SESSION, 'open', lane)
  return kept[1] and now - heard <= SESSION_IDLE and (not kept[2] or (read('<I8', kept[2])) < seq)
end
local function keep_answer(request, answer)
  call('HSET', SESSION, sub(request, 1, 4), sub(request, 5, 13) .. answer)
end

-- The counters of a partition that is there and has no index.
local function plain_counters()
  local raw = call('GET', META)
  if not raw then return nil end
  local counters = { read(FIELDS, raw) }
  return counters[INDEX] == 0 and counters
end
local function keep_counters(counters) call('SET', META, pack(FIELDS, unpack(counters, 1, 46))) end
