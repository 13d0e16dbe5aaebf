-- commands: what a caller wants done, all of it looked at before the first is run. `prepared(keys,
-- args, key, arg)` reads as many commands as args[arg] says, the keys from keys[key] on, and from
-- there the name of each, the number of its arguments and the arguments. Returns the commands; or
-- nil, the number of one that would fail, and why.
local prepared
do
  -- The type that each command wants its key to have; false: any.
  local WANTS = {
    GET = 'string', SET = false, INCRBY = 'string', DEL = false, PEXPIRE = false,
    HGET = 'hash', HGETALL = 'hash', HSET = 'hash', HDEL = 'hash', HINCRBY = 'hash',
    LPUSH = 'list', RPUSH = 'list', LRANGE = 'list',
    SADD = 'set', SREM = 'set', SMEMBERS = 'set',
    ZADD = 'zset', ZREM = 'zset', ZRANGE = 'zset',
  }
  local READS = {GET = true, HGET = true, HGETALL = true, LRANGE = true, SMEMBERS = true, ZRANGE = true}
  -- Sums of two such numbers are exact here, and no counter of the server runs over.
  local LARGEST = 2 ^ 52

  -- What earlier commands of this step will have made of the keys.
  local types, written, deleted
  local function kind(key)
    types[key] = types[key] or redis.call('TYPE', key)['ok']
    return types[key]
  end
  local function cannot_count(stored, by)
    -- As the server reads numbers: it counts neither on `007` nor on `-0`.
    if stored and stored ~= '0' and not string.match(stored, '^-?[1-9]%d*$') then
      return 'its value is no whole number as the server writes them'
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
    if not redis.acl_check_cmd(unpack(command)) then
      return 'the user may not do it'
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

  prepared = function(keys, args, key, arg)
    types, written, deleted = {}, {}, {}
    local commands, at = {}, arg + 1
    for n = 1, tonumber(args[arg]) do
      local count = tonumber(args[at + 1])
      local command = {args[at], keys[key + n - 1]}
      for i = 1, count do
        command[2 + i] = args[at + 1 + i]
      end
      local why = wrong_with(command)
      if why then
        return nil, n, why
      end
      commands[n] = command
      at = at + 2 + count
    end
    return commands
  end
end
