-- deadline: of a grant by itself, as its cell has it, or, where that has none, its head.
local function deadline_of(cell, head)
  local till = read('<I8', cell)
  if till > 0 then return till end
  local GRANTED_AT, LIFETIME = 31, 51
  return read('<I8', head, GRANTED_AT) + math.min(read('<I8', cell, KIND + 8), (read('<I8', head, LIFETIME)))
end
