-- words: short names that all functions share. They are taken on the first call, since a server of
-- version 7.0 shows a library that is being loaded neither `string` nor `struct` nor `redis.call`.
-- For the limits of the rules, the places and flags of a record, and what a call can come to,
-- library.rs puts numbers in the place of their names. Names of counters come before this file.
local call, sub, byte, char, find, format, pack, read, concat, floor, min, max, band
local function learn()
  call, sub, byte, char = redis.call, string.sub, string.byte, string.char
  find, format, pack, read = string.find, string.format, struct.pack, struct.unpack
  concat, floor, min, max, band = table.concat, math.floor, math.min, math.max, bit.band
end

local function p8(n) return pack('<I8', n) end
local function u8(s, at) return (read('<I8', s, at)) end
local function u4(s, at) return (read('<I4', s, at)) end
local function text(s) return pack('<I4', #s) .. s end
-- The server itself would write a number as a real one, at ten times the cost.
local function decimal(n) return format('%d', n) end

-- Where the head of a grant has how many of its leases are alive; `grant.lua` has the rest.
local HEAD_LIVE = 13
-- So much of what takes long is done in one step: about a millisecond of it.
local EXPIRIES, PROMOTIONS, CHUNK = 50, 200, 50
-- So many grants are counted in one step, where that cannot be left to several.
local COUNTED = 2000
-- Lists of ready jobs: for each priority the suspects' and the others'. A partition that is new
-- knows of one, that of the usual priority; one that lost its memory looks at all of them.
local ALL_LINES = 2 ^ LINES - 1
local USUAL_LINE = 2 * USUAL_PRIORITY + 1
-- A sequence that does not begin here began without its partition.
local FIRST_SEQ = 1

-- The names of a partition's keys, by its tag; `keys.rs` says what they hold. They are made once.
local PARTS = {
  'meta', 'jobs', 'due', 'park', 'excl', 'uniq', 'uwin', 'done', 'dead', 'gone', 'keep', 'held',
  'note', 'ends', 'sleep',
}
local known, partitions = {}, 0
local function names_of(key)
  local names = known[key]
  if names then return names end
  if partitions == 1000 then known, partitions = {}, 0 end
  local tag = sub(key, 1, -5)
  names = { queue = string.match(tag, '^{[^:]*:([^:]*):') }
  for _, part in ipairs(PARTS) do names[part] = tag .. part end
  for line = 0, LINES - 1 do
    names[line] = tag .. floor(line / 2) .. (line % 2 == 0 and 's' or '')
  end
  names.c, names.d, names.x = names.done, names.dead, names.gone
  known[key], partitions = names, partitions + 1
  return names
end

-- Calls a command with many arguments, a thousand at a time: Lua cannot spread more.
local function many(command, key, list)
  for from = 1, #list, 1000 do
    call(command, key, unpack(list, from, min(from + 999, #list)))
  end
end
