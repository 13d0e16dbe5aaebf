-- enqueue, in bulk: segments of one priority, of which nothing but the first start comes through here.
-- in   1 request · 2 [priority][u32 jobs][12 head of the first segment]
-- out  as enqueue, or NOT_PLAIN
-- why  the server's Lua reads every byte of what it is given. So what is to be stored follows in the same
--      transaction, by RPUSHX to FILL, which is there only if all is well: it is the line under a name that no
--      other call has. At the end it is given back its own. Whatever keeps this script from running keeps FILL
--      from being there.
local SLEEP, FILL, LINE = KEYS[3], KEYS[4], KEYS[5]
local priority, jobs = read('<I1I4', ARGV[2])
-- Who may not begin a transaction is in none. Of what belongs to one, the server asks again at its end whether
-- the user may, and leaves out what it may not: then none of it.
local may = redis.acl_check_cmd
if not (may('MULTI') and may('RPUSHX', FILL, '') and may('RENAMENX', FILL, LINE) and may('LLEN', LINE)
  and may('LINDEX', FILL, '0') and may('LSET', FILL, '0', '')) then return NOT_PLAIN end
if call('LLEN', LINE) > 0 then call('RENAMENX', LINE, FILL) end
call('RPUSH', FILL, sub(ARGV[2], 6, 17) .. pack('<I8', now))
call('HSET', SESSION, lane, sub(ARGV[1], 5, 15) .. '\0\0\0\0')
local ready, enqueued = read('<I8', counters, 8 * N_READY - 7), read('<I8', counters, 8 * ENQUEUED - 7)
local at = 8 * (IN_LINE + 2 * priority + 1)
call('SET', META, sub(counters, 1, 64) .. pack('<I8', ready + jobs) .. sub(counters, 73, 112)
  .. pack('<I8', enqueued + jobs) .. sub(counters, 121, at - 8)
  .. pack('<I8', read('<I8', counters, at - 7) + jobs) .. sub(counters, at + 1))
wake(SLEEP, jobs, 'j')
return pack('<I1I8I1I4', 0, now, 0, 0)
