-- fence: compare the token with the mark, then run the caller's commands.
-- in   keys: marks, floor, operations done, one key per command
--      args: scope, token, once or always, operation, then the commands
-- out  stale and the mark | before | invalid, the command's number and why | done and the answers
-- why  one script is one step, and a script that fails half way is not rolled back: whatever could
--      fail is looked at before the first write

local marks, floor, done = KEYS[1], KEYS[2], KEYS[3]
local scope, token, once, operation = ARGV[1], tonumber(ARGV[2]), ARGV[3] == 'once', ARGV[4]

local mark = math.max(
  tonumber(redis.call('ZSCORE', marks, scope) or '0'),
  tonumber(redis.call('GET', floor) or '0'))
if token < mark then
  return {'stale', string.format('%.0f', mark)}
end

local commands, wrong, why = prepared(KEYS, ARGV, 4, 5)
if not commands then
  return {'invalid', wrong, why}
end

redis.call('ZADD', marks, ARGV[2], scope)
if once then
  if redis.call('HGET', done, operation) == ARGV[2] then
    return {'before'}
  end
  redis.call('HSET', done, operation, ARGV[2])
end
local answers = {'done'}
for _, command in ipairs(commands) do
  answers[#answers + 1] = redis.call(unpack(command))
end
return answers
