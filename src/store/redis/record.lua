-- record: reading and changing job records. `store/codec.rs` has their layout.
local has = function(flags, flag) return bit.band(flags, flag) ~= 0 end

local function id_of(rec) return sub(rec, 17, 32) end
local function micros(rec, at)
  local seconds, nanos = read('<I8I4', rec, at)
  return seconds * 1000000 + math.floor(nanos / 1000)
end

local parse, rewrite
do
  -- Where the parts of a record are.
  function parse(rec)
    local flags = read('<I2', rec, 7)
    local at = 58 + byte(rec, 57)
    local p = { flags = flags }
    local function bytes()
      local from = at + 4
      at = from + u4(rec, at)
      return sub(rec, from, at - 1)
    end
    local function duration(flag)
      if not has(flags, flag) then return nil end
      at = at + 12
      return micros(rec, at - 12)
    end
    if has(flags, UNIQUE) then
      p.unique = bytes()
      p.window = duration(WINDOW)
    end
    if has(flags, EXCLUSIVE) then p.exclusive = bytes() end
    if has(flags, TERM) then p.term_raw = sub(rec, at, at + 11) end
    p.term = duration(TERM)
    p.lifetime = duration(MAX_LIFETIME)
    duration(TIMEOUT)
    duration(STALL_LIMIT)
    p.retention = duration(RETENTION)
    if has(flags, MAX_FAILURES) then at = at + 4 end
    if has(flags, RETRY) then at = at + 32 end
    if has(flags, VERSION) then at = at + 4 end
    if has(flags, HEADERS) then
      local count = u4(rec, at)
      at = at + 4
      for _ = 1, 2 * count do at = at + 4 + u4(rec, at) end
    end
    at = at + 4 + u4(rec, at)
    p.rest = at
    if has(flags, CHECKPOINT) then
      p.saved = 20 + u4(rec, at + 16)
      p.checkpoint = sub(rec, at, at + p.saved - 1)
      at = at + p.saved
    end
    if has(flags, RESULT) then
      local from = at
      at = at + 4 + u4(rec, at)
      p.result = sub(rec, from, at - 1)
    end
    if has(flags, DECLINED) then p.declined = sub(rec, -8) end
    if has(flags, HISTORY) then p.history = sub(rec, at, p.declined and -9 or -1) end
    return p
  end

  -- Adds an ended lease; the ninth oldest is forgotten.
  local function lengthen(history, ended)
    if not history then return pack('<I4', 1) .. ended end
    local count, at = u4(history, 1), 5
    if count == HISTORY_LENGTH then
      local parts = byte(history, at + 29)
      at = at + 30
      for _ = 1, 2 + parts % 2 do at = at + 4 + u4(history, at) end
      if parts >= 2 then at = at + 17 + 4 + u4(history, at + 17) end
      count = count - 1
    end
    return pack('<I4', count + 1) .. sub(history, at) .. ended
  end

  -- The record with some of its parts changed.
  function rewrite(rec, p, change)
    local checkpoint = change.checkpoint or p.checkpoint
    local result = change.result or p.result
    local history = change.ended and lengthen(p.history, change.ended) or p.history
    local declined = p.declined
    if change.ended then declined = change.declined and (declined or p8(now)) end
    local weight = u4(rec, 53)
    if change.checkpoint then weight = weight - (p.saved or 20) + #change.checkpoint end
    if change.ended then weight = weight + #history - (p.history and #p.history or 4) end
    local flags = bit.band(p.flags, CHECKPOINT - 1)
    if checkpoint then flags = flags + CHECKPOINT end
    if result then flags = flags + RESULT end
    if history then flags = flags + HISTORY end
    if declined then flags = flags + DECLINED end
    local tail = sub(rec, 57, p.rest - 1) .. (checkpoint or '') .. (result or '') .. (history or '')
      .. (declined or '')
    return pack('<I4', 56 + #tail) .. sub(rec, 5, 6)
      .. pack('<I2I4I4', flags, change.failures or u4(rec, 9), change.expiries or u4(rec, 13))
      .. sub(rec, 17, 40) .. (change.run_at and p8(change.run_at) or sub(rec, 41, 48))
      .. sub(rec, 49, 52) .. pack('<I4', weight) .. tail
  end
end
