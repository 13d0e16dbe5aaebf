#!lua
-- fence: compare the token with the mark, then run the caller's commands.
-- in   keys: marks, floor, operations done, one key per command
--      args: scope, token, once or always, operation, then per command its name, the number of its
--      arguments and the arguments
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

-- The type that each command wants its key to have; false: any.
local WANTS = {
  GET = 'string', SET = false, INCRBY = 'string', DEL = false, PEXPIRE = false,
  HGET = 'hash', HGETALL = 'hash', HSET = 'hash', HDEL = 'hash', HINCRBY = 'hash',
  LPUSH = 'list', RPUSH = 'list', LRANGE = 'list',
  SADD = 'set', SREM = 'set', SMEMBERS = 'set',
  ZADD = 'zset', ZREM = 'zset', ZRANGE = 'zset',
}
-- Sums of two such numbers are exact here, and no counter of the server runs over.
local LARGEST = 2 ^ 52

local commands, at = {}, 5
while at <= #ARGV do
  local count = tonumber(ARGV[at + 1])
  local command = {ARGV[at], KEYS[4 + #commands]}
  for i = 1, count do
    command[2 + i] = ARGV[at + 1 + i]
  end
  commands[#commands + 1] = command
  at = at + 2 + count
end

local READS = {GET = true, HGET = true, HGETALL = true, LRANGE = true, SMEMBERS = true, ZRANGE = true}

-- What earlier commands of this step will have made of the keys.
local types, written, deleted = {}, {}, {}
local function kind(key)
  types[key] = types[key] or redis.call('TYPE', key)['ok']
  return types[key]
end
local function cannot_count(stored, by)
  if stored and not string.match(stored, '^-?%d+$') then
    return 'its value is no whole number'
  end
  local before, more = tonumber(stored or '0'), tonumber(by)
  if math.abs(before) > LARGEST or math.abs(more) > LARGEST then
    return 'its value is too large to be counted on'
  end
  return nil
end
local function wrong_with(command)
  local name, key, wants = command[1], command[2], WANTS[command[1]]
  if wants == nil then
    return 'not one of the commands that can be fenced'
  end
  if deleted[key] then
    return 'its key is deleted earlier in the step'
  end
  if wants and kind(key) ~= 'none' and kind(key) ~= wants then
    return 'its key holds a ' .. kind(key)
  end
  local place = wants == 'hash' and key .. '\0' .. (command[3] or '') or key
  if name == 'INCRBY' or name == 'HINCRBY' then
    if written[place] then
      return 'what it counts is written earlier in the step'
    end
    local stored, by = nil, command[3]
    if name == 'HINCRBY' then
      stored, by = redis.call('HGET', key, command[3]), command[4]
    elseif kind(key) == 'string' then
      stored = redis.call('GET', key)
    end
    local why = cannot_count(stored, by)
    if why then
      return why
    end
  end
  if READS[name] then
    return nil
  end
  written[place] = true
  if name == 'DEL' then
    deleted[key] = true
  elseif name == 'SET' then
    types[key] = 'string'
  elseif wants then
    types[key] = wants
  end
  return nil
end
for n, command in ipairs(commands) do
  local why = wrong_with(command)
  if why then
    return {'invalid', n, why}
  end
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
