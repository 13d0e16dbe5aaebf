-- parked: how many jobs wait behind each exclusive key, by key.
-- in   1 empty, or = and the key after which to begin · 2 how many keys
-- out  per key its text and the number of its jobs
-- why  two commands a key, however many wait behind it
local function past_key(key) return '[' .. sub(line_of_key(key), 1, -2) .. '\1' end
local function parked()
  local from = ARGS[1] == '' and '-' or past_key(sub(ARGS[1], 2))
  local rows = {}
  for n = 1, tonumber(ARGS[2]) do
    local first = call('ZRANGE', K.park, from, '+', 'BYLEX', 'LIMIT', 0, 1)[1]
    if not first then break end
    local line = sub(first, 1, (find(first, '\0\0', 1, true)) + 1)
    local key = string.gsub(sub(line, 1, -3), '%z\255', '\0')
    from = past_key(key)
    rows[n] = text(key) .. p8(call('ZLEXCOUNT', K.park, '[' .. line, '(' .. sub(from, 2)))
  end
  return reply(DONE, concat(rows))
end
register('parked', parked, { 'no-writes' })
