-- record: reading and changing job records. `store/codec.rs` has their layout, and the places of
-- their fields.
local function has(flags, flag) return band(flags, flag) ~= 0 end
local function flags_of(rec)
  local low, high = byte(rec, FLAGS_AT, FLAGS_AT + 1)
  return low + 256 * high
end
local function id_of(rec) return sub(rec, ID_AT, ID_AT + 15) end
local function weight_of(rec) return u4(rec, WEIGHT_AT) end
-- The record with another time to run at.
local function due_at(rec, at) return sub(rec, 1, RUN_AT - 1) .. p8(at) .. sub(rec, RUN_AT + 8) end
local function micros(rec, at)
  local seconds, nanos = read('<I8I4', rec, at)
  return seconds * 1000000 + floor(nanos / 1000)
end

-- Where `parse` is, in which record.
local rec_read, at_read
local function next_bytes()
  local from = at_read + 4
  at_read = from + u4(rec_read, at_read)
  return sub(rec_read, from, at_read - 1)
end
local function next_duration(flags, flag)
  if not has(flags, flag) then return nil end
  at_read = at_read + 12
  return micros(rec_read, at_read - 12)
end
-- Where the parts of a record are.
local function parse(rec)
  local flags = flags_of(rec)
  local p = { flags = flags }
  rec_read, at_read = rec, KIND_AT + 1 + byte(rec, KIND_AT)
  if has(flags, UNIQUE) then
    p.unique = next_bytes()
    p.window = next_duration(flags, WINDOW)
  end
  if has(flags, EXCLUSIVE) then p.exclusive = next_bytes() end
  if has(flags, TERM) then p.term_raw = sub(rec, at_read, at_read + 11) end
  p.term = next_duration(flags, TERM)
  p.lifetime = next_duration(flags, MAX_LIFETIME)
  next_duration(flags, TIMEOUT)
  next_duration(flags, STALL_LIMIT)
  p.retention = next_duration(flags, RETENTION)
  if has(flags, MAX_FAILURES) then at_read = at_read + 4 end
  if has(flags, RETRY) then at_read = at_read + 32 end
  if has(flags, VERSION) then at_read = at_read + 4 end
  if has(flags, HEADERS) then
    local count = u4(rec, at_read)
    at_read = at_read + 4
    for _ = 1, 2 * count do at_read = at_read + 4 + u4(rec, at_read) end
  end
  local at = at_read + 4 + u4(rec, at_read)
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
local function rewrite(rec, p, change)
  local checkpoint = change.checkpoint or p.checkpoint
  local result = change.result or p.result
  local history = change.ended and lengthen(p.history, change.ended) or p.history
  local declined = p.declined
  if change.ended then declined = change.declined and (declined or p8(now)) end
  local weight = weight_of(rec)
  if change.checkpoint then weight = weight - (p.saved or 20) + #change.checkpoint end
  if change.ended then weight = weight + #history - (p.history and #p.history or 4) end
  local flags = band(p.flags, CHECKPOINT - 1)
  if checkpoint then flags = flags + CHECKPOINT end
  if result then flags = flags + RESULT end
  if history then flags = flags + HISTORY end
  if declined then flags = flags + DECLINED end
  local tail = sub(rec, KIND_AT, p.rest - 1) .. (checkpoint or '') .. (result or '') .. (history or '')
    .. (declined or '')
  return pack('<I4', KIND_AT - 1 + #tail) .. sub(rec, 5, FLAGS_AT - 1)
    .. pack('<I2I4I4', flags, change.failures or u4(rec, FAILURES_AT), change.expiries or u4(rec, EXPIRIES_AT))
    .. sub(rec, ID_AT, RUN_AT - 1) .. (change.run_at and p8(change.run_at) or sub(rec, RUN_AT, RUN_AT + 7))
    .. sub(rec, LIMIT_AT, WEIGHT_AT - 1) .. pack('<I4', weight) .. tail
end
