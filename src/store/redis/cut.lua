-- cut: a segment in two.

-- Cuts a segment behind `most` jobs, or where `room` bytes are used up. `seg` is all of it, or its start, and
-- then `rest` is the other element. Returns the parts of the first half, the elements of the second, and
-- the jobs and the weight of the first; there is no second if nothing is left for it.
local function cut(seg, rest, most, room)
  local bytes, count, flags, heavy, stamp = read('<I4I2I2I4c8', seg)
  if count <= most and heavy <= room then return { seg, rest }, nil, count, heavy end
  local whole = { seg, rest }
  if not rest then rest = sub(seg, START + 1) end
  local form = read('<I2', rest)
  local ids, base = 3 + form, form > 0 and read('<I4', rest, 55) or 0
  local body = ids + 16 * count
  local from, n, part = body, 0, 0
  while n < most and n < count and part < room do
    local length = read('<I4', rest, from)
    if form > 0 then
      part, from = part + base + length, from + 4 + length
    else
      part, from = part + read('<I4', rest, from + 52), from + length
    end
    n = n + 1
  end
  if n == count then return whole, nil, count, heavy end
  local shared = sub(rest, 1, 2 + form)
  local first = 16 * n + from - body
  return {
      pack('<I4I2I2I4c8', START + 2 + form + first, n, flags, part, stamp), shared,
      sub(rest, ids, ids + 16 * n - 1), sub(rest, body, from - 1),
    }, {
      pack('<I4I2I2I4c8', bytes - first, count - n, flags, heavy - part, stamp),
      shared .. sub(rest, ids + 16 * n, body - 1) .. sub(rest, from),
    }, n, part
end
