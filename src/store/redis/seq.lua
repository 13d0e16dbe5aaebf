-- seq: whether a checkpoint's number comes after another's.
local function later(a, b)
  local low_a, high_a = read('<I4I4', a)
  local low_b, high_b = read('<I4I4', b)
  return high_a > high_b or (high_a == high_b and low_a > low_b)
end
