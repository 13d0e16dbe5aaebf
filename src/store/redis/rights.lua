-- rights: what the user may not do.
-- in   command lines, each behind a word for it
-- out  the words of those that the user may not run, one a line
-- why  the server knows it without running them
local function rights()
  local missing = {}
  for _, line in ipairs(ARGS) do
    local words = {}
    for word in string.gmatch(line, '[^ ]+') do words[#words + 1] = word end
    local name = table.remove(words, 1)
    local is_known, may = pcall(redis.acl_check_cmd, unpack(words))
    if not (is_known and may) then missing[#missing + 1] = name end
  end
  return concat(missing, '\n')
end
register('rights', rights, { 'no-writes', 'allow-oom' })
