-- settle: end held leases.
-- in   1 request · 2 settlements: [8 grant][16 nonce][op][u16 first][u16 n], then the ids of n
--      neighbours that complete, or one lease's id and outcome
-- out  one verdict per settlement, in order
-- why  the receipt is compared in the step that ends the lease; runs of plain jobs end without
--      being looked at
open_meta()
local status, verdicts = settle_under(ARGV[1], ARGV[2])
save_meta()
ring()
return reply(status, verdicts)
