-- settle, plainly: runs only.
-- in   1 request · 2 runs: [8 grant][16 nonce][0][u16 first][u16 n] · 3 … the ids of each
-- out  as settle, or NOT_PLAIN
-- why  the whole of a grant ends by one comparison
local done, late = end_runs()
call('HSET', SESSION, lane, sub(ARGV[1], 5, 15) .. verdicts)
local leased, completed = read('<I8', counters, 8 * N_LEASED - 7), read('<I8', counters, 8 * ENDED - 7)
local live, lates = read('<I8I8', counters, 8 * LIVE - 7)
call('SET', META, sub(counters, 1, 80) .. pack('<I8', leased - done) .. sub(counters, 89, 128)
  .. pack('<I8', completed + done) .. sub(counters, 137, 200) .. pack('<I8I8', live - done, lates + late)
  .. sub(counters, 217))
return pack('<I1I8I1', 0, now, 0) .. verdicts
