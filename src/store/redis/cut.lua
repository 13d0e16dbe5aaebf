-- cut: a segment in two.

-- Cuts a segment behind `most` jobs, or where `room` bytes are used up. Returns both parts, and the jobs
-- and the weight of the first; the second is missing if nothing is left for it.
local function cut(seg, most, room)
  local bytes, count, flags, heavy, stamp, form = read(SEGMENT, seg)
  if count <= most and heavy <= room then return seg, nil, count, heavy end
  local ids, base = 23 + form, form > 0 and read('<I4', seg, 75) or 0
  local body = ids + 16 * count
  local from, n, part = body, 0, 0
  while n < most and n < count and part < room do
    local length = read('<I4', seg, from)
    if form > 0 then
      part, from = part + base + length, from + 4 + length
    else
      part, from = part + read('<I4', seg, from + 52), from + length
    end
    n = n + 1
  end
  if n == count then return seg, nil, count, heavy end
  local shared = sub(seg, 23, 22 + form)
  local first = 16 * n + from - body
  return pack(SEGMENT, 22 + form + first, n, flags, part, stamp, form) .. shared
      .. sub(seg, ids, ids + 16 * n - 1) .. sub(seg, body, from - 1),
    pack(SEGMENT, bytes - first, count - n, flags, heavy - part, stamp, form) .. shared
      .. sub(seg, ids + 16 * n, body - 1) .. sub(seg, from),
    n, part
end
