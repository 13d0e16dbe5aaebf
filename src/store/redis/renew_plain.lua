-- renew, plainly: nothing lapses, nothing is shown, nothing is known of the leases but that they live,
-- and the maximum lifetime is far. All beats are looked at before any is renewed; what is not plain goes
-- into `others`.
local answers, others = {}, {}
do
  local roll, runs, names, cells = ARGV[1], ARGV[2], {}, {}
  local beats, first, leases = #roll / NAME, 0, 0
  if beats > 0 then
    for n = 1, beats do names[n] = sub(roll, NAME * n - NAME + 1, NAME * n) end
    cells = call('HMGET', HELD, unpack(names))
    first, leases = read('<I2I2', runs)
  end
  -- Beats are much alike: what a cell or a kind comes to is found out once.
  local alike, known, kinds, rounds = runs == rep(sub(runs, 1, 4), beats), {}, {}, {}
  local left, freed = {}, {}
  for n = 1, beats do
    local raw, name = cells[n], names[n]
    local to = raw and known[raw]
    if to == nil and raw then
      local deadline, renewals, round = read('<I8I4c12', raw)
      local text = sub(raw, KIND)
      local kind = kinds[text]
      if kind == nil then
        local capped, term, count, live, noted = read('<I8I8I2I2I1', text)
        kind = noted == 0 and now < capped and { text = text, term = term, count = count, live = live, cells = {} }
        kinds[text] = kind
      end
      to = kind and deadline > now and { kind = kind, renewals = renewals + 1, round = round, times = 0 }
      known[raw] = to
    end
    if not alike then first, leases = read('<I2I2', runs, 4 * n - 3) end
    local kind = to and to.kind
    local is_plain = to and first + leases <= kind.count
    if is_plain and kind.live < kind.count then
      local ended = string.find(sub(call('HGET', HELD, sub(name, 1, 8)), -kind.count), '1', first + 1, true)
      is_plain = not (ended and ended <= first + leases)
    end
    if is_plain then
      local round = rounds[kind.term]
      if not round then
        local till = now + kind.term
        round = {
          name = beats > 1 and sub(name, 1, 8) .. pack('<I4', to.renewals) or ALONE,
          till = till, changed = {}, at = 1, answer = pack('<I1I8I4', 1, kind.term, 0),
        }
        rounds[kind.term] = round
      end
      local cell = to.cell
      if not cell then
        cell = kind.cells[to.renewals]
        if not cell then
          cell = pack('<I8I4', round.till, to.renewals) .. round.name .. kind.text
          kind.cells[to.renewals] = cell
        end
        to.cell = cell
      end
      local at = round.at
      round.changed[at], round.changed[at + 1], round.at = name, cell, at + 2
      if to.round == ALONE then freed[#freed + 1] = name else to.times = to.times + 1 end
      answers[n] = round.answer
    else
      others[#others + 1] = {
        nth = n, gid = sub(name, 1, 8), nonce = sub(name, 9), runs = { { first, leases } }, lapse = {}, progress = {},
      }
    end
  end
  for _, to in pairs(known) do
    if to and to.times > 0 then left[to.round] = (left[to.round] or 0) + to.times end
  end
  leave(left)
  if beats > 1 and freed[1] then call('ZREM', ENDS, unpack(freed)) end
  for _, round in pairs(rounds) do
    call('HSET', HELD, unpack(round.changed))
    if round.name == ALONE then
      call('ZADD', ENDS, round.till, names[1])
    else
      local came = (round.at - 1) / 2
      if came < beats then
        roll = {}
        for n = 1, came do roll[n] = round.changed[2 * n - 1] end
        roll = concat(roll)
      end
      call('HSET', HELD, round.name, roll, round.name .. STAYED, came)
      call('ZADD', ENDS, round.till, round.name)
    end
  end
  if #others == 0 and ARGV[3] == '' then return pack('<I1I8I1', 0, now, 0) .. concat(answers) end
end
