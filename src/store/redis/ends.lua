-- ends: live grants by (deadline, token), between two deadlines. `visit` gets the id, the deadline and the
-- number of leases alive, and says false if it has had enough. No more is read than it wants.
local function by_deadline(since, upto, visit)
  -- Entries of one deadline come by the first token of each. What waits has a token that a round still to
  -- come could go before.
  local waiting, names, first, till = {}, {}, 1, nil
  local order, tills = {}, {}
  local function let_pass(before)
    while waiting[first] and waiting[first] < before do
      order[#order + 1], tills[#order + 1] = names[waiting[first]], till
      first = first + 1
    end
    if not waiting[first] then waiting, first = {}, 1 end
  end
  local function wait(base, name)
    if names[base] then return end
    names[base] = name
    local at = #waiting
    while at >= first and waiting[at] > base do at = at - 1 end
    table.insert(waiting, at + 1, base)
  end
  local function visit_all()
    for at = 1, #order, 100 do
      local cells = call('HMGET', HELD, unpack(order, at, math.min(at + 99, #order)))
      for n, raw in ipairs(cells) do
        local place = at + n - 1
        local live = raw and read('<I2', raw, KIND + 18)
        if live and visit(sub(order[place], 1, 8), tills[place], live) == false then return false end
      end
    end
    order, tills = {}, {}
  end
  for from = 0, math.huge, 100 do
    local some = call('ZRANGE', ENDS, since, upto, 'BYSCORE', 'LIMIT', from, 100, 'WITHSCORES')
    for n = 1, #some, 2 do
      local roll, score = some[n], tonumber(some[n + 1])
      if score ~= till then
        let_pass(math.huge)
        till, names = score, {}
      end
      let_pass((read('>I8', roll)))
      if #roll == ROUND then roll = call('HGET', HELD, roll) end
      for at = 1, #roll, NAME do wait((read('>I8', roll, at)), sub(roll, at, at + NAME - 1)) end
    end
    if #some < 200 then break end
    if visit_all() == false then return end
  end
  let_pass(math.huge)
  visit_all()
end
