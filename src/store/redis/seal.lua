-- seal: gives the last segments of FILL the stamp of the one before them.
-- in   1 nothing · 2 their heads, 12 bytes each
-- why  only the store knows the time, and they came past the scripts
if ARGV[1] == '' then
  local FILL, heads, n = KEYS[1], ARGV[2], #ARGV[2] / 12
  local before = call('LINDEX', FILL, -2 * n - 2)
  -- The call was refused, or is not plain.
  if not before then return '' end
  local stamp = sub(before, 13)
  for at = 1, n do call('LSET', FILL, 2 * (at - n - 1), sub(heads, 12 * at - 11, 12 * at) .. stamp) end
  return ''
end
