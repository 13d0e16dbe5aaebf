-- bases: the first tokens of all live grants, and perhaps of some that have ended, in order.
local function all_bases()
  local bases, seen = {}, {}
  for _, roll in ipairs(call('ZRANGE', ENDS, 0, -1)) do
    if #roll == ROUND then roll = call('HGET', HELD, roll) end
    for at = 1, #roll, NAME do
      local base = (read('>I8', roll, at))
      if not seen[base] then bases[#bases + 1] = base end
      seen[base] = true
    end
  end
  table.sort(bases)
  return bases
end
