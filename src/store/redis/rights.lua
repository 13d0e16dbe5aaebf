-- rights: what the user may not do.
-- in   1 command lines, each behind a word for it
-- out  the words of those that the user may not run, one a line
-- why  the server knows it without running them; and it does not undo what a function did before a
--      command that it refuses
local function rights()
  local missing = {}
  for line in string.gmatch(ARGS[1], '[^\n]+') do
    local words = {}
    for word in string.gmatch(line, '[^ ]+') do words[#words + 1] = word end
    local name = table.remove(words, 1)
    local is_known, may = pcall(redis.acl_check_cmd, unpack(words))
    if not (is_known and may) then missing[#missing + 1] = name end
  end
  return reply(DONE, concat(missing, '\n'))
end
register('rights', rights, { 'no-writes', 'allow-oom' })
