-- settle: end held leases.
-- in   1 request
--      2 settlements: [8 grant][16 nonce][u16 lease][16 job][u8 kind][u64 delay][u64 mark],
--      [u32 bytes] and the result as it stands in a record, [u32 bytes] and the reason
-- out  one verdict per settlement, in order
-- why  the receipt is compared in the step that ends the lease
open_meta()
local status, verdicts = recall(ARGV[1])
if status == DONE and not verdicts then
  verdicts = settle_all(ARGV[2])
  save_grants()
  remember(verdicts)
end
save_meta()
ring()
return reply(status, verdicts)
