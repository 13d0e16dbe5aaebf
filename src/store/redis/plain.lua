-- plain: the way of plain jobs, which come by the hundred. A plain script has few keys, looks at no
-- job, and makes hardly a function: each costs as much as a command. A call that turns out not to be
-- plain has changed nothing; the answer is NOT_PLAIN, and the script of the verb takes it up from
-- the start.
local META, SESSION = KEYS[1], KEYS[2]
local NOT_PLAIN = '\255'

-- The request is neither a repeat nor to be refused, the partition is there and has no index.
local lane, seq, _, _, heard = read('<c4I8I1I2I8', ARGV[1])
local kept = call('HMGET', SESSION, 'open', lane)
if not kept[1] or now - heard > SESSION_IDLE or kept[2] and read('<I8', kept[2]) >= seq then return NOT_PLAIN end
local counters = call('GET', META)
if not counters or read('<I8', counters, 8 * INDEX - 7) ~= 0 then return NOT_PLAIN end
