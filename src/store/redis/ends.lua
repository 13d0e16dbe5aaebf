-- ends: live grants by (deadline, token), between two deadlines. `visit` gets the id, the deadline and the
-- number of leases alive, and says false if it has had enough.
local function by_deadline(since, upto, visit)
  local from, till, bases, names, order, tills = 0, nil, {}, {}, {}, {}
  local function end_group()
    table.sort(bases)
    for _, base in ipairs(bases) do order[#order + 1], tills[#order + 1] = names[base], till end
    bases, names = {}, {}
  end
  -- A round has names of some that have left it: they are gone, or have another deadline.
  local function visit_all()
    for at = 1, #order, 100 do
      local cells = call('HMGET', HELD, unpack(order, at, math.min(at + 99, #order)))
      for n, raw in ipairs(cells) do
        local place = at + n - 1
        local live = raw and u8(raw, 1) == tills[place] and read('<I2', raw, KIND + 18)
        if live and visit(sub(order[place], 1, 8), tills[place], live) == false then return false end
      end
    end
    order, tills = {}, {}
  end
  while true do
    local some = call('ZRANGE', ENDS, since, upto, 'BYSCORE', 'LIMIT', from, 100, 'WITHSCORES')
    for n = 1, #some, 2 do
      local roll, score = some[n], tonumber(some[n + 1])
      if score ~= till then
        end_group()
        if #order >= 100 and visit_all() == false then return end
        till = score
      end
      if #roll == ROUND then roll = call('HGET', HELD, roll) end
      for at = 1, #roll, NAME do
        local base = (read('>I8', roll, at))
        if not names[base] then bases[#bases + 1] = base end
        names[base] = sub(roll, at, at + NAME - 1)
      end
    end
    if #some < 200 then break end
    if visit_all() == false then return end
    from = from + 100
  end
  end_group()
  visit_all()
end
