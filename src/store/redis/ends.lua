-- ends: live grants, by deadline and by token.

-- Visits the live grants between two deadlines, by (deadline, token). `visit` gets the id, the
-- deadline and the number of leases alive, and returns false to stop.
local function by_deadline(since, upto, visit)
  local from, some = 0, nil
  repeat
    some = call('ZRANGE', ENDS, since, upto, 'BYSCORE', 'LIMIT', from, 100, 'WITHSCORES')
    local ids = {}
    for n = 1, #some, 2 do ids[#ids + 1] = some[n] end
    local heads = #ids > 0 and call('HMGET', HELD, unpack(ids)) or {}
    for n, head in ipairs(heads) do
      if head and visit(ids[n], tonumber(some[2 * n]), (read('<I2', head, HEAD_LIVE))) == false then return end
    end
    from = from + #ids
  until #ids < 100
end

-- The first tokens of all live grants, in order.
local function all_bases()
  local bases = {}
  for n, gid in ipairs(call('ZRANGE', ENDS, 0, -1)) do bases[n] = (read('>I8', gid)) end
  table.sort(bases)
  return bases
end
